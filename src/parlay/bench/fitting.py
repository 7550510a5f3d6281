"""Learns the thresholds of a strategy that rolls back (big-little decoding) from examples, for each kind of text.

Thresholds are tried from the safest on. Each kind gets the fastest pair of thresholds with which enough of the answers
to its examples were good. This proves nothing about other prompts: `parlay.bench.certify` does, with prompts of its
own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from parlay.bench.certify import counts, speed
from parlay.certificates.bounds import agreement
from parlay.certificates.requirement import Floor
from parlay.llm.llm import LLM
from parlay.llm.outputs import RequestOutput
from parlay.strategies.accept_rules import RULE
from parlay.strategies.spelling import StrategySpec
from parlay.system.progress import Progress, bar
from parlay.text.answers import PatternFailed, find_answer
from parlay.text.prompt_kind import PromptClassifier
from parlay.types import Exactness, SamplingParams

NATS = (0.5, 1.0, 2.0, 3.0, 5.0, 8.0)
"""Rollback thresholds, tried in this order after 0 until too few answers are good. For greedy requests, 0 accepts only
tokens that the target would write."""
FALLBACKS = (0.8, 0.6, 0.4, 0.2)
LEAST_EXAMPLES = 8
"""A kind with fewer examples than this gets the thresholds that all examples together gave."""
ALL = "all"

Ids = tuple[int, ...]
IsGood = Callable[[RequestOutput, RequestOutput], bool]
"""Tells whether an answer (the first argument) is good enough, given the exact answer (the second)."""


@dataclass(frozen=True, slots=True)
class Learned:
    """The thresholds learned for a kind of text. With them, ``good`` of its ``examples`` had good answers.

    ``speed`` is a multiple of exact decoding's. ``fallback`` is None if the strategy has no such threshold.
    """

    kind: str
    nats: float
    fallback: float | None
    good: int
    examples: int
    speed: float

    def told(self, model: str) -> str:
        """Describe the thresholds in one line. It says so if the verifying ``model`` alone is faster."""
        fallback = "" if self.fallback is None else f"fallback {self.fallback:g}, "
        slower = f": slower than {model} alone" if self.speed < 1 else ""
        return (
            f"{self.kind}: {fallback}{self.nats:g} nats; {self.good} of {self.examples} answers are good, "
            f"{self.speed:.2f} times the speed of exact decoding{slower}"
        )


def good_by_agreement(floor: Floor) -> IsGood:
    """Return the test that an answer's agreement with the exact answer is at least ``floor.agreement``."""

    def is_good(answer: RequestOutput, exact: RequestOutput) -> bool:
        return agreement(answer.chosen.token_ids, exact.chosen.token_ids) >= floor.agreement

    return is_good


def good_by_answer(rule: str) -> IsGood:
    """Return the test that an answer's result equals the exact answer's result, whatever their other words.

    ``rule`` finds the result in a text, as in a vote. The test raises ValueError if the rule's pattern takes too much
    time.
    """

    def is_good(answer: RequestOutput, exact: RequestOutput) -> bool:
        try:
            return find_answer(rule, answer.chosen.text) == find_answer(rule, exact.chosen.text)
        except PatternFailed as error:
            raise ValueError(f"the answer's pattern can't be used: {error}") from None

    return is_good


def fit(
    llm: LLM,
    prompts: Sequence[Ids],
    strategy: StrategySpec,
    floor: Floor,
    params: SamplingParams,
    *,
    is_good: IsGood | None = None,
    progress: Progress = None,
) -> tuple[StrategySpec, tuple[Learned, ...]]:
    """Learn a strategy's thresholds.

    Returns the strategy with its thresholds, and the results: first for all examples, then for each kind that has
    enough examples. At least a share ``floor.floor`` of the answers must be good. Raises ValueError for a strategy
    without the accept rule ``rollback``, and for too few examples.
    """
    if strategy.settings.get(RULE) != "rollback":
        raise ValueError(f"strategy {strategy} has no thresholds to learn: use big-little, or rule=rollback")
    if len(set(prompts)) < LEAST_EXAMPLES:
        raise ValueError(f"thresholds need at least {LEAST_EXAMPLES} examples, got {len(prompts)}: give more prompts")
    tried = _Trials(llm, list(dict.fromkeys(prompts)), params, is_good or good_by_agreement(floor), progress)
    learned = tuple(_learned(tried, kind, strategy, floor.floor) for kind in tried.kinds())
    usual, *own = learned
    changes: dict[str, object] = {"rollback.nats": usual.nats, "rollback.by_kind": _spelled(own, "nats")}
    if usual.fallback is not None:
        changes |= {"fallback": usual.fallback, "by_kind": _spelled(own, "fallback")}
    return strategy.changed(**changes), learned  # type: ignore[arg-type]


def _spelled(learned: Sequence[Learned], name: str) -> tuple[str, ...]:
    values = {each.kind: each.nats if name == "nats" else each.fallback for each in learned}
    return tuple(f"{kind}/{value:g}" for kind, value in values.items() if value is not None)


class _Trials:
    """Decodes the examples with each strategy that is tried, in turns with exact decoding, and keeps the answers."""

    def __init__(
        self, llm: LLM, prompts: Sequence[Ids], params: SamplingParams, is_good: IsGood, progress: Progress
    ) -> None:
        self._llm, self._prompts, self._is_good, self._progress = llm, prompts, is_good, progress
        seed = params.seed or 0
        self._params = [replace(params, n=1, seed=seed + place) for place in range(len(prompts))]
        classifier = PromptClassifier(llm.tokenizer)
        self._kinds = [classifier.of(prompt, params) for prompt in prompts]
        self._found: dict[tuple[str, int], tuple[RequestOutput, RequestOutput]] = {}

    def kinds(self) -> list[str]:
        """Return `ALL`, and each kind that has enough examples."""
        counts: Mapping[str, int] = {kind: self._kinds.count(kind) for kind in sorted(set(self._kinds))}
        return [ALL, *(kind for kind, count in counts.items() if kind and count >= LEAST_EXAMPLES)]

    def of(self, kind: str, strategy: StrategySpec) -> tuple[int, int, float]:
        """Return a kind's number of good answers, of all its answers, and the speed over exact decoding's."""
        places = [place for place, own in enumerate(self._kinds) if kind in (ALL, own)]
        self._decode([place for place in places if (str(strategy), place) not in self._found], strategy)
        pairs = [self._found[str(strategy), place] for place in places]
        good = sum(self._is_good(lossy, exact) for lossy, exact in pairs)
        return good, len(places), speed(counts([lossy for lossy, _ in pairs]), counts([exact for _, exact in pairs]))

    def _decode(self, places: Sequence[int], strategy: StrategySpec) -> None:
        """Decode the examples with the strategy and exactly, in turns, so that load of the machine affects both alike.

        The first example is decoded once more before, to warm up.
        """
        with bar(2 * len(places[:1]) + 2 * len(places), f"Decoding {strategy}", "answer", self._progress) as shown:
            for turn, place in enumerate((*places[:1], *places)):
                step = -1 if turn % 2 else 1
                lossy, exact = [self._answer(place, way) for way in (strategy, None)[::step]][::step]
                self._found[str(strategy), place] = lossy, exact
                shown.update(2)

    def _answer(self, place: int, strategy: StrategySpec | None) -> RequestOutput:
        """Decode one example alone, as for a certificate. ``strategy`` None decodes exactly, without drafts."""
        self._llm.reset_prefix_cache()
        prompt, own = list(self._prompts[place]), self._params[place]
        exactness = Exactness.SEED if strategy is None else None
        (output,) = self._llm.generate(prompt, own, False, strategy=strategy or "none", exactness=exactness)
        return output


def _learned(tried: _Trials, kind: str, strategy: StrategySpec, floor: float) -> Learned:
    """Find the fastest thresholds for a kind with which at least a share ``floor`` of the answers are good.

    The rollback threshold is found first, then the fallback threshold for it.
    """
    fallback = strategy.settings.get("fallback")
    usual = float(fallback) if isinstance(fallback, int | float) else None
    plain = strategy.changed(**{"rollback.by_kind": ()}, **({} if usual is None else {"by_kind": ()}))

    def result(nats: float, least: float | None) -> Learned:
        own = plain.changed(**{"rollback.nats": nats}, **({} if least is None else {"fallback": least}))
        return Learned(kind, nats, least, *tried.of(kind, own))

    best = result(0.0, usual)
    for nats in NATS:
        found = result(nats, usual)
        if found.good < floor * found.examples:
            break
        best = max(best, found, key=lambda one: one.speed)
    for least in FALLBACKS if usual is not None else ():
        found = result(best.nats, least)
        if found.good >= floor * found.examples:
            best = max(best, found, key=lambda one: one.speed)
    return best
