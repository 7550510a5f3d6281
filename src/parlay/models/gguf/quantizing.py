"""Quantizes a model: from a folder or a GGUF file to a GGUF file, tensor by tensor.

A matrix that already has no more bits than wanted is copied, as quantizing it again would only lose.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from parlay.models.config import DecoderConfig, Json, read_json
from parlay.models.families.table import FAMILIES
from parlay.models.gguf.blocks import encoded
from parlay.models.gguf.file import read_config, read_parts
from parlay.models.gguf.metadata import folder_keys, gguf_form, rope_factors
from parlay.models.gguf.mixtures import FileType, Mixed
from parlay.models.gguf.reader import BadGguf, Header
from parlay.models.gguf.vocabulary import tokenizer_keys
from parlay.models.gguf.weights import LM_HEAD, gguf_name, mapped
from parlay.models.gguf.writing import TensorPlan, record, write
from parlay.models.loading import as_tensor, load_tensors
from parlay.models.loading import read_config as read_any_config
from parlay.models.weights.dequantize import dense
from parlay.models.weights.formats import DamagedWeights
from parlay.models.weights.regrouped import fused, in_pairs
from parlay.models.weights.shapes import Weight
from parlay.models.weights.stored import StoredTensor
from parlay.system import threads
from parlay.types import ParlayError

_PART = 1 << 22
"""Weights that a thread quantizes at a time."""
_REPLACED = ("general.file_type", "general.quantization_version", "general.alignment", "split.", "quantize.imatrix.")
"""Prefixes of keys that are not copied from the source file."""
_VERSION_OF_BLOCKS = 2
"""The version of ggml's block formats."""

Importance = Mapping[str, Tensor]
"""The mean square of each input of a matrix, ``[I]`` (of stacked experts ``[E, I]``), by its GGUF name."""


@dataclass(frozen=True, slots=True)
class Source:
    """A model to be written: encoded records of its keys, and its tensors by GGUF name."""

    config: DecoderConfig
    records: Sequence[bytes]
    tensors: Mapping[str, Weight]


@dataclass(frozen=True, slots=True)
class Written:
    """Facts of a written file. ``formats`` counts tensors, ``kept`` counts the matrices that were copied, and
    ``fell_back`` those whose shape required another format."""

    bytes: int
    bits: float
    formats: Mapping[str, int]
    fell_back: int
    kept: int


def source_of(model: Path) -> Source:
    """Open the model in a folder or GGUF file. Raises ParlayError for a model that Parlay's decoder does not run."""
    return _of_file(model) if model.is_file() else _of_folder(model)


def _of_file(path: Path) -> Source:
    config, parts = read_config(path), read_parts(path)
    kept = [key for key in parts[0].keys if not key.startswith(_REPLACED)]
    tensors: dict[str, Weight] = {info.name: stored for part in parts for info, stored in mapped(part)}
    return Source(config, copied_records(parts[0], kept), tensors)


def copied_records(header: Header, keys: Iterable[str]) -> list[bytes]:
    """Copy the encoded records of these keys from a file. Raises BadGguf if it can't be read."""
    try:
        with header.path.open("rb") as file:
            return [_between(file, *header.places[key]) for key in keys]
    except OSError as error:
        raise BadGguf(f"{header.path} can't be read as a GGUF file: {error}") from None


def _between(file: BinaryIO, begin: int, end: int) -> bytes:
    file.seek(begin)
    return file.read(end - begin)


def _of_folder(folder: Path) -> Source:
    config = read_any_config(folder)
    raw = FAMILIES[config.architecture].normalize(read_json(folder / "config.json"))
    tensors = gguf_tensors(config, load_tensors(folder, config), raw)
    keys = folder_keys(config, raw, {name: tuple(weight.shape) for name, weight in tensors.items()})
    keys |= {"general.name": folder.resolve().name, **tokenizer_keys(folder, config.vocab_size, config.eos_ids)}
    return Source(config, [record(key, value) for key, value in keys.items()], tensors)


def gguf_tensors(config: DecoderConfig, weights: Mapping[str, Tensor], raw: Json | None = None) -> dict[str, Weight]:
    """Name, fuse and order the decoder's weights as its family's GGUF files do; ``raw`` is that of `shape_keys`."""
    form = gguf_form(config)
    found: dict[str, Weight] = {name: torch.tensor(numbers) for name, numbers in rope_factors(config, raw).items()}
    laid = in_pairs(weights, config) if form.interleaved else weights
    joined = fused({name: as_tensor(weight) for name, weight in laid.items()}, form.names.values())
    return found | {gguf_name(name, form): weight for name, weight in joined.items()}


def quantize(
    source: Source,
    kind: FileType,
    path: Path,
    *,
    importance: Importance | None = None,
    records: Sequence[bytes] = (),
    done: Callable[[int, int], None] = lambda written, tensors: None,
) -> Written:
    """Write ``source`` to ``path`` in formats of ``kind``; ``records`` are further keys.

    ``done`` is called with the number of tensors written and of all. Raises ParlayError for a source that already has
    no more bits, for weights that are not finite, and for a path that can't be written.
    """
    config, weights = source.config, source.tensors
    sharing, tied = config.num_heads // config.num_kv_heads, LM_HEAD not in weights
    mixed = Mixed(kind, config.num_layers, sharing, tied, importance is not None)
    plans = [_planned(name, weight, mixed) for name, weight in weights.items()]
    matrices = [plan for plan in plans if len(plan.shape) > 1]
    changed = [plan for plan in matrices if not _is_kept(plan, weights[plan.name])]
    if not changed:
        raise ParlayError(f"--to {kind.name}: no matrix of this model has more bits than that; choose a smaller type")
    ours = {"general.quantization_version": _VERSION_OF_BLOCKS, "general.file_type": kind.number}
    own = [record(key, value) for key, value in ours.items()]

    def blocks() -> Iterator[Iterator[Tensor]]:
        with ThreadPoolExecutor(threads.count(), initializer=partial(torch.set_num_threads, 1)) as pool:
            for number, plan in enumerate(plans):
                known = None if importance is None else importance.get(plan.name)
                yield _rounded(pool, plan, weights[plan.name], known)
                done(number + 1, len(plans))

    write(path, [*source.records, *own, *records], plans, blocks())
    return Written(
        bytes=path.stat().st_size,
        bits=8 * sum(plan.bytes for plan in plans) / sum(plan.rows * plan.shape[-1] for plan in plans),
        formats=Counter(plan.format.name for plan in plans),
        fell_back=sum(plan.shape[-1] % kind.usual.block != 0 for plan in changed),
        kept=len(matrices) - len(changed),
    )


def _planned(name: str, weight: Weight, mixed: Mixed) -> TensorPlan:
    """A tensor's plan: the mixture's format, or its own blocks if they have no more bits."""
    shape = tuple(weight.shape)
    wanted = mixed.format_of(name, shape)
    if isinstance(weight, StoredTensor) and weight.format.plain is None and weight.format.bits <= wanted.bits:
        return TensorPlan(name, shape, weight.format)
    return TensorPlan(name, shape, wanted)


def _is_kept(plan: TensorPlan, weight: Weight) -> bool:
    return isinstance(weight, StoredTensor) and weight.format is plan.format


def _rounded(pool: ThreadPoolExecutor, plan: TensorPlan, weight: Weight, known: Tensor | None) -> Iterator[Tensor]:
    """Quantize rows in parts, several at once; ``known`` ``[I]`` (of experts ``[E, I]``) is the inputs' importance."""
    return pool.map(partial(_encoded, plan), _in_parts(weight, known))


def _in_parts(weight: Weight, known: Tensor | None) -> Iterator[tuple[Weight, Tensor | None]]:
    """Split rows into parts, each with its importance, from ``known`` ``[I]`` or, for stacked experts, ``[E, I]``."""
    columns = weight.shape[-1]
    step = max(1, _PART // columns)
    if known is not None and known.dim() > 1:
        for number, own_I in enumerate(known):
            expert = weight.item(number) if isinstance(weight, StoredTensor) else weight[number]
            yield from _in_parts(expert, own_I)
    elif isinstance(weight, StoredTensor):
        yield from ((part, known) for part in (weight.parts(step) if len(weight.shape) > 1 else [weight]))
    else:
        yield from ((part, known) for part in torch.split(weight.reshape(-1, columns), step))


def _encoded(plan: TensorPlan, of: tuple[Weight, Tensor | None]) -> Tensor:
    part, importance_I = of
    if isinstance(part, StoredTensor):
        with part.reading():
            if part.format is plan.format:
                return part.data.clone()
            numbers = dense(part)
    else:
        numbers = part.float()
        if not numbers.isfinite().all():
            raise DamagedWeights(f"the tensor {plan.name!r}")
    return encoded(plan.format, numbers.reshape(-1, plan.shape[-1]), importance_I)
