"""Reads a model's facts from its files without loading it: sizes, weight format, hash, chat template."""

from __future__ import annotations

import hashlib
import json
import math
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from safetensors import SafetensorError, safe_open

from parlay.models.config import UnsupportedModel, read_json
from parlay.models.fetch.hashes import remembered_hash_of
from parlay.models.gguf import SUFFIX
from parlay.models.gguf.file import read_parts
from parlay.models.gguf.reader import Header
from parlay.models.gguf.weights import LM_HEAD, embedding_twice
from parlay.models.loading import load_template, read_config
from parlay.types import ParlayError

Stamp = tuple[Path, int, int]
"""A file, its size, and its modification time."""
_reading = threading.Lock()

_SECOND = {"lm_head.weight"}
"""The LM head of tied weights, which some checkpoints store as a second copy of the embedding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """``family`` is the architecture; ``quantization`` is the format of most parameters."""

    form: str
    family: str
    bytes: int
    parameters: int
    quantization: str
    digest: str
    """SHA-256 of the file; of several files, the hash of their hashes."""


def read_facts(path: Path) -> ModelFacts:
    """Read the facts of a GGUF file or of a folder. Files are hashed once, and again only after they have changed.

    Raises ParlayError for files that are no model, OSError for unreadable files.
    """
    files = stamps(path)
    with _reading:  # one thread at a time, so that no file is hashed twice
        return _read(path, files)


def stamps(path: Path) -> tuple[Stamp, ...]:
    """The state of a GGUF file or of a folder's files, which changes whenever one is written. Raises OSError if they
    can't be read."""
    files = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.is_file())
    stats = [(file, file.stat()) for file in files]
    return tuple((file, stat.st_size, stat.st_mtime_ns) for file, stat in stats)


@lru_cache(maxsize=64)
def _read(path: Path, files: tuple[Stamp, ...]) -> ModelFacts:
    return _of_file(path) if path.is_file() else _of_folder(path, [file for file, _, _ in files])


def _of_file(path: Path) -> ModelFacts:
    parts = read_parts(path)
    family = str(parts[0].keys.get("general.architecture", ""))
    return _facts("gguf", family, _stored_in_file(parts), [part.path for part in parts])


def _stored_in_file(parts: Sequence[Header]) -> Counter[str]:
    second = {LM_HEAD} if embedding_twice(parts) else set()
    stored = Counter[str]()
    for tensor in (tensor for part in parts for tensor in part.tensors if tensor.name not in second):
        stored[tensor.format.name] += math.prod(tensor.shape)
    return stored


def _of_folder(path: Path, files: list[Path]) -> ModelFacts:
    family, stored = _stored_in_folder(path, files)
    return _facts("safetensors", family, stored, files)


def _stored_in_folder(path: Path, files: Sequence[Path]) -> tuple[str, Counter[str]]:
    """The model's family, and the count of numbers of each type."""
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        family, tied = str(config.get("model_type", "")), config.get("tie_word_embeddings") is True
        stored = Counter[str]()
        for file in files:
            if file.suffix == ".safetensors":
                with safe_open(file, "numpy") as tensors:
                    for name in sorted(set(tensors.keys()) - (_SECOND if tied else set())):
                        part = tensors.get_slice(name)
                        stored[part.get_dtype()] += math.prod(part.get_shape())
    except (ValueError, AttributeError, RecursionError, SafetensorError) as error:
        raise ParlayError(f"no model can be read from {path}: {error}") from None
    return family, stored


def count_parameters(path: Path) -> int:
    """Count a model's parameters from the headers of its files; tied ones count once.

    Raises ParlayError for files that are no model, OSError for unreadable files.
    """
    if path.is_file():
        return _stored_in_file(read_parts(path)).total()
    return _stored_in_folder(path, sorted(path.iterdir()))[1].total()


def ties_embeddings(file: Path) -> bool:
    """Whether a GGUF file stores the embedding a second time as LM head; False for a folder."""
    return file.is_file() and embedding_twice(read_parts(file))


def spell_parameters(count: int) -> str:
    """Write a count as ``134.52M`` or ``7.6B``."""
    return f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.2f}M"


def _facts(form: str, family: str, stored: Counter[str], files: Iterable[Path]) -> ModelFacts:
    hashes = [(file, remembered_hash_of(file)) for file in files]
    listed = "".join(f"{digest}  {file.name}\n" for file, digest in hashes)
    return ModelFacts(
        form=form,
        family=family,
        bytes=sum(file.stat().st_size for file, _ in hashes),
        parameters=stored.total(),
        quantization=stored.most_common(1)[0][0] if stored else "",
        digest=hashes[0][1] if form == SUFFIX[1:] and len(hashes) == 1 else hashlib.sha256(listed.encode()).hexdigest(),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """Sizes of a model: tokens, elements of a hidden state, and layers; None if the files do not say.

    ``template`` is all chat templates joined; empty if there is none.
    """

    max_context: int | None
    vocab_size: int | None
    hidden_size: int | None
    num_layers: int | None
    template: str


def describe(path: Path) -> Description:
    """Describe the model in a folder or GGUF file without loading it. Files are read again only after they have
    changed.

    Raises ParlayError for files that are no model, OSError for unreadable files.
    """
    return _read_description(path, stamps(path))


@lru_cache(maxsize=64)
def _read_description(path: Path, files: tuple[Stamp, ...]) -> Description:
    del files  # part of the cache key: a changed file is read again
    try:
        config = read_config(path)
    except UnsupportedModel:
        if path.is_file():
            raise
        return _describe_foreign(path)
    return Description(
        max_context=config.max_context,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_layers,
        template=load_template(path),
    )


def _describe_foreign(folder: Path) -> Description:
    """Describe a model that the native decoder does not run; older architectures name these fields differently."""
    config = read_json(folder / "config.json")

    def size(*names: str) -> int | None:
        return next((config[name] for name in names if isinstance(config.get(name), int)), None)

    return Description(
        max_context=size("max_position_embeddings", "n_positions", "max_seq_len"),
        vocab_size=size("vocab_size"),
        hidden_size=size("hidden_size", "n_embd", "d_model"),
        num_layers=size("num_hidden_layers", "n_layer", "n_layers"),
        template=load_template(folder),
    )
