"""Groups of ranks that run the same layers together. Their numbers are added or gathered in the order of ranks.

Every rank adds up the same numbers in the same order, beginning with the first rank's. So all ranks have the same
hidden states, and a row's sum does not depend on the other rows or on their number. Adding up in a ring or a tree would
not guarantee that.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from parlay.compiled import structs
from parlay.compiled.library import load
from parlay.models.part import Loss
from parlay.ranks.wire import Connection, Kind
from parlay.types import ParlayError, RunnerLost, one_line

_PART = 1 << 16
"""Numbers per part of shared memory; longer sums take several parts."""
_LINE = 64
_LOST = ctypes.c_int64
_HOST = torch.device("cpu")


def _bytes(count: int) -> int:
    return _LINE * (1 + count) + 2 * count * _PART * 4


def shared_folder() -> Path:
    """Return the folder whose files are in memory, or else the folder for temporary files."""
    memory = Path("/dev/shm")
    return memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())


def make_shared_file(count: int) -> Path:
    """Make the shared memory of a group of ``count`` ranks, which only its owner can open. Raises ParlayError if that
    fails."""
    name = ""
    try:
        handle, name = tempfile.mkstemp(prefix="parlay-ranks-", dir=shared_folder())
        with open(handle, "wb") as file:
            file.truncate(_bytes(count))
            if sys.platform == "linux":  # without room, a later write to the mapped memory would kill the process
                os.posix_fallocate(file.fileno(), 0, _bytes(count))
    except OSError as error:
        if name:
            os.unlink(name)
        raise ParlayError(
            f"no shared memory for {count} ranks ({error.strerror}): make room in {shared_folder()}"
        ) from None
    return Path(name)


class SharedGroup:
    """A `Group` on one machine, in which the compiled library adds up in shared memory. ``ranks`` are its members.

    Raises RunnerLost if the file does not exist, and NotLoaded without the library.
    """

    device = _HOST

    def __init__(self, file: Path, ranks: Sequence[int], member: int, seconds: float) -> None:
        self._core, self._ranks, self._seconds = load(), ranks, seconds
        try:
            with file.open("r+b") as opened:
                self._memory = mmap.mmap(opened.fileno(), _bytes(len(ranks)))
        except (OSError, ValueError) as error:
            raise RunnerLost(f"can't open the memory that ranks share ({error}): are all on one machine?") from None
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.struct = structs.RanksStruct(
            rank=member, count=len(ranks), part=_PART, memory=self._address, patience=int(seconds * 1e9)
        )

    def add(self, numbers_N: Tensor) -> None:
        self._core.sum_over_ranks(ctypes.byref(self.struct), numbers_N.data_ptr(), numbers_N.numel())

    def gather(self, numbers_RN: Tensor) -> None:
        each = numbers_RN.numel() // len(self._ranks)
        self._core.gather_over_ranks(ctypes.byref(self.struct), numbers_RN.data_ptr(), each)

    @property
    def loss(self) -> Loss | None:
        if not self.struct.lost:
            return None
        rank = self._ranks[abs(self.struct.lost) - 1]
        if self.struct.lost < 0:
            return Loss(rank, f"rank {rank} has ended")
        return Loss(rank, f"rank {rank} has not done its part of a forward within {self._seconds:g} s")

    def give_up(self) -> None:
        """End all waiting in sums, because this rank ends; any thread may call this. A rank that was lost before stays
        the reason."""
        with suppress(ValueError):
            lost = _LOST.from_address(self._address)
            lost.value = lost.value or -(self.struct.rank + 1)


class SocketGroup:
    """A `Group` over several machines: each rank sends its part to all others, and adds up what it gets.

    ``connections`` lead to the other ``ranks``. Pairs exchange in a fixed order, the lower rank first, so that there is
    no deadlock.
    """

    device = _HOST

    def __init__(self, connections: Mapping[int, Connection], ranks: Sequence[int], member: int) -> None:
        self._connections, self._ranks, self._own = connections, ranks, ranks[member]
        self.loss: Loss | None = None
        self._calls = structs.EXCHANGE(self._sum_at), structs.EXCHANGE(self._gather_at)
        self.struct = structs.RanksStruct(rank=member, count=len(ranks), part=_PART)
        self.struct.sum, self.struct.gather = self._calls

    def add(self, numbers_N: Tensor) -> None:
        if self.loss is None:
            self._exchange(numbers_N.view(-1).numpy())

    def gather(self, numbers_RN: Tensor) -> None:
        if self.loss is None:
            self._gather(numbers_RN.view(len(self._ranks), -1).numpy())

    def give_up(self) -> None:
        """End all waiting in sums; any thread may call this."""
        for connection in self._connections.values():
            connection.close()

    def _sum_at(self, numbers: ctypes._Pointer[ctypes.c_float], count: int) -> int:
        """Add up the ranks' numbers. The compiled library calls this from one of its threads. Returns 0, or 1 if a rank
        is lost."""
        return self._for_library(lambda: self._exchange(np.ctypeslib.as_array(numbers, (count,))))

    def _gather_at(self, numbers: ctypes._Pointer[ctypes.c_float], each: int) -> int:
        """Gather the other ranks' ``[ranks][each]`` numbers for the library; see `_sum_at`."""
        return self._for_library(lambda: self._gather(np.ctypeslib.as_array(numbers, (len(self._ranks), each))))

    def _for_library(self, exchange: Callable[[], bool]) -> int:
        """Exchange numbers within a forward; see `_sum_at`.

        No garbage is collected meanwhile, because freeing a model waits until no forward runs. An interrupt can't pass
        through the library, which would take it for success; so it counts as a lost rank.
        """
        collects = gc.isenabled()
        gc.disable()
        try:
            return int(not exchange())
        except BaseException as error:
            self.loss = self.loss or Loss(self._own, f"rank {self._own} was interrupted ({type(error).__name__})")
            return 1
        finally:
            if collects:
                gc.enable()

    def _gather(self, parts_RN: np.ndarray[tuple[int, int], np.dtype[np.float32]]) -> bool:
        """Fill in the other ranks' rows. Returns whether all ranks sent theirs."""
        found = self._swap_all(parts_RN[self._ranks.index(self._own)])
        for place, part in enumerate(found):
            parts_RN[place] = part
        return bool(found)

    def _exchange(self, numbers: np.ndarray[tuple[int], np.dtype[np.float32]]) -> bool:
        """Replace ``numbers``, float32 ``[N]``, by the sums. Returns whether all ranks sent their part."""
        parts = self._swap_all(numbers)
        if parts:
            total = parts[0].copy()
            for part in parts[1:]:
                total += part
            numbers[:] = total
        return bool(parts)

    def _swap_all(
        self, numbers: np.ndarray[tuple[int], np.dtype[np.float32]]
    ) -> list[np.ndarray[tuple[int], np.dtype[np.float32]]]:
        """Send this rank's numbers to all ranks. Returns all ranks' numbers in order, or an empty list if a rank is
        lost."""
        parts: list[np.ndarray[tuple[int], np.dtype[np.float32]]] = []
        for rank in self._ranks:
            try:
                parts.append(numbers if rank == self._own else self._swap(rank, numbers))
            except Exception as error:  # an exception can't pass through the library
                self.loss = Loss(rank, one_line(error))
                return []
        return parts

    def _swap(
        self, rank: int, numbers: np.ndarray[tuple[int], np.dtype[np.float32]]
    ) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        connection, own = self._connections[rank], numbers.tobytes()
        if self._own < rank:
            connection.send(Kind.DATA, own)
        found = connection.expect(Kind.DATA)
        if self._own > rank:
            connection.send(Kind.DATA, own)
        if len(found) != len(own):
            raise RunnerLost(f"rank {rank} gave {len(found)} bytes to a sum of {len(own)}: the ranks differ")
        return np.frombuffer(found, dtype=np.float32)


def send_rows(connection: Connection, rows_NH: Tensor) -> None:
    """Send hidden states, float32 ``[N, H]``, to another rank. Raises RunnerLost if that fails."""
    connection.send(Kind.DATA, rows_NH.contiguous().numpy().tobytes())


def receive_rows(connection: Connection, rows: int, hidden: int) -> Tensor:
    """Receive the hidden states, float32 ``[N, H]``, of ``rows`` rows from another rank. Raises RunnerLost for any
    other number of rows."""
    found = connection.expect(Kind.DATA)
    if len(found) != rows * hidden * 4:
        raise RunnerLost(f"rank {connection.rank} sent {len(found)} bytes of {rows} rows of {hidden}: the ranks differ")
    return torch.frombuffer(found, dtype=torch.float32).view(rows, hidden) if rows else torch.empty(0, hidden)
