"""A transformers model's forward over slots as one graph of torch.compile, used if it computes the same and is faster.

The graph is traced once, for any number of rows from 2 on and any number of slots, so that no step waits for tracing; a
single row is padded to two. Identical layers are traced and compiled once. Inductor's results are kept on disk, where
the next process finds them.
"""

from __future__ import annotations

import logging
import os
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
from transformers import PreTrainedModel

from parlay.models.slots import IDLE, SlotRows
from parlay.models.transformers_adapter.call import ModelCall
from parlay.models.transformers_adapter.packed_linears import PackedLinears, linear_bytes
from parlay.models.transformers_adapter.regions import LayerRegions
from parlay.models.transformers_adapter.slots import TransformersPool
from parlay.system import machine
from parlay.system.user_cache import user_cache

ROWS = (1, 2, 4, 8, 16, 32, 64)
"""Upper ends of the ranges of row counts for which the faster form is determined. Larger chunks of prompts run
uncompiled."""
FOLDER = "TORCHINDUCTOR_CACHE_DIR"
"""torch's environment variable for the folder of inductor's results."""
_LEAST = 2  # least rows of the graph; torch would make another one for a single row
_ROUNDS = 3  # rounds in which both forms are timed; the fastest counts
_ROOM = 1.25  # memory needed for packing, as a multiple of the linear layers' weights
_UNITS, _MOST = 512, 0.1
"""Largest difference of both forms' logits in units in the last place of the largest logit, and as a share of it."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FlatRows:
    """Rows of any sequences: token ids, positions and slots ``[N]``, and an additive mask over all slots, ``[N,
    K]``."""

    ids_N: Tensor
    positions_N: Tensor
    slots_N: Tensor
    mask_NK: Tensor

    @staticmethod
    def of(rows: SlotRows, dtype: torch.dtype, device: torch.device) -> FlatRows:
        """Convert rows for a model of this dtype, whose lowest number masks slots."""
        seen_NK = rows.seen_NK.to(device)
        mask_NK = torch.zeros(seen_NK.shape, dtype=dtype, device=device)
        return FlatRows(
            torch.tensor(rows.ids, device=device),
            torch.tensor(rows.positions, device=device),
            torch.tensor(rows.slots, device=device),
            mask_NK.masked_fill_(~seen_NK, torch.finfo(dtype).min),
        )

    def __len__(self) -> int:
        return len(self.ids_N)

    def filled(self, count: int) -> FlatRows:
        """Pad to ``count`` rows that no row sees."""
        more = count - len(self)
        if more <= 0:
            return self
        wider = torch.nn.functional.pad
        return FlatRows(
            wider(self.ids_N, (0, more)),
            wider(self.positions_N, (0, more)),
            wider(self.slots_N, (0, more), value=IDLE),
            wider(self.mask_NK, (0, 0, 0, more)),
        )


@dataclass(frozen=True, slots=True)
class FlatResult:
    """``logits_NV`` of the wanted rows, and the hidden states ``[N, H]`` of all rows at each layer boundary."""

    logits_NV: Tensor
    hidden: tuple[Tensor, ...]


@dataclass(slots=True)
class _Graph:
    """A model's graph, with or without hidden states; its layers may be ``regions``. ``pays`` says whether it is
    faster, by range of row counts. ``broken`` says why there is no graph; empty if there is one."""

    run: Callable[..., tuple[Tensor, tuple[Tensor, ...]]]
    regions: LayerRegions | None = None
    pays: dict[int, bool] = field(default_factory=dict)
    broken: str = ""

    def inside(self) -> AbstractContextManager[None]:
        """A context in which the model is in the state in which it was traced."""
        return nullcontext() if self.regions is None else self.regions.inside()


_graphs: WeakKeyDictionary[PreTrainedModel, dict[tuple[bool, str], _Graph]] = WeakKeyDictionary()
"""The graphs of a model object, shared by all its runners."""


class CompiledCall:
    """Runs rows through a model and its pool of slots, compiled if that is faster.

    A graph that can't be made, or whose logits differ by more than rounding, is not used; if only the one with hidden
    states fails, a line is logged. ``backend`` is torch.compile's, and ``clock`` times both forms.
    """

    def __init__(
        self,
        call: ModelCall,
        pool: TransformersPool,
        *,
        backend: str = "inductor",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._call, self._pool, self._backend, self._clock = call, pool, backend, clock
        if backend == "inductor":
            _keep_on_disk()

    def pack(self, rows: FlatRows) -> None:
        """Pack the linear layers of a model that nobody else holds, if possible and if its logits stay the same up to
        rounding.

        Until that is known both forms are in memory, so it is skipped if memory is short.
        """
        model, everything = self._call.model, range(len(rows))
        if machine.available_bytes() < _ROOM * linear_bytes(model):
            _log.info("%s keeps its weights as they are: there is no memory to pack them", self._call.name)
            return
        expected_NV = self._plain(rows, everything, hidden=False).logits_NV
        packed = PackedLinears(model)
        try:
            difference = _difference(self._plain(rows, everything, hidden=False).logits_NV, expected_NV)
        except Exception as error:  # a foreign model may read weights elsewhere
            packed.undo()
            _log.info("%s keeps its weights as they are: %s", self._call.name, error)
            return
        if not difference <= _allowed(expected_NV):
            packed.undo()

    def prepare(self, rows: FlatRows) -> str:
        """Allocate keys and values, which a graph needs, and make the graph. Returns why there is no graph, or an empty
        string."""
        self._plain(rows, range(len(rows)), hidden=False)
        graph = self._graph(hidden=False)
        if not graph.broken and not graph.pays:
            self._try(graph, rows, _size(rows), hidden=False)
        return graph.broken

    def __call__(self, rows: FlatRows, wanted: Sequence[int], hidden: bool) -> FlatResult:
        """Write the rows' keys and values; returns the logits of the ``wanted`` rows."""
        if len(rows) > ROWS[-1]:
            return self._plain(rows, wanted, hidden)
        graph = self._graph(hidden)
        size = _size(rows)
        if not graph.broken and size not in graph.pays:
            self._try(graph, rows, size, hidden)
            if graph.broken:
                _log.warning("%s runs uncompiled where drafters read its states: %s", self._call.name, graph.broken)
        if graph.broken or not graph.pays[size]:
            return self._plain(rows, wanted, hidden)
        logits_NV, states = self._compiled(graph, rows, hidden)
        return _of_rows(logits_NV[list(wanted)], states, len(rows))

    def _graph(self, hidden: bool) -> _Graph:
        known = _graphs.setdefault(self._call.model, {})
        if (hidden, self._backend) not in known:
            regions = None if hidden else LayerRegions.of(self._call.model)  # hidden states are read between layers
            known[hidden, self._backend] = _compiled(self._backend, regions)
        return known[hidden, self._backend]

    def _plain(self, rows: FlatRows, wanted: Sequence[int], hidden: bool) -> FlatResult:
        """Run the model uncompiled; its LM head runs on the wanted rows only, if it can."""
        kept = self._call.kept_rows(wanted)
        self._pool.write_to(rows.slots_N)
        logits_NV, states = _forward(self._call.model, self._inputs(rows, hidden) | kept)
        if not kept:
            logits_NV = logits_NV[list(wanted)]
        return _of_rows(logits_NV[: len(wanted)], states, len(rows))

    def _compiled(self, graph: _Graph, rows: FlatRows, hidden: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
        filled = rows.filled(_LEAST)
        self._pool.write_to(filled.slots_N)
        with graph.inside():
            return graph.run(self._call.model, self._inputs(filled, hidden))

    def _inputs(self, rows: FlatRows, hidden: bool) -> dict[str, Any]:
        return self._call.cached_by(self._pool.cache) | {
            "input_ids": rows.ids_N[None],
            "position_ids": rows.positions_N[None],
            "attention_mask": rows.mask_NK[None, None],
            "output_hidden_states": hidden,
        }

    # ------------------------------------------------------------------------------------------------- making a graph

    def _try(self, graph: _Graph, rows: FlatRows, size: int, hidden: bool) -> None:
        """Find out whether the graph computes what the model does, and whether it is faster for this number of rows.

        Both forms write the same keys and values to the same slots, so nothing remains of the trial. If the graph can't
        be made with regions, it is made without.
        """
        name, first = self._call.name, not graph.pays
        expected_NV = self._plain(rows, range(len(rows)), hidden).logits_NV
        began = self._clock()
        try:
            got_NV = self._traced(graph, rows, hidden) if first else self._compiled(graph, rows, hidden)[0]
        except Exception as error:  # a foreign model or a compiler, or its absence, may raise anything
            graph.broken = _reason(error)
            self._try_whole(graph, rows, size, hidden)
            return
        if first:
            _log.info("%s was compiled in %.1f s", name, self._clock() - began)
        difference = _difference(got_NV[: len(rows)], expected_NV)
        if not difference <= _allowed(expected_NV):
            graph.broken = f"its compiled logits differ from its own by {difference:.1e}"
            self._try_whole(graph, rows, size, hidden)
            return
        graph.pays[size] = self._is_quicker(graph, rows, hidden)
        _log.info("%s runs %s for up to %d rows", name, "compiled" if graph.pays[size] else "uncompiled", size)

    def _try_whole(self, graph: _Graph, rows: FlatRows, size: int, hidden: bool) -> None:
        """Make the graph without regions, if it had any."""
        if graph.regions is None or graph.pays:
            return
        _log.debug("%s is compiled as a whole: %s", self._call.name, graph.broken)
        whole = _compiled(self._backend, None)
        graph.run, graph.regions, graph.broken = whole.run, None, whole.broken
        if not graph.broken:
            self._try(graph, rows, size, hidden)

    def _traced(self, graph: _Graph, rows: FlatRows, hidden: bool) -> Tensor:
        """Make the first call, which traces the graph for any number of rows and slots."""
        filled = rows.filled(_LEAST)
        dynamic = torch._dynamo.mark_dynamic
        self._pool.write_to(filled.slots_N)
        inputs = self._inputs(filled, hidden)
        dynamic(inputs["input_ids"], 1)
        dynamic(inputs["position_ids"], 1)
        dynamic(inputs["attention_mask"], (2, 3))
        self._pool.any_size(dynamic)
        with graph.inside():
            return graph.run(self._call.model, inputs)[0]

    def _is_quicker(self, graph: _Graph, rows: FlatRows, hidden: bool) -> bool:
        everything = range(len(rows))
        plain = compiled = float("inf")
        for _ in range(_ROUNDS):
            began = self._clock()
            self._plain(rows, everything, hidden)
            between = self._clock()
            self._compiled(graph, rows, hidden)
            ended = self._clock()
            plain, compiled = min(plain, between - began), min(compiled, ended - between)
        return compiled < plain


def _forward(model: PreTrainedModel, inputs: dict[str, Any]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The model's call, to be compiled or not."""
    out = model(use_cache=True, **inputs)
    return out.logits[0], out.hidden_states or ()


def _compiled(backend: str, regions: LayerRegions | None) -> _Graph:
    try:
        return _Graph(torch.compile(_forward, backend=backend, fullgraph=True, dynamic=False), regions)
    except RuntimeError as error:  # torch does not support this Python or system
        return _Graph(_forward, broken=_reason(error))


def _size(rows: FlatRows) -> int:
    """The range of row counts of these rows."""
    return ROWS[bisect_left(ROWS, len(rows))]


def _of_rows(logits_NV: Tensor, states: Sequence[Tensor], count: int) -> FlatResult:
    return FlatResult(logits_NV, tuple(each_BNH[0, :count] for each_BNH in states))


def _difference(got_NV: Tensor, expected_NV: Tensor) -> float:
    return float((got_NV - expected_NV).abs().max())


def _allowed(expected_NV: Tensor) -> float:
    return min(_UNITS * torch.finfo(expected_NV.dtype).eps, _MOST) * float(expected_NV.abs().max())


def _reason(error: Exception) -> str:
    """The first line of an error, without the names of the compiler's layers."""
    inner = error.__cause__ if isinstance(error.__cause__, Exception) else error
    lines = [line.strip() for line in str(inner).splitlines() if line.strip()]
    return f"torch.compile fails ({lines[0][:200] if lines else type(inner).__name__})"


def _keep_on_disk() -> None:
    """Let inductor keep its results in the user's cache folder, unless the user sets a folder.

    torch sets the variable to its own default, a temporary folder, as soon as parts of it are imported.
    """
    folder = user_cache() / "graphs"
    if os.environ.get(FOLDER) in (None, os.path.abspath(default_cache_dir())):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.environ[FOLDER] = str(folder)
