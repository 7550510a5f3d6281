"""The part of a stream that a client has: enough to have another replica send exactly the rest."""

from __future__ import annotations

from dataclasses import dataclass, field

from pydantic_core import from_json

from parlay.gateway.client import ReplicaLost
from parlay.serve.protocol.resuming import END, NO, OPENED, TOKENS

BLOCK_BYTES = 4 * 1024 * 1024
"""Most bytes of one event."""
_ERROR = b'data: {"error"'
_DONE = b"data: [DONE]"
_CHUNK = b'data: {"id":'
_NO_CHOICE = b'"choices":[]'


class ErrorEvent(Exception):
    """The replica ended the stream with an error: its event, and whether another replica might do better.

    ``leaving``: the replica shuts down. Raises ReplicaLost for what is no error of a server.
    """

    def __init__(self, event: bytes) -> None:
        super().__init__("the replica ended the stream with an error")
        self.event = event
        try:
            error = from_json(event.removeprefix(b"data: "))["error"]
            self.elsewhere, self.leaving = error["type"] == "server_error", error["code"] == "unavailable"
        except (ValueError, KeyError, TypeError):
            raise ReplicaLost("its stream ends with an error that can't be read") from None


@dataclass(slots=True)
class Delivered:
    """A stream so far, read from its events. `feed` gives the bytes that the client is to have.

    ``header`` is the replica's: fingerprint, id and time. Nothing is given out before the last event that precedes
    decoding, so that until then the stream can begin anew.
    """

    header: str = ""
    opened: bool = False
    done: bool = False
    tokens: dict[int, list[int]] = field(default_factory=dict)
    ended: list[int] = field(default_factory=list)
    fault: ReplicaLost | ErrorEvent | None = None
    """Why the replica's stream can't be read on, once `feed` has given what came before."""
    _buffer: bytes = b""
    _first: bytes = b""

    def begin(self, header: str) -> None:
        """A replica begins to send, with this header. Raises ReplicaLost where it goes on with another stream."""
        if self.opened and header != self.header:
            raise ReplicaLost("it goes on with another stream than was asked for")
        if len(header.split()) != 3 or header.startswith(NO):
            raise ReplicaLost("its header is no fingerprint, id and time")
        self.header, self.fault, self._buffer, self._first = header, None, b"", b""

    @property
    def count(self) -> int:
        """Tokens of all choices."""
        return sum(map(len, self.tokens.values()))

    def resume(self, choices: int) -> dict[str, object]:
        """The body's field that asks for the rest."""
        fingerprint, name, created = self.header.split()
        return {
            "fingerprint": fingerprint,
            "id": name,
            "created": int(created),
            "token_ids": [self.tokens.get(index, []) for index in range(choices)],
            "ended": self.ended,
        }

    def feed(self, data: bytes) -> bytes:
        """The whole events in what has come, without their comments, up to the first that can't be passed on."""
        *blocks, self._buffer = (self._buffer + data).split(b"\n\n")
        given = []
        try:
            for block in blocks:
                given.append(self._read(block))
            if len(self._buffer) > BLOCK_BYTES:
                raise ReplicaLost(f"an event of its stream has more than {BLOCK_BYTES} bytes")
        except (ReplicaLost, ErrorEvent) as fault:
            self.fault = fault
        return b"".join(given)

    def _read(self, block: bytes) -> bytes:
        comment, event = b"", block
        if block.startswith(b": "):
            comment, _, event = block[2:].partition(b"\n")
        if event.startswith(_ERROR):
            raise ErrorEvent(event + b"\n\n")
        self.done = self.done or event == _DONE
        if event and not self.done:
            self._check(event, bool(comment))
        if comment:
            self._note(comment.decode("latin-1").split(" "))
        self._first += event + b"\n\n" if event else b""
        if not self.opened and not self.done:
            return b""
        given, self._first = self._first, b""
        return given

    def _check(self, event: bytes, commented: bool) -> None:
        if not event.startswith(_CHUNK):
            raise ReplicaLost("its stream holds what is no chunk")
        if self.opened and not commented and _NO_CHOICE not in event:
            raise ReplicaLost("its stream holds a chunk without its tokens")

    def _note(self, words: list[str]) -> None:
        kind, *numbers = words
        if kind == OPENED:
            self.opened = True
            return
        readable = numbers and all(number.isdecimal() for number in numbers)
        if not self.opened or kind not in (TOKENS, END) or not readable:
            raise ReplicaLost("its stream holds a comment that can't be read")
        index, *ids = map(int, numbers)
        self.tokens.setdefault(index, []).extend(ids)
        if kind == END:
            self.ended.append(index)
