"""Layers that don't fit into memory: they lie in a file in their packed form, and every forward streams them.

The file is written once, layer by layer, so that only one layer is in memory at a time. Its name identifies the
checkpoint, the packed form and the library; a checksum of each layer is verified on every read. Files of experts work
in the same way (`parlay.models.compiled.shelving`), with an expert in the place of a layer.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, NamedTuple, Protocol, TypeVar

from torch import Tensor

from parlay.cache.budget import format_bytes
from parlay.compiled import structs
from parlay.compiled.build import digest
from parlay.models.compiled.layer_file import (
    Place,
    in_blocks,
    offset_of_layers,
    open_past_cache,
    read_header,
    write_layers,
)
from parlay.models.compiled.memory import Arena, RegionArena, whole_blocks
from parlay.system import threads
from parlay.system.user_cache import user_cache
from parlay.types import ParlayError, RunnerLost
from parlay.types.layer_split import BUFFERS, LayerSplit, least_room, split_layers

PATIENCE = 30.0
"""Seconds that a forward waits for a piece of a layer."""
S = TypeVar("S", structs.LayerStruct, structs.Expert, covariant=True)

_log = logging.getLogger(__name__)
_stuck: list[object] = []  # kept alive: threads that a disk holds up still use it


class LayersLost(ParlayError):
    """Raised when a layer can't be read from disk; the forward that needs it fails."""


class LayersDamaged(RunnerLost, LayersLost):
    """Raised when the file has changed since it was loaded: all later forwards would fail, too."""


@dataclass(slots=True)
class Loss:
    """Why a model's layers are lost; empty while they can be read. This object may outlive the model."""

    reason: str = ""

    def read(self) -> str:
        """Return the reason."""
        return self.reason


@dataclass(frozen=True, slots=True)
class WeightRoom:
    """How many ``bytes`` of memory a model's weights may take.

    ``explicit``: the user gave the limit; otherwise it is the memory that is free.
    ``name`` is the model's name, and ``identity`` returns a fingerprint of its weights.
    """

    bytes: int
    explicit: bool
    name: str
    identity: Callable[[], str]

    def split(self, sizes: Sequence[int], resident: int, otherwise: int | None = None) -> LayerSplit:
        """Choose which layers stay in memory, from their sizes; ``resident`` bytes of the model stay in any case.

        Raises ParlayError if the room is below the least that works: that, or ``otherwise`` bytes if given.
        """
        split = split_layers(sizes, self.bytes - resident)
        if split is None:
            least, all_of_it = resident + least_room(sizes), resident + sum(sizes)
            least = least if otherwise is None else min(least, otherwise)
            raise ParlayError(
                f"weights of {self.name} in {format_bytes(self.bytes)} of memory: they take {format_bytes(all_of_it)}, "
                f"and at least {format_bytes(least)} of it must be there; allow {least} bytes or more"
            )
        return split


class PackedUnit(NamedTuple, Generic[S]):
    """One layer or expert laid out in memory, and the jobs that fill that memory."""

    struct: S
    jobs: Sequence[Callable[[], object]]


class LayOut(Protocol[S]):
    """Lays a layer or an expert out in memory that ``arena`` gives, always in the same way."""

    def __call__(self, unit: int, arena: Arena) -> PackedUnit[S]: ...


def linears_of(layer: structs.LayerStruct) -> Iterator[structs.Linear]:
    """All products of a layer, including those of its experts."""
    yield from (layer.query, layer.key, layer.value, layer.out, layer.gate, layer.up, layer.down)
    yield from (layer.router, layer.per_layer_gate, layer.per_layer_out)
    for place in range(layer.experts + bool(layer.shared)):
        yield from linears_of_expert(layer.expert[place])


def linears_of_expert(expert: structs.Expert) -> Sequence[structs.Linear]:
    """The three products of an expert."""
    return expert.gate, expert.up, expert.down


@dataclass(frozen=True, slots=True, eq=False)
class LayerFile:
    """A file with all layers of a model, open for reading; ``direct``: reads bypass the page cache."""

    path: Path
    places: tuple[Place, ...]
    file: int
    direct: bool
    core: structs.Core

    @staticmethod
    def open(path: Path, core: structs.Core, sizes: Sequence[int]) -> LayerFile | None:
        """Open the file; None if it does not exist, is incomplete, or has layers of other ``sizes``."""
        try:
            with path.open("rb") as file:
                places = read_header(file.read(offset_of_layers(len(sizes))))
                whole = file.seek(0, os.SEEK_END) == places[-1].offset + places[-1].bytes
        except (OSError, ValueError, KeyError, TypeError, IndexError):
            return None
        if not whole or [place.bytes for place in places] != list(sizes):
            return None
        descriptor, direct = open_past_cache(path)
        return LayerFile(path, tuple(places), descriptor, direct, core)

    def streaming(self, numbers: Sequence[int], buffers: Sequence[Tensor] = ()) -> structs.Streaming:
        """A struct that tells the library where to read these layers, and into which buffers."""
        chosen = (structs.StreamedLayer * len(numbers))(
            *(structs.StreamedLayer(*self.places[number]) for number in numbers)
        )
        found = structs.Streaming(self.file, int(self.direct), len(numbers), int(PATIENCE * 1e9), chosen)
        for place, buffer in enumerate(buffers):
            found.buffer[place] = buffer.data_ptr()
        return found

    def read(self, layer: int, to_B: Tensor) -> None:
        """Read a layer into memory. Raises LayersLost if that fails."""
        fault = int(self.core.stream_read(ctypes.byref(self.streaming([layer])), 0, to_B.data_ptr()))
        if fault:
            raise self.lost(fault)

    def lost(self, fault: int) -> LayersLost:
        """The error for a layer that can't be read. A damaged file is deleted, so that the next load packs it anew."""
        if fault == structs.STREAM_STALLED:
            return LayersLost(f"the disk gave nothing of {self.path} for {PATIENCE:g} s: see whether it still answers")
        if fault > 0:
            return LayersLost(f"{self.path} can't be read ({os.strerror(fault)}): see whether its disk still answers")
        with suppress(OSError):
            if self.path.stat().st_ino == os.fstat(self.file).st_ino:
                self.path.unlink()
        what = "was cut short" if fault == structs.STREAM_ENDED else "is damaged"
        return LayersDamaged(f"{self.path} {what} since the model was loaded: load it again, which packs it anew")

    def check(self, fault: int, loss: Loss) -> None:
        """Raises LayersLost for a fault, and notes in ``loss`` if no later forward can work."""
        if fault:
            error = self.lost(fault)
            loss.reason = str(error) if isinstance(error, RunnerLost) else ""
            raise error

    def close(self) -> None:
        os.close(self.file)

    def close_with(self, ended: bool, buffers: Sequence[Tensor]) -> None:
        """Close the file if the threads that read it have ``ended``; else keep it and their buffers alive."""
        if ended:
            self.close()
        else:
            _stuck.append((self, buffers))


class LayerStream:
    """The library's threads that read the layers ``split.streamed`` of a file, in order, in every forward."""

    def __init__(self, file: LayerFile, split: LayerSplit) -> None:
        """Raises ParlayError if no thread can be started."""
        self.split, self.loss, self._file = split, Loss(), file
        self.buffers = [whole_blocks(split.buffer_bytes) for _ in range(BUFFERS)]
        streaming = file.streaming(split.streamed, self.buffers)
        self.address = file.core.stream_open(ctypes.byref(streaming))
        if not self.address:
            raise ParlayError("no thread can be started that reads layers from disk: allow more processes")

    @property
    def bytes(self) -> int:
        """Bytes that every forward reads."""
        return self.split.streamed_bytes

    def describe(self, layers: int) -> str:
        """Say how many of ``layers`` layers are read from disk."""
        return f"{len(self.split.streamed)} of {layers} layers read from disk in every forward"

    def point(self, model: structs.ModelStruct) -> None:
        """Make the model's forwards wait for the layers."""
        model.stream = self.address

    def check(self) -> None:
        """Raises LayersLost if the last forward ended early; its output is then invalid."""
        self._file.check(int(self._file.core.stream_fault(self.address)), self.loss)

    def close(self) -> None:
        """End the threads; call this when no forward is under way."""
        self._file.close_with(bool(self._file.core.stream_close(self.address)), self.buffers)


class DiskReader(Protocol):
    """Reads parts of a model from disk: `LayerStream`, or `parlay.models.compiled.shelving.ExpertShelf`."""

    loss: Loss

    @property
    def bytes(self) -> int: ...

    def describe(self, layers: int) -> str: ...

    def point(self, model: structs.ModelStruct) -> None: ...

    def check(self) -> None: ...

    def close(self) -> None: ...


class StreamedLayers(NamedTuple):
    """The structs of all layers in order, the memory of those that stay, and the reader of the others."""

    structs: Sequence[structs.LayerStruct]
    pinned: Sequence[Tensor]
    stream: DiskReader


class PackedFile(Generic[S]):
    """The file of a model's layers or experts; ``sizes`` are the bytes of each."""

    def __init__(self, core: structs.Core, lay_out: LayOut[S], room: WeightRoom, sizes: Sequence[int], form: object):
        """``form`` identifies the way in which the weights are packed."""
        self._core, self._room, self._sizes = core, room, sizes
        self._lay_out: LayOut[S] = lay_out
        self._form = hashlib.sha256(repr(form).encode()).hexdigest()[:16]

    def opened(self) -> LayerFile | None:
        """The open file, or None if it does not exist or is incomplete."""
        return LayerFile.open(self._path(), self._core, self._sizes)

    def written(self, packed: Callable[[int, int], None]) -> LayerFile:
        """Write the file, and open it. Raises ParlayError if that fails."""
        path, count = self._path(), len(self._sizes)
        with ThreadPoolExecutor(threads.count()) as pool:

            def pack(unit: int, region_B: Tensor) -> None:
                for job in [pool.submit(job) for job in self._lay_out(unit, RegionArena(region_B.data_ptr())).jobs]:
                    job.result()
                packed(unit + 1, count)

            write_layers(path, self._core, self._sizes, pack)
        for old in path.parent.glob(f"{path.name.rpartition('-')[0]}-*.layers"):
            if old != path:  # written by another version, so nobody will read it
                old.unlink(missing_ok=True)
        _log.warning("packed %s of layers of %s into %s", format_bytes(sum(self._sizes)), self._room.name, path)
        file = self.opened()
        if file is None:
            raise ParlayError(f"{path} was written and can't be read: see whether its disk works")
        return file

    def _path(self) -> Path:
        about = f"{digest()} {self._core.name.decode()}"
        of_code = hashlib.sha256(about.encode()).hexdigest()[:8]
        return user_cache() / "layers" / f"{self._room.identity()[:16]}-{self._form}-{of_code}.layers"


class LayersOnDisk:
    """A model's layers, some of which will be streamed; ``resident`` bytes of its weights are in memory in any case."""

    def __init__(
        self,
        core: structs.Core,
        lay_out: LayOut[structs.LayerStruct],
        layers: int,
        room: WeightRoom,
        resident: int,
        *,
        otherwise: int | None = None,
    ) -> None:
        """Raises ParlayError if the room is below the least that works; see `WeightRoom.split`."""
        self._lay_out, self._room = lay_out, room
        laid = [(arena := RegionArena(), lay_out(layer, arena)) for layer in range(layers)]
        self._sizes = [in_blocks(arena.taken) for arena, _ in laid]
        self.split, self._resident = room.split(self._sizes, resident, otherwise), resident
        shapes = [(each.kind, each.inputs, each.outputs) for _, unit in laid for each in linears_of(unit.struct)]
        self._packed = PackedFile(core, lay_out, room, self._sizes, shapes)

    def load(self, packed: Callable[[int, int], None]) -> StreamedLayers:
        """Write the file of layers unless it exists, read those that stay in memory, and start streaming the others.

        Raises LayersLost if it can't be read, ParlayError if it can't be written.
        """
        found = self._packed.opened()
        file = found or self._packed.written(packed)
        try:
            pinned = {layer: self._read(file, layer) for layer in self.split.pinned}
        except LayersLost:
            file.close()
            if found is None or file.path.exists():
                raise
            return self.load(packed)  # the file was damaged and is deleted by now
        stream = LayerStream(file, self.split)
        places = {layer: memory.data_ptr() for layer, memory in pinned.items()}
        for number, layer in enumerate(self.split.streamed):
            places[layer] = stream.buffers[number % BUFFERS].data_ptr()
        layers = [self._lay_out(layer, RegionArena(places[layer])).struct for layer in range(len(self._sizes))]
        for number, layer in enumerate(self.split.streamed, start=1):
            layers[layer].streamed = number
        self._say()
        return StreamedLayers(layers, list(pinned.values()), stream)

    def _read(self, file: LayerFile, layer: int) -> Tensor:
        memory = whole_blocks(self._sizes[layer])
        file.read(layer, memory)
        return memory

    def _say(self) -> None:
        split = self.split
        _log.warning(
            "%s does not fit into %s of memory: every forward reads %s of its layers from disk, %d of %d; %s hold all",
            self._room.name,
            format_bytes(self._room.bytes),
            format_bytes(split.streamed_bytes),
            len(split.streamed),
            len(self._sizes),
            format_bytes(self._resident + sum(self._sizes)),
        )
