"""How a model is loaded: the options that all commands and classes which load one share."""

from __future__ import annotations

from dataclasses import dataclass

from parlay.options.declare import Options, option
from parlay.types import FieldError

DTYPES = ("float32", "bfloat16", "float16", "float64")

RUNNERS = ("auto", "llama.cpp", "mlx")

KV_CACHE_DTYPES = ("auto", "float32", "bfloat16", "q8_0")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions(Options):
    """How a model is loaded. Raises UsageError for a value that is not allowed.

    ``dtype="auto"`` chooses the fastest type that this machine computes in; ``half`` and ``float`` are float16 and
    float32. ``device="auto"`` is cuda, else mps, else cpu. A loaded transformers model keeps its own: there, both must
    be ``auto``. ``quantize="int8"`` stores the target's weights in eight bits: nearly the same model, about twice as
    fast where memory is the limit. ``draft_quantize`` does the same for draft models that are not quantised yet; no
    exact text depends on it. ``threads`` is the number of threads that decode, one number for all models of the
    process; by default PARLAY_THREADS, or one per usable core. ``end_tokens`` replace the end tokens of the model's own
    files. ``kv_cache_dtype`` is the type of the compiled decoder's KV cache: ``q8_0`` takes about half of bfloat16's
    memory and reading time, and changes the model little. ``lora`` is the folder of an adapter that is merged into the
    target's weights. ``ngram_states`` is the most n-gram states that are kept for a model whose first layers are a
    lookup; None: 65,536. ``runner="llama.cpp"`` has llama.cpp run a GGUF file, through the package llama-cpp-python, on
    the devices that this package was built for; ``runner="mlx"`` has Apple's MLX run a folder, through the package
    mlx-lm. ``compile`` has torch.compile make one graph of each model that runs through transformers. ``enforce_eager``
    launches a GPU's operators one by one, without CUDA graphs.
    """

    runner: str = option(
        "auto",
        "backend: auto is Parlay's decoder, or transformers for models that it can't run; llama.cpp is for GGUF files, "
        "mlx for folders",
        choices=RUNNERS,
    )
    dtype: str = option("auto", "number type of weights and computation", choices=("auto", *DTYPES, "half", "float"))
    device: str = option("auto", "auto (cuda, else mps, else cpu), cpu, cuda or mps")
    quantize: str | None = option(
        None, "quantise the weights at load to 8 bits, half the size of bfloat16", choices=("int8",)
    )
    draft_quantize: str | None = option(
        None,
        "quantise the weights of draft models at load to 8 bits, unless they are quantised already",
        choices=("int8",),
    )
    kv_cache_dtype: str = option(
        "auto",
        "number type of the KV cache; auto: the model's; q8_0: 8 bits, as in llama.cpp, for long texts",
        choices=KV_CACHE_DTYPES,
    )
    threads: int | None = option(None, "CPU threads (default: one per usable core)", low=1, metavar="N")
    compile: bool = option(
        False, "use torch.compile for models that run through transformers; the first start takes a minute"
    )
    enforce_eager: bool = option(False, "do not use CUDA graphs")
    lora: str | None = option(None, "folder of a PEFT adapter to merge into the weights at load", metavar="FOLDER")
    ngram_states: int | None = option(
        None,
        "most n-gram states kept in memory, for models whose first layers are a lookup table (default: 65536)",
        low=1,
        metavar="N",
    )
    end_tokens: str | None = option(
        None, "end-of-text tokens, as ids or texts joined by commas (default: the model's)", metavar="TOKENS"
    )

    def __post_init__(self) -> None:
        super(LoadOptions, self).__post_init__()
        if self.compile and self.enforce_eager:
            raise FieldError("compile", "can't be used with enforce_eager: remove one of them", "enforce_eager")
