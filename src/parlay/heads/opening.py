"""Opens the head that a strategy names, or the head that was made for the target."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from parlay.cache import Budget
from parlay.heads import store
from parlay.heads.artefact import (
    CONFIG,
    GENERAL,
    BadHead,
    HeadArtefact,
    check_target,
    in_mlp,
    load,
    read_witness,
    same_rows,
    witness_ids,
)
from parlay.heads.base import draft_ids
from parlay.heads.layouts.files import fetched, is_artefact, read
from parlay.heads.layouts.layout import EMBEDDING, LAYOUT, LM_HEAD, NEED_LM_HEAD, TargetShape
from parlay.heads.proof import ProofMemory, target_states
from parlay.heads.store import StoredDrafter
from parlay.models.compiled.newest_tokens import RowsOfHead
from parlay.models.compiled.product import Product
from parlay.models.config import DecoderConfig
from parlay.models.fetch.hub import without_address
from parlay.models.fetch.origin import build_fingerprint, weight_files
from parlay.models.fetch.resolving import BUILT_IN, BUILT_IN_DRAFTS, resolve
from parlay.models.loading import load_weights, read_config
from parlay.models.native import NativeRunner
from parlay.models.weights.formats import Format
from parlay.models.weights.fused import Operand, as_tensor, chosen_rows, rows_of
from parlay.models.weights.grids import packable
from parlay.models.weights.quantize import Int8Weight, fits_blocks, in_q4_1, in_q8_0
from parlay.models.weights.stored import StoredTensor
from parlay.options import UsageError, nearest, user_path
from parlay.types import FieldError, ParlayError, Runner, RunnerSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_EMBEDDING, _LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"
_DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_MOST_OPEN = 8  # most heads kept open for strategies with other settings
_REPO = re.compile(r"[\w.-]+/[\w.-]+")
_log = logging.getLogger(__name__)
MakeRunner = Callable[[DecoderConfig, Mapping[str, Operand]], NativeRunner]
StatesOf = Callable[[Sequence[int], Sequence[int]], Tensor | None]
"""Returns the target's states ``[T, F]`` of a text that enter some layers, side by side; None if not available now."""


@dataclass(frozen=True)
class OpenHead:
    """An open head with the target's embedding ``[V, H]`` and the function that makes runners of its layers.

    ``dtype`` is the dtype of products. Strategies with different settings share an open head and its packed weights.
    ``states`` runs the target itself, so nothing else may run it meanwhile. ``proved_in``: the drafter classes in which
    the head was proved. ``memory`` remembers proofs of earlier processes.
    """

    artefact: HeadArtefact
    embedding: Operand
    make_runner: MakeRunner
    dtype: torch.dtype
    states: StatesOf | None = None
    memory: ProofMemory | None = None
    proved_in: set[str] = field(default_factory=set)
    _runners: dict[str, NativeRunner] = field(default_factory=dict)

    def runner(self, layers: str, decoder: Callable[[], tuple[DecoderConfig, dict[str, Operand]]]) -> NativeRunner:
        """Return the runner of these layers. All drafters share it; their sequences have different names."""
        if layers not in self._runners:
            self._runners[layers] = self.make_runner(*decoder())
        return self._runners[layers]

    @property
    def rows_of_lm_head(self) -> RowsOfHead | None:
        """Reads rows of the target's LM head as a CPU packs them, if that is the head's own; None if they aren't in
        blocks."""
        embedding, shared = self.embedding, _LM_HEAD not in self.artefact.operands
        if isinstance(embedding, StoredTensor):
            blocks = embedding.format.plain is None
        else:
            blocks = isinstance(embedding, Tensor) and fits_blocks(embedding)
        return partial(_rows_of_lm_head, embedding) if shared and blocks else None

    @cached_property
    def fuse(self) -> Product:
        """The product with ``fc.weight``, which fuses the target's features into one state."""
        return Product(self.artefact.operands["fc.weight"])

    @cached_property
    def embedding_VH(self) -> Tensor:
        """The target's embedding in bfloat16."""
        return as_tensor(self.embedding, torch.bfloat16)


FindHead = Callable[[str, str], OpenHead | None]
"""Opens a head by method and name (empty: the head made for the target); None if there is none."""


def opened(source: str, find: FindHead | None, name: str, *, method: str = "") -> OpenHead:
    """Open the head of strategy ``source``; ``method`` is the kind of head, if its name differs.

    Raises UsageError if there is none, BadHead if it can't be used.
    """
    method = method or source
    head = find(method, name) if find is not None else None
    if head is None:
        raise UsageError(
            f"strategy {source}: no head goes with this target; train one with parlay train {method}, "
            "and name its folder by head=FOLDER, or add it with parlay drafters add FOLDER"
        )
    if head.artefact.method != method:
        raise UsageError(f"strategy {source}: {name} is a head for strategy {head.artefact.method}")
    return head


def heads_of(
    model: str | PreTrainedModel,
    target: RunnerSpec,
    budget: Budget | None,
    runner: Runner | None = None,
    *,
    lora: str | None = None,
) -> TargetHeads:
    """Return a finder of heads for the target loaded as ``model``; the heads' caches join ``budget``.

    With the target's ``runner``, which may have the adapter ``lora``, heads can be proved. Heads run on the target's
    device. On a CPU their weights have eight or four bits, since reading weights takes most of the time.
    """
    dtype = _DTYPES[target.dtype]

    make_runner = partial(_head_runner, dtype=dtype, device=torch.device(target.device), budget=budget)
    matrices = cache(partial(matrices_of, model))
    states = partial(target_states, runner) if runner else None
    named = partial(_named, model, target, lora)
    return TargetHeads(target, matrices, make_runner, dtype, states=states, named=named)


def _named(model: str | PreTrainedModel, target: RunnerSpec, lora: str | None) -> tuple[object, ...] | None:
    """Return everything that a target's states depend on; None if it is not all in files."""
    if not isinstance(model, str):
        return None
    found, paths = resolve(model), weight_files(model)
    paths += [found / CONFIG] if found.is_dir() else []
    paths += [] if lora is None else sorted(user_path(lora).iterdir())
    files = [(str(path), path.stat().st_mtime_ns, path.stat().st_size) for path in paths]
    return target.name, target.kernels, target.dtype, build_fingerprint(), files


def converted(folder: Path, target: TargetShape, matrices: Matrices) -> tuple[HeadArtefact, bool]:
    """Convert a head in a published layout, and tell whether it identifies its target.

    A head without an LM head gets the target's. If the head has an embedding that equals the target's, that identifies
    the target, and the copy is dropped. Raises BadHead if it can't be read.
    """
    artefact, ids_W = read(folder, target), witness_ids(target.vocab_size)
    tensors, witness_WH = dict(artefact.tensors), matrices.witnesses(target.vocab_size)
    proved = EMBEDDING in tensors and same_rows(tensors[EMBEDDING][ids_W], witness_WH)
    if proved:
        del tensors[EMBEDDING]
    if LM_HEAD not in tensors and artefact.method in NEED_LM_HEAD:
        tensors[LM_HEAD] = rows_of(matrices.lm_head, draft_ids(tensors["d2t"]))
    return replace(artefact, tensors=tensors, witness_WH=witness_WH), proved


def opened_artefact(artefact: HeadArtefact, embedding: Operand) -> OpenHead:
    """A head in memory, for a target of which only the embedding ``[V, H]`` is available; float32 on a CPU."""
    dtype = torch.float32
    return OpenHead(
        artefact, embedding, partial(_head_runner, dtype=dtype, device=torch.device("cpu"), budget=None), dtype
    )


@dataclass(frozen=True, slots=True)
class Matrices:
    """A target's embedding and LM head, ``[V, H]``; with tied weights they are the same."""

    embedding: Operand
    lm_head: Operand

    def witnesses(self, vocab_size: int) -> Tensor:
        """Return the embedding rows of `witness_ids`, without reading others."""
        return rows_of(self.embedding, witness_ids(vocab_size))


def matrices_of(model: str | PreTrainedModel) -> Matrices:
    """Return the matrices from the target's files, or from the loaded model. Raises ParlayError if they can't be
    read."""
    if not isinstance(model, str):
        return Matrices(model.get_input_embeddings().weight.detach(), model.get_output_embeddings().weight.detach())
    found = resolve(model)
    weights = load_weights(found, read_config(found))
    return Matrices(weights[_EMBEDDING], weights.get(_LM_HEAD, weights[_EMBEDDING]))


def _head_runner(
    config: DecoderConfig,
    weights: Mapping[str, Operand],
    *,
    dtype: torch.dtype,
    device: torch.device,
    budget: Budget | None,
) -> NativeRunner:
    """Make a native decoder of a head's layers, whose cache joins ``budget``."""
    operands = dict(weights)
    if device.type == "cpu":
        matrices = {name: each for name, each in operands.items() if len(each.shape) == 2 and name != _EMBEDDING}
        operands |= {name: _in_few_bits(name, each) for name, each in matrices.items()}
    return NativeRunner(
        config,
        operands,
        dtype=dtype,
        device=device,
        max_tokens_cached=4 * config.max_context,
        budget=budget,
        name="head",
    )


def _in_few_bits(name: str, weight: Operand) -> Operand:
    """Quantize a weight for the CPU; see `in_mlp`.

    Quantized weights stay as they are, except for MLPs' weights that earlier formats saved in eight bits.
    """
    if isinstance(weight, StoredTensor) and not (in_mlp(name) and weight.format is Format.Q8_0):
        return weight
    weight_OI = as_tensor(weight, torch.float32)
    if not fits_blocks(weight_OI):
        return Int8Weight(weight_OI)
    return in_q4_1(weight_OI) if in_mlp(name) else in_q8_0(weight_OI)


def _rows_of_lm_head(embedding: Operand, tokens: Sequence[int]) -> Tensor:
    weight = _in_few_bits(_LM_HEAD, chosen_rows(embedding, torch.tensor(list(tokens))))
    assert isinstance(weight, StoredTensor), "others have no rows in blocks"
    return packable(weight)


class TargetHeads:
    """Finds heads for one target. ``matrices`` is called when the first head is opened."""

    def __init__(
        self,
        target: RunnerSpec,
        matrices: Callable[[], Matrices],
        make_runner: MakeRunner,
        dtype: torch.dtype,
        *,
        states: StatesOf | None,
        named: Callable[[], tuple[object, ...] | None],
    ) -> None:
        """``named`` returns everything that the target's states depend on, by which proofs are remembered; None: they
        are not."""
        self._named = cache(named)
        self._target, self._matrices = target, (read := cache(matrices))
        self._make_runner, self._dtype, self._states = make_runner, dtype, states
        self._warned: set[Path] = set()
        self._opened: dict[Path, tuple[list[tuple[str, int, int]], OpenHead]] = {}
        self._witnesses = cache(lambda: read().witnesses(target.vocab_size))

    def __call__(self, method: str, name: str) -> OpenHead | None:
        """Open a head. ``name`` is a folder, a name or domain in the store, or a repository on the Hugging Face Hub.

        Folders and repositories may use a published layout. Without a name, open the target's general head from the
        store or the package; None if there is none.
        """
        if name and (user_path(name) / CONFIG).is_file():
            return self._open(user_path(name))
        found = store.candidates(method, name)
        fitting = [each for each in found if self.fits(each)]
        if fitting:
            return self._open(fitting[0].folder)
        if name and found:
            return self._open(found[0].folder)  # raises the reason why it does not fit
        if _REPO.fullmatch(without_address(name)) and not user_path(name).exists():
            return self._open(fetched(name))
        if name:
            raise FieldError("head", f"={name}: no folder of one, and {_nothing_called(method, name)}")
        return None

    def domains(self) -> frozenset[str]:
        """Return the domains, other than general text, for which this machine has drafters of this target."""
        return frozenset(
            each.facts.origin.domain
            for each in store.drafters()
            if each.facts.origin.domain != GENERAL and self.fits(each)
        )

    def built_in_draft(self) -> str | None:
        """Return the package's draft model for the target, whatever file or format the target was loaded from."""
        named = BUILT_IN_DRAFTS.get(self._target.name)
        try:
            return named or next((draft for name, draft in BUILT_IN_DRAFTS.items() if self._is(name)), None)
        except ParlayError:
            return None  # its embedding can't be read, so it can't be identified

    def _is(self, name: str) -> bool:
        """Whether the target has the embedding of Parlay's model of this name."""
        size = self._target.vocab_size
        if name in BUILT_IN:
            same_size = read_config(resolve(name)).vocab_size == size
            return same_size and same_rows(self._witnesses(), matrices_of(name).witnesses(size))
        return any(self.fits(each) for each in store.drafters() if each.shipped and each.facts.origin.target == name)

    def fits(self, drafter: StoredDrafter) -> bool:
        """Whether a drafter was trained for this target."""
        layer = drafter.facts.layer
        if layer.vocab_size != self._target.vocab_size:
            return False  # most do not fit, which is seen quickly
        try:
            self._check(drafter.name, layer, read_witness(drafter.folder), drafter.facts.settings)
        except BadHead:
            return False
        return True

    def _open(self, folder: Path) -> OpenHead:
        """Open a folder's head, again only if its files changed; strategies with different settings share it."""
        files = sorted((path.name, path.stat().st_mtime_ns, path.stat().st_size) for path in folder.iterdir())
        known = self._opened.get(folder)
        if known is None or known[0] != files:
            while len(self._opened) >= _MOST_OPEN:
                del self._opened[next(iter(self._opened))]
            named = self._named()
            memory = None if named is None else ProofMemory.of(named, str(folder), files)
            known = self._opened[folder] = files, replace(self._read(folder), memory=memory)
        return known[1]

    def _read(self, folder: Path) -> OpenHead:
        if is_artefact(folder):
            artefact = load(folder)
            self._check(str(folder), artefact.layer, artefact.witness_WH, artefact.settings)
        else:
            artefact, proved = converted(folder, self._target, self._matrices())
            self._warn(folder, artefact, proved)
        embedding = artefact.operands.get(EMBEDDING, self._matrices().embedding)
        layer = artefact.layer
        if tuple(embedding.shape) != (layer.vocab_size, layer.hidden_size):
            raise BadHead(
                f"{folder} is a head for {layer.vocab_size} tokens of {layer.hidden_size} numbers, and its embedding "
                f"has {list(embedding.shape)}: choose a head that was trained for this model"
            )
        return OpenHead(artefact.without(EMBEDDING), embedding, self._make_runner, self._dtype, self._states)

    def _warn(self, folder: Path, artefact: HeadArtefact, proved: bool) -> None:
        if proved or folder in self._warned:
            return
        self._warned.add(folder)
        _log.warning(
            "%s is a head in the layout of %s%s. Nothing in it proves that it goes with this model: look at how many "
            "drafts are accepted",
            folder,
            artefact.settings[LAYOUT],
            f" for {artefact.origin.target}" if artefact.origin.target else "",
        )

    def _check(self, where: str, layer: DecoderConfig, witness_WH: Tensor, settings: Mapping[str, object]) -> None:
        check_target(where, layer, witness_WH, self._witnesses(), self._target.vocab_size)
        read, layers = settings.get("taps"), self._target.num_layers
        deepest = max((each for each in read if isinstance(each, int)), default=0) if isinstance(read, list) else 0
        if deepest > layers:  # a pruned model has the whole model's embedding
            raise BadHead(f"{where} reads layer {deepest}, and {self._target.name} has {layers}: choose another head")


def _nothing_called(method: str, name: str) -> str:
    known = [each.name for each in store.drafters() if each.facts.method == method]
    return f"no drafter for {method} has that name or domain: {nearest(name, known)}"
