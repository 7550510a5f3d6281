"""Arguments of vLLM's `LLM` that Parlay's names differently, does not need, or can't honour."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from parlay.options import nearest
from parlay.options.vllm import ARGUMENTS
from parlay.strategies.catalogue import catalogue
from parlay.strategies.spelling import StrategySpec
from parlay.types import FieldError, check_kind

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
"""Fields of ``speculative_config``, and the strategy's name for each."""


def accept(arguments: Mapping[str, object], known: Sequence[str]) -> None:
    """Warn in one line about arguments without effect. ``known``: the arguments that `LLM` itself has.

    Raises ValueError for a value that can't be honoured, TypeError for an argument that vLLM does not have either.
    """
    idle: dict[str, str] = {}
    for name, value in arguments.items():
        meaning = ARGUMENTS.get(name)
        if meaning is None:
            listed_by = "help(parlay.LLM)"
            raise TypeError(f"LLM() has no argument {name}: {nearest(name, {*known, *ARGUMENTS}, listed_by)}")
        if meaning.only is None:
            idle[name] = meaning.why
        elif value not in meaning.only:
            raise ValueError(f"LLM() can't honour {name}={value!r}: {meaning.why}")
    if idle:
        reasons = "; ".join(dict.fromkeys(filter(None, idle.values())))
        warnings.warn(f"without effect in Parlay: {', '.join(idle)}{reasons and f' ({reasons})'}", stacklevel=3)


def one_strategy(strategy: str | StrategySpec | None, config: Mapping[str, Any] | None) -> str | StrategySpec | None:
    """``strategy``, or the strategy that ``speculative_config`` describes. Raises ValueError if both are given."""
    if strategy is not None:
        check_kind("strategy", strategy, (str, StrategySpec), 'a text, such as "auto"')
    if config is None:
        return strategy
    if strategy is not None:
        raise FieldError("speculative_config", "and strategy both choose how to draft: remove one of them", "strategy")
    return strategy_of(config)


def strategy_of(config: Mapping[str, Any]) -> str:
    """The strategy that vLLM's ``speculative_config`` describes. Raises ValueError if there is no such strategy."""
    check_kind("speculative_config", config, Mapping, 'a dict, such as {"method": "ngram"}')
    unknown = [name for name in config if name not in _SPECULATIVE]
    if unknown:
        raise FieldError("speculative_config", f": {unknown[0]} can't be honoured: name a strategy instead")
    method = config.get("method") or ("draft_model" if config.get("model") else None)
    if not isinstance(method, str):
        raise FieldError(
            "speculative_config", f'={config}: must be a dict with a method, such as {{"method": "ngram"}}'
        )
    drafters = {name: entry for entry in catalogue().values() for name in entry.vllm}
    if method not in drafters:
        raise FieldError("speculative_config", f": no strategy for method {method}: {nearest(method, drafters)}")
    entry = drafters[method]
    options = {_SPECULATIVE[name]: value for name, value in config.items() if _SPECULATIVE[name]}
    if config.get("model"):
        options |= {name: config["model"] for name in ("model", "head") if name in entry.parameters}
    return ":".join(filter(None, (entry.name, ",".join(f"{name}={value}" for name, value in options.items()))))
