"""Checks the numbers among the arguments of `LLM` before a model is loaded, under the names that users know."""

from __future__ import annotations

from dataclasses import dataclass

from parlay.engine import Limits
from parlay.options import Options, RankOptions, option, override
from parlay.options.ranks import SPLITS
from parlay.types import FieldError, SamplingParams, UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step(Options):
    """Limits of a step and of a text, in tokens. Raises UsageError for a value of another type or out of range."""

    max_model_len: int | None = option(low=2)
    max_num_seqs: int = option(low=1)
    max_num_batched_tokens: int = option(low=1)

    def __post_init__(self) -> None:
        super(_Step, self).__post_init__()
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise FieldError(
                "max_num_batched_tokens",
                f"={self.max_num_batched_tokens}: must be at least max_num_seqs, {self.max_num_seqs}",
                "max_num_seqs",
            )


def limits_of(max_model_len: int | None, max_num_seqs: int, max_num_batched_tokens: int) -> Limits:
    """The engine's limits. Raises UsageError for a number of another type or out of range."""
    _Step(max_model_len=max_model_len, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
    return Limits(max_sequences=max_num_seqs, max_rows=max_num_batched_tokens, max_context=max_model_len)


def check_seed(seed: int | None) -> None:
    """Raises FieldError for a seed that requests could not have either."""
    SamplingParams(seed=seed)


def ranks_of(ranks: RankOptions, tensor: int | None, pipeline: int | None, context: int | None) -> RankOptions:
    """``ranks`` with the sizes that were given. Raises UsageError, which calls a wrong size by its argument's name."""

    def argument(field: str) -> str:
        return f"{field}_size" if field in SPLITS else field

    try:
        return override(ranks, tensor_parallel=tensor, pipeline_parallel=pipeline, context_parallel=context)
    except UsageError as error:
        raise UsageError(error.named(argument), *map(argument, error.fields)) from None
