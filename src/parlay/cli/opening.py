"""The LLM of commands that decode text."""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from parlay.cli.flags import options_from
from parlay.options import LoadOptions

if TYPE_CHECKING:
    from parlay.llm.llm import LLM
    from parlay.strategies.spelling import StrategySpec


@contextmanager
def uncollected() -> Iterator[None]:
    """For imports: they make a million objects that stay, and looking through them again and again takes .2 s."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.freeze()


def open_llm(options: argparse.Namespace, strategy: StrategySpec | None) -> LLM:
    """What the flags for model and tokenizer name. ``strategy`` None: the default.

    Raises ValueError for a draft model that nothing uses, before the model is loaded where that can be told.
    """
    if strategy is None and options.draft_model is not None:
        raise ValueError("--draft-model is not used by the default strategy: name one with --strategy")
    from parlay.models.fetch.pulled import default_model
    from parlay.models.fetch.resolving import resolve

    options.model = options.model or default_model()
    resolve(options.model)  # says that a model is not there before torch is loaded, which takes seconds
    with uncollected():
        from parlay.llm.llm import LLM
        from parlay.strategies.entry import DEFAULT_STRATEGY

    llm = LLM(
        options.model,
        tokenizer=options.tokenizer,
        load=options_from(LoadOptions, options),
        strategy=strategy or DEFAULT_STRATEGY,
        draft_model=options.draft_model,
        router_memory=options.router_memory,
        certificates=options.certificates,
    )
    if options.draft_model is not None and options.draft_model not in llm.draft_models:
        raise ValueError(f"strategy {strategy} drafts without a model: leave out --draft-model")
    return llm
