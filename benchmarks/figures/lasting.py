"""Prompts whose text does not repeat itself at once: of the others nothing is left to time.

A small model loops early on open ends, so more prompts are drawn than are wanted. Which of them last is found with the
built-in model: widened, it writes the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.figures.prompts import Prompt
from parlay.bench.loops import lasts
from parlay.llm import LLM
from parlay.models.loading import weight_files
from parlay.types import SamplingParams

TOGETHER = 32

Drawn = Mapping[str, Sequence[Prompt]]


def lasting_first(drawn: Drawn, checkpoint: Path, tokens: int, cache: Path) -> dict[str, list[Prompt]]:
    """The prompts of each kind, in the order drawn but for those that loop at once: they come last.

    Answers have at most ``tokens`` tokens. What was found is kept in ``cache``.
    """
    origin = hashlib.sha256(f"{tokens}\n{[prompt.ids for own in drawn.values() for prompt in own]}".encode())
    for path in weight_files(checkpoint):
        origin.update(path.read_bytes())
    stored = cache / f"lasting-{origin.hexdigest()[:12]}.json"
    if stored.exists():
        found: dict[str, list[bool]] = json.loads(stored.read_text(encoding="utf-8"))
    else:
        found = _decode(drawn, checkpoint, tokens)
        cache.mkdir(parents=True, exist_ok=True)
        stored.write_text(json.dumps(found), encoding="utf-8")
    return {kind: sorted(drawn[kind], key=lambda prompt: not found[kind][prompt.number]) for kind in drawn}


def _decode(drawn: Drawn, checkpoint: Path, tokens: int) -> dict[str, list[bool]]:
    """By kind, whether the text of plain decoding counts, prompt by prompt."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens)
    found: dict[str, list[bool]] = {}
    with LLM(str(checkpoint), strategy="none", max_num_seqs=TOGETHER) as llm:
        for kind, prompts in drawn.items():
            outputs = llm.generate([{"prompt_token_ids": prompt.ids} for prompt in prompts], params)
            found[kind] = [lasts(output.outputs[0].token_ids) for output in outputs]
    return found
