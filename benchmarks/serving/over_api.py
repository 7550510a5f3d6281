"""What the server costs: the same requests through it and through the Python API, one at a time and interleaved."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import httpx

from benchmarks.figures.prompts import Prompt
from benchmarks.figures.results import Block, Results, Row
from parlay import LLM, SamplingParams

PART = "over the API"
API, STREAMED, WHOLE = "Python API", "server, streamed", "server, whole"


@dataclass(frozen=True, slots=True)
class Answer:
    """``seconds`` run from the request to its last token."""

    text: str
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Asking:
    """How all requests are made: greedy, so many tokens, whatever the model would end with."""

    model: str
    strategy: str
    tokens: int
    llm: LLM
    client: httpx.Client

    def api(self, prompt: Prompt) -> Answer:
        params = SamplingParams(temperature=0.0, max_tokens=self.tokens, ignore_eos=True)
        began = time.perf_counter()
        (output,) = self.llm.generate(prompt.text, params, strategy=self.strategy, store=False)
        seconds = time.perf_counter() - began
        return Answer(output.outputs[0].text, len(output.outputs[0].token_ids), seconds)

    def whole(self, prompt: Prompt) -> Answer:
        began = time.perf_counter()
        reply = self.client.post("/v1/completions", json=self._body(prompt))
        seconds = time.perf_counter() - began
        reply.raise_for_status()
        told = reply.json()
        return Answer(told["choices"][0]["text"], told["usage"]["completion_tokens"], seconds)

    def streamed(self, prompt: Prompt) -> Answer:
        """Chunks are read as they come, and understood when the clock has stopped."""
        body = self._body(prompt) | {"stream": True, "stream_options": {"include_usage": True}}
        began = time.perf_counter()
        with self.client.stream("POST", "/v1/completions", json=body) as reply:
            read = list(reply.iter_raw())
        seconds = time.perf_counter() - began
        reply.raise_for_status()
        lines = b"".join(read).splitlines()
        chunks = [json.loads(line.removeprefix(b"data: ")) for line in lines if line.startswith(b"data: {")]
        text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
        return Answer(text, chunks[-1]["usage"]["completion_tokens"], seconds)

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
