"""What the server costs: the same requests through it and through the Python API, one at a time and interleaved.

The client is Python's own, the lightest at hand: it shares the cores with the server, and its work counts against it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPResponse

from benchmarks.figures.prompts import Prompt
from benchmarks.figures.results import Block, Results, Row
from parlay import LLM, SamplingParams

PART = "over the API"
LIMIT = 1200.0
API, STREAMED, WHOLE = "Python API", "server, streamed", "server, whole"


@dataclass(frozen=True, slots=True)
class Answer:
    """``seconds`` run from the request to its last token."""

    text: str
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Asking:
    """How all requests are made: greedy, so many tokens, whatever the model would end with.

    ``server`` is a host and its port. Each request has a connection of its own, made before the clock starts.
    """

    model: str
    strategy: str
    tokens: int
    llm: LLM
    server: str

    def api(self, prompt: Prompt) -> Answer:
        params = SamplingParams(temperature=0.0, max_tokens=self.tokens, ignore_eos=True)
        began = time.perf_counter()
        (output,) = self.llm.generate(prompt.text, params, strategy=self.strategy, store=False)
        seconds = time.perf_counter() - began
        return Answer(output.outputs[0].text, len(output.outputs[0].token_ids), seconds)

    def whole(self, prompt: Prompt) -> Answer:
        with closing(self._connection()) as connection:
            began = time.perf_counter()
            read = _post(connection, self._body(prompt)).read()
            seconds = time.perf_counter() - began
        told = json.loads(read)
        return Answer(told["choices"][0]["text"], told["usage"]["completion_tokens"], seconds)

    def streamed(self, prompt: Prompt) -> Answer:
        """Chunks are read as they come, and understood when the clock has stopped."""
        body = self._body(prompt) | {"stream": True, "stream_options": {"include_usage": True}}
        read: list[bytes] = []
        with closing(self._connection()) as connection:
            began = time.perf_counter()
            reply = _post(connection, body)
            while some := reply.read1():
                read.append(some)
            seconds = time.perf_counter() - began
        lines = b"".join(read).splitlines()
        chunks = [json.loads(line.removeprefix(b"data: ")) for line in lines if line.startswith(b"data: {")]
        text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
        return Answer(text, chunks[-1]["usage"]["completion_tokens"], seconds)

    def _connection(self) -> HTTPConnection:
        connection = HTTPConnection(self.server, timeout=LIMIT)
        connection.connect()
        return connection

    def _body(self, prompt: Prompt) -> dict[str, object]:
        return {
            "model": self.model,
            "prompt": prompt.text,
            "max_tokens": self.tokens,
            "temperature": 0,
            "ignore_eos": True,
            "strategy": self.strategy,
            "store": False,
        }


def _post(connection: HTTPConnection, body: dict[str, object]) -> HTTPResponse:
    """Raises ValueError for an answer that is an error."""
    connection.request("POST", "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    reply = connection.getresponse()
    if reply.status != 200:
        raise ValueError(f"the server answered {reply.status}: {reply.read().decode()}")
    return reply


def compare(results: Results, asking: Asking, prompts: Sequence[Prompt], rounds: int) -> None:
    """Round by round, each prompt through all three in turn; who begins changes. A round before the first warms up."""
    pending = [turn for turn in range(rounds) if not results.has(_block(asking, prompts[-1], turn))]
    for turn in [-1, *pending] if pending else []:
        for prompt in prompts:
            rows = list(_rows(asking, prompt, turn))
            if turn >= 0 and not results.has(_block(asking, prompt, turn)):
                results.add(rows)


def _block(asking: Asking, prompt: Prompt, turn: int) -> Block:
    return Block(PART, asking.model, asking.strategy, prompt.number, turn)


def _rows(asking: Asking, prompt: Prompt, turn: int) -> Iterator[Row]:
    ways = [(API, asking.api), (STREAMED, asking.streamed), (WHOLE, asking.whole)]
    first = (turn + prompt.number) % len(ways)
    answers = {name: ask(prompt) for name, ask in ways[first:] + ways[:first]}
    for name, answer in answers.items():
        yield Row(
            **_block(asking, prompt, turn)._asdict(),
            system=name,
            tokens=answer.tokens,
            decode_tokens=answer.tokens,
            decode_seconds=answer.seconds,
            same=answer.text == answers[API].text,
        )
