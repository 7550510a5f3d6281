"""Opens a GGUF file in llama.cpp with `LoadOptions`, and reports options that llama.cpp can't honour in one line."""

from __future__ import annotations

from pathlib import Path

from parlay.models.llama_cpp.context import ContextOptions, LlamaContext, package
from parlay.models.llama_cpp.runner import LlamaCppRunner
from parlay.models.reserving import TokenRoom, refuse_options
from parlay.options import LoadOptions
from parlay.system import threads
from parlay.types import FieldError

_REFUSED = {
    "dtype": "weights stay as the file has them",
    "quantize": "weights stay as the file has them; `parlay quantize` makes a smaller file",
    "lora": "it merges no adapters in PEFT's layout",
    "compile": "torch computes nothing there",
    "enforce_eager": "GGML_CUDA_DISABLE_GRAPHS=1 in the environment turns its CUDA graphs off",
    "ngram_states": "it looks no layers up",
}


def open_llama_cpp(found: Path, options: LoadOptions, room: TokenRoom) -> LlamaCppRunner:
    """Open a llama.cpp runner for the GGUF file ``found``.

    Raises UsageError for options that llama.cpp can't honour, ParlayError without its package, UnsupportedModel for a
    file that it does not run, and ValueError for a memory budget that is too small.
    """
    if not found.is_file():
        raise FieldError(
            "runner", f"llama.cpp: {room.name} is a folder: name a GGUF file, which `parlay quantize` makes of it"
        )
    refuse_options("llama.cpp", options, _REFUSED)
    wanted = ContextOptions(
        cells=room.tokens,
        threads=threads.count(),
        offload=_offload(options.device),
        cached=options.kv_cache_dtype,
    )
    context = LlamaContext(found, wanted)
    runner = LlamaCppRunner(context, name=room.name, longest=room.longest, capacity=room.cache_tokens)
    if room.budget is not None:
        room.budget.join(runner, runner.nbytes, runner.nbytes)
    return runner


def _offload(device: str) -> bool:
    """Whether layers run on the devices that llama.cpp was built for. Raises UsageError if it has none."""
    able = bool(package().llama_supports_gpu_offload())
    if device in ("auto", "cpu"):
        return able and device == "auto"
    if not able:
        raise FieldError(
            "runner",
            f"llama.cpp: device {device}: this build of llama-cpp-python computes on CPUs alone: remove it, "
            "or build the package for your device (CMAKE_ARGS=-DGGML_CUDA=on, -DGGML_VULKAN=on or -DGGML_METAL=on)",
        )
    return True
