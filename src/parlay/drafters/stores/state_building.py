"""Runs the texts of a datastore through a model, and writes its states, in blocks, and an index of them."""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from parlay.drafters.stores import state_store
from parlay.drafters.stores.datastore_file import Datastore
from parlay.options import UsageError
from parlay.types import Runner, RunnerSpec, Segment

WINDOW = 1024
"""Tokens per window. Each further window of a long document begins with a quarter of a window that was read before."""
_ROWS = 512
"""Rows per forward."""
_FLAT = 4096
"""Most states that a search compares one by one. More are divided into lists, learned from a sample."""
_POINTS, _FEWEST = 40, 10
"""How many states per list the lists are learned from; if memory is short, at least the second number."""
_LEARNED = 1 << 29
"""The most bytes of states, as float32, for learning the lists. The library holds them twice."""
_PROBES = 16
"""How many lists a search looks into."""
_ADDED = 1 << 16
"""How many states are read into memory at a time."""


_names = itertools.count(1 << 62)  # the engine counts its sequences from 0


class _Window(NamedTuple):
    """Tokens that are read together. States of the first ``known`` tokens are not kept.

    ``place``: where in the datastore the token after the first kept state is.
    """

    tokens: tuple[int, ...]
    known: int
    place: int


@dataclass(frozen=True, slots=True)
class Built:
    """The model whose states are written: its ``name``, and the fingerprint of its ``weights``.

    ``prefix``: the tokens with which its tokenizer begins texts.
    """

    runner: Runner
    name: str
    weights: str
    prefix: tuple[int, ...] = ()


def check_has_states(spec: RunnerSpec) -> None:
    """Raises UsageError for a model whose states do not predict the next token."""
    if spec.fills_only or spec.encoder is not None:
        raise UsageError(f"{spec.name} does not write token by token from left to right: choose a model that does")


def write_states(
    path: Path, names: Sequence[str], model: Built, done: Callable[[int], object] = bool
) -> state_store.StateHeader:
    """Write the states of the datastore at ``path``, all or nothing.

    ``done`` is called with how many more tokens were read. ``names``: those of its documents. Only a part of the states
    is in memory at a time: up to `_LEARNED` bytes, twice, while the index is learned. Raises BadStates if no token has
    a successor, OSError.
    """
    check_has_states(model.runner.spec)
    faiss = state_store.need_faiss()
    store, folder = Datastore.open(path), state_store.folder_of(path)
    part = path.with_name(f".{folder.name}.{os.getpid()}.part")
    part.mkdir()
    try:
        count = _write_rows(part, store, model, done)
        if not count:
            raise state_store.BadStates("the corpus has no text of two tokens: there is nothing to look up")
        (part / state_store.DOCUMENTS).write_text(json.dumps(list(names)), encoding="utf-8")
        spec = model.runner.spec
        states_NH = np.memmap(part / state_store.STATES, state_store.STATE_TYPE, "r", shape=(count, spec.hidden_size))
        _index(faiss, states_NH, part, folder)
        files = sorted(part.iterdir())
        header = state_store.StateHeader(
            version=state_store.VERSION,
            model=model.name,
            weights=model.weights,
            layer=spec.num_layers - 1,
            num_layers=spec.num_layers,
            hidden_size=spec.hidden_size,
            states=count,
            datastore=store.checksum,
            sizes={file.name: file.stat().st_size for file in files},
            checksums={file.name: state_store.sha256_of(file) for file in files},
        )
        (part / state_store.HEADER).write_text(state_store.dump(header), encoding="utf-8")
        _replace(part, folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return header


def check_place(path: Path) -> None:
    """Raises ValueError if something other than states is in their place."""
    folder = state_store.folder_of(path)
    if folder.exists() and not (folder / state_store.HEADER).is_file():
        raise ValueError(f"{folder} exists and holds no states: remove it, or name another file")


def _replace(part: Path, folder: Path) -> None:
    """Put the folder ``part`` in the place of ``folder``."""
    old = part.with_suffix(".old")
    with suppress(FileNotFoundError):
        folder.rename(old)
    part.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _write_rows(folder: Path, store: Datastore, model: Built, done: Callable[[int], object]) -> int:
    """Write states and places. Returns how many."""
    count = 0
    with (folder / state_store.STATES).open("wb") as states, (folder / state_store.PLACES).open("wb") as places:
        for states_NH, places_N in states_of(store, model.runner, model.prefix):
            states.write(states_NH.tobytes())
            places.write(places_N.tobytes())
            count += len(places_N)
            done(len(places_N))
    return count


def states_of(
    store: Datastore, runner: Runner, prefix: tuple[int, ...] = ()
) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    """The states of all texts, in parts, and the places in the datastore of the tokens after them."""
    for batch in _batches(_windows(store, prefix, runner.spec.max_context)):
        for window, rows_TH in zip(batch, _states(batch, runner), strict=True):
            wanted_NH = state_store.normalized(rows_TH[window.known :]).astype(state_store.STATE_TYPE)
            yield wanted_NH, np.arange(window.place, window.place + len(wanted_NH), dtype=state_store.PLACE_TYPE)


def _states(batch: Sequence[_Window], runner: Runner) -> list[NDArray[np.float32]]:
    """The states ``[T, H]`` that enter the last layer, for each window."""
    layer, read = runner.spec.num_layers - 1, [0] * len(batch)
    names = [next(_names) for _ in batch]
    found: list[list[NDArray[np.float32]]] = [[] for _ in batch]
    try:
        for name, window in zip(names, batch, strict=True):
            runner.open(name, (), salt=f"states {name}")
            if not runner.reserve(name, len(window.tokens)):
                raise state_store.BadStates(f"the cache has no room for {len(window.tokens)} tokens: free some memory")
        while running := [n for n, window in enumerate(batch) if read[n] < len(window.tokens)]:
            chunks = [batch[n].tokens[read[n] : read[n] + _ROWS] for n in running]
            segments = [
                Segment(names[n], chunk, logits_from=len(chunk)) for n, chunk in zip(running, chunks, strict=True)
            ]
            rows = runner.forward(segments, (layer,)).taps[layer].float().cpu().numpy()
            parts = np.split(rows, np.cumsum([len(chunk) for chunk in chunks])[:-1])
            for n, chunk, own in zip(running, chunks, parts, strict=True):
                runner.keep(names[n], ())
                found[n].append(own.copy())
                read[n] += len(chunk)
    finally:
        for name in names:
            runner.release(name)
    return [np.concatenate(parts) for parts in found]


def _windows(store: Datastore, prefix: tuple[int, ...], max_context: int) -> Iterator[_Window]:
    """Windows of all documents; long ones have several. A document's last token has no successor and is not read."""
    ends = (store.tokens == store.header.vocab_size).nonzero()[0]
    overlap = min(WINDOW, max_context) // 4
    step = max(1, min(WINDOW, max_context - len(prefix) - overlap))
    begin = 0
    for end in ends.tolist():
        first = begin if prefix else begin + 1  # the first token with a token before it
        while first < end:
            stop = min(end, first + step)
            tokens = (*prefix, *store.tokens[max(begin, first - 1 - overlap) : stop - 1].tolist())
            yield _Window(tokens, len(tokens) - (stop - first), first)
            first = stop
        begin = end + 1


def _batches(windows: Iterator[_Window]) -> Iterator[list[_Window]]:
    """Batches of windows; short ones run together."""
    batch: list[_Window] = []
    for window in windows:
        if batch and sum(len(each.tokens) for each in batch) + len(window.tokens) > _ROWS:
            yield batch
            batch = []
        batch.append(window)
    if batch:
        yield batch


def _index(faiss: Any, states_NH: NDArray[np.float16], folder: Path, place: Path) -> None:
    """Write an index of the states, read in blocks, into a folder that will be moved to ``place``.

    If there are many states, parts of the index are merged on disk.
    """
    count, size = states_NH.shape
    if count <= _FLAT:
        index = faiss.IndexFlatL2(size)
        index.add(states_NH.astype(np.float32))
        faiss.write_index(index, str(folder / state_store.INDEX))
        return
    learned = _LEARNED // (4 * size)
    lists = max(1, min(1 << 16, int(4 * math.sqrt(count)), count // _POINTS, learned // _FEWEST))
    index = faiss.index_factory(size, f"IVF{lists},SQ8")
    index.nprobe, index.cp.min_points_per_centroid = _PROBES, 1  # avoids the library's warning on standard error
    sample = np.sort(np.random.default_rng(0).choice(count, min(count, _POINTS * lists, learned), replace=False))
    index.train(states_NH[sample].astype(np.float32))
    parts: list[Path] = []
    for start in range(0, count, _ADDED):
        block = states_NH[start : start + _ADDED].astype(np.float32)
        index.add_with_ids(block, np.arange(start, start + len(block), dtype=np.int64))
        if count > _ADDED:
            parts.append(folder / f"part{len(parts)}")
            faiss.write_index(index, str(parts[-1]))
            index.reset()
    if parts:
        from faiss.contrib.ondisk import merge_ondisk

        with state_store.silent():
            merge_ondisk(index, [str(part) for part in parts], str(folder / state_store.LISTS))
        for part in parts:
            part.unlink()
        faiss.downcast_InvertedLists(index.invlists).filename = str(place / state_store.LISTS)  # after the move
    faiss.write_index(index, str(folder / state_store.INDEX))
