"""Measures the default policy against drafters that know the target's text and draft wrong tokens on purpose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.setup import SMOLLM2, Setup
from parlay.bench.records import OURS, PLAIN, Results
from parlay.bench.runner import Bench, BenchPlan, lacks
from parlay.bench.stopwatch import Stopwatch
from parlay.bench.wave import Answer, Ask, Gauges, Ids, Wave
from parlay.llm import LLM
from parlay.router.policies import Plain, adaptive
from parlay.sampling.rules import SharedNoise
from parlay.testing.toy_drafters import answer_from, sometimes
from parlay.types import Event, NoiseKey, Request, SamplingParams, Strategy

BUDGET = 16
PATTERNS: Mapping[str, Sequence[bool]] = {
    "never right": (False,),
    "right until it is trusted": (True,) * 12 + (False,) * 52,
}


def adversary(setup: Setup, results: Results) -> None:
    """Measure each of `PATTERNS` against plain decoding, on two kinds of text."""
    scale = setup.scale
    plan = BenchPlan(
        part="adversary",
        model=SMOLLM2,
        strategies=tuple(PATTERNS),
        workloads=setup.workloads(SMOLLM2, ("prose", "edit")),
        rounds=scale.rounds,
        max_tokens=scale.tokens,
        keep_loops=True,
    )
    if lacks(results, plan):
        with setup.llm(SMOLLM2) as llm:
            Bench(llm, plan, results, {OURS: Adversaries(llm, scale.tokens)}).run()


class Adversaries:
    """Implements `Decoder` for one greedy request at a time: plain decoding, and each of `PATTERNS`.

    It calls the engine directly, because the time for making text would hide losses. Each request starts with a policy
    that has learned nothing, which is the hardest case. The drafters know the first ``most`` tokens of each text.
    """

    def __init__(self, llm: LLM, most: int) -> None:
        self._llm = llm
        self._most = most
        self._gauges = Gauges(llm.runner.spec.device)
        self._texts: dict[Ids, Ids] = {}

    def decode(self, strategy: str, asks: Sequence[Ask], temperature: float) -> Wave:
        """Decode as `Decoder` says."""
        (ask,) = asks
        if ask.ids not in self._texts:
            (answer,) = self._decode(PLAIN, ask.ids, self._most).answers
            self._texts[ask.ids] = ask.ids + answer.tokens
        return self._decode(strategy, ask.ids, ask.most)

    def _decode(self, strategy: str, ids: Ids, most: int) -> Wave:
        engine = self._llm.engine
        request = Request(
            id=strategy,
            prompt=ids,
            params=SamplingParams(temperature=0.0, max_tokens=most),
            key=NoiseKey(0),
            stop_ids=frozenset(self._llm.runner.spec.eos_ids),
        )
        last: list[Event] = []

        def run(watch: Stopwatch) -> None:
            engine.add(request, self._strategy(strategy))
            while not engine.idle:
                last[:] = engine.step()
                for event in last:
                    watch.emit(event.committed.tokens)

        def answers(watch: Stopwatch) -> list[Answer]:
            metrics = last[-1].metrics
            assert metrics is not None
            return [Answer(watch.read(steps=metrics.steps), metrics)]

        return self._gauges.measure(run, answers)

    def _strategy(self, name: str) -> Strategy:
        if name == PLAIN:
            return Strategy(PLAIN, (), SharedNoise(), Plain())
        answer = answer_from(lambda request: self._texts[request.prompt])
        drafter = sometimes(answer, self._llm.runner.spec.vocab_size, PATTERNS[name])
        return Strategy(name, (drafter,), SharedNoise(), adaptive(self._llm.engine.cost, BUDGET))
