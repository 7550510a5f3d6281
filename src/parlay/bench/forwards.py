"""Seconds of one forward by its rows and the text before them: measured, kept as rows of results, read back as prices.

A row of results holds one timed forward: one step, whose tokens are the forward's rows.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import median

import torch

from parlay.bench.records import Cell, Results, Row, read
from parlay.cost.timing import chain_of, time_forward, with_context
from parlay.models.config import UnsupportedModel
from parlay.models.loading import load_weights, read_config
from parlay.models.weights.shapes import weight_shapes
from parlay.system import threads
from parlay.types import Runner

FORWARD = "forward"
"""The strategy's name in cells of timed forwards."""
ROWS = (1, 2, 4, 8, 16, 32)
CONTEXTS = (64, 512, 2048)
PASSES = 7

WEIGHTS = "weights"
"""The workload's name in cells that time reading as many bytes as a model's weights have."""

EMBEDDING = "model.embed_tokens.weight"
_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class ForwardPrices:
    """Seconds of forwards of one model, interpolated from a table; implements `Cost`.

    ``curves`` are pairs (rows, seconds) in ascending order, by context. Values between and beyond the points lie on
    straight lines.
    """

    model: str
    curves: Mapping[int, Points]

    @property
    def revision(self) -> int:
        """Nothing: a table does not change."""
        return 0

    def forward(self, rows: int, context: int) -> float:
        return _along([(known, _along(self.curves[known], rows)) for known in sorted(self.curves)], context)

    def record(self, rows: int, context: int, seconds: float) -> None:
        """Nothing: a table learns nothing."""


def _along(points: Points, x: float) -> float:
    """The value at ``x`` on straight lines: constant before the first point, never falling after the last."""
    if len(points) == 1 or x <= points[0][0]:
        return points[0][1]
    high = min(bisect_left(points, (x, 0.0)), len(points) - 1)
    (left, low), (right, top) = points[high - 1], points[high]
    slope = (top - low) / (right - left)
    return top + (slope if x < right else max(0.0, slope)) * (x - right)


@dataclass(frozen=True, slots=True)
class TimedModel:
    """A model whose forwards are timed. ``threads`` None: as many as decoding uses.

    ``weights``: bytes of the weights that each row uses; reading so many bytes is timed too.
    """

    runner: Runner
    weights: int = 0
    threads: int | None = None


def add_missing(runner: Runner, model: str, results: Results, weights: int) -> None:
    """Time forwards of the model and the reading of ``weights`` bytes, unless ``results`` hold these times."""
    if not any(is_forward(row) and row.cell.model == model for row in results.rows):
        results.add(list(measure({model: TimedModel(runner, weights)}, ROWS, CONTEXTS, PASSES)))


def is_forward(row: Row) -> bool:
    """Whether the row is a timed forward, not a decoded text."""
    return row.cell.strategy == FORWARD


def measure(
    models: Mapping[str, TimedModel], rows: Sequence[int], contexts: Sequence[int], passes: int
) -> Iterator[Row]:
    """Time forwards that verify chains of the given numbers of rows after the given contexts, all models and row counts
    in turn in each pass, so that ratios compare the same seconds.

    A context for which a runner has no room gives a row that says so.
    """
    places = {model: -1 - index for index, model in enumerate(models)}  # requests have no negative numbers
    for context in contexts:
        with ExitStack() as texts:
            ready: dict[str, TimedModel] = {}
            for model, timed in models.items():
                if texts.enter_context(with_context(timed.runner, places[model], context, max(rows))):
                    ready[model] = timed
                else:
                    yield Row(cell=_cell(model, max(rows), context), note=f"no room for {context + max(rows)} tokens")
            for turn in range(-1, passes):  # the first pass may build kernels
                seen = [*_forwards(ready, places, rows, context, turn), *_readings(ready, context, turn)]
                yield from seen if turn >= 0 else ()


def _forwards(
    models: Mapping[str, TimedModel], places: Mapping[str, int], rows: Sequence[int], context: int, turn: int
) -> Iterator[Row]:
    for count in rows:
        for model, timed in models.items():
            with threads.using(timed.threads):
                seconds = time_forward(timed.runner, [chain_of(timed.runner, places[model], count)])
            cell = _cell(model, count, context)
            yield Row(cell=cell, round=turn, steps=1, tokens=count, seconds=seconds, verify_seconds=seconds)


def _readings(models: Mapping[str, TimedModel], context: int, turn: int) -> Iterator[Row]:
    for model, timed in models.items():
        if timed.weights:
            with threads.using(timed.threads):
                seconds = time_reading(timed.weights, timed.runner.spec.device)
            cell = Cell(model=model, strategy=FORWARD, workload=WEIGHTS, context=context)
            yield Row(cell=cell, round=turn, seconds=seconds, peak_memory_bytes=timed.weights)


def weight_bytes(model: Path, stored: str) -> int:
    """Bytes of all the weights that each row of the native decoder goes through; 0 for a model it can't run.

    ``stored`` is their dtype, or ``int8``, whose few scales are left out; a GGUF file's stay as they are.
    """
    try:
        config = read_config(model)
    except UnsupportedModel:
        return 0
    looked_up = () if config.tie_embeddings else (EMBEDDING,)
    if model.is_file():
        weights = load_weights(model, config)
        return sum(weight.data.nbytes for name, weight in weights.items() if name not in looked_up)
    sizes = (math.prod(shape) for name, shape in weight_shapes(config).items() if name not in looked_up)
    return sum(sizes) * _BYTES[stored]


def _cell(model: str, rows: int, context: int) -> Cell:
    return Cell(model=model, strategy=FORWARD, workload=f"rows {rows}", context=context)


def time_reading(size: int, device: str) -> float:
    """Seconds to read so many bytes with hardly any arithmetic."""
    block = torch.zeros(size // 4, device=device)
    began = time.perf_counter()
    block.sum().item()
    return time.perf_counter() - began


def curves(rows: Iterable[Row], model: str) -> dict[int, Points]:
    """The median timing for each number of rows, by context.

    No median exceeds that of a larger forward: delays only add time.
    """
    seconds: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if is_forward(row) and row.cell.model == model and row.steps:
            seconds[row.cell.context][row.tokens // row.steps].append(row.verify_seconds / row.steps)
    return {context: _rising(by_rows) for context, by_rows in sorted(seconds.items())}


def _rising(seconds: Mapping[int, Sequence[float]]) -> Points:
    counts = sorted(seconds)
    least = list(accumulate((median(seconds[count]) for count in reversed(counts)), min))[::-1]
    return list(zip(counts, least, strict=True))


@dataclass(frozen=True, slots=True)
class ForwardReading:
    """The bytes, and the shortest time in which they were read, because delays only add time."""

    bytes: int
    seconds: float


def reading(rows: Iterable[Row], model: str) -> ForwardReading | None:
    """The reading of the model's weights, if it was timed."""
    own = [row for row in rows if row.cell.workload == WEIGHTS and row.cell.model == model and row.seconds > 0]
    return ForwardReading(own[0].peak_memory_bytes, min(row.seconds for row in own)) if own else None


def prices(rows: Sequence[Row], where: str) -> ForwardPrices:
    """The table of the one model whose forwards these rows time. Raises ValueError for none, or for several."""
    models = list(dict.fromkeys(row.cell.model for row in rows if is_forward(row) and row.steps))
    if len(models) != 1:
        found = f"forwards of {', '.join(models)}" if models else "no timed forwards"
        raise ValueError(f"{where} holds {found}: wanted those of one model")
    return ForwardPrices(models[0], curves(rows, models[0]))


def read_prices(path: Path) -> ForwardPrices:
    """The prices in a file of results. Raises ValueError for a file without such rows."""
    return prices(read(path)[1], str(path))
