"""Opens what a command line names: text files, and the LLM of decoding commands."""

from __future__ import annotations

import argparse
import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from parlay.cli.ensemble_flags import chosen_ensemble
from parlay.cli.flags import options_from
from parlay.options import LoadOptions, RankOptions, UsageError
from parlay.system.progress import watched

if TYPE_CHECKING:
    from parlay.llm.llm import LLM
    from parlay.strategies.spelling import StrategySpec

SILENT_SECONDS = 2.0
"""Seconds of loading after which a line reports it, unless a progress bar does."""


def read_text(name: str, kind: str) -> str:
    """Read a UTF-8 file. Raises ValueError with the ``kind`` of file and what to do."""
    if not name:
        raise ValueError(f"the file of the {kind} has an empty name: name a file")
    try:
        return Path(name).read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ValueError(f"can't read the {kind} {name}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{kind} {name} is not UTF-8 (byte {error.start}): convert it, such as with iconv") from None


@contextmanager
def uncollected() -> Iterator[None]:
    """Pause the garbage collector during imports, where it would scan a million objects repeatedly for 0.2 s."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.freeze()


def pack_ahead(model: str, options: argparse.Namespace) -> AbstractContextManager[None]:
    """Pack the weights of a GGUF model while torch is imported, if the CPU will decode it."""
    from parlay.models.fetch.resolving import resolve
    from parlay.models.gguf.packing_ahead import packing_ahead

    load = options_from(LoadOptions, options)
    if options_from(RankOptions, options).ranks > 1:  # each rank packs its own part
        return nullcontext()
    has_gpu = load.device == "auto" and any(Path("/dev").glob("nvidia[0-9]*"))
    if has_gpu or load.device not in ("auto", "cpu") or load.quantize is not None or load.threads == 1:
        return nullcontext()
    if "weights" in str(options.memory):  # some layers may stay on disk
        return nullcontext()
    return packing_ahead(resolve(model))


def named_model(options: argparse.Namespace) -> str | None:
    """The model given as MODEL (``named``) or as ``--model``; None if neither is. Raises UsageError if both are
    given."""
    if None not in (options.named, options.model):
        raise UsageError(
            f"the model is given twice, as {options.named} and as --model {options.model}: remove one of them"
        )
    name: str | None = options.model if options.named is None else options.named
    return name


def open_llm(options: argparse.Namespace, strategy: StrategySpec | None) -> LLM:
    """Load the model that the flags name, or the default model. With ``strategy`` None, the default strategy is used.

    Raises ValueError for a draft model that the named strategy does not use.
    """
    from parlay.models.fetch.pulled import named_or_default
    from parlay.models.fetch.resolving import resolve

    load, ranks = options_from(LoadOptions, options), options_from(RankOptions, options)
    ensemble = chosen_ensemble(options)
    options.model = named_or_default(options.model)
    for name in filter(None, (options.model, options.draft_model, *(ensemble.models if ensemble else ()))):
        resolve(name)  # reports a missing model before importing torch, which takes seconds
    with _announced(options.model), ExitStack() as stack:
        with uncollected():
            stack.enter_context(pack_ahead(options.model, options))
            from parlay.llm.llm import LLM
            from parlay.strategies.entry import DEFAULT_STRATEGY

        llm = LLM(
            options.model,
            tokenizer=options.tokenizer,
            load=load,
            ranks=ranks,
            strategy=strategy or DEFAULT_STRATEGY,
            draft_model=options.draft_model,
            max_model_len=options.max_model_len,
            memory=options.memory,
            prefix_cache=options.prefix_cache,
            prefix_cache_size=options.prefix_cache_size,
            router_memory=options.router_memory,
            certificates=options.certificates,
            ensemble=ensemble,
        )
    if options.draft_model is not None:
        _check_draft(llm, options.draft_model, strategy)
    return llm


@contextmanager
def _announced(model: str) -> Iterator[None]:
    """Print on standard error that the model is being loaded, if that takes long and no progress bar shows it."""
    line = f"parlay: loading {model} ..."
    timer = threading.Timer(SILENT_SECONDS, lambda: print(line, file=sys.stderr, flush=True))
    timer.daemon = True
    if not watched():
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _check_draft(llm: LLM, draft: str, strategy: StrategySpec | None) -> None:
    """Print a note if the draft model has no use. Raises ValueError if the named strategy does not use a draft
    model."""
    if draft in llm.draft_models:
        return
    if strategy is not None and not strategy.name.startswith("auto"):
        raise ValueError(f"--draft-model has no effect with strategy {strategy}, which uses no draft model: remove it")
    why = "a trained head for this model is cheaper and right more often; --strategy draft-model uses it"
    print(f"parlay: note: auto does not use the draft model {draft}: {why}", file=sys.stderr)
