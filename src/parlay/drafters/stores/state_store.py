"""States of a datastore's texts: what a model's layer reads at each token, and an index that finds similar states.

They are in a folder beside the datastore with ``.states`` after its name: ``header.json``; ``states``, one row of
float16 for each token that has a successor; ``places``, u64, where in the datastore that successor is;
``documents.json``, the documents' names; and ``index`` in faiss's format. If there are many states, the index has them
again in eight bits; if there are very many, these are in ``lists``. All but names and ``index`` are memory-mapped,
never loaded. States are divided by their root mean square.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from parlay.drafters.stores.datastore_file import Datastore
from parlay.drafters.stores.suffix_array import Integers
from parlay.models.ensembles.nest import Neighbours
from parlay.models.fetch.origin import weights_fingerprint
from parlay.types import ParlayError, RunnerSpec

VERSION = 1
HEADER, STATES, PLACES, DOCUMENTS, INDEX, LISTS = (
    "header.json", "states", "places", "documents.json", "index", "lists",
)  # fmt: skip
STATE_TYPE, PLACE_TYPE = np.dtype("<f2"), np.dtype("<u8")
_FILES = (STATES, PLACES, DOCUMENTS, INDEX)
_BLOCK = 1 << 24
_ROWS = 1 << 20  # how many places are checked at a time
_LOOKED_UP = 1024  # how many results are cached: a drafter looks up the same states as the target
_WIDER = 4  # the index returns this multiple of the wanted number, because it is approximate


class BadStates(ParlayError):
    """The states can't be used: they are damaged, or belong to another model or datastore."""


class Index(Protocol):
    """Finds nearest rows, with the interface of faiss."""

    def search(self, queries_QH: NDArray[np.float32], count: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Distances and numbers ``[Q, count]`` of the rows that seem nearest to each query; -1 for none."""
        ...


@dataclass(frozen=True, slots=True)
class StateHeader:
    """Describes states. ``weights``: the fingerprint of the model's weights, empty if they were not in files.

    ``datastore``: the checksum of the datastore's file. ``sizes`` (bytes) and ``checksums`` (SHA-256): those of the
    other files, by name.
    """

    version: int
    model: str
    weights: str
    layer: int
    num_layers: int
    hidden_size: int
    states: int
    datastore: int
    sizes: dict[str, int]
    checksums: dict[str, str]

    @property
    def fits(self) -> bool:
        """Whether the files with one entry per state have the right sizes."""
        rows = self.sizes[STATES] == self.states * self.hidden_size * STATE_TYPE.itemsize
        return rows and self.sizes[PLACES] == self.states * PLACE_TYPE.itemsize


class MappedStates:
    """The states of a datastore and its index; see `parlay.models.ensembles.nest.StateStore`."""

    def __init__(
        self,
        store: Datastore,
        header: StateHeader,
        states_NH: NDArray[np.float16],
        places_N: Integers,
        *,
        names: Sequence[str],
        index: Index,
    ) -> None:
        self.store, self.header = store, header
        self._states_NH, self._places_N, self._names, self._index = states_NH, places_N, names, index
        self._known: OrderedDict[bytes, Neighbours] = OrderedDict()

    @property
    def layer(self) -> int:
        return self.header.layer

    @property
    def hidden_size(self) -> int:
        return self.header.hidden_size

    def nearest(self, state_H: NDArray[Any], count: int) -> Neighbours:
        """See `StateStore.nearest`. If distances are equal, the row stored first comes first."""
        key = hashlib.blake2b(state_H.tobytes() + count.to_bytes(4, "little"), digest_size=16).digest()
        if (known := self._known.get(key)) is None:
            known = self._known[key] = self._find(normalized(state_H[None]), min(count, self.header.states))
            if len(self._known) > _LOOKED_UP:
                self._known.popitem(last=False)
        return known

    def _find(self, query_1H: NDArray[np.float32], count: int) -> Neighbours:
        """Let the index find candidates, measure their distances exactly, and keep the nearest."""
        (found,) = self._index.search(query_1H, min(_WIDER * count, self.header.states))[1]
        numbers = np.sort(found[(found >= 0) & (found < self.header.states)])
        if not len(numbers):  # a broken index must not end requests
            numbers = np.zeros(1, np.int64)
        apart = self._states_NH[numbers].astype(np.float32) - query_1H
        distances = np.einsum("nh,nh->n", apart, apart, dtype=np.float64)
        nearest = distances.argsort(kind="stable")[:count]
        places = self._places_N[numbers[nearest]].astype(np.int64)
        return Neighbours(places, self.store.tokens[places].astype(np.int64), distances[nearest])

    def locate(self, place: int) -> tuple[str, int]:
        """See `StateStore.locate`."""
        document = int(self._ends.searchsorted(place))
        before = int(self._ends[document - 1]) + 1 if document else 0
        return self._names[document], place - before

    @cached_property
    def _ends(self) -> Integers:
        """The places of the borders after each document."""
        ends: Integers = (self.store.tokens == self.store.header.vocab_size).nonzero()[0]
        return ends

    @classmethod
    def open(cls, path: Path, model: object, spec: RunnerSpec) -> Self:
        """Map the states of the datastore at ``path`` for a model that is loaded already.

        Raises BadDatastore or BadStates with one line if they can't be used, ParlayError if faiss is missing.
        """
        faiss = need_faiss()
        store, folder = Datastore.open(path), folder_of(path)
        header = read_header(path)
        _check(folder, header, store, path)
        _check_model(folder, header, model, spec)
        if store.header.vocab_size > spec.vocab_size:
            raise BadStates(
                f"{path} has a vocabulary of {store.header.vocab_size:,} tokens, and {spec.name} one of "
                f"{spec.vocab_size:,}: build it again with --model {spec.name}"
            )
        try:
            names = json.loads((folder / DOCUMENTS).read_text(encoding="utf-8"))
            states = np.memmap(folder / STATES, STATE_TYPE, "r", shape=(header.states, header.hidden_size))
            places = np.memmap(folder / PLACES, PLACE_TYPE, "r", shape=(header.states,))
            mapped = faiss.IO_FLAG_ONDISK_SAME_DIR if LISTS in header.sizes else faiss.IO_FLAG_MMAP
            with silent():
                index = faiss.read_index(str(folder / INDEX), mapped)
        except (OSError, ValueError, RuntimeError) as error:
            raise BadStates(f"can't read the states in {folder}: {_reason(error)}: build them again") from None
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise BadStates(f"{folder / DOCUMENTS} is not a list of names: build the states again")
        if (index.ntotal, index.d, len(names)) != (header.states, header.hidden_size, store.header.documents):
            raise BadStates(f"the states in {folder} do not fit each other: build them again")
        if not all(_in_texts(places[start : start + _ROWS], store) for start in range(0, header.states, _ROWS)):
            raise BadStates(f"{folder / PLACES} is damaged (it names places outside the texts): build the states again")
        faiss.omp_set_num_threads(1)  # results among equals must not depend on the number of threads
        return cls(store, header, states, places, names=names, index=index)


def folder_of(path: Path) -> Path:
    """The folder with the states of a datastore."""
    return path.with_name(f"{path.name}.states")


def normalized(states_NH: NDArray[Any]) -> NDArray[np.float32]:
    """States divided by their root mean square, so that distances mean the same in every model."""
    wide = states_NH.astype(np.float32)
    square_N = np.einsum("nh,nh->n", wide, wide, dtype=np.float64) / wide.shape[1]
    wide /= np.sqrt(np.maximum(square_N, 1e-12))[:, None].astype(np.float32)
    return wide


def need_faiss() -> Any:
    """The faiss library. Raises ParlayError if it is missing."""
    if find_spec("faiss") is None:
        raise ParlayError("states of a datastore need the package faiss-cpu: pip install 'parlay[nest]'")
    import faiss

    return faiss


@contextmanager
def silent() -> Iterator[None]:
    """Suppress what a C library prints on standard output, which belongs to the user's program."""
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        ctypes.CDLL(None).fflush(None)
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


def read_header(path: Path) -> StateHeader:
    """The header of the states of the datastore at ``path``. Raises BadStates if it is missing or invalid."""
    folder = folder_of(path)
    try:
        values = json.loads((folder / HEADER).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadStates(
            f"no states of a datastore in {folder}: make them with `parlay datastore build CORPUS --states -o {path}`"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise BadStates(f"can't read the states in {folder}: {_reason(error)}: build them again") from None
    names = {field.name: field.type for field in fields(StateHeader)}
    if not isinstance(values, dict) or values.keys() != names.keys():
        raise BadStates(f"{folder} has an invalid header: build the states again")
    if values["version"] != VERSION:
        raise BadStates(f"{folder} holds states of version {values['version']!r:.20}, not {VERSION}: build them again")
    numbers = [values[name] for name, kind in names.items() if kind == "int"]
    words = [values[name] for name, kind in names.items() if kind == "str"]
    well = all(type(number) is int and number >= 0 for number in numbers) and all(isinstance(w, str) for w in words)
    listed = all(
        isinstance(values[name], dict)
        and all(Path(file).name == file and type(value) is kind for file, value in values[name].items())
        for name, kind in (("sizes", int), ("checksums", str))
    )
    if not well or not listed or not values["sizes"].keys() == values["checksums"].keys() >= set(_FILES):
        raise BadStates(f"{folder} has an invalid header: build the states again")
    return StateHeader(**values)


def verify(folder: Path, header: StateHeader) -> None:
    """Check every byte against the checksums. Raises BadStates."""
    for name, checksum in header.checksums.items():
        if sha256_of(folder / name) != checksum:
            raise BadStates(f"{folder / name} is damaged (its checksum does not match): build the states again")


def sha256_of(path: Path) -> str:
    """The file's SHA-256. Raises BadStates if it can't be read."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                digest.update(block)
    except OSError as error:
        raise BadStates(f"can't read {path}: {error.strerror}: build the states again") from None
    return digest.hexdigest()


def dump(header: StateHeader) -> str:
    return json.dumps(asdict(header), indent=1)


def _check(folder: Path, header: StateHeader, store: Datastore, path: Path) -> None:
    """Raises BadStates for files that are truncated or belong to another datastore, and for a damaged index."""
    if header.datastore != store.checksum:
        raise BadStates(f"the states in {folder} are not those of {path}, which was built anew: build them again")
    if not header.fits:
        raise BadStates(f"{folder} has an invalid header: build the states again")
    for name, size in header.sizes.items():
        file = folder / name
        there = file.stat().st_size if file.is_file() else 0
        if there != size:
            what = "cut short" if there < size else "too long"
            raise BadStates(f"{file} is {what} ({there:,} of {size:,} bytes): copy it or build the states again")
    for name in (INDEX, DOCUMENTS):  # the readers of these two files trust them
        if sha256_of(folder / name) != header.checksums[name]:
            raise BadStates(f"{folder / name} is cut short or damaged: copy it or build the states again")


def _in_texts(places: Integers, store: Datastore) -> bool:
    """Whether a token of a text is at each of these places; if not, looking it up would end a forward."""
    inside = bool((places < len(store.tokens)).all())
    return inside and bool((store.tokens[places] < store.header.vocab_size).all())


def _check_model(folder: Path, header: StateHeader, model: object, spec: RunnerSpec) -> None:
    """Raises BadStates if the states are another model's."""
    own, there = (spec.hidden_size, spec.num_layers), (header.hidden_size, header.num_layers)
    if own != there:
        raise BadStates(
            f"the states in {folder} are those of {header.model}, {there[0]} numbers in {there[1]} layers; {spec.name} "
            f"has {own[0]} in {own[1]}: build them with --model {spec.name}"
        )
    if isinstance(model, str) and header.weights and weights_fingerprint(model) != header.weights:
        raise BadStates(
            f"the states in {folder} are those of {header.model}, whose weights are not those of {spec.name}: build "
            f"them with --model {spec.name}"
        )


def _reason(error: Exception) -> str:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return reason.splitlines()[0] if reason else type(error).__name__
