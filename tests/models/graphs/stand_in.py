"""Emulates CUDA graphs on a CPU: it records the operators of a call, and a replay runs the call again.

A graph uses the addresses that it used when it was recorded, and gets no data from the host. So the stand-in refuses a
call in which a tensor's numbers reach Python or come from there. It also refuses a replay that differs from the
recording: in operators, shapes, kernels, numbers in their arguments, or addresses of memory that the call did not make.
Watching takes ten times as long, so only the first replays and some later ones are watched.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parlay.models.torch_ops.step_graphs import Recording
from tests.models.graphs import host_kernels
from tests.models.graphs.host_kernels import Seen

_FETCHING = {"item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "tensor", "from_numpy"}
_WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "repeat_interleave.Tensor", "lift_fresh")


class NotCapturable(RuntimeError):
    """Raised for an operation that a CUDA graph can't contain."""


class _Host(TorchFunctionMode):
    """Refuses operations that move numbers to or from the host without an operator."""

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _FETCHING:
            raise NotCapturable(f"{func.__name__} moves numbers between the host and the device")
        return func(*args, **(kwargs or {}))


class _Watch(TorchDispatchMode):
    """Records operators: their plain arguments, the shapes of tensors, and the addresses of tensors that existed
    before.

    ``outputs`` are tensors that existed before and are written before anything reads them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Tensor] = []
        self._seen: list[tuple[object, ...]] = []
        self._own: dict[int, Tensor] = {}  # by address; none is freed meanwhile, or another might have it
        self._touched: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        if any(word in str(func) for word in _WAITING):
            raise NotCapturable(f"{func} waits for the device, or takes numbers from the host")
        leaves = tree_leaves((args, kwargs or {}))
        given = [each for each in leaves if isinstance(each, Tensor)]
        if "index" in str(func) and any(each.dtype == torch.bool for each in given):
            raise NotCapturable(f"{func} by a mask waits for the device")
        written = args[0] if func is torch.ops.aten.copy_.default else None
        for each in given:
            if _storage(each) not in self._own and _address(each) not in self._touched:
                self._touched.add(_address(each))
                self.outputs += [each] if each is written else []
        outside = [_address(each) for each in given if _storage(each) not in self._own]
        found = func(*args, **(kwargs or {}))
        made = [each for each in tree_leaves(found) if isinstance(each, Tensor)]
        before = {_storage(each) for each in given}
        self._own.update((_storage(each), each) for each in made if _storage(each) not in before)
        shapes = [(tuple(each.shape), each.dtype) for each in (*given, *made)]
        self._seen.append((str(func), shapes, outside, [each for each in leaves if not isinstance(each, Tensor)]))
        return found

    def done(self) -> list[tuple[object, ...]]:
        """Return all operators, then all kernels."""
        launches = [
            tuple(self._where(each) if isinstance(each, Seen) else each for each in one)
            for one in host_kernels.launched
        ]
        return [*self._seen, *launches]

    def _where(self, seen: Seen) -> object:
        """Describe a tensor that a kernel got. The address of a tensor made by the call itself does not count."""
        own = any(begin <= seen.address < begin + each.untyped_storage().nbytes() for begin, each in self._own.items())
        return seen.shape if own else seen


def _storage(tensor: Tensor) -> int:
    """Return a number that identifies a tensor's memory; packed weights have no address."""
    return id(tensor) if tensor.layout == torch._mkldnn else tensor.untyped_storage().data_ptr()


def _address(tensor: Tensor) -> int:
    return id(tensor) if tensor.layout == torch._mkldnn else tensor.data_ptr()


@dataclass(slots=True)
class StandIn:
    """A `Recorder` for tests. ``bytes`` is the size that each recording reports; ``fails`` is raised when one is made.

    ``recorded`` and ``replayed`` count calls.
    """

    bytes: int = 0
    share: int = 1 << 30
    fails: Exception | None = None
    recorded: int = 0
    replayed: int = 0

    def record(self, call: Callable[[], None]) -> Recording:
        """Run the call while it is watched, and again as a first replay."""
        if self.fails is not None:
            raise self.fails
        first, outputs = _watched(call)
        self.recorded += 1
        turns = count()

        def replay() -> None:
            self.replayed += 1
            turn = next(turns)
            for each in outputs:  # so that whoever reads what an earlier step left there finds nothing
                each.fill_(torch.nan)
            if turn > 2 and turn % 16:
                call()
                return
            again, _ = _watched(call)
            if again != first:
                pairs = zip(first, again, strict=False)
                one, other = next((pair for pair in pairs if pair[0] != pair[1]), (len(first), len(again)))
                raise NotCapturable(f"a replay does {other} where {one} was recorded")

        replay()
        return Recording(replay, self.bytes)

    def forget(self) -> None:
        """Do nothing: it keeps no memory."""


def _watched(call: Callable[[], None]) -> tuple[list[tuple[object, ...]], list[Tensor]]:
    """Return what the call did, and the memory that it wrote before it read it."""
    host_kernels.launched.clear()
    with _Host(), _Watch() as watch:
        call()
    return watch.done(), watch.outputs
