"""What stands for CUDA graphs on a CPU: it records what a call does, and a replay is the call once more.

A graph reads and writes the addresses that it did when it was recorded, and asks the host nothing. So a call is refused
in which a tensor's numbers reach Python or come from there, and so is a replay that does anything else than what was
recorded: other operators, shapes, kernels or numbers in their arguments, or memory of others that lies elsewhere. The
first replays are watched for that, and some later ones, for it takes ten times as long.
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
    """Writes down operators: their other arguments, the shapes of tensors, and where those lie that were there before.

    ``outputs`` are tensors of others that are written before anything reads them.
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
        """All operators, then all kernels."""
        launches = [
            tuple(self._where(each) if isinstance(each, Seen) else each for each in one)
            for one in host_kernels.launched
        ]
        return [*self._seen, *launches]

    def _where(self, seen: Seen) -> object:
        """A tensor that a kernel got; those that the call itself made may lie anywhere."""
        own = any(begin <= seen.address < begin + each.untyped_storage().nbytes() for begin, each in self._own.items())
        return seen.shape if own else seen


def _storage(tensor: Tensor) -> int:
    """What tells memory from other memory; packed weights don't say where they lie."""
    return id(tensor) if tensor.layout == torch._mkldnn else tensor.untyped_storage().data_ptr()


def _address(tensor: Tensor) -> int:
    return id(tensor) if tensor.layout == torch._mkldnn else tensor.data_ptr()


@dataclass(slots=True)
class StandIn:
    """A `Recorder` for tests. ``bytes`` is what each recording is said to hold; ``fails`` is raised when one is made.

    ``recorded`` and ``replayed`` count.
    """

    bytes: int = 0
    share: int = 1 << 30
    fails: Exception | None = None
    recorded: int = 0
    replayed: int = 0

    def record(self, call: Callable[[], None]) -> Recording:
        """Run the call as it is watched, then once more as a replay."""
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
        """Hold nothing."""


def _watched(call: Callable[[], None]) -> tuple[list[tuple[object, ...]], list[Tensor]]:
    """What the call did, and the memory that it wrote before it read it."""
    host_kernels.launched.clear()
    with _Host(), _Watch() as watch:
        call()
    return watch.done(), watch.outputs
