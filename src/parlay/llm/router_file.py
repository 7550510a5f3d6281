"""The file that keeps what routers learned from one process to the next: numbers by machine, model and owner.

They are what routers know about drafters, and the cost of steps. The file holds no text, token, name or key. If it is
damaged or of another version, a warning is logged and the next write replaces it. A thread writes it at most once in
`EVERY` seconds; it is also written when a model is closed or the program ends.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from parlay.cost.measured import MeasuredCost
from parlay.cost.memory_speed import MemorySpeed
from parlay.cost.timing import calibrate
from parlay.models.fetch.origin import weight_files
from parlay.router.saved_state import KeptArm, Memory, NoMemory
from parlay.system.machine import cpu_model
from parlay.system.user_cache import one_writer, user_cache, written_whole
from parlay.types import NO_COST, FieldError, KeptCost, Runner, RunnerSpec, one_line

RememberedBy = Literal["shared", "per-key", "off"]
REMEMBERED_BY: tuple[RememberedBy, ...] = get_args(RememberedBy)
"""Whether routers learn from all owners together, from each owner separately, or keep nothing."""
FORMAT = 5
"""Version of the file and of the meaning of its numbers."""
EVERY = 60.0
"""Seconds from a first change until it is written. A process that is killed loses no more than that."""
_MOST_ENTRIES, _MOST_ARMS, _MOST_KINDS, _MOST_CONTEXTS = 64, 32, 16, 16
_MOST_BYTES = 4 << 20
_END = 1 << 20  # bytes at each end of a weights file, whose hash identifies it
_UNUSABLE = (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError)
_changing = threading.Lock()  # excludes other threads; `one_writer` excludes other processes
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterFileEntry:
    """All that was learned about one model on one machine: about drafters, and the cost of steps.

    ``model``: the name under which it was loaded, for people; ``weights``: a digest that identifies it. ``owner``:
    empty for all requests together; only that entry has the cost. ``saved``: Unix seconds.
    """

    machine: str
    model: str
    weights: str
    owner: str = ""
    saved: float = 0.0
    arms: Mapping[str, KeptArm]
    cost: KeptCost = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str, str]:
        return self.machine, self.weights, self.owner


def place() -> Path:
    """The path of the file, which need not exist."""
    return user_cache() / "router.json"


def entries(path: Path | None = None) -> list[RouterFileEntry]:
    """All entries, the latest first; empty if there is no file, or an unusable one."""
    path = path or place()
    try:
        return _read(path)
    except FileNotFoundError:
        return []
    except _UNUSABLE as error:
        _log.warning("can't read %s (%s): the drafting statistics start again from nothing", path, one_line(error))
        return []


def forget(model: str = "") -> int:
    """Delete all entries, or those of one model. Returns how many were deleted. Raises OSError."""
    with _changing, one_writer(place().parent):
        stored = entries()
        kept = [each for each in stored if model and each.model != model]
        if kept:
            _write(place(), kept)
        else:
            place().unlink(missing_ok=True)
    return len(stored) - len(kept)


def is_here(entry: RouterFileEntry) -> bool:
    """Whether the entry was learned on this machine: several machines may share a home directory."""
    if entry.machine.startswith(f"{_processors()}, "):
        return True
    import torch

    return entry.machine in [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]


class RouterMemory:
    """A `Memory` in the file that `place` names when this is made. Any thread may call it."""

    def __init__(
        self, model: str, spec: RunnerSpec, quantize: str, *, apart: bool = False, every: float = EVERY
    ) -> None:
        """``model`` was loaded as ``spec`` says and with ``quantize``. Raises OSError."""
        self.apart, self._place = apart, place()
        self._empty = RouterFileEntry(
            machine=_machine(spec), model=spec.name, weights=_weights(model, spec, quantize), arms={}
        )
        self._every = every
        self._lock = threading.Lock()
        self._found: list[RouterFileEntry] | None = None  # content of the file when first read
        self._learned: dict[str, Mapping[str, KeptArm]] = {}  # learned since then, by owner
        self._unwritten: set[str] = set()  # owners with changes that the file lacks
        self._learned_cost: Callable[[], KeptCost] = lambda: NO_COST
        self._timer: threading.Timer | None = None
        self._has_warned = False

    def recall(self, owner: str) -> Mapping[str, KeptArm]:
        with self._lock:
            stored = _stored(self._of(owner), self._in_file())
            return {**stored.arms, **self._learned.get(owner, {})}

    def cost(self) -> KeptCost:
        with self._lock:
            return _stored(self._empty, self._in_file()).cost

    def keep_cost(self, learned: Callable[[], KeptCost]) -> None:
        self._learned_cost = learned
        atexit.register(self.write)

    def keep(self, owner: str, arms: Mapping[str, KeptArm]) -> None:
        if not arms:
            return
        with self._lock:
            self._learned[owner] = {**self._learned.get(owner, {}), **arms}
            self._unwritten.add(owner)
            if self._timer is None:
                self._timer = threading.Timer(self._every, self.write)
                self._timer.daemon = True
                self._timer.start()
                atexit.unregister(self.write)
                atexit.register(self.write)  # a daemon thread ends with the program

    def write(self) -> None:
        with _changing, one_writer(self._place.parent):  # closing a model waits here for a write under way
            changes, cost = self._taken(), self._learned_cost()
            try:
                if changes or cost:
                    _write(self._place, self._joined(changes, cost, _quietly(self._place)))
                    self._has_warned = False
            except OSError as error:
                with self._lock:
                    self._unwritten |= changes.keys()
                self._warn(error)

    def _in_file(self) -> list[RouterFileEntry]:
        """The content of the file when it was first read."""
        if self._found is None:
            self._found = entries(self._place)
        return self._found

    def _taken(self) -> Mapping[str, Mapping[str, KeptArm]]:
        """Take the changes that the file lacks, by owner, in order to write them."""
        with self._lock:
            atexit.unregister(self.write)
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            changes = {owner: self._learned[owner] for owner in self._unwritten}
            self._unwritten.clear()
        return changes

    def _joined(
        self, changes: Mapping[str, Mapping[str, KeptArm]], cost: KeptCost, stored: Sequence[RouterFileEntry]
    ) -> list[RouterFileEntry]:
        """The entries of the file, with the changes merged in."""
        now, by_key = time.time(), {each.key: each for each in stored}
        for owner, arms in changes.items():
            before = _stored(self._of(owner), stored)
            merged = [*arms.items(), *(pair for pair in before.arms.items() if pair[0] not in arms)][:_MOST_ARMS]
            by_key[before.key] = replace(before, saved=now, arms=dict(merged))
        if cost:
            before = by_key.get(self._empty.key, self._empty)
            by_key[before.key] = replace(before, saved=now, cost={**before.cost, **cost})
        return list(by_key.values())

    def _warn(self, error: OSError) -> None:
        """Log a failed write once, until a write succeeds again."""
        if not self._has_warned:
            _log.warning("can't write %s (%s): the drafting statistics are not saved", self._place, error.strerror)
        self._has_warned = True

    def _of(self, owner: str) -> RouterFileEntry:
        """The entry of an owner. It has a hash of the owner's name, so that the file says nothing about keys."""
        name = hashlib.sha256(f"router:{owner}".encode()).hexdigest()[:16] if owner else ""
        return replace(self._empty, owner=name)


def memory_of(model: object, spec: RunnerSpec, quantize: str, wanted: RememberedBy) -> Memory:
    """Make the memory for routers of a model. A model that was loaded elsewhere has no name, so nothing is kept.

    Raises ValueError if ``wanted`` is none of `REMEMBERED_BY`.
    """
    if wanted not in REMEMBERED_BY:
        raise FieldError("router_memory", f"={wanted!r}: choose one of {', '.join(REMEMBERED_BY)}")
    apart = wanted == "per-key"
    if wanted == "off" or not isinstance(model, str):
        return NoMemory(apart)
    return RouterMemory(model, spec, quantize, apart=apart)


def cost_of(runner: Runner, memory: Memory, read: Callable[[], float] | None) -> MeasuredCost:
    """Measure the cost of steps, starting from what an earlier process learned, and keep it for the next process.

    ``read`` times how long reading the runner's weights takes; see `MemorySpeed`.
    """
    cost = calibrate(runner, kept=memory.cost(), memory=None if read is None else MemorySpeed(read))
    memory.keep_cost(cost.kept)
    return cost


def _stored(mine: RouterFileEntry, stored: Sequence[RouterFileEntry]) -> RouterFileEntry:
    """The stored entry of the same machine, model and owner, with the name under which the model is loaded now."""
    found = next((each for each in stored if each.key == mine.key), mine)
    return replace(found, model=mine.model)


def _quietly(path: Path) -> list[RouterFileEntry]:
    """Like `entries`, but without a warning: it was logged when the process first read the file."""
    try:
        return _read(path)
    except _UNUSABLE:
        return []


def _read(path: Path) -> list[RouterFileEntry]:
    """The entries of the file. Raises OSError, or another error with its reason."""
    if path.exists() and not path.is_file():
        raise ValueError("it is not a file")
    if path.stat().st_size > _MOST_BYTES:
        raise ValueError("it is too large")
    content = json.loads(path.read_text(encoding="utf-8"))
    if content.get("format") != FORMAT:
        raise ValueError(f"it has the format {content.get('format')}, and this version reads {FORMAT}")
    if content["sha256"] != _digest(content["entries"]):
        raise ValueError("it is damaged: its checksum is another")
    return [_entry(each) for each in content["entries"][:_MOST_ENTRIES]]


def _write(path: Path, stored: Sequence[RouterFileEntry]) -> None:
    """Write the latest entries as a whole file that only the user may read. Raises OSError."""
    latest = [asdict(each) for each in sorted(stored, key=lambda each: -each.saved)[:_MOST_ENTRIES]]
    content = {"format": FORMAT, "sha256": _digest(latest), "entries": latest}
    with written_whole(path, mode=0o600) as part:
        part.write_text(json.dumps(content), encoding="utf-8")


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _entry(content: Mapping[str, Any]) -> RouterFileEntry:
    arms = {name: _arm(arm) for name, arm in [*content["arms"].items()][:_MOST_ARMS]}
    cost = {context: tuple(numbers) for context, numbers in [*content["cost"].items()][:_MOST_CONTEXTS]}
    return RouterFileEntry(**{**content, "saved": float(content["saved"]), "arms": arms, "cost": cost})


def _arm(content: Mapping[str, Any]) -> KeptArm:
    lists = {name: tuple(content[name]) for name in ("calibration", "record", "seconds", "reading")}
    kinds = {kind: tuple(numbers) for kind, numbers in [*content["kinds"].items()][:_MOST_KINDS]}
    return KeptArm(**lists, gain=content["gain"], depth=content["depth"], row=content["row"], kinds=kinds)


def _machine(spec: RunnerSpec) -> str:
    from parlay.system import threads

    if spec.device.startswith("cuda"):
        import torch

        return torch.cuda.get_device_name(spec.device)
    return f"{_processors()}, {threads.count()} threads"


def _processors() -> str:
    return f"{cpu_model()}, {os.cpu_count()} processors"


def _weights(model: str, spec: RunnerSpec, quantize: str) -> str:
    """A digest that identifies a model: the ends of its files, and the number formats in which it computes."""
    streamed = f" {spec.streamed_bytes} from disk" if spec.streamed_bytes else ""
    digest = hashlib.sha256(f"{spec.dtype} {quantize}{streamed}".encode())
    for path in weight_files(model):
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            digest.update(f"{size} ".encode())
            for start in (0, max(0, size - _END)):
                file.seek(start)
                digest.update(file.read(_END))
    return digest.hexdigest()
