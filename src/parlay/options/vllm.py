"""The effect of vLLM's arguments in Parlay, for `LLM()` and the command line. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class VllmArgument:
    """An argument of vLLM's `LLM`, or with dashes a flag of `vllm serve`, that has no counterpart in Parlay.

    ``only`` are the values that ask for what Parlay does anyway; any other value would change the text or the machine's
    work, and is refused. None: all values are accepted and have no effect. ``why`` gives the reason or a remedy; a
    ``switch`` is a flag without a value.
    """

    why: str = ""
    only: tuple[object, ...] | None = None
    switch: bool = False


def _idle(why: str, *names: str) -> dict[str, VllmArgument]:
    return dict.fromkeys(names, VllmArgument(why))


def _idle_switch(why: str, *names: str) -> dict[str, VllmArgument]:
    return dict.fromkeys(names, VllmArgument(why, switch=True))


def _only(values: tuple[object, ...], why: str, *names: str) -> dict[str, VllmArgument]:
    return dict.fromkeys(names, VllmArgument(why, values))


def _off(why: str, *names: str) -> dict[str, VllmArgument]:
    return dict.fromkeys(names, VllmArgument(why, (False,), switch=True))


FOUND = "it is found from the model"
LOGGED = "requests are logged from log level info on"
_CACHE = "pages of the cache are as long as the texts, and memory bounds them"
_DEVICE = "each process has one copy of a model, or a part of one"
_CONTEXT = "context_parallel_size (--context-parallel) spreads texts over processes, for prompts and for writing"
_CONFIG = "change a copy of config.json, and name its folder"
_TEXT = "remove it: LLM.embed and LLM.score (/v1/embeddings and /v1/score) work without it; no model classifies"
_READ = "models read text only"
_REVISION = "get that revision yourself, and name its folder"
_CODE = "code that comes with a model is never run"

_METHODS = ("gguf", "awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors", "bitsandbytes", "mxfp4")
"""Quantisation methods of checkpoints, which config.json names."""

ARGUMENTS: Mapping[str, VllmArgument] = {
    **_idle(_CACHE, "gpu_memory_utilization", "kv_cache_memory_bytes", "num_gpu_blocks_override", "swap_space"),
    **_idle(_CACHE, "cpu_offload_gb", "block_size"),
    **_idle("", "compilation_config", "cudagraph_capture_sizes", "max_seq_len_to_capture", "attention_backend"),
    **_idle("", "attention_config", "kernel_config", "scheduling_policy", "max_num_partial_prefills"),
    **_idle("", "max_long_partial_prefills", "long_prefill_token_threshold", "distributed_executor_backend"),
    **_idle("", "max_parallel_loading_workers", "worker_cls", "worker_extension_cls", "limit_mm_per_prompt"),
    **_idle("", "structured_outputs_config", "guided_decoding_backend", "served_model_name"),
    **_idle("", "safetensors_load_strategy", "optimization_level"),
    **_idle(FOUND, "reasoning_parser"),
    **_idle("any number may be asked for", "max_logprobs"),
    **_idle("HF_HOME says where models are kept", "download_dir"),
    **_idle("the environment's HF_TOKEN is used", "hf_token"),
    **_idle_switch("", "async_scheduling", "disable_custom_all_reduce", "disable_async_output_proc"),
    **_idle_switch("", "disable_log_stats", "enable_sleep_mode"),
    **_idle_switch(LOGGED, "disable_log_requests"),
    **_idle_switch("prompts are always read in chunks", "enable_chunked_prefill"),
    **_idle_switch("texts that begin alike always share what is cached", "enable_prefix_caching"),
    **_idle_switch(_CODE, "trust_remote_code"),
    **_only((1,), _CONTEXT, "decode_context_parallel_size", "prefill_context_parallel_size"),
    **_only((1,), f"{_DEVICE}: start several", "data_parallel_size"),
    **_off(_DEVICE, "enable_expert_parallel"),
    **_only(
        (None, *_METHODS),
        "name a checkpoint in GGUF, AWQ, GPTQ or another form that is read, or quantize to int8",
        "quantization",
    ),
    **_off("kv_cache_dtype='q8_0' has a scale for each block", "calculate_kv_scales"),
    **_only(("auto", "safetensors", "gguf"), "weights come from *.safetensors or *.gguf", "load_format"),
    **_only(("auto", "hf"), "config.json is read", "config_format"),
    **_only(("auto", "hf"), "the model's own tokenizer is used, or the one that tokenizer names", "tokenizer_mode"),
    **_off("prompts may be token ids all the same", "skip_tokenizer_init"),
    **_only(("", None), _READ, "allowed_local_media_path"),
    **_only((None, {}), _READ, "mm_processor_kwargs"),
    **_only((None, "main"), _REVISION, "revision", "tokenizer_revision"),
    **_only((None,), _CODE, "code_revision"),
    **_only((None, {}), _CONFIG, "hf_overrides"),
    **_only((None,), "config.json stands in the model's folder", "hf_config_path"),
    **_only((None, {}), "requests and SamplingParams say it", "override_generation_config"),
    **_only(("auto", "generate", None), _TEXT, "task"),
    **_only(("auto", "generate"), _TEXT, "runner"),
    **_only(("auto", "none"), _TEXT, "convert"),
    **_idle_switch("adapters need no switch", "enable_lora"),
    **_idle("any number of adapters of any rank may be loaded", "max_loras", "max_lora_rank", "max_cpu_loras"),
    **_idle("adapters are in the type of the model", "lora_dtype"),
    **_off("prompts are texts or token ids", "enable_prompt_embeds"),
    **_only((None, [], ()), "give them to SamplingParams", "logits_processors"),
    **_only(("raw_logprobs",), "SamplingParams(logprobs_mode='processed') asks for them", "logprobs_mode"),
    **_off("windows are as the model's config says", "disable_sliding_window"),
    **_only((None, {}), "positions are as the model's config says", "rope_scaling"),
    **_only((None,), "positions are as the model's config says", "rope_theta"),
}
