"""A target without weights, whose rows give the true distribution of the words in each place of right answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

import torch

from parlay.bench.counting import CountingRunner
from parlay.bench.quality.laws import Law, Places
from parlay.drafters.resources import Resources
from parlay.engine import Engine, Limits
from parlay.strategies.built import StrategyCache
from parlay.types import (
    NO_SKIP,
    CanvasSpec,
    Exactness,
    Metrics,
    NoiseKey,
    Output,
    Request,
    SamplingParams,
    Segment,
    Skip,
    trees,
)

ORACLE = "oracle"
"""The name of the target in rows of results."""
TOGETHER = 32
"""Limit on the requests in one step."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer: its text, its number of tokens, the forwards that it took, and the strategy's exactness."""

    text: str
    tokens: int
    steps: int
    exactness: Exactness


class OracleRunner(CountingRunner):
    """A `Runner` whose prompt is one token, the number of a law. A row's logits follow from the decided words it sees.

    It can fill canvases, and it can also decode token by token, where each row sees only the tokens before it.
    """

    def __init__(self, laws: Sequence[Law]) -> None:
        self._laws = laws
        vocab_size = max(max(len(law.words) for law in laws), len(laws)) + 1
        super().__init__(ORACLE, vocab_size, kernels="none: the right answers are known")
        self._spec = replace(self._spec, together=True, canvas=CanvasSpec(vocab_size - 1))
        self._texts: dict[int, list[int]] = {}
        self._last: dict[int, Segment] = {}

    def open(self, sequence: int, tokens: Sequence[int], salt: str = "") -> int:
        self._texts[sequence] = []
        return super().open(sequence, tokens, salt)

    def forward(self, segments: Sequence[Segment], taps: Sequence[int] = (), skip: Skip = NO_SKIP) -> Output:
        starts = [0]
        for segment in segments:
            self._last[segment.sequence] = segment
            starts.append(starts[-1] + len(self.places(segment)))
        logits_RV = torch.full((starts[-1], self.spec.vocab_size), -torch.inf)
        for segment, start in zip(segments, starts, strict=False):
            for row, (place, decided) in enumerate(self._rows(segment)[segment.logits_from :], start=start):
                law = self._law(segment)
                if 0 <= place < law.places:
                    logits_RV[row, : len(law.words)] = law.logits(decided)[place]
                else:
                    logits_RV[row] = 0  # rows after the answer are never read
        return Output(logits_RV, tuple(starts))

    def _law(self, segment: Segment) -> Law:
        return self._laws[(*self._texts[segment.sequence], *segment.pending)[0]]

    def _rows(self, segment: Segment) -> list[tuple[int, Places]]:
        """Return, for each row, the place that it predicts and the decided words that it sees.

        A row of text or of a draft sees the words before it. A row of a canvas sees all words of the canvas.
        """
        text, pending, tree = self._texts[segment.sequence], segment.pending, segment.tree
        size, whole = self._law(segment).places, [*text, *pending]
        rows = [(end - 1, _padded(whole[1:end], size)) for end in range(len(text) + 1, len(whole) + 1)]
        if segment.together:
            mask = self.spec.vocab_size - 1
            decided = _padded(whole[1:] + [None if token == mask else token for token in tree.tokens], size)
            return rows + [(len(whole) - 1 + node, decided) for node in range(len(tree))]
        paths = [[tree.tokens[above] for above in trees.path_to(tree, node)] for node in range(len(tree))]
        return rows + [(len(whole) + len(path) - 1, _padded(whole[1:] + path, size)) for path in paths]

    def keep(self, sequence: int, path: Sequence[int]) -> int:
        last = self._last[sequence]
        self._texts[sequence] += [*last.pending, *(last.tree.tokens[node] for node in path)]
        return super().keep(sequence, path)

    def truncate(self, sequence: int, length: int) -> int:
        del self._texts[sequence][length:]
        return super().truncate(sequence, length)

    def fork(self, sequence: int, copy: int) -> None:
        self._texts[copy] = list(self._texts[sequence])
        super().fork(sequence, copy)

    def release(self, sequence: int) -> None:
        self._texts.pop(sequence, None)
        super().release(sequence)


def _padded(tokens: Sequence[int | None], size: int) -> Places:
    return (*tokens, *[None] * size)[:size]


class _NoCost:
    """A `Cost` for which all forwards are free."""

    revision = 0

    def forward(self, rows: int, context: int) -> float:
        return 0.0

    def record(self, rows: int, context: int, seconds: float) -> None:
        """Do nothing: the time of an oracle's forwards does not matter."""


class Oracle:
    """Decodes problems at temperature 1 with the oracle's probabilities: all right answers are equally likely."""

    name = ORACLE

    def __init__(self, laws: Sequence[Law]) -> None:
        self.runner = OracleRunner(laws)
        self._laws = laws
        self._engine = Engine(self.runner, cost := _NoCost(), Limits(max_sequences=TOGETHER, max_draft_rows=1024))
        spec = self.runner.spec
        self._strategies = StrategyCache(Resources(spec.vocab_size, _no_model, target=spec), cost)

    def write(self, strategy: str, seeds: Mapping[int, Sequence[int]]) -> list[Answer]:
        """Write one answer for each seed of each problem; ``seeds`` are by the problem's number.

        Raises ValueError if the engine fails.
        """
        chosen = self._strategies.get(strategy)
        texts: dict[str, list[int]] = {}
        ends: dict[str, Metrics] = {}
        faults: list[str] = []
        for number, own in seeds.items():
            params = SamplingParams(temperature=1, max_tokens=self._laws[number].places)
            for seed in own:
                name = f"{number} {seed}"
                texts[name] = []
                self._engine.add(Request(id=name, prompt=(number,), params=params, key=NoiseKey(seed)), chosen)
        while not self._engine.idle:
            for event in self._engine.step():
                texts[event.request] += [one.token for one in event.committed]
                if event.metrics is not None:
                    ends[event.request] = event.metrics
                faults += [event.error] if event.error else []
        if faults:
            raise ValueError(f"strategy {strategy}: {faults[0]}")
        words = {name: self._laws[int(name.split()[0])].words for name in texts}
        return [
            Answer(" ".join(words[name][token] for token in text), len(text), ends[name].steps, ends[name].exactness)
            for name, text in texts.items()
        ]


def _no_model(name: str) -> NoReturn:
    """Raise ValueError, because an oracle has no draft model."""
    raise ValueError("an oracle has no draft model: choose another strategy")
