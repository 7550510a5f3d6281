"""Replays recorded answers of people and of models of 7 and 8 B parameters with every strategy."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.setup import MINI
from parlay.bench.records import Results
from parlay.bench.replay.run import cell, measure, read_texts
from parlay.bench.replay.tokens import open_tokens

PART = "replay"
FILES: Mapping[str, str] = {
    "Mistral 7B answers": "replay-alpaca-eval/Mistral-7B-Instruct-v0.3.jsonl.zst",
    "Llama 3.1 8B answers": "replay-alpaca-eval/Meta-Llama-3.1-8B-Instruct-Turbo.jsonl.zst",
    "LLMA summaries": "llma-reference/cnndm.jsonl",
    "LLMA questions": "llma-reference/rag.jsonl",
    "code edits": "editeval/edit_eval.jsonl",
}
"""The recordings' paths in the data folder, by their names in tables."""

logger = logging.getLogger(__name__)


def replays(data: Path, results: Results, strategies: Sequence[str], count: int) -> None:
    """Measure tokens per step of each strategy on the first ``count`` answers of each file.

    Raises ValueError if ``data`` lacks a file.
    """
    tokens = open_tokens(MINI)
    for kind, place in FILES.items():
        texts = replace(read_texts(data / place, tokens, count), name=kind)
        for strategy in strategies:
            if not results.of(replace(cell(strategy, texts), part=PART)):
                row = measure(strategy, texts, tokens)
                results.add([replace(row, cell=replace(row.cell, part=PART))])
                logger.info("replay: %s on %s", strategy, kind)
