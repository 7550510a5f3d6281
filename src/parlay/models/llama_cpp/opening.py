"""Opens a GGUF file in llama.cpp, as `LoadOptions` ask, and says in one line what llama.cpp can't do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from parlay.cache import Budget
from parlay.cache.budget import format_bytes
from parlay.models.llama_cpp.context import ContextOptions, LlamaContext, package
from parlay.models.llama_cpp.runner import LlamaCppRunner
from parlay.options import LoadOptions, UsageError
from parlay.system import threads
from parlay.types import ParlayError

_LEAST_CELLS = 512
_USUAL_CELLS = 16_384
"""llama.cpp takes the memory of all cells at once: so many, or one full context if that is more."""
_SHARE = 0.75
"""Share of a fixed budget that is free which a model's cells may take: a draft model may come after it."""


def open_llama_cpp(
    found: Path,
    options: LoadOptions,
    free: Callable[[], float],
    *,
    name: str,
    cache_tokens: int | None = None,
    budget: Budget | None = None,
    longest: int | None = None,
) -> LlamaCppRunner:
    """A runner over llama.cpp for the GGUF file ``found``.

    ``free`` tells the bytes that its cells may take where neither ``cache_tokens`` nor a fixed ``budget`` says it.
    Raises UsageError for options that llama.cpp can't honour, ParlayError without its package, UnsupportedModel for a
    file that it does not run, ValueError for a budget that holds next to nothing.
    """
    _refuse(found, options, name)
    offload = _offload(options.device)

    def cells(cell_bytes: int, context: int) -> int:
        if cache_tokens is not None:
            return cache_tokens
        if budget is not None and budget.fixed:
            room = int(budget.free * _SHARE) // cell_bytes
            if room < _LEAST_CELLS:
                least = format_bytes(int(_LEAST_CELLS * cell_bytes / _SHARE) + 1)
                raise ParlayError(f"memory is too small for {name} in llama.cpp: give it at least {least}")
            return min(room, max(_USUAL_CELLS, 4 * context))
        most = max(longest or context, _USUAL_CELLS)
        return max(_LEAST_CELLS, min(most, int(free() / cell_bytes)))

    wanted = ContextOptions(cells=cells, threads=threads.count(), offload=offload, cached=options.kv_cache_dtype)
    runner = LlamaCppRunner(LlamaContext(found, wanted), name=name, longest=longest, capacity=cache_tokens)
    if budget is not None:
        budget.join(runner, runner.held, runner.held)
    return runner


def _refuse(found: Path, options: LoadOptions, name: str) -> None:
    if not found.is_file():
        raise UsageError(f"runner llama.cpp: {name} is a folder: name a GGUF file, which `parlay quantize` makes of it")
    asked = {
        "dtype": ("auto", options.dtype, "weights stay as the file has them"),
        "quantize": (
            None,
            options.quantize,
            "weights stay as the file has them; `parlay quantize` makes a smaller file",
        ),
        "lora": (None, options.lora, "it merges no adapters in PEFT's layout"),
        "compile": (False, options.compile, "torch computes nothing there"),
    }
    for option, (usual, value, why) in asked.items():
        if value != usual:
            raise UsageError(f"runner llama.cpp: {option} {value} can't be had there: {why}; leave it out")


def _offload(device: str) -> bool:
    """Whether layers run on the devices that llama.cpp was built for. Raises UsageError where it has none."""
    able = bool(package().llama_supports_gpu_offload())
    if device in ("auto", "cpu"):
        return able and device == "auto"
    if not able:
        raise UsageError(
            f"runner llama.cpp: device {device}: this build of llama-cpp-python computes on CPUs alone: leave it out, "
            "or build the package for your device (CMAKE_ARGS=-DGGML_CUDA=on, -DGGML_VULKAN=on or -DGGML_METAL=on)"
        )
    return True
