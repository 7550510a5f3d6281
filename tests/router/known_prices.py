"""Decodes texts that change their kind with the engine, on a virtual clock that only known costs advance.

A forward takes time by its rows, a proposal takes time by its levels, and everything else takes none. So figures are
the same on every machine, and estimates of costs are right. Prose repeats no earlier text, and a draft head is often
right about it. A copied document repeats the prompt, and calls repeat each other except for their arguments.
"""

from __future__ import annotations

import zlib
from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from parlay.cost.measured import MeasuredCost
from parlay.drafters.resources import Resources
from parlay.engine import Engine
from parlay.router.arms import Arm
from parlay.router.goals import GOALS, Aim
from parlay.router.policies import Fixed
from parlay.router.router import Router
from parlay.sampling.rules import SharedNoise
from parlay.strategies.building import build
from parlay.strategies.spelling import parse
from parlay.testing.toys import ToyRunner
from parlay.types import (
    NO_SKIP,
    Draft,
    Drafter,
    Needs,
    NoiseKey,
    Observation,
    Output,
    Policy,
    Request,
    SamplingParams,
    Segment,
    SequenceView,
    Skip,
    Strategy,
    trees,
)

VOCAB = 512
PROSE, COPY, CALLS = "prose", "copy", "calls"
ORDERS = (
    (PROSE, COPY, CALLS, PROSE),
    (CALLS, PROSE, COPY, PROSE),
    (COPY, PROSE, CALLS, PROSE),
    (PROSE, CALLS, COPY, PROSE),
)
_PROMPT, _STRETCH = 192, 96  # tokens
_MEASURED = (1, 2, 4, 8, 9, 16, 17, 32, 33, 64, 128)  # rows of forwards whose price is known from the start
_KNOWN_BY = 8  # so many first tokens tell texts apart
_CALL = 16  # tokens of a call, of which every fifth is an argument
_SEES = {PROSE: (0.15, 0.5, 0.85, 0.97), COPY: (0.1, 0.3, 0.5, 0.9), CALLS: (0.3, 0.7, 0.9, 0.98)}
"""By kind: the probability that the head is right about a token. Each value holds for a quarter of the tokens."""
_DEEPER = 0.93  # by which factor it is less right from one level to the next
_BLUR = 0.15  # how far its score lies from that chance at most


@dataclass(frozen=True, eq=False)
class Prices:
    """Costs in milliseconds: of forwards by rows, interpolated linearly, and of a head's drafts by levels.

    ``row`` is what each further text adds to a level, and ``copy`` what the search for a copy takes in each text.
    """

    forwards: Mapping[int, float]
    draft: float
    level: float
    copy: float = 0.03
    row: float = 0.0

    def forward(self, rows: int) -> float:
        known = sorted(self.forwards)
        high = min(max(1, bisect_left(known, rows)), len(known) - 1)
        fewer, more = known[high - 1], known[high]
        slope = (self.forwards[more] - self.forwards[fewer]) / (more - fewer)
        return self.forwards[fewer] + slope * (rows - fewer)


IDLE = Prices({1: 6.0, 3: 6.6, 5: 8.6, 9: 11.0, 17: 16.0, 33: 26.0}, draft=0.7, level=0.5)
"""SmolLM2-135M in bfloat16 with an EAGLE-3 head on two idle cores of a Zen 3. log.md has the forwards up to five
rows."""
BUSY = Prices({1: 10.0, 3: 13.0, 5: 18.5, 9: 26.0, 17: 40.0, 33: 68.0}, draft=1.0, level=0.7)
"""SmolLM2-135M while other processes use the same cores."""
LARGE = Prices(
    {1: 22, 2: 23, 4: 24, 8: 27, 16: 45, 32: 88, 64: 175, 128: 350}, draft=3.0, level=2.0, copy=0.01, row=0.2
)
"""Qwen2.5-Coder-1.5B in four bits on two idle cores of a Zen 5. Beyond eight rows, cost is proportional to
arithmetic."""


def of_experts(share: float, read: Mapping[int, float]) -> Prices:
    """Return the costs of a model that reads its weights in 20 ms for one row. ``share`` of these weights are experts.

    ``read`` says, by number of rows, how many times as many expert weights they read together as one row. Each row adds
    0.3 ms of arithmetic. A head costs what it costs in `LARGE`.
    """
    forwards = {rows: 20 * (1 - share + share * times) + 0.3 * rows for rows, times in read.items()}
    return Prices(forwards, draft=3.0, level=2.0, copy=0.01)


def by_chance(count: int, chosen: int) -> dict[int, float]:
    """Return by rows how many times as many expert weights they read as one row, if each chooses ``chosen`` of
    ``count``.

    Choices are independent: the rows read n (1 - (1 - k / n)^rows) experts, and one row reads k.
    """
    rows = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 24, 32, 64, 128)
    return {each: count * (1 - (1 - chosen / count) ** each) / chosen for each in rows}


COUNTED = {1: 1.0, 2: 5.7 / 4, 4: 9.2 / 4, 8: 14.7 / 4, 16: 18.4 / 4, 32: 20.3 / 4}
"""Counts of a synthetic mixture of 32 experts, of which each row runs four; see cpu-performance.md."""
DENSE = of_experts(0.0, dict.fromkeys((1, 128), 1.0))
EXPERTS = of_experts(0.66, COUNTED)
"""Costs like those of gpt-oss-20b: two thirds of the weights that a row reads are experts."""
MANY_EXPERTS = of_experts(0.55, by_chance(128, 8))
"""Costs of Qwen3-30B-A3B, in the worst case of independent choices."""


def chance(*what: int) -> float:
    """Return a number in [0, 1) that depends on the arguments alone."""
    return zlib.crc32(array("q", what).tobytes()) / 2**32


@dataclass(frozen=True)
class Text:
    """A prompt and the answer that every strategy writes; ``kinds`` names the kind of each token of both."""

    seed: int
    tokens: tuple[int, ...]
    kinds: tuple[str, ...]

    @staticmethod
    def of(seed: int, order: Sequence[str]) -> Text:
        tokens, kinds = [_word(seed, place) for place in range(_PROMPT)], [PROSE] * _PROMPT
        for kind in order:
            begin = len(tokens)
            copied = int(chance(seed, begin) * (_PROMPT - _STRETCH))
            for place in range(begin, begin + _STRETCH):
                if kind == COPY and chance(seed, place, 1) > 0.03:
                    token = tokens[copied + place - begin]
                elif kind == CALLS and place % _CALL % 5:
                    token = VOCAB - _CALL + place % _CALL
                else:
                    token = _word(seed, place)
                tokens.append(token)
            kinds += [kind] * _STRETCH
        return Text(seed, tuple(tokens), tuple(kinds))

    def sees(self, place: int, depth: int) -> float:
        """Return the probability that the head is right about this token when it drafts it at this depth."""
        return _SEES[self.kinds[place]][int(4 * chance(self.seed, place, 2))] * _DEEPER**depth


def _word(seed: int, place: int) -> int:
    """Return a token. Frequencies are like those of words in a language: few tokens are frequent, and many of 400
    are rare."""
    return int(400 ** chance(seed, place, 3))


class _Clocked(ToyRunner):
    """Writes a text, whatever is drafted, and advances its clock ``now`` by the cost of the rows."""

    def __init__(self, prices: Prices) -> None:
        super().__init__(self._next, VOCAB)
        self.now, self._prices = 0.0, prices
        self.steps, self.nodes = 0, 0
        self._written: dict[tuple[int, ...], Text] = {}

    def write(self, text: Text) -> None:
        """Register a text, which is written after its prompt."""
        self._written[text.tokens[:_KNOWN_BY]] = text

    def text_of(self, ids: Sequence[int]) -> Text:
        return self._written[tuple(ids[:_KNOWN_BY])]

    def _next(self, ids: Sequence[int]) -> Tensor:
        logits_V = torch.zeros(VOCAB)
        if len(ids) >= _KNOWN_BY and len(ids) < len(tokens := self.text_of(ids).tokens):
            logits_V[tokens[len(ids)]] = 9.0
        return logits_V

    def forward(self, segments: Sequence[Segment], taps: Sequence[int] = (), skip: Skip = NO_SKIP) -> Output:
        self.now += self._prices.forward(sum(segment.rows for segment in segments)) / 1000
        self.steps += len(segments)
        self.nodes += sum(len(segment.tree) for segment in segments)
        return super().forward(segments, taps, skip)


class _Head:
    """A head that drafts chains. `Text.sees` is the probability that a token is right; scores differ from it a
    little."""

    needs = Needs(taps=(1,), expected=0.55)

    def __init__(self, runner: _Clocked, prices: Prices) -> None:
        self._runner, self._prices = runner, prices

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        level = self._prices.level + self._prices.row * (len(views) - 1)
        self._runner.now += (self._prices.draft + level * max(budgets)) / 1000
        return [self._draft(view, budget) for view, budget in zip(views, budgets, strict=True)]

    def _draft(self, view: SequenceView, nodes: int) -> Draft:
        text, begin = self._runner.text_of(view.tokens), len(view.tokens)
        tokens, scores = [], []
        for place in range(begin, min(begin + nodes, len(text.tokens))):
            sees = text.sees(place, place - begin)
            right = chance(text.seed, place, place - begin, 4) < sees
            tokens.append(text.tokens[place] if right else VOCAB - 1 - text.tokens[place])
            blur = _BLUR * (2 * chance(text.seed, place, place - begin, 5) - 1)
            scores.append(min(0.99, max(0.01, sees + blur)))
        return trees.chain(tokens, "head", scores)

    def observe(self, observations: Sequence[Observation]) -> None:
        """Ignore the observations."""

    def release(self, sequence: int) -> None:
        """Do nothing: it keeps no state."""


class _Copier:
    """Wraps the real prompt-lookup drafter, and advances the clock by a known cost."""

    needs = Needs(outcomes=False)

    def __init__(self, runner: _Clocked, prices: Prices) -> None:
        built = build(parse("prompt-lookup"), Resources(VOCAB, lambda name: runner))
        assert built is not None
        self._drafter, self._runner, self._prices = built, runner, prices

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        self._runner.now += self._prices.copy * len(views) / 1000
        return self._drafter.propose(views, budgets)

    def observe(self, observations: Sequence[Observation]) -> None:
        """Ignore the observations."""

    def release(self, sequence: int) -> None:
        self._drafter.release(sequence)


def texts(seed: int, count: int = 8) -> list[Text]:
    """Return ``count`` texts, whose orders of kinds are `ORDERS` in turn."""
    return [Text.of(1000 * seed + number, ORDERS[number % len(ORDERS)]) for number in range(count)]


class PricedEngine:
    """An engine on a virtual clock, which decodes texts with one strategy. Each reading of the clock takes ``tick``
    seconds."""

    def __init__(self, prices: Prices, tick: float = 0.0) -> None:
        self._prices, self._tick = prices, tick
        self._runner = _Clocked(prices)
        self.cost = MeasuredCost(
            {rows: prices.forward(rows) / 1000 for rows in (1, 2, 4, 8, 9, 16, 17, 32, 33, 64, 128)}
        )
        self._engine = self._open()

    @property
    def drafted(self) -> float:
        """Return the mean number of draft nodes per step."""
        return self._runner.nodes / self._runner.steps

    def _open(self) -> Engine:
        return Engine(self._runner, self.cost, clock=self._clock)

    def _clock(self) -> float:
        self._runner.now += self._tick
        return self._runner.now

    def auto(self) -> Strategy:
        arms = [Arm("copy", 10, replayable=True), Arm("head", 8, expected=_Head.needs.expected, sees_first=True)]
        return self._strategy([self._copier(), self._head()], Router(self.cost, arms))

    def copies(self, goal: str) -> Strategy:
        """Return `auto` with this goal, with a copying drafter only."""
        router = Router(self.cost, [Arm("copy", 10, replayable=True)], aim=Aim(goal=GOALS[goal]))
        return self._strategy([self._copier()], router)

    def fixed(self, drafter: str, nodes: int) -> Strategy:
        """Return a strategy with one drafter, or none, that always drafts ``nodes`` nodes."""
        return self._strategy([self._head() if drafter == "head" else self._copier()], Fixed(nodes))

    def _head(self) -> Drafter:
        return _Head(self._runner, self._prices)

    def _copier(self) -> Drafter:
        return _Copier(self._runner, self._prices)

    def _strategy(self, drafters: Sequence[Drafter], policy: Policy) -> Strategy:
        return Strategy("known", tuple(drafters), SharedNoise(), policy)

    def seconds(self, text: Text, strategy: Strategy) -> list[float]:
        """Return the seconds of each token after the first. A step's seconds are divided among the tokens that it
        committed."""
        self._add("text", text, strategy)
        written: list[int] = []
        taken: list[float] = []
        while not self._engine.idle:
            began = self._runner.now
            [event] = self._engine.step()
            new = [one.token for one in event.committed]
            taken += [(self._runner.now - began) / len(new)] * len(new)
            written += new
        assert tuple(written) == text.tokens[_PROMPT:], "the text of plain decoding"
        return taken[1:]

    def seconds_at_once(self, together: Sequence[Text], strategy: Strategy) -> float:
        """Return the seconds of all steps that write these texts concurrently, without the steps that read prompts."""
        for number, text in enumerate(together):
            self._add(str(number), text, strategy)
        written: dict[str, list[int]] = {str(number): [] for number in range(len(together))}
        began = self._runner.now
        while not self._engine.idle:
            for event in self._engine.step():
                written[event.request] += [one.token for one in event.committed]
            if not all(written.values()):
                began = self._runner.now
        assert [tuple(each) for each in written.values()] == [text.tokens[_PROMPT:] for text in together]
        return self._runner.now - began

    def seconds_per_token(self, texts: Sequence[Text], apart: float, strategy: Strategy) -> list[float]:
        """Return each text's seconds per token from its arrival to its last token, in the order in which the texts end.

        A text arrives every ``apart`` seconds on average (a Poisson process).
        """
        gaps = torch.empty(len(texts)).exponential_(1 / apart, generator=torch.Generator().manual_seed(1))
        times = gaps.cumsum(0).tolist()
        waiting, began, taken = list(zip(times, texts, strict=True)), dict[str, float](), list[float]()
        start = self._runner.now
        while waiting or not self._engine.idle:
            if self._engine.idle:
                self._runner.now = max(self._runner.now, start + waiting[0][0])
            while waiting and start + waiting[0][0] <= self._runner.now:
                at, text = waiting.pop(0)
                began[str(text.seed)] = start + at
                self._add(str(text.seed), text, strategy)
            for event in self._engine.step():
                if event.finish_reason is not None:
                    taken.append((self._runner.now - began[event.request]) / (4 * _STRETCH))
        return taken

    def _add(self, name: str, text: Text, strategy: Strategy) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=len(text.tokens) - _PROMPT, ignore_eos=True)
        self._runner.write(text)
        self._engine.add(Request(id=name, prompt=text.tokens[:_PROMPT], params=params, key=NoiseKey(0)), strategy)


def stretches(count: int = 4) -> list[slice]:
    """Return the slices of an answer's tokens after the first that have each kind."""
    ends = [max(0, number * _STRETCH - 1) for number in range(count + 1)]
    return [slice(begin, end) for begin, end in pairwise(ends)]
