"""The runners: models together with their caches. `load` uses the native decoder if it runs the model, else the adapter
for transformers."""

from __future__ import annotations

import hashlib
import logging
import math
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from parlay.cache import Budget
from parlay.cache.pages import CODED, CODES
from parlay.models.choosing import CacheRefused, CompileRefused, MakeForward, choose_forward
from parlay.models.compiled.limits import runs_here
from parlay.models.compiled.streaming import WeightRoom
from parlay.models.compiled.weights import Packed, nobody
from parlay.models.config import DecoderConfig, UnsupportedModel, read_json
from parlay.models.fetch.origin import weight_files
from parlay.models.fetch.resolving import resolve
from parlay.models.forward import cache_room
from parlay.models.layer_lookup import MOST_STATES, LookupPlan
from parlay.models.loading import load_weights, read_config
from parlay.models.lookup import NgramTable
from parlay.models.lora import merged, read_adapter, refuse_masks
from parlay.models.native import NativeRunner
from parlay.models.reserving import TokenRoom
from parlay.models.state_table import StateTable
from parlay.models.torch_ops.kernels import choose_dtype
from parlay.models.weights.fused import QuantizeRefused, stored_as
from parlay.models.weights.shapes import Weight
from parlay.models.weights.stored import StoredTensor
from parlay.options import LoadOptions, user_path
from parlay.system import machine, threads
from parlay.types import FieldError, ParlayError, Runner, kind_and_message

if TYPE_CHECKING:  # importing transformers' models takes seconds, and few models need it
    from transformers import PreTrainedModel

__all__ = ["NativeRunner", "UnsupportedModel", "load"]

_log = logging.getLogger(__name__)
_DTYPES = {
    "auto": None,
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
    "float": torch.float32,
}
_CACHE_SHARE = 0.25
"""Share of the free memory for the cache, if its size is not given."""
_MOST_CONTEXTS = 16
"""Most full contexts that the cache holds in that case."""
_SURELY_FITS = 0.5
"""Weights below this share of the free memory, as stored, are packed without an exact count first."""
_END = 1 << 20  # bytes at both ends of a weight file by which it is identified
USUAL = LoadOptions()
BLOCK_DIFFUSION = "diffusion_gemma"
"""The model type that transformers runs with canvases."""


def load(
    model: str | PreTrainedModel,
    options: LoadOptions = USUAL,
    *,
    cache_tokens: int | None = None,
    budget: Budget | None = None,
    packed: Packed = nobody,
    make_forward: MakeForward = choose_forward,
    longest: int | None = None,
) -> Runner:
    """Open a runner for a built-in name, a local folder or GGUF file, a Hugging Face Hub id, or a loaded transformers
    model.

    ``cache_tokens`` is how many tokens all sequences may cache; the default depends on the free memory. Runners with
    the same ``budget`` share its memory, and the target has precedence. If the weights don't fit into their part of the
    budget or into the free memory, the compiled decoder reads some layers from disk in every forward. A model that runs
    through transformers manages its own memory. ``packed`` is called with the number of packed matrices and of all.
    ``longest`` is the most tokens of a text; if it exceeds the original context of a model with longrope, all texts are
    computed with the factors for long ones. Raises ParlayError (UnsupportedModel, BadCheckpoint) for a model that can't
    be found or run, and ValueError for a missing device and for options that a loaded model can't honour.
    """
    threads.settle(options.threads)
    if not isinstance(model, str):
        return _adapt_loaded(model, options, cache_tokens, budget)
    if options.runner != "auto":
        return _in_other_program(model, options, cache_tokens, budget, longest)
    asked_dtype, device, found = _DTYPES[options.dtype], chosen_device(options.device), resolve(model)
    try:
        config = read_config(found, longest or 0)
    except UnsupportedModel as reason:
        if found.is_file():
            raise
        _log.warning("%s runs through transformers, which is slower than Parlay's decoder: %s", model, reason)
        loaded = _transformers_model(found, asked_dtype, device)
        return _adapt(loaded, cache_tokens, budget, options, model)
    if options.compile:
        raise CompileRefused(model)
    weights = _weights_of(found, config, options)
    _check_states(model, config, options)
    table = StateTable.open(found, config, weights)
    dtype = asked_dtype or (_fastest(model, config, weights, device) if table is None else table.dtype)
    _check_table(table, dtype)
    room = _weight_room(model, found, weights, replace(options, device=device.type), budget)
    if make_forward is choose_forward:
        make_forward = partial(choose_forward, room=room, graphs=not options.enforce_eager)
    return NativeRunner(
        config,
        weights,
        dtype=dtype,
        device=device,
        max_tokens_cached=cache_tokens or _default_cache_tokens(config, dtype, device, options.kv_cache_dtype),
        budget=budget,
        quantize="int8" if options.quantize else None,
        name=model,
        packed=packed,
        kv_cache_dtype=options.kv_cache_dtype,
        make_forward=make_forward,
        ngrams=None if config.ngrams is None else NgramTable.open(found, config),
        lookup=LookupPlan(options.ngram_states or MOST_STATES, table),
    )


def _check_table(table: StateTable | None, dtype: torch.dtype) -> None:
    """Raises UnsupportedModel if the table's states have another type than the model."""
    if table is not None and table.dtype != dtype:
        raise UnsupportedModel(
            f"{table.path} has states in {_short(table.dtype)}, and the model runs in {_short(dtype)}: leave dtype at "
            "auto, or make the table again with parlay train ngram-states"
        )


def _in_other_program(
    model: str, options: LoadOptions, cache_tokens: int | None, budget: Budget | None, longest: int | None
) -> Runner:
    """Open a runner over llama.cpp or MLX, whichever the options name."""
    through = "MLX" if options.runner == "mlx" else options.runner
    if budget is not None and budget.weights is not None:
        raise UnsupportedModel(
            f"memory weights={budget.weights}: Parlay's decoder reads layers from disk, not {through}: remove it",
            "memory",
        )
    room = TokenRoom(
        name=model,
        through=through,
        free=partial(_free_share, torch.device("cpu")),
        cache_tokens=cache_tokens,
        budget=budget,
        longest=longest,
    )
    if options.runner == "mlx":
        from parlay.models.mlx.opening import open_mlx

        return open_mlx(resolve(model), options, room)
    from parlay.models.llama_cpp.opening import open_llama_cpp

    return open_llama_cpp(resolve(model), options, room)


def _weight_room(
    model: str, found: Path, weights: Mapping[str, Weight], options: LoadOptions, budget: Budget | None
) -> WeightRoom | None:
    """How much memory the weights may take, if the user set a limit or memory may be short; None: they fit.

    Draft models are always loaded completely. On a CUDA device only a limit set by the user counts. Raises
    UnsupportedModel on a device that can't stream layers.
    """
    limit = None if budget is None else budget.weights
    if limit is not None and options.device not in ("cpu", "cuda"):
        raise UnsupportedModel(
            f"memory weights={limit}: layers are streamed for CPUs and CUDA devices, not {options.device}: remove it",
            "memory",
        )
    identity = partial(_identity, found, options)
    if limit is not None:
        return WeightRoom(limit, True, model, identity)
    free = free_bytes(torch.device("cpu"))
    stored = sum(each.data.nbytes if isinstance(each, StoredTensor) else each.nbytes for each in weights.values())
    if options.device != "cpu" or stored < _SURELY_FITS * free or (budget is not None and not budget.awaits_target):
        return None
    return WeightRoom(int(free * (1 - _CACHE_SHARE)), False, model, identity)


def _identity(found: Path, options: LoadOptions) -> str:
    """A hash that identifies weights: modification times, sizes, and the bytes at both ends of their files."""
    adapter = [] if options.lora is None else sorted(user_path(options.lora).glob("*.*"))
    digest = hashlib.sha256(str(options.quantize).encode())
    for path in (*weight_files(str(found)), *adapter):
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            digest.update(f"{size} {os.fstat(file.fileno()).st_mtime_ns} ".encode())
            for start in (0, max(0, size - _END)):
                file.seek(start)
                digest.update(file.read(_END))
    return digest.hexdigest()


def settled(model: str, options: LoadOptions) -> LoadOptions:
    """The options with ``auto`` replaced by the actual dtype and device. Raises what `load` raises, and
    UnsupportedModel for a model that the native decoder does not run."""
    device, found = chosen_device(options.device), resolve(model)
    dtype, config = _DTYPES[options.dtype], read_config(found)
    _check_states(model, config, options)
    dtype = dtype or _fastest(model, config, load_weights(found, config), device)
    return replace(options, dtype=_short(dtype), device=str(device))


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_states(name: str, config: DecoderConfig, options: LoadOptions) -> None:
    """Raises UnsupportedModel if a number of cached states is set for a model that has none."""
    if options.ngram_states is not None and config.ngram_layers is None:
        raise UnsupportedModel(
            f"ngram_states can't be honoured for {name}: no layers of it are looked up; remove it", "ngram_states"
        )


def _weights_of(found: Path, config: DecoderConfig, options: LoadOptions) -> Mapping[str, Weight]:
    """The checkpoint's weights, with the options' adapter merged in."""
    weights = load_weights(found, config)
    if options.lora is None:
        return weights
    folder = user_path(options.lora)
    refuse_masks(folder)
    return merged(weights, read_adapter(folder, config, options.lora, merging=True))


def round_weights(runner: NativeRunner, model: str, options: LoadOptions, bits: int) -> None:
    """Read a runner's weights again, and quantize them to ``bits`` bits for drafts.

    Raises ValueError if the runner's own weights have hardly more bits, and BadCheckpoint if they can't be read any
    more.
    """
    found = resolve(model)
    runner.round_weights(bits, _weights_of(found, read_config(found), options))


def _adapt_loaded(
    model: PreTrainedModel, options: LoadOptions, cache_tokens: int | None, budget: Budget | None
) -> Runner:
    if options.runner != "auto":
        raise FieldError("runner", f"={options.runner!r}: a loaded model runs through transformers; leave it at 'auto'")
    if (options.dtype, options.device) != ("auto", "auto"):
        raise FieldError(
            "dtype",
            f"={options.dtype!r}, device={options.device!r}: a loaded model keeps its own; leave both at 'auto'",
            "device",
        )
    return _adapt(model, cache_tokens, budget, options)


def _adapt(
    model: PreTrainedModel, cache_tokens: int | None, budget: Budget | None, options: LoadOptions, name: str = ""
) -> Runner:
    from parlay.models.transformers_adapter.block_diffusion import BlockDiffusionRunner
    from parlay.models.transformers_adapter.compiled_runner import CompiledRunner, NotCompiled
    from parlay.models.transformers_adapter.encoder_decoder import EncoderDecoderRunner
    from parlay.models.transformers_adapter.runner import AdapterRunner

    if budget is not None and ((budget.fixed and cache_tokens is None) or budget.weights is not None):
        raise UnsupportedModel(
            f"memory can't be limited for {name or 'this model'}, which runs through transformers: remove memory",
            "memory",
        )
    if options.kv_cache_dtype != "auto":
        raise CacheRefused(options.kv_cache_dtype, f"{name or 'this model'} runs through transformers, with its cache")
    if options.ngram_states is not None:
        raise UnsupportedModel(
            f"ngram_states can't be honoured for {name or 'this model'}, which runs through transformers",
            "ngram_states",
        )
    if options.lora is not None:
        raise UnsupportedModel(
            f"lora can't be merged into {name or 'this model'}, which runs through transformers: merge it with PEFT",
            "lora",
        )
    if options.quantize is not None:
        raise QuantizeRefused(
            f"quantize can't be honoured for {name or 'this model'}, which runs through transformers: "
            "load it quantised there, and remove quantize",
            "quantize",
        )
    if options.compile:
        try:
            return CompiledRunner(model, max_tokens_cached=cache_tokens, name=name, owned=bool(name))
        except NotCompiled as reason:
            _log.warning("%s", reason)
    made = EncoderDecoderRunner if model.config.is_encoder_decoder else AdapterRunner
    if model.config.model_type == BLOCK_DIFFUSION:
        return BlockDiffusionRunner(model, max_tokens_cached=cache_tokens, name=name)
    return made(model, max_tokens_cached=cache_tokens, name=name)


def _fastest(name: str, config: DecoderConfig, weights: Mapping[str, Weight], device: torch.device) -> torch.dtype:
    """The dtype to compute in. Quantized weights need no timing, which takes half a second, as they are multiplied as
    they are."""
    if device.type == "cpu" and stored_as(weights) and runs_here(config, torch.bfloat16):
        why = "weights stay in the file's blocks, and keys and values take half of float32's memory"
        dtype = torch.bfloat16
    else:
        dtype, why = choose_dtype(config, device)
    _log.info("%s runs in %s: %s", name, dtype, why)
    return dtype


def default_device() -> torch.device:
    """The device that ``auto`` means here."""
    return torch.device("cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu")


def chosen_device(name: str) -> torch.device:
    """The device of this name, or the one that ``auto`` means. Raises ValueError for a device that does not exist
    here."""
    if name == "auto":
        return default_device()
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError):
        needed = {"cuda": "a build of torch with CUDA and its GPU", "mps": "a Mac with an Apple GPU"}
        what = needed.get(name.partition(":")[0], "a kind that torch runs")
        raise FieldError("device", f"{name!r} can't be used here, it needs {what}: use 'auto' or 'cpu'") from None
    return device


def _transformers_model(directory: Path, dtype: torch.dtype | None, device: torch.device) -> PreTrainedModel:
    """Load the checkpoint with transformers. Without a ``dtype`` it is float32 on a CPU, and the checkpoint's own
    elsewhere."""
    import transformers

    raw = read_json(directory / "config.json")
    kind: type[transformers.AutoModelForCausalLM | transformers.AutoModelForSeq2SeqLM | transformers.PreTrainedModel]
    wanted = dtype or (torch.float32 if device.type == "cpu" else "auto")
    try:
        if raw.get("model_type") == BLOCK_DIFFUSION:
            kind = transformers.DiffusionGemmaForBlockDiffusion
        elif raw.get("is_encoder_decoder") is True:
            kind = transformers.AutoModelForSeq2SeqLM
        else:
            kind = transformers.AutoModelForCausalLM
        model = kind.from_pretrained(
            directory, dtype=wanted, local_files_only=True, trust_remote_code=False, use_safetensors=True
        )
    except Exception as error:  # a library may raise anything for invalid files
        reason = kind_and_message(error)
        if "ignore_mismatched_sizes" in reason:
            reason = "its tensors have other shapes than its config.json describes"
        raise ParlayError(f"transformers can't load {directory}: {reason:.300}") from error
    return model.to(device)


def _default_cache_tokens(config: DecoderConfig, dtype: torch.dtype, device: torch.device, cached: str) -> int:
    """How many tokens fit into `_CACHE_SHARE` of the free memory, at least one full context and at most
    `_MOST_CONTEXTS`."""
    cell_bytes: float = (
        max(dtype.itemsize, 4) if device.type == "cpu" else dtype.itemsize
    )  # exact attention computes in float32
    if cached == "q8_0":
        cell_bytes = CODED / CODES
    room, token_bytes = cache_room(config, cell_bytes), 2 * config.num_layers * config.num_kv_heads * config.head_dim
    least, most = room.bytes_for(config.max_context), room.bytes_for(_MOST_CONTEXTS * config.max_context)
    affordable = max(least, min(_free_share(device), most))
    return math.ceil(affordable / (token_bytes * cell_bytes))


def _free_share(device: torch.device) -> float:
    """Free bytes that the cache may take if its size is not given."""
    return free_bytes(device) * _CACHE_SHARE


def cache_bytes_for(processes: int) -> int:
    """Bytes of host memory for each cache, if ``processes`` processes share the machine."""
    return int(free_bytes(torch.device("cpu")) * _CACHE_SHARE) // processes


def free_bytes(device: torch.device, cgroups: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")) -> int:
    """Free bytes on the device; on a host within the limit of our control group."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return machine.available_bytes(cgroups, proc)


def anonymous_bytes(process: int, proc: Path = Path("/proc")) -> int:
    """Bytes of a process's anonymous memory, which no file backs; 0 if the system does not tell."""
    try:
        return machine.number_in(proc / str(process) / "status", "RssAnon:") * 1024
    except (OSError, ValueError):
        return 0
