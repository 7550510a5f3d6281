"""A trained head on disk: a folder with config.json, model.safetensors and README.md (its card), but never a pickle.

The config holds the target's shape, the head's origin, and the SHA-256 of its weights. Some rows of the target's
embedding are saved as witnesses: a target whose rows differ is another model. Quantization rotates these rows by at
most a few degrees. At first use, a `Proof` checks that target and head compute the same here as where the head was
trained.

Matrices whose rows are divisible into blocks are quantized: MLPs' matrices to Q4_1 (5 bits per weight), others of more
than two million weights to Q5_0 (5.5 bits), and the rest to Q8_0 (8.5 bits). Folders of earlier formats can still be
opened: format 3 has only Q8_0, and formats before it bfloat16.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from parlay.heads.proof import Proof
from parlay.models.config import DecoderConfig, RopeConfig
from parlay.models.families.checking import check_forms
from parlay.models.fetch.hub import hash_of
from parlay.models.weights.dequantize import dense
from parlay.models.weights.formats import Format
from parlay.models.weights.fused import Operand
from parlay.models.weights.quantize import fits_blocks, in_q4_1, in_q5_0, in_q8_0
from parlay.models.weights.stored import StoredTensor, is_finite
from parlay.system.user_cache import saved_whole
from parlay.types import ParlayError

WITNESSES = 32
LEAST_COSINE = 0.95
FORMAT = 4
_LARGE = 1 << 21
_ROUND = {Format.Q4_1: in_q4_1, Format.Q5_0: in_q5_0, Format.Q8_0: in_q8_0}
_WITNESS = "target.witness"
CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"
GENERAL = "general"
"""The domain of drafters for all kinds of text."""


class BadHead(ParlayError):
    """Raised for a head that is damaged, or was trained for another target."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The target and the texts for which a head was trained; empty fields are unknown.

    ``target`` is the model's name or Hub id, and ``target_sha256`` the hash of its weights if they are in one file.
    ``domain`` is the kind of text it was trained on, and ``licence`` an SPDX name.
    """

    target: str = ""
    target_sha256: str = ""
    domain: str = GENERAL
    licence: str = ""


class FileTensors(Mapping[str, Tensor]):
    """The tensors of a head's file; a quantized matrix is dequantized to bfloat16 each time it is read."""

    def __init__(self, as_written: Mapping[str, Tensor | StoredTensor]) -> None:
        self.as_written = as_written

    def __getitem__(self, name: str) -> Tensor:
        found = self.as_written[name]
        return found if isinstance(found, Tensor) else dense(found, torch.bfloat16)

    def __iter__(self) -> Iterator[str]:
        return iter(self.as_written)

    def __len__(self) -> int:
        return len(self.as_written)


@dataclass(frozen=True, slots=True)
class HeadArtefact:
    """A trained head: its method (the strategy's name), its weights, and what is known about its target.

    ``settings`` are the method's own parameters, ``layer`` is the shape of its layers, and ``witness_WH`` are rows of
    the target's embedding; see `witness_ids`.
    """

    method: str
    layer: DecoderConfig
    settings: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    witness_WH: Tensor
    origin: Origin = field(default_factory=Origin)
    proof: Proof | None = None

    @property
    def expected(self) -> float:
        """The share of first drafts that were right on held-out texts; 0 if unknown."""
        return float(self.settings.get("expected", 0.0))

    @property
    def operands(self) -> Mapping[str, Operand]:
        """The tensors as kernels read them: quantized matrices as blocks, not dequantized."""
        return self.tensors.as_written if isinstance(self.tensors, FileTensors) else self.tensors

    def without(self, name: str) -> HeadArtefact:
        """Return the head without the tensor ``name``, if there is one."""
        if not isinstance(self.tensors, FileTensors):
            return replace(self, tensors={each: tensor for each, tensor in self.tensors.items() if each != name})
        rest = {each: tensor for each, tensor in self.tensors.as_written.items() if each != name}
        return replace(self, tensors=FileTensors(rest))


@dataclass(frozen=True, slots=True)
class HeadFacts:
    """A head's config, read without its weights. ``sha256`` is empty in format 1.

    ``blocks`` is the quantization format of each matrix, recorded since format 4; before, all were Q8_0.
    """

    method: str
    layer: DecoderConfig
    settings: Mapping[str, Any]
    origin: Origin
    sha256: str
    blocks: Mapping[str, Format] = field(default_factory=dict)

    @property
    def expected(self) -> float | None:
        """The share of first drafts that were right on held-out texts; None if unknown."""
        fields = self.settings.get("expected")
        return None if fields is None else float(fields)


def witness_ids(vocab_size: int) -> Tensor:
    """Return the ids of the witness rows, int64, spread over the vocabulary."""
    return torch.linspace(vocab_size // 16, vocab_size - 1, WITNESSES).long()


def save(folder: Path, head: HeadArtefact, card: str) -> None:
    """Write the folder; existing files are replaced one by one, the weights last."""
    folder.mkdir(parents=True, exist_ok=True)
    written = {name: _written(name, tensor.detach()) for name, tensor in head.tensors.items()}
    tensors = {**written, _WITNESS: head.witness_WH.to(torch.bfloat16).contiguous()}
    tensors |= head.proof.tensors() if head.proof else {}
    (folder / CARD).write_text(card, encoding="utf-8")
    with saved_whole(folder / WEIGHTS) as part:
        save_file(tensors, part)
        fields = {
            "format": FORMAT,
            "method": head.method,
            "origin": asdict(head.origin),
            "sha256": hash_of(part),
            "settings": dict(head.settings),
            "layer": _plain(head.layer),
            "blocks": {
                n: blocks_of(n, head.tensors[n]).name for n, each in written.items() if each.dtype == torch.uint8
            },
        }
        (folder / CONFIG).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def read_facts(folder: Path) -> HeadFacts:
    """Read a folder's config. Raises BadHead if it is missing, damaged, or of a later format."""
    try:
        fields = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        if fields.get("format", 1) > FORMAT:
            raise BadHead(f"{folder} was written by a later version of Parlay: upgrade with pip install -U parlay")
        origin = Origin(**fields.get("origin", {}))
        blocks = {name: _format(each) for name, each in fields.get("blocks", {}).items()}
        found = HeadFacts(
            fields["method"], _layer(fields["layer"]), fields["settings"], origin, fields.get("sha256", ""), blocks
        )
        _check_kinds(found)
        check_forms(str(folder / CONFIG), found.layer)
        return found
    except BadHead:
        raise
    except KeyError as error:
        raise BadHead(f"{folder} holds no draft head that can be read: {CONFIG} lacks {error}") from error
    except (OSError, ValueError, TypeError, AttributeError, ArithmeticError, RecursionError, ParlayError) as error:
        raise BadHead(f"{folder} holds no draft head that can be read: {error}") from error


def _format(name: str) -> Format:
    """Return the quantization format of this name. Raises ValueError if heads do not use it."""
    known = {each.name: each for each in _ROUND}
    if name not in known:
        raise ValueError(f"{CONFIG} names the blocks {name}, and heads are in {', '.join(known)}")
    return known[name]


def _check_kinds(facts: HeadFacts) -> None:
    """Raise ValueError for fields of the wrong type, which other code would print or look up."""
    texts = {"method": facts.method, "sha256": facts.sha256, **asdict(facts.origin)}
    for name, value in texts.items():
        if not isinstance(value, str) or not value.isprintable():
            raise ValueError(f"{name} is no text of one line in {CONFIG}")
    if not isinstance(facts.settings, dict):
        raise ValueError(f"settings are no table in {CONFIG}")
    expected = facts.settings.get("expected", 0.0)
    if not isinstance(expected, int | float) or not 0 <= expected <= 1:
        raise ValueError(f"expected is not a share in {CONFIG}")


def load(folder: Path) -> HeadArtefact:
    """Load a head. Raises BadHead if a file is missing, damaged or replaced, or holds infinite or NaN numbers."""
    facts = read_facts(folder)
    try:
        if facts.sha256 and hash_of(folder / WEIGHTS) != facts.sha256:
            raise BadHead(
                f"{folder / WEIGHTS} is not the file that {CONFIG} names by its SHA-256: "
                "it was damaged or replaced, so get the folder again"
            )
        tensors = {name: each.clone() for name, each in load_file(folder / WEIGHTS).items()}  # not mapped
        witness_WH, proof = tensors.pop(_WITNESS), Proof.taken(tensors, facts.layer.vocab_size)
        written = {name: _read(tensor, facts.blocks.get(name, Format.Q8_0)) for name, tensor in tensors.items()}
        for name, each in written.items():
            if not (bool(each.isfinite().all()) if isinstance(each, Tensor) else is_finite(each)):
                raise BadHead(f"{folder}: {name} holds numbers that are not finite: the file is damaged")
    except (OSError, KeyError, ValueError, TypeError, RuntimeError, SafetensorError) as error:
        raise BadHead(f"{folder} holds no draft head that can be read: {error}") from error
    found = FileTensors(written)
    return HeadArtefact(facts.method, facts.layer, facts.settings, found, witness_WH, facts.origin, proof)


def read_witness(folder: Path) -> Tensor:
    """Load only the witnesses ``[W, H]``. Raises BadHead if they can't be read."""
    try:
        with safe_open(folder / WEIGHTS, "pt") as file:
            found: Tensor = file.get_tensor(_WITNESS)
            return found
    except (OSError, SafetensorError) as error:
        raise BadHead(f"{folder} holds no draft head that can be read: {error}") from error


def check_target(where: str, layer: DecoderConfig, witness_WH: Tensor, rows_WH: Tensor, vocab_size: int) -> None:
    """Raise BadHead unless ``rows_WH``, the target's embedding rows of `witness_ids`, match the head's witnesses.

    ``layer`` is the target's shape according to the head's config.
    """
    if (vocab_size, rows_WH.shape[-1]) != (layer.vocab_size, layer.hidden_size) or rows_WH.shape != witness_WH.shape:
        raise BadHead(
            f"{where} was trained for a target of {layer.vocab_size} tokens and {layer.hidden_size} numbers, "
            f"not {vocab_size} and {rows_WH.shape[-1]}: choose a head that was trained for this model"
        )
    cosine = _cosine(rows_WH, witness_WH)
    if not cosine >= LEAST_COSINE:
        raise BadHead(
            f"{where} was trained for another model of this shape (its embeddings agree to {cosine:.2f}, and "
            f"{LEAST_COSINE} is asked): choose a head that was trained for this one"
        )


def same_rows(some_WH: Tensor, others_WH: Tensor) -> bool:
    """Whether both are rows of the same embedding, possibly quantized."""
    return some_WH.shape == others_WH.shape and _cosine(some_WH, others_WH) >= LEAST_COSINE


def _cosine(some_WH: Tensor, others_WH: Tensor) -> float:
    return float(F.cosine_similarity(some_WH.float(), others_WH.float(), dim=-1).median())


def as_stored(head: HeadArtefact) -> HeadArtefact:
    """Return the head as `load` would return it after `save`, with its weights rounded."""
    tensors = {name: each.detach() for name, each in head.tensors.items()}
    written = {name: _read(_written(name, each), blocks_of(name, each)) for name, each in tensors.items()}
    return replace(head, tensors=FileTensors(written))


def in_mlp(name: str) -> bool:
    """Whether a matrix belongs to an MLP. With 4-bit MLPs, EAGLE-3 on SmolLM2 loses no acceptance; other 4-bit matrices
    cost some."""
    return ".mlp." in name


def blocks_of(name: str, matrix_OI: Tensor) -> Format:
    """Return the quantization format in which a head's matrix is saved."""
    if in_mlp(name):
        return Format.Q4_1
    return Format.Q5_0 if matrix_OI.numel() > _LARGE else Format.Q8_0


def _written(name: str, tensor: Tensor) -> Tensor:
    """Return ``tensor``, of any shape, as it is saved, contiguous; quantized matrices become uint8 blocks."""
    if not tensor.is_floating_point():
        return tensor.contiguous()
    if tensor.ndim != 2 or not fits_blocks(tensor):
        return tensor.to(torch.bfloat16).contiguous()
    return _ROUND[blocks_of(name, tensor)](tensor).data


def _read(tensor: Tensor, blocks: Format) -> Tensor | StoredTensor:
    """Undo `_written`: return ``tensor``, of any shape, and for quantized blocks the matrix with its own shape."""
    if tensor.dtype != torch.uint8 or tensor.ndim != 2 or tensor.shape[1] % blocks.block_bytes:
        return tensor
    shape = len(tensor), tensor.shape[1] // blocks.block_bytes * blocks.block
    return StoredTensor(blocks, shape, tensor)


_NOT_SAVED = frozenset({"head", "layers", "embedding_scale", "logit_cap", "canvas"})
_ALIKE = {
    field.name: field.default
    for field in dataclasses.fields(DecoderConfig)
    if field.name in _NOT_SAVED | {"per_layer_size", "ngrams", "ngram_layers", "shallow"}
}
"""Fields of `DecoderConfig` that have the same value in all draft heads, although some are saved."""
_FRACTIONS = frozenset(field.name for field in dataclasses.fields(RopeConfig) if field.type == "float")
_SIZES = tuple(field.name for field in dataclasses.fields(DecoderConfig) if field.type == "int")


def _is_usual(value: object, usual: object) -> bool:
    return type(value) is not bool and (value == usual or (usual == () and value == []))


def _plain(layer: DecoderConfig) -> dict[str, Any]:
    fields = dataclasses.asdict(layer.plain)
    return {name: value for name, value in fields.items() if name not in _NOT_SAVED}


def _layer(fields: Mapping[str, Any]) -> DecoderConfig:
    rope = fields["rope"]
    numbers = {**fields, "rotated": rope.get("rotated", 0)}
    odd = [name for name in (*_SIZES, "rotated") if type(numbers.get(name, 0)) is not int]
    odd += [name for name, usual in _ALIKE.items() if not _is_usual(fields.get(name, usual), usual)]
    if odd:
        raise ValueError(f"its layer has {odd[0]} {numbers[odd[0]]!s:.40} in {CONFIG}")
    rope = {name: float(value) if name in _FRACTIONS else value for name, value in rope.items()}
    lists = {"rope": RopeConfig(**{**rope, "divisors": tuple(rope["divisors"])}), "eos_ids": tuple(fields["eos_ids"])}
    return DecoderConfig(**{**fields, **lists})
