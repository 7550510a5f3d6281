"""Sequence-level distillation (Kim & Rush 2016, arXiv:1606.07947): a teacher's translations replace people's."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from parlay.models.fetch.origin import weights_fingerprint
from parlay.system.progress import Ticker
from parlay.system.user_cache import saved_whole
from parlay.train.translation.options import TranslatorTrainOptions
from parlay.train.translation.pairs import Texts
from parlay.types import SamplingParams

_AT_ONCE = 1024
"""A teacher translates this many sources between two reports of progress."""


def distilled(pairs: Sequence[Texts], teacher: Path, asked: TranslatorTrainOptions) -> list[Texts]:
    """Return each source once, with the teacher's greedy translation instead of the human ones.

    Translations are stored in ``asked.work`` as they come, so a stopped run goes on. They are written anew for another
    teacher, length or set of sources. Raises ValueError for a teacher whose translations reach no end.
    """
    sources = list(dict.fromkeys(source for source, _ in pairs))
    order = torch.randperm(len(sources), generator=torch.Generator().manual_seed(0)).tolist()
    chosen = [sources[at] for at in order][: asked.distilled or len(sources)]
    file = asked.work / "distilled.json"
    texts = hashlib.sha256("\0".join(chosen).encode()).hexdigest()
    stamp = [weights_fingerprint(str(teacher)), texts, asked.longest]
    before, found = _kept(file, stamp)
    for done, more in _translated(chosen[before:], teacher, asked):
        found += more
        kept = {"stamp": stamp, "done": before + done, "pairs": found}
        with saved_whole(file) as partial:
            partial.write_text(json.dumps(kept, ensure_ascii=False), encoding="utf-8")
    if not found:
        raise ValueError(
            f"{teacher} ends no translation of {len(chosen)} within {asked.longest} tokens: train it longer"
        )
    return found


def _kept(file: Path, stamp: Sequence[object]) -> tuple[int, list[Texts]]:
    """Return the number of sources translated in an earlier run, and their stored translations."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        kept = json.loads(file.read_text(encoding="utf-8"))
        if kept["stamp"] == stamp:
            return kept["done"], [(source, text) for source, text in kept["pairs"]]
    return 0, []


def _translated(
    sources: Sequence[str], teacher: Path, asked: TranslatorTrainOptions
) -> Iterator[tuple[int, list[Texts]]]:
    """Translate some sources at a time. Yield how many are done, and the newest pairs, without those that reach no
    end."""
    from parlay.llm.llm import LLM

    if not sources:
        return
    params, shown = (
        SamplingParams(temperature=0, max_tokens=asked.longest),
        Ticker(len(sources), "Translating", "source"),
    )
    with LLM(str(teacher), threads=asked.threads or None, router_memory="off") as llm, shown:
        for first in range(0, len(sources), _AT_ONCE):
            some = list(sources[first : first + _AT_ONCE])
            outputs = llm.generate(some, params, False, strategy="none")
            each = [(source, output.outputs[0]) for source, output in zip(some, outputs, strict=True)]
            yield (
                first + len(some),
                [(src, one.text) for src, one in each if one.finish_reason == "stop" and one.text.strip()],
            )
            shown.step(len(some))
