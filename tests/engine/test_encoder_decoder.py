"""An encoder and a decoder are one runner: it encodes the rows before the decoder's start token.

So a source is the beginning of a prompt, and the engine needs nothing for it: prefix reuse, forks, prefill in parts,
preemption and strategies work as for any runner.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from parlay.engine import Engine
from parlay.router.policies import Fixed
from parlay.sampling.rules import SharedNoise
from parlay.testing.toy_drafters import answer_by, oracle, tree_oracle
from parlay.testing.toys import ToyRunner, text_hash
from parlay.types import NoiseKey, Request, SamplingParams, Strategy
from tests.engine.toy_engine import LOGITS, PLAIN, VOCAB, committed, engine

START = VOCAB - 1
"""The decoder's start token."""


class Translator(ToyRunner):
    """Its encoder reads a source as a whole, once; decoder rows see what it made of that and the target before them."""

    def __init__(self, capacity: int = 65_536) -> None:
        super().__init__(self.decoder, VOCAB, capacity=capacity)
        self.encoded: dict[tuple[int, ...], list[int]] = {}
        self.calls = 0

    def decoder(self, ids: Sequence[int]) -> Tensor:
        if START not in ids:  # an encoder's row predicts nothing
            return torch.zeros(VOCAB)
        start = ids.index(START)
        logits_V = LOGITS([*self._encode(tuple(ids[:start])), *ids[start:]]).clone()
        logits_V[START] = -torch.inf
        return logits_V

    def _encode(self, source: tuple[int, ...]) -> list[int]:
        if source not in self.encoded:
            self.calls += 1
            self.encoded[source] = [text_hash(source[::-1]) % VOCAB, text_hash(source) % VOCAB]
        return self.encoded[source]


KNOWN = answer_by(Translator().decoder)
STRATEGIES = {
    "plain": PLAIN,
    "chain": Strategy("chain", (oracle(KNOWN),), SharedNoise(), Fixed(4)),
    "tree": Strategy("tree", (tree_oracle(KNOWN, VOCAB),), SharedNoise(), Fixed(6)),
}


def request(name: str, source: Sequence[int], target: Sequence[int] = (), **fields: int) -> Request:
    params = SamplingParams(temperature=0.8, max_tokens=12)
    return Request(id=name, prompt=(*source, START, *target), params=params, key=NoiseKey(4), **fields)  # type: ignore[arg-type]


def run(target: Engine, strategy: Strategy, *wanted: Request) -> dict[str, list[int]]:
    for one in wanted:
        target.add(one, strategy)
    texts: dict[str, list[int]] = {one.id: [] for one in wanted}
    while not target.idle:
        for event in target.step():
            assert event.error is None
            texts[event.request] += committed([event])
        target.runner.check()
    return texts


SOURCES = {"a": (3, 1, 4, 1, 5), "b": (2, 7, 1, 8, 2, 8), "c": (5, 1, 4, 1, 3)}


@pytest.mark.parametrize("limits", [{}, {"max_rows": 3, "max_sequences": 3}], ids=["whole", "in parts"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_writes_the_text_of_plain_decoding(name: str, limits: dict[str, int]) -> None:
    wanted = [request(key, source) for key, source in SOURCES.items()]
    runner = Translator()
    texts = run(engine(runner, **limits), STRATEGIES[name], *wanted)
    assert texts == {one.id: run(engine(Translator()), PLAIN, one)[one.id] for one in wanted}
    assert runner.calls == len(SOURCES)
    assert texts["a"] != texts["c"]  # a source read backwards is another source


def test_a_source_that_was_read_is_found_again_with_another_target() -> None:
    runner = Translator()
    target = engine(runner)
    run(target, PLAIN, request("first", SOURCES["a"]))
    again = request("again", SOURCES["a"], target=(6, 2))
    assert run(target, STRATEGIES["chain"], again) == run(engine(Translator()), PLAIN, again)
    assert target.stats().prefix_tokens_found == len(SOURCES["a"]) + 1
    assert runner.calls == 1


def test_samples_of_one_source_share_it() -> None:
    runner = Translator()
    target = engine(runner)
    run(target, PLAIN, *[request(f"s{number}", SOURCES["b"], group="s") for number in range(3)])
    assert target.stats().prefix_tokens_found == 2 * len(SOURCES["b"])
    assert runner.calls == 1


def test_small_memory_changes_no_translation() -> None:
    wanted = [request(f"r{number}", (*SOURCES["a"], number), (1,) * number) for number in range(6)]
    small = engine(Translator(capacity=55))
    assert run(small, STRATEGIES["chain"], *wanted) == {
        one.id: run(engine(Translator()), PLAIN, one)[one.id] for one in wanted
    }
