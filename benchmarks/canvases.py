"""Tokens per step, texts and right answers of models with canvases: `python -m benchmarks.canvases`.

``tasks DIR`` writes texts to train on and to ask: copy, reverse, sort, or replace letters. ``measure`` decodes prompts
under each strategy and prints a JSON line for each.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

from parlay import LLM, SamplingParams

LETTERS = "abcdefghijkl"
LENGTH = 6
KINDS = ("copy", "reverse", "sort", "replace")


def task(chance: random.Random) -> dict[str, str]:
    """One question with its only right answer."""
    kind, letters = chance.choice(KINDS), chance.choices(LETTERS, k=LENGTH)
    said = {
        "copy": letters,
        "reverse": letters[::-1],
        "sort": sorted(letters),
        "replace": ["m" if letter == letters[0] else letter for letter in letters],
    }
    return {"kind": kind, "prompt": f"{kind}: {' '.join(letters)} =", "answer": " " + " ".join(said[kind])}


def write_tasks(folder: Path, count: int, held: int, seed: int) -> None:
    """Write ``train.jsonl`` and ``held.jsonl``, which have no question in common."""
    chance, seen = random.Random(seed), dict[str, dict[str, str]]()
    while len(seen) < count + held:
        each = task(chance)
        seen[each["prompt"]] = each
    rows = list(seen.values())
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", rows[:count]), ("held", rows[count:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")


def measure(options: argparse.Namespace) -> None:
    """Print a row for each strategy. ``same`` counts texts equal to those of the first one."""
    rows = [json.loads(line) for line in options.data.read_text(encoding="utf-8").splitlines()][: options.prompts]
    llm = LLM(options.model, dtype=options.dtype)
    params = SamplingParams(temperature=options.temperature, seed=0, max_tokens=options.tokens)
    first: list[tuple[int, ...]] = []
    for strategy in options.strategies:
        began = time.perf_counter()
        samples = [each.outputs[0] for each in _answers(llm, rows, params, strategy, chat=options.chat)]
        seconds = time.perf_counter() - began
        texts = [tuple(sample.token_ids) for sample in samples]
        first = first or texts
        steps, tokens = sum(sample.metrics.steps for sample in samples), sum(map(len, texts))
        right = sum(sample.text.strip() == row["answer"].strip() for sample, row in zip(samples, rows, strict=True))
        row = {
            "model": Path(options.model).name, "strategy": strategy, "temperature": options.temperature,
            "prompts": len(rows), "tokens": tokens, "steps": steps, "tokens_per_step": round(tokens / steps, 3),
            "seconds": round(seconds, 2), "same": sum(map(tuple.__eq__, texts, first)), "right": right,
        }  # fmt: skip
        print(json.dumps(row), flush=True)


def _answers(llm: LLM, rows: list[dict[str, Any]], params: SamplingParams, strategy: str, *, chat: bool) -> list[Any]:
    if chat:
        return llm.chat([[{"role": "user", "content": row["prompt"]}] for row in rows], params, strategy=strategy)
    return llm.generate([row["prompt"] for row in rows], params, strategy=strategy)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    tasks = commands.add_parser("tasks")
    tasks.add_argument("folder", type=Path)
    tasks.add_argument("--count", type=int, default=4000)
    tasks.add_argument("--held", type=int, default=200)
    tasks.add_argument("--seed", type=int, default=0)
    measuring = commands.add_parser("measure")
    measuring.add_argument("--model", required=True)
    measuring.add_argument("--data", type=Path, required=True)
    measuring.add_argument("--strategies", nargs="+", default=["none"])
    measuring.add_argument("--prompts", type=int, default=100)
    measuring.add_argument("--tokens", type=int, default=64)
    measuring.add_argument("--temperature", type=float, default=0.0)
    measuring.add_argument("--dtype", default="float32")
    measuring.add_argument("--chat", action="store_true", help="ask in the model's chat template")
    options = parser.parse_args()
    if options.command == "tasks":
        write_tasks(options.folder, options.count, options.held, options.seed)
    else:
        measure(options)


if __name__ == "__main__":
    main()
