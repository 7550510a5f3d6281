"""Records the part of a stream that a client has, so that another replica can send exactly the rest."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from parlay.gateway.client import ReplicaLost
from parlay.serve import anthropic, llama_server, ollama
from parlay.serve.errors import ERROR
from parlay.serve.openai import responses
from parlay.serve.protocol import DONE_EVENT
from parlay.serve.protocol.resume_comments import DONE, END, FAILED, NO, OPENED, TOKENS

BLOCK_BYTES = 4 * 1024 * 1024
"""The most bytes of one event, and of the events that are held until the comment on the last of them arrives."""
_HOLDING = (TOKENS.encode(), END.encode())
"""Comments with a choice's index and token ids."""
_NAMED = "|".join(map(re.escape, (anthropic.LAST_EVENT, *responses.LAST_EVENTS.values(), ERROR)))
_LAST = re.compile(
    rf'^{re.escape(DONE_EVENT)}|^event: (?:{_NAMED})\r?\n|^(?:data: )?\{{"{ERROR}":'
    rf'|"(?:{ollama.LAST_FIELD}|{llama_server.LAST_FIELD})":true'.encode()
)
"""What is in the last event of a stream, of any protocol, and in no other: quotes within a text are escaped."""
_OPENED, _DONE, _FAILED = OPENED.encode(), DONE.encode(), FAILED.encode()


class ErrorEvent(Exception):
    """Raised if the replica ended the stream with an error. ``event`` is the error's event; ``elsewhere``: another
    replica may succeed.

    ``leaving``: the replica is shutting down.
    """

    def __init__(self, event: bytes, kind: str, code: str) -> None:
        super().__init__("the replica ended the stream with an error")
        self.event = event
        self.elsewhere, self.leaving = kind == "server_error", code == "unavailable"


def is_last(event: bytes) -> bool:
    """Whether a stream with text ends with this event, whichever protocol it has."""
    return _LAST.search(event) is not None


@dataclass(slots=True)
class Delivered:
    """The state of a stream so far, parsed from its events. `feed` returns the bytes for the client.

    ``header`` is the replica's: fingerprint, id and time. Events are held until the comment arrives that says what they
    contain; see `parlay.serve.protocol.resume_comments`. Until the first such comment, the stream can be restarted.
    """

    header: str = ""
    opened: bool = False
    done: bool = False
    tokens: dict[int, list[int]] = field(default_factory=dict)
    ended: list[int] = field(default_factory=list)
    events: int = 0
    fault: ReplicaLost | ErrorEvent | None = None
    """The reason why the replica's stream can't be read any further; `feed` returns the events before it."""
    _end: bytes = b"\n\n"
    """The separator that the client expects after each event."""
    _buffer: bytes = b""
    _kept: list[bytes] = field(default_factory=list)
    """Events whose comment has not arrived."""
    _notes: bytearray = field(default_factory=bytearray)
    """Lines, each a choice's index and token ids, that are not in ``tokens`` yet. They are parsed only when a stream is
    resumed."""

    def begin(self, header: str, *, lines: bool) -> None:
        """Start reading a replica's stream with this header, which consists of events or of ``lines``.

        Raises ReplicaLost if it continues another stream.
        """
        if self.opened and header != self.header:
            raise ReplicaLost("it continued another stream than the one asked for")
        if len(words := header.split()) != 3 or header.startswith(NO) or not words[2].isdecimal():
            raise ReplicaLost("its header is not a fingerprint, id and time")
        self.header, self.fault, self._buffer = header, None, b""
        self._end = b"\n" if lines else b"\n\n"
        self._kept.clear()

    @property
    def count(self) -> int:
        """The number of tokens of all choices."""
        self._fold()
        return sum(map(len, self.tokens.values()))

    def _fold(self) -> None:
        for line in self._notes.splitlines():
            index, *ids = map(int, line.split())
            self.tokens.setdefault(index, []).extend(ids)
        self._notes.clear()

    def resume(self) -> dict[str, object]:
        """Return the value of the body's field ``resume``, which asks for the rest."""
        self._fold()
        fingerprint, name, created = self.header.split()
        choices = max(self.tokens, default=-1) + 1
        return {
            "fingerprint": fingerprint,
            "id": name,
            "created": int(created),
            "token_ids": [self.tokens.get(index, []) for index in range(choices)],
            "ended": self.ended,
            "events": self.events,
        }

    def feed(self, data: bytes) -> bytes:
        """Return the complete events received, without comments, up to the first that can't be relayed."""
        *blocks, self._buffer = (self._buffer + data if self._buffer else data).split(b"\n\n")
        given: list[bytes] = []
        try:
            for block in blocks:
                self._read(block, given)
            if (self._buffer or self._kept) and len(self._buffer) + sum(map(len, self._kept)) > BLOCK_BYTES:
                raise ReplicaLost(f"an event of its stream has more than {BLOCK_BYTES} bytes")
        except (ReplicaLost, ErrorEvent) as fault:
            self.fault = fault
        return b"".join(given)

    def _read(self, block: bytes, given: list[bytes]) -> None:
        """Read an event and its comment; add to ``given`` the events that the client may have now."""
        comment, event = b"", block
        if block.startswith(b": "):
            comment, _, event = block[2:].partition(b"\n")
        if event:
            self._kept.append(event + self._end)
        if comment:
            self._note(comment)
            given += self._kept
            self.events += len(self._kept)
            self._kept.clear()

    def _note(self, comment: bytes) -> None:
        """Read a comment. Raises ReplicaLost for an invalid one, and ErrorEvent for one that ends the stream with an
        error."""
        kind, _, rest = comment.partition(b" ")
        if kind in _HOLDING and self.opened and rest.replace(b" ", b"").isdigit():
            self._notes += rest + b"\n"
            if kind != _HOLDING[0]:
                self.ended.append(int(rest.split()[0]))
        elif comment == _OPENED:
            self.opened = True
        elif comment == _DONE and self.opened:
            self.done = True
        elif kind == _FAILED and len(words := rest.decode("latin-1").split(" ")) == 2:
            raise ErrorEvent(b"".join(self._kept), *words)
        else:
            raise ReplicaLost("its stream has a comment that can't be read")
