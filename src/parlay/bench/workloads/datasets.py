"""Published sets of prompts, by name. They are read from a folder of the user's; none is part of the package."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

FILES: Mapping[str, str] = {
    "spec-bench": "spec-bench/question.jsonl",
    "mt-bench": "mt-bench/mt_bench_question.jsonl",
    "editeval": "editeval/edit_eval.jsonl",
    "humaneval": "humaneval/HumanEval.jsonl.gz",
    "bfcl-simple": "bfcl/BFCL_v4_simple_python.jsonl.zst",
    "bfcl-multiple": "bfcl/BFCL_v4_multiple.jsonl.zst",
    "bfcl-parallel": "bfcl/BFCL_v4_parallel.jsonl.zst",
    "llma-summaries": "llma-reference/cnndm.jsonl",
    "llma-questions": "llma-reference/rag.jsonl",
}
"""The place of each set in that folder, by name."""


def find(name: str, data: Path | None) -> Path:
    """The file of a set. Raises ValueError when no folder was given, or it lacks the file."""
    if data is None:
        raise ValueError(f"the workload {name} needs --data DIR, a folder that holds {FILES[name]}")
    path = data / FILES[name]
    if not path.exists():
        raise ValueError(f"the workload {name} wants {FILES[name]}, which {data} does not hold")
    return path
