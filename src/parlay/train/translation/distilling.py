"""Sequence-level distillation (Kim & Rush 2016, arXiv:1606.07947): trains on a teacher's translations of the
sources."""

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
"""Number of sources that a teacher translates between two saves."""


def distilled(pairs: Sequence[Texts], teacher: Path, asked: TranslatorTrainOptions) -> list[Texts]:
    """Return each source once, with the teacher's greedy translation in place of the human ones.

    Translations are saved in ``asked.work`` as they come, so a stopped run continues. They are made anew for another
    teacher, another length or other sources. Raises ValueError if no translation of the teacher ends.
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
    """Return how many sources an earlier run translated, and the saved pairs."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        kept = json.loads(file.read_text(encoding="utf-8"))
        if kept["stamp"] == stamp:
            return kept["done"], [(source, text) for source, text in kept["pairs"]]
    return 0, []


def _translated(
    sources: Sequence[str], teacher: Path, asked: TranslatorTrainOptions
) -> Iterator[tuple[int, list[Texts]]]:
    """Translate the sources in parts: yield how many are done, and the part's pairs without unfinished translations."""
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
