"""Makes the table of measured tokens per step by kind of work, which `parlay plan` stands on, from committed rows.

`python -m benchmarks.plan.kinds` writes it again; a test compares it with the rows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

from benchmarks.commands import one_line_errors
from parlay.bench.plan.kinds import FILE, KindRate
from parlay.bench.records import OURS, PLAIN, Cell, read
from parlay.bench.replay.run import MODEL
from parlay.bench.summary import Measurements

RESULTS = Path(__file__).parents[1] / "results"
_CHAT, _CODE, _MATHS, _SUMMARIES = "open chat", "code", "maths", "summaries"
_DOCUMENTS, _EDITS, _EXTRACTION, _TRANSLATION = "questions on documents", "edits of code", "extraction", "translation"
RECORDED: Mapping[str, tuple[str, str]] = {
    "Mistral-7B-Instruct-v0.3": (_CHAT, "answers of Mistral 7B"),
    "cnndm": (_SUMMARIES, "LLMA's CNN/DM"),
    "rag": (_DOCUMENTS, "LLMA's retrieval"),
    "edit_eval": (_EDITS, "EditEval"),
}
"""Kind and texts by the workload of a replay: answers of larger models, exact for drafters that read only the text."""
SPEC_BENCH = {
    "writing": _CHAT,
    "roleplay": _CHAT,
    "humanities": _CHAT,
    "stem": _CHAT,
    "reasoning": _CHAT,
    "qa": _CHAT,
    "coding": _CODE,
    "math": _MATHS,
    "math_reasoning": _MATHS,
    "summarization": _SUMMARIES,
    "rag": _DOCUMENTS,
    "extraction": _EXTRACTION,
    "translation": _TRANSLATION,
}
_WHOLE = (":policy=fixed,k=16", ":k=16,policy=fixed")
"""Ends of the names of strategies whose drafts are always whole."""
_KINDS = dict.fromkeys([kind for kind, _ in RECORDED.values()] + list(SPEC_BENCH.values()))
_FILES: Mapping[str, Callable[[Cell], bool]] = {
    "replay.jsonl": lambda cell: True,
    "spec-bench.jsonl": lambda cell: True,
    "copies.jsonl": lambda cell: True,
    "trained.jsonl": lambda cell: cell.model == "smollm2-135m" and cell.strategy == "eagle3",
    "modelled-inputs.jsonl": lambda cell: cell.strategy.endswith(_WHOLE),
    "modelled.jsonl": lambda cell: cell.strategy.endswith(_WHOLE),
    "draft-models.jsonl": lambda cell: cell.strategy.endswith(_WHOLE),
}
"""Files of rows, and the cells that count."""


def rates() -> list[KindRate]:
    """From replays; copies and a shipped head under the default policy; every trained head, and a draft model of a
    third of its target's size, with 16 nodes.

    Of a strategy on the same texts the row of the last file counts, in which drafts are whole.
    """
    found: dict[tuple[str, str], KindRate] = {}
    for name, kept in _FILES.items():
        measurements = Measurements(read(RESULTS / name)[1])
        for cell in measurements.cells:
            rows = [row for row in measurements.of(cell) if row.steps]
            strategy = cell.strategy.partition(":")[0] if cell.strategy.endswith(_WHOLE) else cell.strategy
            if rows and kept(cell) and _usual(cell) and strategy != PLAIN and ":" not in strategy:
                kind, texts = _texts(cell)
                steps = sum(row.tokens for row in rows) / sum(row.steps for row in rows)
                rate = KindRate(kind, strategy, texts, round(steps, 3), rows[0].requests, f"benchmarks/results/{name}")
                found[strategy, texts] = rate
    return sorted(found.values(), key=lambda each: list(_KINDS).index(each.kind))


def _usual(cell: Cell) -> bool:
    """One request at a time, greedy, of Parlay, with the prompts as they are."""
    return (cell.engine, cell.concurrency, cell.temperature, cell.context) == (OURS, 1, 0.0, 0)


def _texts(cell: Cell) -> tuple[str, str]:
    """Kind and name of what was decoded."""
    if cell.model == MODEL:
        return RECORDED[cell.workload]
    category = cell.workload.removeprefix("spec-bench/")
    model = cell.model.removesuffix(".gguf")
    return SPEC_BENCH[category], f"Spec-Bench {category}, {model}"


def main() -> None:
    """Write the table."""
    with one_line_errors("plan.kinds"):
        write()


def write() -> None:
    lines = [json.dumps(asdict(rate)) for rate in rates()]
    FILE.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
