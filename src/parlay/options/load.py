"""How a model is loaded: the options that all commands and classes which load one share."""

from __future__ import annotations

from dataclasses import dataclass

from parlay.options.declare import Options, UsageError, option

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
        "what runs the model: auto is Parlay's decoder, or transformers where it has to be; llama.cpp runs GGUF files "
        "through llama-cpp-python, mlx runs folders through mlx-lm",
        choices=RUNNERS,
    )
    dtype: str = option("auto", "number type of the weights", choices=("auto", *DTYPES, "half", "float"))
    device: str = option("auto", "auto, cpu, cuda or mps")
    quantize: str | None = option(None, "store the weights in eight bits, half the size of bfloat16", choices=("int8",))
    draft_quantize: str | None = option(
        None,
        "store the weights of draft models in eight bits, unless they are in few bits already; no exact text changes",
        choices=("int8",),
    )
    kv_cache_dtype: str = option(
        "auto",
        "type of cached keys and values: auto is the model's; q8_0 has eight bits in blocks of 32, for long texts",
        choices=KV_CACHE_DTYPES,
    )
    threads: int | None = option(
        None, "number of threads that decode (default: one per usable core)", low=1, metavar="N"
    )
    compile: bool = option(False, "compile models that run through transformers; the first start takes a minute")
    enforce_eager: bool = option(False, "launch a GPU's operators one by one, without CUDA graphs")
    lora: str | None = option(
        None, "folder of an adapter in PEFT's layout that is merged into the weights", metavar="FOLDER"
    )
    ngram_states: int | None = option(
        None,
        "n-grams whose states are kept, for models that look up their first layers (default: 65536)",
        low=1,
        metavar="N",
    )
    end_tokens: str | None = option(
        None, "tokens that end a text, in place of the model's own: ids or texts, with commas", metavar="TOKENS"
    )

    def __post_init__(self) -> None:
        super(LoadOptions, self).__post_init__()
        if self.compile and self.enforce_eager:
            raise UsageError("compile can't be used with enforce_eager: remove one of them")
