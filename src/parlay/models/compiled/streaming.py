"""Layers that don't fit into memory: a file has them as the compiled products read them, and every forward streams it.

The file is written once, layer by layer, so that no more than one of them is in memory for it. Its name says of which
checkpoint, in which form and for which library it is; a sum over each layer is checked whenever that is read.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple, Protocol

from torch import Tensor

from parlay.cache.budget import format_bytes
from parlay.compiled import structs
from parlay.compiled.build import digest
from parlay.models.compiled.memory import Arena, RegionArena, whole_blocks
from parlay.system import threads
from parlay.system.user_cache import user_cache, written_whole
from parlay.types import ParlayError, RunnerLost
from parlay.types.layer_split import BUFFERS, LayerSplit, least_room, split_layers

PATIENCE = 30.0
"""Seconds that a forward waits for a piece of a layer."""
_MAGIC = b"parlay layers 1\n"
_BLOCK = structs.STREAM_BLOCK
_HEADER_OF_LAYER = 96  # bytes of the header for each, at most
_PIECE = 1 << 24
_log = logging.getLogger(__name__)
_stuck: list[object] = []  # what threads still read that a disk holds


class LayersLost(ParlayError):
    """A layer can't be read from disk: the forward that needs it fails."""


class LayersDamaged(RunnerLost, LayersLost):
    """The file is not what was loaded, so no later forward can work either."""


@dataclass(slots=True)
class Loss:
    """Why a model's layers can't be had any more; empty while they can. It may outlive the model."""

    reason: str = ""

    def read(self) -> str:
        """Return the reason."""
        return self.reason


@dataclass(frozen=True, slots=True)
class WeightRoom:
    """How many ``bytes`` a model's weights may take in memory: ``said`` by the user, or free.

    ``name`` is the model's, and ``identity`` tells its weights from others.
    """

    bytes: int
    said: bool
    name: str
    identity: Callable[[], str]

    def split(self, sizes: Sequence[int], resident: int) -> LayerSplit:
        """Choose the layers that stay, of layers of these sizes, beside ``resident`` bytes that do in any case.

        Raises ParlayError where the room does not hold the least that works.
        """
        split = split_layers(sizes, self.bytes - resident)
        if split is None:
            least, all_of_it = resident + least_room(sizes), resident + sum(sizes)
            raise ParlayError(
                f"weights of {self.name} in {format_bytes(self.bytes)} of memory: they take {format_bytes(all_of_it)}, "
                f"and at least {format_bytes(least)} of it must be there; allow {least} bytes or more"
            )
        return split


class PackedLayer(NamedTuple):
    """One layer laid out in some memory, and the calls that fill that."""

    struct: structs.LayerStruct
    jobs: Sequence[Callable[[], object]]


class LayOut(Protocol):
    """Lays a layer out in memory that ``arena`` gives, always in the same way."""

    def __call__(self, layer: int, arena: Arena) -> PackedLayer: ...


class Place(NamedTuple):
    """Where the file has a layer, and the library's sum of it."""

    offset: int
    bytes: int
    sum: int


def linears_of(layer: structs.LayerStruct) -> Iterator[structs.Linear]:
    """All products of a layer, those of its experts too."""
    yield from (layer.query, layer.key, layer.value, layer.out, layer.gate, layer.up, layer.down)
    yield from (layer.router, layer.per_layer_gate, layer.per_layer_out)
    for place in range(layer.experts + bool(layer.shared)):
        expert = layer.expert[place]
        yield from (expert.gate, expert.up, expert.down)


@dataclass(frozen=True, slots=True, eq=False)
class LayerFile:
    """A file with all layers of a model, open for reading. ``direct``: past the system's cache."""

    path: Path
    places: tuple[Place, ...]
    file: int
    direct: bool
    core: structs.Core

    @staticmethod
    def open(path: Path, core: structs.Core, sizes: Sequence[int]) -> LayerFile | None:
        """None where there is no such file, or one that is not whole, or has layers of other ``sizes``."""
        try:
            with path.open("rb") as file:
                places = _read_header(file.read(_offset_of_layers(len(sizes))))
                whole = file.seek(0, os.SEEK_END) == places[-1].offset + places[-1].bytes
        except (OSError, ValueError, KeyError, TypeError, IndexError):
            return None
        if not whole or [place.bytes for place in places] != list(sizes):
            return None
        descriptor, direct = open_past_cache(path)
        return LayerFile(path, tuple(places), descriptor, direct, core)

    def streaming(self, numbers: Sequence[int], buffers: Sequence[Tensor] = ()) -> structs.Streaming:
        """Tell the library where to read these layers, and into which buffers."""
        chosen = (structs.StreamedLayer * len(numbers))(
            *(structs.StreamedLayer(*self.places[number]) for number in numbers)
        )
        found = structs.Streaming(self.file, int(self.direct), len(numbers), int(PATIENCE * 1e9), chosen)
        for place, buffer in enumerate(buffers):
            found.buffer[place] = buffer.data_ptr()
        return found

    def read(self, layer: int, to_B: Tensor) -> None:
        """Read a layer into memory. Raises LayersLost."""
        fault = int(self.core.stream_read(ctypes.byref(self.streaming([layer])), 0, to_B.data_ptr()))
        if fault:
            raise self.lost(fault)

    def lost(self, fault: int) -> LayersLost:
        """Say why a layer can't be had. A file that is damaged goes, so that the next one who loads packs it anew."""
        if fault == structs.STREAM_STALLED:
            return LayersLost(f"the disk gave nothing of {self.path} for {PATIENCE:g} s: see whether it still answers")
        if fault > 0:
            return LayersLost(f"{self.path} can't be read ({os.strerror(fault)}): see whether its disk still answers")
        with suppress(OSError):
            if self.path.stat().st_ino == os.fstat(self.file).st_ino:
                self.path.unlink()
        what = "was cut short" if fault == structs.STREAM_ENDED else "is damaged"
        return LayersDamaged(f"{self.path} {what} since the model was loaded: load it again, which packs it anew")

    def close(self) -> None:
        os.close(self.file)


def open_past_cache(path: Path) -> tuple[int, bool]:
    """A descriptor of the file, and whether reads go past the system's cache; some file systems refuse that."""
    if sys.platform == "linux":
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
            try:
                os.preadv(descriptor, [whole_blocks(_BLOCK).numpy().data], 0)
            except OSError:
                os.close(descriptor)
            else:
                return descriptor, True
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    if sys.platform == "darwin":
        import fcntl  # here, because some systems have none

        fcntl.fcntl(descriptor, fcntl.F_NOCACHE, 1)
    return descriptor, False


def _offset_of_layers(count: int) -> int:
    needed = len(_MAGIC) + 64 + 32 + _HEADER_OF_LAYER * count
    return needed + -needed % _BLOCK


def _header(places: Sequence[Place]) -> bytes:
    content = json.dumps({"layers": places}).encode()
    head = _MAGIC + hashlib.sha256(content).hexdigest().encode() + content
    return head.ljust(_offset_of_layers(len(places)))


def _read_header(head: bytes) -> list[Place]:
    """Raises ValueError, KeyError or TypeError for what is none."""
    begin = len(_MAGIC) + 64
    content = head[begin:].rstrip()
    if not head.startswith(_MAGIC) or hashlib.sha256(content).hexdigest().encode() != head[len(_MAGIC) : begin]:
        raise ValueError("no header, or a damaged one")
    return [Place(*place) for place in json.loads(content)["layers"]]


def write_layers(path: Path, core: structs.Core, sizes: Sequence[int], pack: Callable[[int, Tensor], None]) -> None:
    """Write the file: ``pack`` fills memory with a layer. Raises ParlayError where there is no room for it."""
    first = _offset_of_layers(len(sizes))
    offsets = list(accumulate(sizes, initial=first))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(path.parent).free < offsets[-1]:
            raise _no_room(path.parent, offsets[-1])
        with written_whole(path, mode=0o600) as part, part.open("r+b", buffering=0) as file:
            region, places = whole_blocks(max(sizes)), []
            file.seek(first)
            for number, size in enumerate(sizes):
                region.zero_()
                pack(number, region)
                _write(file.fileno(), region[:size].numpy().data)
                places.append(Place(offsets[number], size, int(core.stream_sum(region.data_ptr(), size))))
            os.pwrite(file.fileno(), _header(places), 0)
            os.fsync(file.fileno())
            if sys.platform == "linux":
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    except OSError as error:
        raise _no_room(path.parent, offsets[-1], error.strerror) from None


def _write(file: int, content: memoryview) -> None:
    for begin in range(0, len(content), _PIECE):
        piece = content[begin : begin + _PIECE]
        while piece:
            piece = piece[os.write(file, piece) :]


def _no_room(folder: Path, size: int, why: str | None = None) -> ParlayError:
    return ParlayError(
        f"the packed layers of a model that does not fit into memory take {format_bytes(size)} in {folder}, and "
        f"{why or 'there is less room'}: free some, or name another folder by XDG_CACHE_HOME"
    )


class LayerStream:
    """Threads of the library that read the layers ``split.streamed`` of a file, in order, in every forward."""

    def __init__(self, file: LayerFile, split: LayerSplit) -> None:
        """Raises ParlayError where no thread can be started."""
        self.split, self.loss, self._file = split, Loss(), file
        self.buffers = [whole_blocks(split.buffer_bytes) for _ in range(BUFFERS)]
        streaming = file.streaming(split.streamed, self.buffers)
        self.address = file.core.stream_open(ctypes.byref(streaming))
        if not self.address:
            raise ParlayError("no thread can be started that reads layers from disk: allow more processes")

    def check(self) -> None:
        """Raises LayersLost if the last forward had to end early: then nothing that it wrote means anything."""
        fault = int(self._file.core.stream_fault(self.address))
        if fault:
            error = self._file.lost(fault)
            self.loss.reason = str(error) if isinstance(error, RunnerLost) else ""
            raise error

    def close(self) -> None:
        """End the threads, once no forward can be under way any more."""
        if self._file.core.stream_close(self.address):
            self._file.close()
        else:
            _stuck.append((self._file, self.buffers))


class StreamedLayers(NamedTuple):
    """Structures of all layers, in order, the memory of those that stay, and what reads the others."""

    structs: Sequence[structs.LayerStruct]
    pinned: Sequence[Tensor]
    stream: LayerStream


class LayersOnDisk:
    """A model's layers, of which some will be streamed. ``resident`` bytes of its weights are in memory in any case."""

    def __init__(self, core: structs.Core, lay_out: LayOut, layers: int, room: WeightRoom, resident: int) -> None:
        """Raises ParlayError where the room does not hold the least that works."""
        self._core, self._lay_out, self._room = core, lay_out, room
        laid = [(arena := RegionArena(), lay_out(layer, arena)) for layer in range(layers)]
        self._sizes = [arena.taken + -arena.taken % _BLOCK for arena, _ in laid]
        self.split, self._resident = room.split(self._sizes, resident), resident
        shapes = [(each.kind, each.inputs, each.outputs) for _, (layer, _) in laid for each in linears_of(layer)]
        self._form = hashlib.sha256(repr(shapes).encode()).hexdigest()[:16]

    def load(self, packed: Callable[[int, int], None]) -> StreamedLayers:
        """Write the file of layers if it is not there, read those that stay, and begin to stream the others.

        Raises LayersLost where it can't be read, ParlayError where it can't be written.
        """
        found = LayerFile.open(self._path(), self._core, self._sizes)
        file = found or self._written(packed)
        try:
            pinned = {layer: self._read(file, layer) for layer in self.split.pinned}
        except LayersLost:
            file.close()
            if found is None or file.path.exists():
                raise
            return self.load(packed)  # it was damaged, so it is gone now
        stream = LayerStream(file, self.split)
        places = {layer: memory.data_ptr() for layer, memory in pinned.items()}
        for number, layer in enumerate(self.split.streamed):
            places[layer] = stream.buffers[number % BUFFERS].data_ptr()
        layers = [self._lay_out(layer, RegionArena(places[layer])).struct for layer in range(len(self._sizes))]
        for number, layer in enumerate(self.split.streamed, start=1):
            layers[layer].streamed = number
        self._say()
        return StreamedLayers(layers, list(pinned.values()), stream)

    def _path(self) -> Path:
        about = f"{digest()} {self._core.name.decode()}"
        of_code = hashlib.sha256(about.encode()).hexdigest()[:8]
        return user_cache() / "layers" / f"{self._room.identity()[:16]}-{self._form}-{of_code}.layers"

    def _written(self, packed: Callable[[int, int], None]) -> LayerFile:
        path, count = self._path(), len(self._sizes)
        with ThreadPoolExecutor(threads.count()) as pool:

            def pack(layer: int, region_B: Tensor) -> None:
                for job in [pool.submit(job) for job in self._lay_out(layer, RegionArena(region_B.data_ptr())).jobs]:
                    job.result()
                packed(layer + 1, count)

            write_layers(path, self._core, self._sizes, pack)
        for old in path.parent.glob(f"{path.name.rpartition('-')[0]}-*.layers"):
            if old != path:  # of another version, which nobody will read
                old.unlink(missing_ok=True)
        _log.warning("packed %s of layers of %s into %s", format_bytes(sum(self._sizes)), self._room.name, path)
        file = LayerFile.open(path, self._core, self._sizes)
        if file is None:
            raise ParlayError(f"{path} was written and can't be read: see whether its disk works")
        return file

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
