"""Who connects to a rank's port and is none is sent away soon, whatever it says and however slowly."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from parlay.ranks import wire

SECRET = b"a secret of the ranks"


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 4096, b"parlay ranks 1\n"])
def test_what_is_no_rank_is_sent_away_at_once(ends: tuple[socket.socket, socket.socket], said: bytes) -> None:
    ends[1].sendall(said)
    began = time.monotonic()
    with pytest.raises(wire.WrongSecret, match="it is no rank of a model, or one of another version"):
        wire.admit(ends[0], SECRET)
    assert time.monotonic() - began < 5


def test_a_byte_now_and_then_extends_nothing(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "_HANDSHAKE_SECONDS", 0.3)
    ended = threading.Event()

    def drip() -> None:
        with suppress(OSError):
            for byte in b"parlay ranks 2\n" + b"x" * 64:
                ends[1].sendall(bytes([byte]))
                if ended.wait(0.1):
                    return

    thread = threading.Thread(target=drip)
    thread.start()
    try:
        with pytest.raises(wire.WrongSecret, match="did not prove that it knows the secret"):
            wire.admit(ends[0], SECRET)
    finally:
        ended.set()
        thread.join()


def test_both_sides_prove_that_they_know_the_secret(ends: tuple[socket.socket, socket.socket]) -> None:
    thread = threading.Thread(target=wire.present, args=(ends[1], SECRET, "there"))
    thread.start()
    wire.admit(ends[0], SECRET)
    thread.join()
