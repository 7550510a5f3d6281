"""Tokens per step, texts and right answers of models with canvases: `python -m benchmarks.canvases`.

``tasks DIR`` writes texts to train on and to ask: copy, reverse, sort, or replace letters. ``answers`` lets a model
answer prompts greedily, for what is to be trained on its own texts. ``measure`` decodes prompts under each strategy and
prints a JSON line for each. ``mixed DIR`` writes texts of two kinds: fields that are looked up, for which a request may
be lossy under a floor, and sums that are worked out step by step, for which it may not. ``serve`` decodes such requests
one way each, and as each of them allows.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from parlay import LLM, SamplingParams
from parlay.text.chat_template import render

LETTERS = "abcdefghijkl"
LENGTH = 6
KINDS = ("copy", "reverse", "sort", "replace")
FIELDS = ("name", "city", "color", "animal", "month", "food", "metal", "tree")
VALUES = (
    "anna",
    "rome",
    "red",
    "horse",
    "june",
    "bread",
    "iron",
    "oak",
    "paris",
    "blue",
    "mouse",
    "march",
    "gold",
    "peter",
)
FORWARD, ROWS = 1.0, (0.03, 0.1)
"""Known prices: of a forward, and of each of its rows, small and large."""


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


def lookup(chance: random.Random) -> dict[str, str]:
    """Fields of a record to be found again, in another order."""
    record = {name: chance.choice(VALUES) for name in chance.sample(FIELDS, 5)}
    wanted = chance.sample(sorted(record), 4)
    given = ", ".join(f"{name} {value}" for name, value in record.items())
    said = ", ".join(f"{name} is {record[name]}" for name in wanted)
    return {"kind": "lookup", "prompt": f"record: {given}. find {' '.join(wanted)}:", "answer": f" {said}."}


def sums(chance: random.Random) -> dict[str, str]:
    """A sum that is worked out one number at a time."""
    first, *others = [chance.randint(1, 9) for _ in range(5)]
    steps = list[str]()
    total = first
    for other in others:
        steps.append(f"{total} + {other} = {total + other}")
        total += other
    asked = " + ".join(map(str, (first, *others)))
    return {"kind": "sums", "prompt": f"sum: {asked}:", "answer": f" {', '.join(steps)}."}


def write_mixed(folder: Path, count: int, held: int, seed: int) -> None:
    """Two look-ups for each sum; and ``calibrate.txt``, prompts of further look-ups."""
    chance = random.Random(seed)
    write_rows(folder, count, held, lambda: chance.choice((lookup, lookup, sums))(chance))
    known = (folder / "train.jsonl").read_text() + (folder / "held.jsonl").read_text()
    prompts = [each for _ in range(400) if json.dumps(each := lookup(chance)["prompt"]) not in known]
    (folder / "calibrate.txt").write_text("".join(f"{each}\n" for each in prompts[:300]), encoding="utf-8")


def write_tasks(folder: Path, count: int, held: int, seed: int) -> None:
    """Write questions of all kinds."""
    chance = random.Random(seed)
    write_rows(folder, count, held, lambda: task(chance))


def write_rows(folder: Path, count: int, held: int, make: Callable[[], dict[str, str]]) -> None:
    """Write ``train.jsonl`` and ``held.jsonl``, which have no question in common."""
    seen = dict[str, dict[str, str]]()
    while len(seen) < count + held:
        each = make()
        seen[each["prompt"]] = each
    rows = list(seen.values())
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", rows[:count]), ("held", rows[count:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")


def write_answers(options: argparse.Namespace) -> None:
    """Write a line for each prompt: it in the model's chat template, and the model's own answer."""
    rows = [json.loads(line) for line in options.data.read_text(encoding="utf-8").splitlines()][: options.prompts]
    llm = LLM(options.model)
    params = SamplingParams(temperature=0, max_tokens=options.tokens)
    answers = _answers(llm, rows, params, "none", chat=True)
    assert llm.tokenizer is not None
    with options.out.open("w", encoding="utf-8") as out:
        for row, answer in zip(rows, answers, strict=True):
            prompt = render(llm.tokenizer, [{"role": "user", "content": row["prompt"]}])
            if not answer.outputs[0].text.strip():
                continue
            out.write(json.dumps({"prompt": prompt, "answer": answer.outputs[0].text, "framed": True}) + "\n")


def measure(options: argparse.Namespace) -> None:
    """Print a row for each strategy. ``same`` counts texts equal to those of the first one."""
    rows = [json.loads(line) for line in options.data.read_text(encoding="utf-8").splitlines()][: options.prompts]
    llm = LLM(options.model, dtype=options.dtype, max_num_seqs=options.together)
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
            "rows": sum(sample.metrics.rows for sample in samples),
            "seconds": round(seconds, 2), "same": sum(map(tuple.__eq__, texts, first)), "right": right,
        }  # fmt: skip
        print(json.dumps(row), flush=True)


def serve(options: argparse.Namespace) -> None:
    """Decode all requests one after another: in each named way, and last by ``auto`` as each of them allows.

    Look-ups allow ``--floor``, sums want the exact text. ``right``: answers that are the only right one; ``same``:
    that are plain decoding's.
    """
    rows = [json.loads(line) for line in options.data.read_text(encoding="utf-8").splitlines()][: options.prompts]
    params = SamplingParams(temperature=0, max_tokens=options.tokens)
    plain: list[tuple[int, ...]] = []
    for way in (*options.strategies, ""):
        held = () if way else (options.certificate,)
        with LLM(options.model, certificates=held, router_memory="off", audit_share=0.02) as llm:
            began = time.perf_counter()
            samples = []
            for row in rows:
                exactness = None if way else options.floor if row["kind"] == "lookup" else "seed"
                said = llm.generate(row["prompt"], params, strategy=way or None, exactness=exactness)
                samples.append(said[0].outputs[0])
            seconds = time.perf_counter() - began
            audits = [(each.evidence.audited, each.evidence.bad) for each in llm.gate.audited()]
        texts = [tuple(sample.token_ids) for sample in samples]
        plain = plain or texts
        print(
            json.dumps(_served(way, rows, samples, plain) | {"seconds": round(seconds, 1), "audits": audits}),
            flush=True,
        )


def _served(way: str, rows: list[dict[str, Any]], samples: list[Any], plain: list[tuple[int, ...]]) -> dict[str, Any]:
    """One row for the whole trace."""
    steps, all_rows = (
        sum(each) for each in zip(*((one.metrics.steps, one.metrics.rows) for one in samples), strict=True)
    )
    found: dict[str, Any] = {"strategy": way or "auto, as each request allows", "prompts": len(rows), "steps": steps}
    found |= {"tokens": sum(len(sample.token_ids) for sample in samples), "rows": all_rows}
    found |= {f"price at {each:g} a row": round(FORWARD * steps + each * all_rows, 1) for each in ROWS}
    for kind in sorted({row["kind"] for row in rows}):
        each = [
            (sample, row, text) for sample, row, text in zip(samples, rows, plain, strict=True) if row["kind"] == kind
        ]
        found[kind] = {
            "of": len(each),
            "right": sum(sample.text.strip() == row["answer"].strip() for sample, row, _ in each),
            "same": sum(tuple(sample.token_ids) == text for sample, _, text in each),
            "ways": dict(Counter(str(sample.strategy) for sample, _, _ in each)),
        }
    return found


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
    mixing = commands.add_parser("mixed")
    mixing.add_argument("folder", type=Path)
    mixing.add_argument("--count", type=int, default=6000)
    mixing.add_argument("--held", type=int, default=120)
    mixing.add_argument("--seed", type=int, default=0)
    serving = commands.add_parser("serve")
    serving.add_argument("--model", required=True)
    serving.add_argument("--data", type=Path, required=True)
    serving.add_argument("--certificate", type=Path, required=True)
    serving.add_argument("--strategies", nargs="+", default=["none", "auto"])
    serving.add_argument("--floor", default="lossy:floor=0.9")
    serving.add_argument("--prompts", type=int, default=120)
    serving.add_argument("--tokens", type=int, default=48)
    answering = commands.add_parser("answers")
    answering.add_argument("--model", required=True)
    answering.add_argument("--data", type=Path, required=True)
    answering.add_argument("--out", type=Path, required=True)
    answering.add_argument("--prompts", type=int, default=1000)
    answering.add_argument("--tokens", type=int, default=112)
    measuring = commands.add_parser("measure")
    measuring.add_argument("--model", required=True)
    measuring.add_argument("--data", type=Path, required=True)
    measuring.add_argument("--strategies", nargs="+", default=["none"])
    measuring.add_argument("--prompts", type=int, default=100)
    measuring.add_argument("--tokens", type=int, default=64)
    measuring.add_argument("--temperature", type=float, default=0.0)
    measuring.add_argument("--dtype", default="float32")
    measuring.add_argument("--together", type=int, default=32, help="prompts at once: many leave each few draft rows")
    measuring.add_argument("--chat", action="store_true", help="ask in the model's chat template")
    options = parser.parse_args()
    if options.command == "tasks":
        write_tasks(options.folder, options.count, options.held, options.seed)
    elif options.command == "mixed":
        write_mixed(options.folder, options.count, options.held, options.seed)
    elif options.command == "serve":
        serve(options)
    elif options.command == "answers":
        write_answers(options)
    else:
        measure(options)


if __name__ == "__main__":
    main()
