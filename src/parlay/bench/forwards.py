"""Times forwards by rows and context, stores the times as rows of results, and makes tables of prices from them.

A row of results holds one timed forward. It counts as one step; its number of tokens is the forward's number of rows.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
"""The name in place of a strategy in cells of timed forwards."""
ROWS = (1, 2, 4, 8, 16, 32)
CONTEXTS = (64, 512, 2048)
PASSES = 7

WEIGHTS = "weights"
"""The name in place of a workload in cells that time reading as many bytes as a model's weights have."""

EMBEDDING = "model.embed_tokens.weight"
_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class ForwardPrices:
    """Seconds of forwards of one model, interpolated from a table; implements `Cost`.

    ``curves`` has pairs (rows, seconds) in ascending order for each context. Values between the points lie on straight
    lines. So do values beyond the last point; values before the first one equal it.
    """

    model: str
    curves: Mapping[int, Points]

    @property
    def revision(self) -> int:
        """0, because a table does not change."""
        return 0

    def forward(self, rows: int, context: int) -> float:
        """Return the seconds of a forward of ``rows`` rows after ``context`` cached tokens."""
        return _along([(known, _along(self.curves[known], rows)) for known in sorted(self.curves)], context)

    def record(self, rows: int, context: int, seconds: float) -> None:
        """Do nothing: a table learns nothing."""


def _along(points: Points, x: float) -> float:
    """Interpolate at ``x`` on straight lines, constant before the first point and not falling after the last."""
    if len(points) == 1 or x <= points[0][0]:
        return points[0][1]
    high = min(bisect_left(points, (x, 0.0)), len(points) - 1)
    (left, low), (right, top) = points[high - 1], points[high]
    slope = (top - low) / (right - left)
    return top + (slope if x < right else max(0.0, slope)) * (x - right)


@dataclass(frozen=True, slots=True)
class TimedModel:
    """A model whose forwards are timed with ``threads`` threads; None means as many as decoding uses.

    ``weights`` is the size in bytes of the weights that each row uses. Reading as many bytes is timed, too, unless it
    is 0.
    """

    runner: Runner
    weights: int = 0
    threads: int | None = None


def add_missing(runner: Runner, model: str, results: Results, weights: int) -> None:
    """Time forwards of the model and reading of ``weights`` bytes, unless ``results`` already holds these times."""
    if not any(is_forward(row) and row.cell.model == model for row in results.rows):
        results.add(list(measure({model: TimedModel(runner, weights)}, ROWS, CONTEXTS, PASSES)))


def is_forward(row: Row) -> bool:
    """Whether the row is a timed forward, not a decoded text."""
    return row.cell.strategy == FORWARD


def measure(
    models: Mapping[str, TimedModel],
    rows: Sequence[int],
    contexts: Sequence[int],
    passes: int,
    note: Callable[[], dict[str, float]] = dict,
) -> Iterator[Row]:
    """Time forwards that verify chains of the given numbers of rows after the given contexts.

    In each pass, all models and row counts take turns, so that a slow moment affects all of them alike. If a runner has
    no room for a context, a row says so. A row's ``values`` are what ``note`` returns right before its forward.
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
                seen = [*_forwards(ready, places, rows, (context, turn), note), *_readings(ready, context, turn)]
                yield from seen if turn >= 0 else ()


def _forwards(
    models: Mapping[str, TimedModel],
    places: Mapping[str, int],
    rows: Sequence[int],
    turn: tuple[int, int],
    note: Callable[[], dict[str, float]],
) -> Iterator[Row]:
    """Time a forward of each model and number of rows. ``turn``: the context and the number of the pass."""
    context, number = turn
    for count in rows:
        for model, timed in models.items():
            with threads.using(timed.threads):
                values = note()
                seconds = time_forward(timed.runner, [chain_of(timed.runner, places[model], count)])
            yield Row(
                cell=_cell(model, count, context),
                round=number,
                steps=1,
                tokens=count,
                seconds=seconds,
                verify_seconds=seconds,
                values=values,
            )


def _readings(models: Mapping[str, TimedModel], context: int, turn: int) -> Iterator[Row]:
    for model, timed in models.items():
        if timed.weights:
            with threads.using(timed.threads):
                seconds = time_reading(timed.weights, timed.runner.spec.device)
            cell = Cell(model=model, strategy=FORWARD, workload=WEIGHTS, context=context)
            yield Row(cell=cell, round=turn, seconds=seconds, peak_memory_bytes=timed.weights)


def weight_bytes(model: Path, stored: str) -> int:
    """Return the bytes of the weights that each row is multiplied by; 0 if Parlay's own decoder can't run the model.

    ``stored`` is the weights' dtype, or ``int8``, whose few scales are left out. A GGUF file has types of its own.
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
    """Return the seconds to read ``size`` bytes with almost no arithmetic."""
    block = torch.zeros(size // 4, device=device)
    began = time.perf_counter()
    block.sum().item()
    return time.perf_counter() - began


def curves(rows: Iterable[Row], model: str) -> dict[int, Points]:
    """Return the median seconds for each number of rows, by context.

    A median that exceeds the median of a forward with more rows is lowered to it, because only a delay can explain it.
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
    """A number of bytes, and the shortest measured time in which they were read; delays can only make it longer."""

    bytes: int
    seconds: float


def reading(rows: Iterable[Row], model: str) -> ForwardReading | None:
    """Return the reading of the model's weights; None if it was not timed."""
    own = [row for row in rows if row.cell.workload == WEIGHTS and row.cell.model == model and row.seconds > 0]
    return ForwardReading(own[0].peak_memory_bytes, min(row.seconds for row in own)) if own else None


def prices(rows: Sequence[Row], where: str) -> ForwardPrices:
    """Make a table of prices from rows that time forwards of one model. Raises ValueError unless it is exactly one.

    ``where`` names the rows' file in the error.
    """
    models = list(dict.fromkeys(row.cell.model for row in rows if is_forward(row) and row.steps))
    if len(models) != 1:
        found = f"forwards of {', '.join(models)}" if models else "no timed forwards"
        raise ValueError(f"{where} holds {found}: it must hold timed forwards of one model")
    return ForwardPrices(models[0], curves(rows, models[0]))


def read_prices(path: Path) -> ForwardPrices:
    """Read the table of prices in a file of results. Raises ValueError for a file without timed forwards."""
    return prices(read(path)[1], str(path))
