"""Answers recorded elsewhere, to be replayed: prompt, answer and what the answer may be copied from, as ids."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from parlay.bench.replay.tokens import Recorded
from parlay.train import checks
from parlay.train.chat import END, render_chat
from parlay.train.corpus import read_records

LONGEST = 3500
"""Records that come to more tokens than this, prompt and answer together, are left out."""
FEWEST = 8
DIALOGUES = 260

Triple = tuple[str, str, tuple[str, ...]]
"""Prompt, answer, references, as text."""


def read(kind: str, data: Path, tokenizer: PreTrainedTokenizerBase, count: int) -> list[Recorded]:
    """The first ``count`` records of a kind that are neither empty nor too long.

    Raises:
        FileNotFoundError: when ``data`` lacks the file.
    """
    found: list[Recorded] = []
    for prompt, answer, references in KINDS[kind](data):
        record = Recorded(
            tuple(tokenizer.encode(prompt)),
            tuple(tokenizer.encode(answer, add_special_tokens=False)),
            tuple(tuple(tokenizer.encode(text, add_special_tokens=False)) for text in references),
        )
        if len(record.output) >= FEWEST and len(record.prompt) + len(record.output) <= LONGEST:
            found.append(record)
        if len(found) == count:
            break
    return found


def answers(name: str) -> Callable[[Path], Sequence[Triple]]:
    """What a model of 7 or 8 B parameters answered to AlpacaEval's prompts."""

    def triples(data: Path) -> list[Triple]:
        records = read_records(data / "replay-alpaca-eval" / f"{name}.jsonl.zst")
        return [(f"{record['prompt']}\n\n", record["output"], ()) for record in records]

    return triples


def with_reference(name: str) -> Callable[[Path], Sequence[Triple]]:
    """LLMA's prompts: the documents stand before the question, and are named as references."""

    def triples(data: Path) -> list[Triple]:
        lines = (data / "llma-reference" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        records = [json.loads(line) for line in lines]
        return [
            ("\n\n".join([*record["docs"], record["query"]]) + "\n", record["result"]["text"], tuple(record["docs"]))
            for record in records
        ]

    return triples


def code_edits(data: Path) -> list[Triple]:
    """EditEval: a function, what to change in it, and the function after the change."""
    lines = (data / "editeval" / "edit_eval.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    return [
        (f"{record['input']}\n\n{record['instruction']}\n\n", record["output"], (record["input"],))
        for record in records
    ]


def tool_calls(data: Path) -> list[Triple]:
    """JSON calls of held-out dialogues: the same tools again and again, other arguments, no prompt twice."""
    calls = checks.make_calls(data, DIALOGUES, random.Random(11))
    seen: dict[str, Triple] = {}
    for call in calls:
        prompt = render_chat(call.turns, answer_next=True)
        seen.setdefault(prompt, (prompt, call.answer + END, ()))
    return list(seen.values())


KINDS: Mapping[str, Callable[[Path], Sequence[Triple]]] = {
    "Mistral 7B answers": answers("Mistral-7B-Instruct-v0.3"),
    "Llama 3.1 8B answers": answers("Meta-Llama-3.1-8B-Instruct-Turbo"),
    "LLMA summaries": with_reference("cnndm"),
    "LLMA questions": with_reference("rag"),
    "code edits": code_edits,
    "tool calls": tool_calls,
}
