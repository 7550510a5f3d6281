"""Who connects to a rank's port and is none is sent away soon, whatever it says and however slowly."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress

import pytest

from parlay.ranks import wire
from parlay.ranks.layout import Plan
from parlay.ranks.part import join_group

SECRET = b"a secret of the ranks"


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 4096, b"parlay ranks 1\n"])
def test_what_is_no_rank_is_sent_away_at_once(
    ends: tuple[socket.socket, socket.socket], said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "_HANDSHAKE_SECONDS", 600.0)
    ends[1].sendall(said)
    began = time.monotonic()
    with pytest.raises(wire.WrongSecret, match="it is not a rank of a model, or one of another version"):
        wire.admit(ends[0], SECRET)
    assert time.monotonic() - began < wire._HANDSHAKE_SECONDS / 2


def test_a_byte_now_and_then_extends_nothing(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "_HANDSHAKE_SECONDS", 0.3)
    ended = threading.Event()

    def drip() -> None:
        with suppress(OSError):
            for byte in wire._GREETING + b"x" * 64:
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


def test_those_who_say_nothing_keep_no_rank_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "_HANDSHAKE_SECONDS", 600.0)
    with wire.listen(("127.0.0.1", 0)) as listener, ExitStack() as strangers:
        where, door = listener.getsockname()[:2], wire.Door(listener, SECRET, 5)
        for _ in range(3):
            strangers.enter_context(socket.create_connection(where))
        thread = threading.Thread(target=lambda: strangers.push(closing(wire.connect(where, SECRET, 0, 600))))
        began = time.monotonic()
        thread.start()
        admitted = door.admit(began + 600)
        assert admitted is not None
        assert time.monotonic() - began < wire._HANDSHAKE_SECONDS / 2
        thread.join()
        admitted.close()


def test_a_rank_too_many_that_comes_while_others_find_each_other_is_sent_away() -> None:
    stages = Plan(
        **dict.fromkeys(("tensor", "context"), 1),
        **dict.fromkeys(("model", "digest", "adapter"), ""),
        **dict.fromkeys(("quantize", "threads", "lora"), None),
        rank=0,
        stages=2,
        span=1024,
        hosts=["", ""],
        ports=[0, 0],
        memory=["", ""],
        seconds=600,
        dtype="float32",
        device="cpu",
        kv_cache_dtype="auto",
    )
    with wire.listen(("127.0.0.1", 0)) as listener:
        where = listener.getsockname()[:2]

        def join() -> None:
            with closing(wire.connect(where, SECRET, 0, 600)) as spare:
                spare.send(wire.Kind.HELLO, b'{"build": "p"}')
                with pytest.raises(wire.Stopped, match="all ranks of the model are there"):
                    spare.expect(wire.Kind.MODEL)
            with closing(wire.connect(where, SECRET, 0, 600)) as second:
                second.send(wire.Kind.HELLO, b"1")

        thread = threading.Thread(target=join)
        thread.start()
        assert [*join_group(stages, wire.Door(listener, SECRET, 600), None).peers] == [1]
        thread.join()
