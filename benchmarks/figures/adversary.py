"""Drafters that know the target's text and use it against the engine, under the default policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.figures.ours import PLAIN
from benchmarks.figures.prompts import Prompt
from benchmarks.figures.systems import Stopwatch, System, Timed
from parlay.llm import LLM
from parlay.router.policies import Adaptive, Plain
from parlay.sampling.rules import SharedNoise
from parlay.testing.toy_drafters import Answer, answer_from, sometimes
from parlay.types import Event, NoiseKey, Request, SamplingParams, Strategy

BUDGET = 16
PATTERNS = {"never right": (False,), "right until it is trusted": (True,) * 12 + (False,) * 52}


def plainly(llm: LLM) -> System:
    """Plain decoding, asked as the adversaries are: of the engine, without a text being made of the tokens."""
    return _asked(llm, f"parlay {PLAIN}", lambda: Strategy(PLAIN, None, SharedNoise(), Plain()))


def adversaries(llm: LLM, reference: System, prompts: Sequence[Prompt], most: int) -> list[System]:
    """One system for each of `PATTERNS`. Each request meets a policy that knows nothing yet, the hardest case."""
    texts = {prompt.ids: prompt.ids + reference.decode(prompt, most).tokens for prompt in prompts}
    answer = answer_from(lambda request: texts[request.prompt])
    return [_adversary(llm, name, pattern, answer) for name, pattern in PATTERNS.items()]


def _adversary(llm: LLM, name: str, pattern: Sequence[bool], answer: Answer) -> System:
    def strategy() -> Strategy:
        drafter = sometimes(answer, llm.runner.spec.vocab_size, pattern)
        return Strategy(name, drafter, SharedNoise(), Adaptive(llm.engine.cost, BUDGET))

    return _asked(llm, f"adversary: {name}", strategy)


def _asked(llm: LLM, name: str, strategy: Callable[[], Strategy]) -> System:
    """Requests to the engine, each under a strategy of its own."""
    engine = llm.engine

    def decode(prompt: Prompt, most: int) -> Timed:
        request = Request(
            id=name,
            prompt=prompt.ids,
            params=SamplingParams(temperature=0.0, max_tokens=most),
            key=NoiseKey(0),
            stop_ids=frozenset(llm.runner.spec.eos_ids),
        )
        watch = Stopwatch()
        engine.add(request, strategy())
        events: list[Event] = []
        while not engine.idle:
            events = engine.step()
            for event in events:
                watch.emit(event.committed.tokens)
        metrics = events[-1].metrics
        assert metrics is not None
        return watch.read(
            steps=metrics.steps, draft_tokens=metrics.draft_tokens, accepted_tokens=metrics.accepted_tokens
        )

    return System(name, decode)
