"""Experts of mixtures that don't fit into memory: they lie in a file, and those that rows choose are read on demand."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from itertools import accumulate

from torch import Tensor

from parlay.cache.budget import format_bytes
from parlay.compiled import structs
from parlay.models.compiled.layer_file import in_blocks
from parlay.models.compiled.memory import RegionArena, whole_blocks
from parlay.models.compiled.streaming import LayerFile, LayOut, Loss, PackedFile, WeightRoom, linears_of_expert
from parlay.types import ParlayError
from parlay.types.layer_split import BUFFERS

_log = logging.getLogger(__name__)


class ExpertShelf:
    """Slots in memory, and the library's threads that read experts into them when rows of a layer choose these.

    Reads are checked like those of layers, and a disk that fails or stalls ends a forward in the same way.
    """

    def __init__(
        self, file: LayerFile, slots_B: Tensor, slot_bytes: int, layers: Sequence[structs.LayerStruct]
    ) -> None:
        """Raises ParlayError if no thread can be started."""
        self.loss, self._file, self._slots = Loss(), file, slots_B
        counts = [layer.experts for layer in layers]
        firsts = (ctypes.c_int64 * (len(layers) + 1))(*accumulate(counts, initial=0))
        experts = (ctypes.POINTER(structs.Expert) * len(layers))(*(layer.expert for layer in layers))
        count = len(slots_B) // slot_bytes
        shelving = structs.Shelving(
            source=file.streaming(range(sum(counts))),
            layers=len(layers),
            slots=count,
            slot_bytes=slot_bytes,
            first=firsts,
            expert=experts,
            slot=slots_B.data_ptr(),
        )
        self._experts, self._told = experts, f"{count} of {sum(counts)} experts in memory, others read from disk"
        self.bytes = (sum(counts) - count) * slot_bytes
        """Bytes of all experts that are not in memory: the most that a forward can read."""
        self.address = file.core.shelf_open(ctypes.byref(shelving))
        if not self.address:
            raise ParlayError("no thread can be started that reads experts from disk: allow more processes")

    @property
    def bytes_read(self) -> int:
        """Bytes that all forwards have read so far."""
        return int(self._file.core.shelf_bytes(self.address))

    def describe(self, layers: int) -> str:
        """Say what is read."""
        return f"{self._told} when rows choose them"

    def point(self, model: structs.ModelStruct) -> None:
        """Make the model's forwards read experts from here."""
        model.shelf = self.address

    def check(self) -> None:
        """Raises LayersLost if the last forward ended early; its output is then invalid."""
        self._file.check(int(self._file.core.shelf_fault(self.address)), self.loss)

    def close(self) -> None:
        """End the threads; call this when no forward is under way."""
        self._file.close_with(bool(self._file.core.shelf_close(self.address)), [self._slots])


class ExpertsOnDisk:
    """All experts of a model, by layer and number, of which as many are in memory at a time as fit."""

    def __init__(
        self,
        core: structs.Core,
        lay_out: LayOut[structs.Expert],
        counts: Sequence[int],
        room: WeightRoom,
        resident: int,
    ) -> None:
        """``counts`` are the experts of each layer; the rest of the model takes ``resident`` bytes."""
        self._room, self._resident = room, resident
        laid = [(arena := RegionArena(), lay_out(number, arena)) for number in range(sum(counts))]
        self._sizes = [in_blocks(arena.taken) for arena, _ in laid]
        self.slot_bytes = max(self._sizes)
        self._slots = min(len(self._sizes), (room.bytes - resident) // self.slot_bytes)
        shapes = [(each.kind, each.inputs, each.outputs) for _, unit in laid for each in linears_of_expert(unit.struct)]
        self._packed = PackedFile(core, lay_out, room, self._sizes, ("experts", shapes))

    @property
    def least(self) -> int:
        """The least bytes that work: the rest of the model, and slots to read one expert while another is computed."""
        return self._resident + BUFFERS * self.slot_bytes

    @property
    def serves(self) -> bool:
        """Whether the rest of the model and some experts fit into the room, but not all experts."""
        return self.least <= self._room.bytes < self._resident + sum(self._sizes)

    def slots(self) -> Tensor:
        """Allocate the slots."""
        return whole_blocks(self._slots * self.slot_bytes)

    def file(self, packed: Callable[[int, int], None]) -> LayerFile:
        """Open the file of experts; it is written first if it does not exist. Raises ParlayError if it can't be
        written."""
        file = self._packed.opened() or self._packed.written(packed)
        _log.warning(
            "%s does not fit into %s of memory: %d of %d experts are there at a time, others are read from disk when "
            "rows choose them; %s hold all",
            self._room.name,
            format_bytes(self._room.bytes),
            self._slots,
            len(self._sizes),
            format_bytes(self._resident + sum(self._sizes)),
        )
        return file
