"""Measures the server's cost: the same requests through it and through the Python API, one at a time and interleaved.

The client runs in the process of the benchmark, on the same cores as the server, so its work counts against the server.
While the clock runs it only reads from a socket; it parses the bytes afterwards. Its CPU time is recorded.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from parlay import LLM, SamplingParams
from parlay.bench.prepare import first_ids
from parlay.bench.records import Cell, Results
from parlay.bench.rounds import Rounds
from parlay.bench.stopwatch import Reading
from parlay.bench.wave import Ask, Ids, Prepared, Wave, lone_wave
from parlay.bench.workloads import Item

PART = "over the API"
LIMIT = 1200.0
API, STREAMED, WHOLE = "Python API, streamed", "server, streamed", "server, whole"
CLIENT = "client_seconds"
"""The client's CPU time, among a row's values."""


class Answer(NamedTuple):
    """A text, the seconds from the request to its first and last piece, and the client's CPU time."""

    text: str
    first: float
    last: float
    client: float = 0.0


class Way:
    """Implements `Decoder` for one greedy request at a time with a fixed number of tokens, through the Python API.

    The server returns text, so texts are compared as the tokenizer's ids. In every way the first piece counts as one
    token.
    """

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def decode(self, strategy: str, asks: Sequence[Ask], temperature: float) -> Wave:
        """Decode as `Decoder` says."""
        (ask,) = asks
        found = self.ask(strategy, ask)
        wave = lone_wave(ask, strategy, Reading(text_ids(self._llm, found.text), 1, found.first, found.last))
        return replace(wave, decode_tokens=ask.most - 1, values={CLIENT: found.client})

    def ask(self, strategy: str, ask: Ask) -> Answer:
        """Return the answer through the Python API, streamed."""
        params = SamplingParams(temperature=0.0, max_tokens=ask.most, ignore_eos=True)
        began = time.perf_counter()
        read: list[tuple[float, str]] = []
        for event in self._llm.stream({"prompt_token_ids": ask.ids}, params, strategy=strategy, store=False):
            if event.token_ids:
                read.append((time.perf_counter() - began, event.text))
        return Answer("".join(text for _, text in read), read[0][0], read[-1][0])


class OverHttp(Way):
    """Sends requests to the server, for one reply or a stream. ``server`` is a host and its port.

    Each request has a connection of its own, which is opened before the clock starts.
    """

    def __init__(self, llm: LLM, server: str, model: str, *, streamed: bool) -> None:
        super().__init__(llm)
        self._server = server
        self._model = model
        self._streamed = streamed

    def ask(self, strategy: str, ask: Ask) -> Answer:
        """Return the answer through the server. Raises ValueError if it is an error."""
        request = _request(self._server, self._body(strategy, ask))
        host, _, port = self._server.rpartition(":")
        read: list[tuple[float, bytes]] = []
        with socket.create_connection((host, int(port)), LIMIT) as connection:
            began, worked = time.perf_counter(), time.thread_time()
            connection.sendall(request)
            while some := connection.recv(1 << 16):
                read.append((time.perf_counter() - began, some))
            client = time.thread_time() - worked
        told = [at for at, some in read if b'"choices"' in some]
        if not told:
            raise ValueError(f"the server answered: {b''.join(some for _, some in read)[:300].decode()}")
        return Answer(_text(b"".join(some for _, some in read)), told[0], told[-1], client)

    def _body(self, strategy: str, ask: Ask) -> dict[str, object]:
        return {
            "model": self._model,
            "prompt": ask.ids,
            "max_tokens": ask.most,
            "temperature": 0,
            "ignore_eos": True,
            "strategy": strategy,
            "store": False,
            "stream": self._streamed,
        }


def _request(server: str, body: dict[str, object]) -> bytes:
    sent = json.dumps(body).encode()
    lines = (
        "POST /v1/completions HTTP/1.1",
        f"Host: {server}",
        "Content-Type: application/json",
        f"Content-Length: {len(sent)}",
        "Connection: close",
    )
    return "\r\n".join((*lines, "", "")).encode() + sent


def _text(reply: bytes) -> str:
    """Return the text of a reply or a stream. Each line that holds a JSON object is a reply or a chunk."""
    lines = (line.removeprefix(b"data: ") for line in reply.splitlines())
    chunks = [json.loads(line) for line in lines if line.startswith(b"{")]
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


def text_ids(llm: LLM, text: str) -> Ids:
    """Return a text's ids, without the token that begins every prompt."""
    assert llm.tokenizer is not None
    return tuple(llm.tokenizer.encode(text, add_special_tokens=False))


def compare(
    results: Results, llm: LLM, server: str, cell: Cell, items: Sequence[Item], *, tokens: int, rounds: int
) -> None:
    """Compare the three ways round by round, with each prompt in all ways in turn. ``cell`` names model and
    strategy."""
    cells = [replace(cell, part=PART, engine=way) for way in (API, STREAMED, WHOLE)]
    pending = range(len(results.of(cells[0])), rounds)
    if not pending:
        return
    ways = {
        API: Way(llm),
        STREAMED: OverHttp(llm, server, cell.model, streamed=True),
        WHOLE: OverHttp(llm, server, cell.model, streamed=False),
    }
    asks = tuple(Ask(ids=first_ids(llm, item), most=tokens) for item in items)
    goals = tuple(text_ids(llm, ways[API].ask(cell.strategy, ask).text) for ask in asks)
    measuring = Rounds(ways)
    for number in pending:
        results.add(measuring.measure(cells, Prepared(asks, goals, None, ""), number))
