"""Stores at work: whole requests through the engine on a target that knows its answers, one after the other."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest
import torch
from torch import Tensor

from parlay.drafters.resources import Resources
from parlay.engine import Engine
from parlay.router.policies import Fixed
from parlay.sampling.rules import SharedNoise
from parlay.strategies.building import build
from parlay.strategies.spelling import parse
from parlay.testing.conformance.stage import Steady
from parlay.testing.toys import ToyRunner
from parlay.types import Metrics, NoiseKey, Request, SamplingParams, Strategy
from tests.drafters.sight import no_runner, wait_for_store_files

VOCAB = 600
EOS = 1
STORES = ("trie-lookahead", "suffix-decoding", "suffix-automaton", "token-recycling")

Ids = tuple[int, ...]


@dataclass(frozen=True)
class Answers:
    """A target that answers known prompts with known texts, then with `EOS`, and likes the other tokens alike."""

    texts: dict[Ids, Ids]

    @cached_property
    def lengths(self) -> set[int]:
        return set(map(len, self.texts))

    def __call__(self, ids: Sequence[int]) -> Tensor:
        logits_V = torch.zeros(VOCAB)
        for length in self.lengths:
            text, written = self.texts.get(tuple(ids[:length])), tuple(ids[length:])
            if text is not None and written == text[: len(written)]:
                logits_V[text[len(written)] if len(written) < len(text) else EOS] = 9.0
        return logits_V


class Service:
    """One strategy, one instance of its drafter, and requests one after the other."""

    def __init__(self, spec: str, texts: dict[Ids, Ids]) -> None:
        self._texts = texts
        self._engine = Engine(ToyRunner(Answers(texts), VOCAB), Steady())
        nodes = parse(spec).settings["k"]
        assert isinstance(nodes, int)
        drafter = build(parse(spec), Resources(VOCAB, no_runner))
        self._strategy = Strategy(spec, (drafter,), SharedNoise(), Fixed(nodes))

    def ask(self, prompt: Ids, *, salt: str = "", store: bool = True) -> Metrics:
        """The metrics of a request, whose text must be the answer."""
        params = SamplingParams(temperature=0.0, max_tokens=400)
        request = Request(
            id="r", prompt=prompt, params=params, key=NoiseKey(0), stop_ids=frozenset({EOS}), salt=salt, store=store
        )
        self._engine.add(request, self._strategy)
        written: list[int] = []
        while True:
            for event in self._engine.step():
                written += [one.token for one in event.committed]
                if event.metrics is not None:
                    assert tuple(written) == (*self._texts[prompt], EOS)
                    assert event.metrics.drafter_faults == 0
                    return event.metrics


def unlike(chance: random.Random, length: int) -> Ids:
    """Tokens of which none comes twice."""
    return tuple(chance.sample(range(20, VOCAB), length))


@pytest.mark.parametrize(
    ("spec", "at_least"),
    [("trie-lookahead", 12.0), ("suffix-decoding", 9.0), ("suffix-automaton", 12.0), ("token-recycling", 6.5)],
)
def test_a_request_that_comes_again_is_drafted_to_the_end_of_what_is_known(spec: str, at_least: float) -> None:
    """Trie: branches of 12, so up to 13 tokens per step. Recycling: a tree of depth 6. The others: growing matches."""
    answer = unlike(random.Random(1), 260)
    service = Service(spec, {(2, 3, 4): answer})
    assert service.ask((2, 3, 4)).tokens_per_step < 1.1
    assert service.ask((2, 3, 4)).tokens_per_step >= at_least


@pytest.mark.parametrize("spec", STORES)
def test_neither_another_tenant_nor_a_request_that_opts_out_teaches(spec: str) -> None:
    service = Service(spec, {(2, 3, 4): unlike(random.Random(1), 60)})
    service.ask((2, 3, 4), salt="other")
    service.ask((2, 3, 4), store=False)
    assert service.ask((2, 3, 4)).tokens_per_step < 1.1
    assert service.ask((2, 3, 4), store=False).tokens_per_step > 4


@pytest.mark.parametrize("spec", STORES)
def test_what_one_process_learned_serves_the_next(spec: str, tmp_path: Path) -> None:
    texts = {(2, 3, 4): unlike(random.Random(1), 60)}
    named = f"{spec}:save_every=1,store={tmp_path / 'past.store'}"
    Service(named, texts).ask((2, 3, 4))
    wait_for_store_files()
    assert Service(named, texts).ask((2, 3, 4)).tokens_per_step > 4


@dataclass(frozen=True)
class Tool:
    """How calls of one tool are written: fixed parts, with arguments of two figures between them."""

    parts: tuple[Ids, ...]

    def call(self, chance: random.Random) -> Ids:
        text: Ids = ()
        for part in self.parts:
            text += (*part, chance.randrange(2, 12), chance.randrange(2, 12))
        return text


def traffic(seed: int, calls: int) -> list[tuple[Ids, Ids]]:
    """Prompts, none like another, and the calls of the same five tools that answer them, with other arguments."""
    shapes = random.Random(0)
    tokens = list(unlike(shapes, 400))
    tools = [Tool(tuple(tuple(tokens.pop() for _ in range(20)) for _ in range(4))) for _ in range(5)]
    chance = random.Random(seed)
    prompts = [tuple(chance.choices(range(2, VOCAB), k=10)) for _ in range(calls)]
    return [(prompt, chance.choice(tools).call(chance)) for prompt in prompts]


@pytest.mark.parametrize(
    ("spec", "at_least"),
    [("trie-lookahead", 3.0), ("suffix-decoding", 3.0), ("suffix-automaton:bias=0", 3.0), ("token-recycling", 2.5)],
)
def test_calls_of_known_tools_with_other_arguments_and_no_prompt_repeated(spec: str, at_least: float) -> None:
    """With its default bias SAM decoding goes plainly until six tokens match; recycling is never more than 6 deep."""
    first, second = traffic(1, 10), traffic(2, 10)
    assert not {prompt for prompt, _ in first} & {prompt for prompt, _ in second}
    service = Service(spec, dict(first + second))
    for prompt, _ in first:
        service.ask(prompt)
    assert tokens_per_step([service.ask(prompt) for prompt, _ in second]) >= at_least


def test_no_such_call_can_be_copied_from_its_own_request() -> None:
    alone = Service("prompt-lookup", dict(traffic(2, 20)))
    assert tokens_per_step([alone.ask(prompt) for prompt, _ in traffic(2, 20)]) < 1.5


def tokens_per_step(asked: Sequence[Metrics]) -> float:
    return sum(one.completion_tokens for one in asked) / sum(one.steps for one in asked)


@pytest.mark.parametrize("spec", STORES)
def test_drafts_never_pass_the_end_token(spec: str) -> None:
    """Short answers, asked again: a draft ends with the stop token, so none is longer than what is left to say."""
    texts = {(2, 3, place): unlike(random.Random(place), 4) for place in range(10, 14)}
    service = Service(f"{spec}:k=40", texts)
    for _ in range(2):
        for prompt in texts:
            metrics = service.ask(prompt)
            assert metrics.completion_tokens == 5
            assert len(metrics.drafted_by_depth) <= 5
