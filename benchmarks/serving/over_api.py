"""What the server costs: the same requests through it and through the Python API, one at a time and interleaved.

The client is Python's own, the lightest at hand: it shares the cores with the server, and its work counts against it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import closing
from http.client import HTTPConnection, HTTPResponse

from parlay import LLM, SamplingParams
from parlay.bench.prepare import first_ids
from parlay.bench.records import Cell, Results
from parlay.bench.rounds import Rounds
from parlay.bench.stopwatch import Reading
from parlay.bench.wave import Ask, Ids, Prepared, Wave, lone_wave
from parlay.bench.workloads import Item

PART = "over the API"
LIMIT = 1200.0
API, STREAMED, WHOLE = "Python API", "server, streamed", "server, whole"


class Way:
    """Implements `Decoder`: greedy, one request at a time, so many tokens whatever the model would end with.

    The server says no tokens, so texts are held against each other as ids of the tokenizer. A reading has the time to
    the last token alone.
    """

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def decode(self, strategy: str, asks: Sequence[Ask], temperature: float) -> Wave:
        """See `Decoder`."""
        (ask,) = asks
        text, seconds = self.ask(strategy, ask)
        return lone_wave(ask, strategy, Reading(text_ids(self._llm, text), 0, 0.0, seconds))

    def ask(self, strategy: str, ask: Ask) -> tuple[str, float]:
        """The answer through the Python API, and the seconds it took."""
        params = SamplingParams(temperature=0.0, max_tokens=ask.most, ignore_eos=True)
        began = time.perf_counter()
        (output,) = self._llm.generate({"prompt_token_ids": ask.ids}, params, strategy=strategy, store=False)
        return output.outputs[0].text, time.perf_counter() - began


class OverHttp(Way):
    """The same through the server, in one reply or in a stream. Each request has a connection of its own, made before
    the clock starts. ``server`` is a host and its port."""

    def __init__(self, llm: LLM, server: str, model: str, *, streamed: bool) -> None:
        super().__init__(llm)
        self._server = server
        self._model = model
        self._streamed = streamed

    def ask(self, strategy: str, ask: Ask) -> tuple[str, float]:
        """Chunks are read as they come, and understood when the clock has stopped."""
        body = json.dumps(self._body(strategy, ask)).encode()
        read: list[bytes] = []
        with closing(HTTPConnection(self._server, timeout=LIMIT)) as connection:
            connection.connect()
            began = time.perf_counter()
            reply = _post(connection, body)
            while some := reply.read1():
                read.append(some)
            seconds = time.perf_counter() - began
        return _text(b"".join(read), streamed=self._streamed), seconds

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


def _post(connection: HTTPConnection, body: bytes) -> HTTPResponse:
    """Raises ValueError for an answer that is an error."""
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    reply = connection.getresponse()
    if reply.status != 200:
        raise ValueError(f"the server answered {reply.status}: {reply.read().decode()}")
    return reply


def _text(reply: bytes, *, streamed: bool) -> str:
    lines = (line.removeprefix(b"data: ") for line in reply.splitlines() if line.startswith(b"data: {"))
    chunks = [json.loads(line) for line in lines] if streamed else [json.loads(reply)]
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


def text_ids(llm: LLM, text: str) -> Ids:
    """A text as ids, without the token that begins every prompt."""
    assert llm.tokenizer is not None
    return tuple(llm.tokenizer.encode(text, add_special_tokens=False))


def compare(
    results: Results, llm: LLM, server: str, cell: Cell, items: Sequence[Item], *, tokens: int, rounds: int
) -> None:
    """Round by round, each prompt in all three ways in turn; ``cell`` names model and strategy."""
    cells = [
        Cell(part=PART, engine=way, model=cell.model, strategy=cell.strategy, workload=cell.workload)
        for way in (API, STREAMED, WHOLE)
    ]
    pending = range(len(results.of(cells[0])), rounds)
    if not pending:
        return
    ways = {
        API: Way(llm),
        STREAMED: OverHttp(llm, server, cell.model, streamed=True),
        WHOLE: OverHttp(llm, server, cell.model, streamed=False),
    }
    asks = tuple(Ask(ids=first_ids(llm, item), most=tokens) for item in items)
    goals = tuple(text_ids(llm, ways[API].ask(cell.strategy, ask)[0]) for ask in asks)
    measuring = Rounds(ways)
    for number in pending:
        results.add(measuring.measure(cells, Prepared(asks, goals, None, ""), number))
