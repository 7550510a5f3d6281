"""CUDA graphs of a decoder's steps: a step's launches are recorded, and replayed as one.

In small models most of a GPU's step is the host's time for launching operators, and a graph needs one launch. Each
shape of a step needs its own graph; row counts are rounded to powers of two, so there are few shapes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import lru_cache, partial
from itertools import accumulate
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from parlay.cache import Budget
from parlay.cache.budget import format_bytes
from parlay.compiled.triton_here import reason
from parlay.models.forward import ForwardBatch, Taps
from parlay.models.torch_ops.fixed_step import FixedStep, StepInputs, StepShape
from parlay.models.torch_ops.linear import MIN_ROWS
from parlay.models.triton_ops.attention import SPAN
from parlay.models.triton_ops.row_table import PlacedRows, RowNumbers

_log = logging.getLogger(__name__)

MOST_ROWS = 512
"""Rows of the largest graph; the engine's steps rarely have more."""
_MOST_GRAPHS = 96
"""Most graphs kept; the least recently used one is dropped."""
_PATIENCE = 256
"""Steps without graphs after memory was needed elsewhere; doubled each time."""
_UNITS, _MOST = 64, 0.05
"""By how many units of precision a replay may differ from the operators' result, and the largest such difference as a
share of the largest number."""


class Recording(NamedTuple):
    """A recorded call: ``replay`` launches it again, and it takes ``bytes`` of memory."""

    replay: Callable[[], None]
    bytes: int


class Recorder(Protocol):
    """Records the launches of calls, in memory that its recordings share."""

    @property
    def share(self) -> int:
        """Bytes for recordings if no budget sets a limit."""
        ...

    def record(self, call: Callable[[], None]) -> Recording:
        """Record a call that has run before. Raises what the driver raises."""
        ...

    def forget(self) -> None:
        """Free the memory of all recordings after they have been dropped."""
        ...


class CudaRecorder:
    """A `Recorder` with `torch.cuda.CUDAGraph`: one memory pool for all graphs of a decoder, which are replayed one at
    a time.

    Other threads may use the device meanwhile.
    """

    def __init__(self, device: torch.device) -> None:
        self._device: torch.device = device
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    @property
    def share(self) -> int:
        """A sixteenth of the free memory; see `Recorder`."""
        return self._free() // 16

    def record(self, call: Callable[[], None]) -> Recording:
        """Record the call on a stream of its own; it runs there once before, as libraries allocate their memory then.

        ``bytes`` is the decrease of the device's free memory.
        """
        usual = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(usual)
        with torch.cuda.stream(self._stream):
            call()
        usual.wait_stream(self._stream)
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        before, graph = self._free(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            call()
        graph.replay()
        torch.cuda.synchronize(self._device)
        return Recording(graph.replay, max(0, before - self._free()))

    def forget(self) -> None:
        """See `Recorder`."""
        torch.cuda.synchronize(self._device)
        self._pool = torch.cuda.graph_pool_handle()  # the pool of dropped graphs can't be reused
        torch.cuda.empty_cache()

    def _free(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[0])


class StepGraphs:
    """The graphs of one decoder. A shape is recorded at its second occurrence, so that startup does not wait for it.

    At its first, operators run one by one over the same memory. A new recording is replayed at once, and compared with
    them. If recording fails or the results differ, operators are used from then on, and one line is logged.

    The memory is charged to a budget with a fixed total, beside the caches of all models. The target's texts may take
    it; then there are no graphs for a while. For that this is a `Holder` of the budget. Without such a budget the
    recorder's share is the limit.
    """

    def __init__(self, make_step: Callable[[], FixedStep], recorder: Recorder) -> None:
        self._make_step, self._recorder = make_step, recorder
        self._step: FixedStep | None = None
        self._graphs: dict[StepShape, Callable[[], None]] = {}
        self._bytes, self._share = 0, recorder.share
        self._met: set[StepShape] = set()
        self._budget: Budget | None = None
        self._waiting, self._patience = 0, _PATIENCE
        self._over = False

    def attach(self, budget: Budget) -> None:
        """Charge graphs to a budget if its total is fixed."""
        if budget.fixed:
            self._budget = budget
            budget.attach(self)

    def run(self, work: ForwardBatch, inputs: Callable[[Tensor], StepInputs], taps: Taps) -> Tensor | None:
        """Run a step with a graph; returns the last layer's output ``[rows, H]``, normed for the LM head, of the work's
        rows and padding.

        None if the work must run without graphs. ``inputs`` makes the first layer's inputs from the ids of all rows.
        The next step overwrites the output, but not the states in ``taps``.
        """
        if self._waiting:
            self._waiting -= 1
            return None
        if self._over or len(work.ids) > MOST_ROWS or _is_special(work):
            return None
        try:
            return self._run(work, inputs, taps)
        except Exception as error:  # a driver may raise anything
            self._over = True
            _warn_once(reason(error))
            self._drop()
            return None

    def _run(self, work: ForwardBatch, inputs: Callable[[Tensor], StepInputs], taps: Taps) -> Tensor | None:
        step = self._step or self._begin()
        begins = accumulate((place.end - place.base for place in work.places), initial=0)
        rows = RowNumbers.of([PlacedRows(*each) for each in zip(begins, work.places, strict=False)])
        if step is None or not step.takes(rows):
            return None
        count = len(work.ids)
        sizes = _power_of_two(count, MIN_ROWS), _power_of_two(rows.bound, SPAN)
        shape = StepShape(*sizes, tuple(work.taps), work.skip)
        step.enter(inputs(step.place(shape, work.ids, rows)))
        if (replay := self._graphs.pop(shape, None)) is not None:
            self._graphs[shape] = replay  # the newest is last
            replay()
        else:
            step.run(shape)
            if shape in self._met:
                self._record(step, shape)
            else:
                self._met.add(shape)
        step.tap(shape, taps, count)
        return step.hidden(shape)

    def _record(self, step: FixedStep, shape: StepShape) -> None:
        """Record a step that has just run. Raises ArithmeticError if its replay gives another result."""
        found_NH = step.hidden(shape).clone()
        replay, size = self._recorder.record(partial(step.run, shape))
        if not _near(step.hidden(shape), found_NH):
            raise ArithmeticError("a replay gives other numbers than the operators")
        if not self._fits(size):
            del replay
            self.drop_used()
            return
        self._graphs[shape] = replay
        self._bytes += size
        if len(self._graphs) > _MOST_GRAPHS:
            del self._graphs[next(iter(self._graphs))]  # its memory stays in the pool

    def _begin(self) -> FixedStep | None:
        """Allocate the memory of steps; None if there is not enough now."""
        step = self._make_step()
        if not self._fits(step.bytes):
            self._wait()
            return None
        self._step = step
        return step

    def _fits(self, size: int) -> bool:
        """Whether there is memory for ``size`` more bytes."""
        return self.nbytes + size <= self._share if self._budget is None else self._budget.make_room(size, self)

    def _wait(self) -> None:
        self._waiting, self._patience = self._patience, 2 * self._patience

    def _drop(self) -> None:
        self._graphs.clear()
        self._met.clear()
        self._step, self._bytes = None, 0
        self._recorder.forget()

    # --------------------------------------------------------------------------------------------------- a Holder

    @property
    def nbytes(self) -> int:
        """Bytes of all graphs and their inputs and outputs."""
        return self._bytes + (0 if self._step is None else self._step.bytes)

    @property
    def spare(self) -> int:
        """Always 0, as unused graphs will soon be used; see `parlay.cache.budget.Holder`."""
        return 0

    def drop_spare(self) -> bool:
        """Drop nothing; see `parlay.cache.budget.Holder`."""
        return False

    def drop_used(self) -> bool:
        """Drop all graphs, and use none for a while; see `parlay.cache.budget.Holder`."""
        if self._step is None:
            return False
        _log.info("CUDA graphs gave up %s", format_bytes(self.nbytes))
        self._drop()
        self._wait()
        return True


def _is_special(work: ForwardBatch) -> bool:
    """Whether rows have adapters, join at a later layer, or see a prefix: such steps run without graphs."""
    special = (given.features.join is not None or given.features.prefix is not None for given in work.features)
    return any(adapter is not None for adapter in work.adapters) or any(special)


def _power_of_two(number: int, least: int) -> int:
    """The least power of two that is at least ``number`` and ``least``, which is one itself."""
    return max(least, 1 << (number - 1).bit_length())


def _near(got_NH: Tensor, wanted_NH: Tensor) -> bool:
    """Whether a replay gave the operators' result, up to rounding. It waits for the device."""
    difference, largest = (float(each.abs().amax()) for each in (got_NH - wanted_NH, wanted_NH))
    return difference <= min(_UNITS * torch.finfo(got_NH.dtype).eps, _MOST) * largest


@lru_cache
def _warn_once(why: str) -> None:
    _log.warning("no CUDA graphs: %s; operators are launched one by one instead, which takes longer", why)
