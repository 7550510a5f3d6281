"""Arguments of vLLM's `LLM` that Parlay's has under another name, has no need of, or can't honour."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from parlay.options import nearest
from parlay.strategies.catalogue import catalogue
from parlay.strategies.spelling import StrategySpec

_NO_GPU_MEMORY = "memory=... bounds the caches"
_WITHOUT_EFFECT: Mapping[str, str] = {
    "gpu_memory_utilization": _NO_GPU_MEMORY,
    "kv_cache_memory_bytes": _NO_GPU_MEMORY,
    "num_gpu_blocks_override": _NO_GPU_MEMORY,
    "swap_space": _NO_GPU_MEMORY,
    "cpu_offload_gb": _NO_GPU_MEMORY,
    "block_size": "",
    "enforce_eager": "",
    "compilation_config": "",
    "cudagraph_capture_sizes": "",
    "max_seq_len_to_capture": "",
    "attention_backend": "",
    "attention_config": "",
    "kernel_config": "",
    "disable_custom_all_reduce": "",
    "disable_async_output_proc": "",
    "async_scheduling": "",
    "scheduling_policy": "",
    "enable_chunked_prefill": "prompts are always read in chunks",
    "enable_prefix_caching": "texts that begin alike always share what is cached",
    "max_num_partial_prefills": "",
    "max_long_partial_prefills": "",
    "long_prefill_token_threshold": "",
    "distributed_executor_backend": "",
    "max_parallel_loading_workers": "",
    "worker_cls": "",
    "worker_extension_cls": "",
    "disable_log_stats": "",
    "disable_log_requests": "",
    "enable_sleep_mode": "",
    "limit_mm_per_prompt": "",
    "max_logprobs": "any number may be asked for",
    "structured_outputs_config": "",
    "guided_decoding_backend": "",
    "reasoning_parser": "",
    "served_model_name": "",
    "download_dir": "HF_HOME says where models are kept",
    "hf_token": "the environment's HF_TOKEN is used",
    "safetensors_load_strategy": "",
    "optimization_level": "",
    "trust_remote_code": "code that comes with a model is never run",
}
"""Text and results are the same without them. Some have a counterpart, or a reason."""

_ONLY: Mapping[str, tuple[tuple[object, ...], str]] = {
    "tensor_parallel_size": ((1,), "a model runs on one device"),
    "pipeline_parallel_size": ((1,), "a model runs on one device"),
    "data_parallel_size": ((1,), "start several processes"),
    "decode_context_parallel_size": ((1,), "a model runs on one device"),
    "prefill_context_parallel_size": ((1,), "a model runs on one device"),
    "enable_expert_parallel": ((False,), "a model runs on one device"),
    "quantization": ((None, "gguf"), "name a checkpoint in GGUF, or quantize='int8'"),
    "kv_cache_dtype": (("auto",), "keys and values keep the model's own type"),
    "calculate_kv_scales": ((False,), "keys and values keep the model's own type"),
    "load_format": (("auto", "safetensors", "gguf"), "weights come from *.safetensors or *.gguf"),
    "config_format": (("auto", "hf"), "config.json is read"),
    "tokenizer_mode": (("auto", "hf"), "the model's own tokenizer is used, or tokenizer=..."),
    "skip_tokenizer_init": ((False,), "prompts may be token ids all the same"),
    "allowed_local_media_path": (("", None), "models read text alone"),
    "revision": ((None, "main"), "get that revision yourself, and name its folder"),
    "tokenizer_revision": ((None, "main"), "get that revision yourself, and name its folder"),
    "code_revision": ((None,), "code that comes with a model is never run"),
    "hf_overrides": ((None, {}), "change a copy of config.json, and name its folder"),
    "hf_config_path": ((None,), "config.json stands in the model's folder"),
    "override_generation_config": ((None, {}), "say it in SamplingParams"),
    "task": (("auto", "generate", None), "models write text here, and nothing else"),
    "runner": (("auto", "generate"), "models write text here, and nothing else"),
    "convert": (("auto", "none"), "models write text here, and nothing else"),
    "enable_lora": ((False,), "merge the adapter into its base model"),
    "enable_prompt_embeds": ((False,), "prompts are texts or token ids"),
    "mm_processor_kwargs": ((None, {}), "models read text alone"),
    "logits_processors": ((None, [], ()), "give them to SamplingParams"),
    "logprobs_mode": (("raw_logprobs",), "SamplingParams(logprobs_mode='processed')"),
    "disable_sliding_window": ((False,), "windows are as the model's config says"),
    "rope_scaling": ((None, {}), "positions are as the model's config says"),
    "rope_theta": ((None,), "positions are as the model's config says"),
}
"""Values that ask for what is so anyway. Any other would change the text, or what the machine does; with a reason."""

_SPECULATIVE = {
    "method": "",
    "model": "",
    "num_speculative_tokens": "k",
    "prompt_lookup_max": "max_ngram",
    "prompt_lookup_min": "min_ngram",
    "suffix_decoding_max_tree_depth": "depth",
    "suffix_decoding_max_spec_factor": "factor",
    "suffix_decoding_min_token_prob": "min_prob",
    "draft_tensor_parallel_size": "",
    "disable_padded_drafter_batch": "",
}
"""Fields of ``speculative_config``, and what the strategy calls them."""


def accept(arguments: Mapping[str, object], known: Mapping[str, object]) -> None:
    """Warns of arguments without effect, in one line. ``known`` are those that `LLM` itself has.

    Raises ValueError for a value that can't be honoured, TypeError for an argument that vLLM hasn't either.
    """
    for name, value in arguments.items():
        if name in _ONLY:
            allowed, reason = _ONLY[name]
            if value not in allowed:
                raise ValueError(f"LLM() can't honour {name}={value!r}: {reason}")
        elif name not in _WITHOUT_EFFECT:
            raise TypeError(f"LLM() has no argument {name}: {nearest(name, {*known, *_ONLY, *_WITHOUT_EFFECT})}")
    idle = [name for name in arguments if name in _WITHOUT_EFFECT]
    if idle:
        hints = dict.fromkeys(_WITHOUT_EFFECT[name] for name in idle)
        said = "; ".join(hint for hint in hints if hint)
        warnings.warn(f"without effect in Parlay: {', '.join(idle)}{f' ({said})' if said else ''}", stacklevel=3)


def one_strategy(strategy: str | StrategySpec | None, config: Mapping[str, Any] | None) -> str | StrategySpec | None:
    """``strategy``, or what ``speculative_config`` stands for. Raises ValueError where both are given."""
    if config is None:
        return strategy
    if strategy is not None:
        raise ValueError("speculative_config and strategy both say how to draft: leave out one of them")
    return strategy_of(config)


def strategy_of(config: Mapping[str, Any]) -> str:
    """The strategy that vLLM's ``speculative_config`` asks for. Raises ValueError for what there is none for."""
    unknown = [name for name in config if name not in _SPECULATIVE]
    if unknown:
        raise ValueError(f"speculative_config: {unknown[0]} can't be honoured: name a strategy instead")
    method = config.get("method") or ("draft_model" if config.get("model") else "ngram")
    drafters = {name: entry for entry in catalogue().values() for name in entry.vllm}
    if method not in drafters:
        raise ValueError(f"speculative_config: no strategy for method {method}: {nearest(method, drafters)}")
    entry = drafters[method]
    options = {_SPECULATIVE[name]: value for name, value in config.items() if _SPECULATIVE[name]}
    if config.get("model"):
        options |= {name: config["model"] for name in ("model", "head") if name in entry.parameters}
    return ":".join(filter(None, (entry.name, ",".join(f"{name}={value}" for name, value in options.items()))))
