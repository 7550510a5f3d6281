"""Messages between ranks over sockets. Both sides first prove that they know the secret, and then exchange frames of
bytes.

A frame consists of its length, its kind and its content; the reader checks all three. Nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import secrets
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from queue import Empty, SimpleQueue

from parlay.types import ParlayError, RunnerLost

_log = logging.getLogger(__name__)

SECRET = "PARLAY_RANK_SECRET"
"""The environment variable with the secret that all ranks of a model share."""
LEAST_SECRET = 16
_GREETING = b"parlay ranks 3\n"
_NONCE = 32
_HANDSHAKE_SECONDS = 10.0
"""Seconds for the whole handshake, so that a peer that sends a byte now and then does not delay others."""
_AT_ONCE = 32
"""The most handshakes at a time; further connections wait to be accepted."""
LOOK_SECONDS = 0.05
"""Seconds between two checks whether a handshake has ended."""
_HEADER = struct.Struct("<IB")
_MOST_BYTES = 1 << 28
_ONE_PACKET = 1 << 15


class Kind(IntEnum):
    """The kinds of frames. The first four are sent while ranks join: a rank's greeting, its plan, the message that the
    rank is ready, and the message that all are."""

    HELLO = 1
    PLAN = 2
    READY = 3
    START = 4
    CALLS = 5
    DATA = 6
    BEAT = 7
    """A heartbeat without content."""
    STOP = 8
    """From rank 0: end, for the reason given or because the work is done."""
    FAILED = 9
    """To rank 0: the sender ends, for the reason given."""
    MODEL = 10
    """From rank 0: the files that a rank must have. The answer has no content, and confirms that the rank has them."""
    ADAPTER = 11
    """From rank 0: read an adapter. The answer says whether the rank could read it."""
    JOINED = 12
    """To rank 0: the sender has found the other ranks, and opened its shared memory."""


class Stopped(RunnerLost):
    """Raised when rank 0 has ended this rank, for the reason given."""


class WrongSecret(ParlayError):
    """Raised when the peer does not know the secret, or speaks another protocol."""


class Connection:
    """A socket to another rank. Every wait on it ends after ``seconds``. Any thread may send."""

    def __init__(self, opened: socket.socket, rank: int, seconds: float) -> None:
        self.rank = rank
        self._socket, self._sending = opened, threading.Lock()
        self.bound(seconds)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def bound(self, seconds: float) -> None:
        """Limit every wait to ``seconds`` from now on."""
        self._seconds = seconds
        self._socket.settimeout(seconds)

    def fileno(self) -> int:
        """The socket's descriptor, for selectors."""
        return self._socket.fileno()

    @property
    def local_host(self) -> str:
        """The address of this machine as the peer sees it."""
        return str(self._socket.getsockname()[0])

    def send(self, kind: Kind, content: bytes = b"") -> None:
        """Send a frame. Raises RunnerLost if the peer is gone or does not read."""
        with self._sending:
            try:
                header = _HEADER.pack(len(content), kind)
                if len(content) <= _ONE_PACKET:
                    self._socket.sendall(header + content)
                else:
                    self._socket.sendall(header)
                    self._socket.sendall(content)
            except TimeoutError:
                raise RunnerLost(f"rank {self.rank} has read nothing for {self._seconds:g} s") from None
            except OSError:
                raise RunnerLost(f"rank {self.rank} has ended") from None

    def receive(self) -> tuple[Kind, bytearray]:
        """Wait for the next frame. Raises RunnerLost if none arrives in time, or if it is invalid."""
        try:
            size, kind = _HEADER.unpack(_read(self._socket, _HEADER.size))
            if size > _MOST_BYTES or kind not in Kind._value2member_map_:
                raise RunnerLost(f"rank {self.rank} sent what is not a message of a rank: are the versions the same?")
            return Kind(kind), _read(self._socket, size)
        except TimeoutError:
            raise RunnerLost(f"rank {self.rank} has said nothing for {self._seconds:g} s") from None
        except OSError:
            raise RunnerLost(f"rank {self.rank} has ended") from None

    def expect(self, kind: Kind) -> bytearray:
        """Wait for a frame of this kind. Raises RunnerLost for another kind, with the peer's reason if it sends one."""
        while (found := self.receive())[0] is Kind.BEAT:
            pass
        if found[0] is Kind.STOP:
            raise Stopped(found[1].decode(errors="replace") or "rank 0 has ended")
        if found[0] is not kind:
            raise RunnerLost(
                f"rank {self.rank} sent {found[0].name} in place of {kind.name}: are the versions the same?"
            )
        return found[1]

    def has_ended(self, seconds: float) -> bool:
        """Wait for ``seconds``, or until the peer closes the connection; returns whether it has."""
        if sys.platform != "linux":  # on other systems, the next message shows the end
            time.sleep(seconds)
            return self._socket.fileno() < 0
        poller = select.poll()
        try:
            poller.register(self._socket, select.POLLRDHUP)
            return bool(poller.poll(1e3 * seconds))
        except (OSError, ValueError):
            return True

    def send_away(self, reason: str) -> None:
        """Refuse the peer with a reason, and close the connection."""
        with suppress(RunnerLost):
            self.send(Kind.STOP, reason.encode())
        self.close_softly()

    def close_softly(self) -> None:
        """Close the sending side only, so that the peer can still read what was sent."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the connection, also for threads that wait on it."""
        with suppress(OSError):  # the peer has closed it already
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def _read(opened: socket.socket, size: int, until: float | None = None) -> bytearray:
    """Read exactly ``size`` bytes, at the latest by the time ``until``. Raises OSError if that fails."""
    content = bytearray(size)
    view = memoryview(content)
    while view:
        if until is not None:
            opened.settimeout(max(0.001, until - time.monotonic()))
        count = opened.recv_into(view)
        if count == 0:
            raise ConnectionError("the other side has closed the connection")
        view = view[count:]
    return content


def _proof(secret: bytes, side: bytes, nonces: bytes) -> bytes:
    return hmac.new(secret, side + nonces, hashlib.sha256).digest()


def admit(opened: socket.socket, secret: bytes) -> None:
    """Have the connecting peer prove that it knows the secret, and prove it to the peer. Raises WrongSecret if the peer
    can't."""
    opened.settimeout(_HANDSHAKE_SECONDS)
    mine, until = secrets.token_bytes(_NONCE), time.monotonic() + _HANDSHAKE_SECONDS
    try:
        opened.sendall(_GREETING + mine)
        if _read(opened, len(_GREETING), until) != _GREETING:
            raise WrongSecret("it is not a rank of a model, or one of another version")
        theirs, proof = bytes(_read(opened, _NONCE, until)), bytes(_read(opened, hashlib.sha256().digest_size, until))
        if not hmac.compare_digest(proof, _proof(secret, b"joins", mine + theirs)):
            raise WrongSecret("it does not know the secret")
        opened.sendall(_proof(secret, b"admits", mine + theirs))
    except OSError as error:
        raise WrongSecret(f"it did not prove that it knows the secret ({error})") from None


class Door:
    """Accepts peers that know the secret; handshakes run concurrently, so that a silent peer delays nobody."""

    def __init__(self, listener: socket.socket, secret: bytes, seconds: float) -> None:
        """``seconds`` is the limit of waits on accepted connections."""
        self.secret = secret
        self._listener, self._seconds = listener, seconds
        self._asked: list[threading.Thread] = []
        self._admitted = SimpleQueue[Connection]()
        self._closed = False

    def fileno(self) -> int:
        """The listening socket's descriptor, for selectors."""
        return self._listener.fileno()

    @property
    def is_asking(self) -> bool:
        """Whether a handshake is under way, so that `admit` may return a peer without a new connection."""
        self._asked = [each for each in self._asked if each.is_alive()]
        return bool(self._asked) or not self._admitted.empty()

    def admit(self, until: float) -> Connection | None:
        """Wait until the time ``until`` for a peer that knows the secret; None if none comes. Other peers are refused
        and logged."""
        while True:
            with suppress(Empty):
                return self._admitted.get_nowait()
            if (left := until - time.monotonic()) <= 0:
                return None
            if self.is_asking and len(self._asked) >= _AT_ONCE:
                time.sleep(min(left, LOOK_SECONDS))
                continue
            self._listener.settimeout(min(left, LOOK_SECONDS) if self._asked else left)
            with suppress(TimeoutError):
                opened, peer = self._listener.accept()
                self._asked.append(threading.Thread(target=self._ask, args=(opened, str(peer[0])), daemon=True))
                self._asked[-1].start()

    def _ask(self, opened: socket.socket, peer: str) -> None:
        try:
            admit(opened, self.secret)
        except WrongSecret as reason:
            _log.warning("the connection of %s was ended: %s", peer, reason)
            opened.close()
            return
        self._admitted.put(Connection(opened, -1, self._seconds))
        if self._closed:
            self.close()

    def close(self) -> None:
        """Refuse peers that were accepted and that `admit` has not returned."""
        self._closed = True
        with suppress(Empty):
            while True:
                self._admitted.get_nowait().send_away("all ranks of the model are there")


def present(opened: socket.socket, secret: bytes, where: str) -> None:
    """Prove to the rank at ``where`` that this rank knows the secret, and have it prove the same. Raises WrongSecret if
    it can't."""
    opened.settimeout(_HANDSHAKE_SECONDS)
    mine, until = secrets.token_bytes(_NONCE), time.monotonic() + _HANDSHAKE_SECONDS
    try:
        opened.sendall(_GREETING)
        if _read(opened, len(_GREETING), until) != _GREETING:
            raise WrongSecret(f"what answers at {where} is not a rank of a model, or one of another version")
        theirs = bytes(_read(opened, _NONCE, until))
        opened.sendall(mine + _proof(secret, b"joins", theirs + mine))
        proof = bytes(_read(opened, hashlib.sha256().digest_size, until))
    except OSError as error:
        raise WrongSecret(
            f"the rank at {where} ended the connection ({error}): is {SECRET} the same on both?"
        ) from None
    if not hmac.compare_digest(proof, _proof(secret, b"admits", theirs + mine)):
        raise WrongSecret(f"the rank at {where} does not know the secret: is {SECRET} the same on both?")


def connect(
    where: tuple[str, int], secret: bytes, rank: int, seconds: float, waits: Callable[[], None] = lambda: None
) -> Connection:
    """Connect to a rank, and retry for ``seconds`` if nobody answers; ``waits`` is called once if the first attempt
    fails.

    Raises RunnerLost and WrongSecret.
    """
    until, name, has_waited = time.monotonic() + seconds, f"{where[0]}:{where[1]}", False
    while True:
        try:
            opened = socket.create_connection(where, timeout=max(0.1, until - time.monotonic()))
            break
        except OSError as error:
            if not has_waited:
                waits()
            has_waited = True
            if time.monotonic() > until - 0.5:
                raise RunnerLost(f"nobody answers at {name} within {seconds:g} s ({error})") from None
            time.sleep(0.25)
    try:
        present(opened, secret, name)
    except WrongSecret:
        opened.close()
        raise
    return Connection(opened, rank, seconds)


def listen(where: tuple[str, int]) -> socket.socket:
    """Listen at a host and port; port 0 chooses a free port. Raises ParlayError, in one line, if that fails."""
    try:
        family = socket.getaddrinfo(*where, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server(where, family=family)
    except OSError as error:
        raise ParlayError(
            f"can't wait for ranks at {where[0]}:{where[1]} ({error.strerror or error}): choose another address"
        ) from None


def read_address(text: str) -> tuple[str, int]:
    """Parse HOST:PORT, with an IPv6 host in brackets. Raises ParlayError for any other text."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ParlayError(f"{text!r} is not HOST:PORT: write it as in 127.0.0.1:5000")
    return host.strip("[]"), int(port)


def read_secret(file: Path | None) -> bytes:
    """Return the secret from a file or the environment; empty if there is none. Raises ParlayError if it is too
    short."""
    try:
        text = os.environ.get(SECRET, "") if file is None else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ParlayError(f"can't read the secret of the ranks from {file}: {error}") from None
    secret = text.strip().encode()
    if (secret or file is not None) and len(secret) < LEAST_SECRET:
        raise ParlayError(f"the secret of the ranks has {len(secret)} bytes: give it at least {LEAST_SECRET}")
    return secret
