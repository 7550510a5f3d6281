"""Makes the table of measured tokens per step by kind of work, which `parlay plan` uses, from committed rows.

`python -m benchmarks.plan.kinds` writes the table again; a test compares it with the rows.
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
"""The kind and the texts of each replayed workload. A replay of a larger model's answers is exact for drafters that
read only the text."""
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
"""The ends of names of strategies that always make full drafts."""
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
"""The files of rows, and which of their cells are used."""


def rates() -> list[KindRate]:
    """Return the rates of replays, of copying and a shipped head under the default policy, and of full drafts of 16
    nodes.

    Full drafts are those of every trained head, and of a draft model of a third of its target's size. If two files have
    the same strategy and texts, the later file counts; its drafts are full.
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
    """Return whether the cell is Parlay's with one greedy request at a time and unchanged prompts."""
    return (cell.engine, cell.concurrency, cell.temperature, cell.context) == (OURS, 1, 0.0, 0)


def _texts(cell: Cell) -> tuple[str, str]:
    """Return the kind and the name of the decoded texts."""
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
