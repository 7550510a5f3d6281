"""Tokens per step, texts and right answers of models with canvases: `python -m benchmarks.canvases`.

``tasks DIR`` writes texts to train on and to ask: copy, reverse, sort, or replace letters. ``answers`` lets a model
answer prompts greedily, for what is to be trained on its own texts. ``measure`` decodes prompts under each strategy and
prints a JSON line for each. ``mixed DIR`` writes texts of two kinds: fields that are looked up, for which a request may
be lossy under a floor, and sums that are worked out step by step, for which it may not. ``serve`` sends such requests
to a server: all decoded in one way, and each as it allows.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from benchmarks.commands import one_line_errors
from benchmarks.serving.served import served
from parlay import LLM, SamplingParams
from parlay.text.chat_template import render

LETTERS = "abcdefghijkl"
LENGTH = 6
KINDS = ("copy", "reverse", "sort", "replace")
FIELDS = {
    "name": ("anna", "peter", "maria", "john", "lucy", "mark"),
    "city": ("rome", "paris", "london", "berlin", "madrid", "vienna"),
    "color": ("red", "blue", "green", "black", "white", "brown"),
    "animal": ("horse", "mouse", "dog", "cat", "cow", "sheep"),
    "month": ("june", "march", "april", "may", "july", "october"),
    "food": ("bread", "rice", "soup", "cheese", "apple", "cake"),
    "metal": ("gold", "iron", "silver", "copper", "zinc", "lead"),
    "tree": ("oak", "pine", "elm", "birch", "maple", "willow"),
}
ADDENDS = 4
TOKENS = {"lookup": 20, "sums": 48}
"""The most that an answer of the mixed trace has."""
AS_ALLOWED = "as each request allows"
_BEFORE = 24
"""Requests of each kind from which costs are learned."""
LIMIT = 120.0
"""Seconds that one answer may take."""


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
    """Fields of a record to be found again, in another order: an answer that can be given all at once."""
    record = {name: chance.choice(FIELDS[name]) for name in chance.sample(sorted(FIELDS), len(FIELDS))}
    wanted = chance.sample(sorted(FIELDS), len(FIELDS))
    given = ", ".join(f"{name} {value}" for name, value in record.items())
    said = ", ".join(record[name] for name in wanted)
    return {"kind": "lookup", "prompt": f"record: {given}. find {', '.join(wanted)}:", "answer": f" {said}."}


def sums(chance: random.Random) -> dict[str, str]:
    """A sum that is worked out one number at a time, each of which hangs on the one before it."""
    first, *others = [chance.randint(1, 9) for _ in range(ADDENDS)]
    steps = list[str]()
    total = first
    for other in others:
        steps.append(f"{total} + {other} = {total + other}")
        total += other
    asked = " + ".join(map(str, (first, *others)))
    return {"kind": "sums", "prompt": f"sum: {asked}:", "answer": f" {', '.join(steps)}."}


def write_mixed(folder: Path, count: int, held: int, seed: int) -> None:
    """Two look-ups for each sum; and ``calibrate.jsonl``, prompts of further look-ups."""
    chance = random.Random(seed)
    write_rows(folder, count, held, lambda: chance.choice((lookup, lookup, sums))(chance))
    known = (folder / "train.jsonl").read_text() + (folder / "held.jsonl").read_text()
    prompts = [each for _ in range(400) if json.dumps(each := lookup(chance)["prompt"]) not in known]
    lines = [json.dumps({"prompt": each}) + "\n" for each in prompts[:300]]
    (folder / "calibrate.jsonl").write_text("".join(lines), encoding="utf-8")


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


@dataclass(slots=True)
class Played:
    """What came of the trace in one way: by round, the seconds, the server's own, and the answers of all requests."""

    seconds: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)
    answers: list[list[dict[str, Any]]] = field(default_factory=list)


def serve(options: argparse.Namespace) -> None:
    """Send the trace to a server in each way in turn, round after round: the named ones, and as each request allows.

    Look-ups allow ``--floor``, sums want the exact text. No prompt is found in the cache of another way. What each way
    costs is learned from other requests first.
    """
    rows = [json.loads(line) for line in options.data.read_text(encoding="utf-8").splitlines()]
    trace, others = mixture(rows, options.prompts)
    floor = ("--certificate", str(options.certificate)) if options.certificate else ()
    words = (*floor, "--strategy", options.usual, "--audit-share", str(options.audit_share), "--threads", "1")
    ways, found = (*options.strategies, AS_ALLOWED), dict[str, Played]()
    with served(f"model={options.model}", *words) as url, httpx.Client(base_url=url, timeout=LIMIT) as client:
        for way in ways:
            _play(client, options, others, way, "before")
            found[way] = Played()
        for turn in range(options.rounds):
            for place in range(len(ways)):  # who is first changes
                way = ways[(turn + place) % len(ways)]
                began, spent = time.perf_counter(), _metric(client, "process_cpu_seconds_total")
                found[way].answers.append(_play(client, options, trace, way, f"round {turn}"))
                found[way].seconds.append(time.perf_counter() - began)
                found[way].processor.append(_metric(client, "process_cpu_seconds_total") - spent)
        audits = [_metric(client, f"parlay_audits{each}_total") for each in ("", "_disagreed")]
    for way in ways:
        own = {"usual": options.usual, "audits": audits} if way == AS_ALLOWED else {}
        print(json.dumps(_served(way, trace, found, ways[0]) | own))


def mixture(rows: Sequence[dict[str, Any]], count: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """``count`` requests, two look-ups for each sum, and some others. Raises ValueError where there are too few."""
    lookups, sums = ([row for row in rows if row["kind"] == kind] for kind in ("lookup", "sums"))
    thirds = count // 3
    if len(lookups) <= 2 * thirds or len(sums) <= thirds:
        raise ValueError(f"{len(lookups)} look-ups and {len(sums)} sums are too few for {count} requests: write more")
    trace = [row for n in range(thirds) for row in (lookups[2 * n], lookups[2 * n + 1], sums[n])]
    return trace, [*lookups[2 * thirds :][:_BEFORE], *sums[thirds:][:_BEFORE]]


def _play(
    client: httpx.Client, options: argparse.Namespace, rows: Sequence[Mapping[str, Any]], way: str, salt: str
) -> list[dict[str, Any]]:
    """The answers of all requests, so many at once."""

    def ask(row: Mapping[str, Any]) -> dict[str, Any]:
        allows = options.floor if row["kind"] == "lookup" else "seed"
        own = {"exactness": allows} if way == AS_ALLOWED else {"strategy": way}
        body = {"model": "model", "prompt": row["prompt"], "max_tokens": TOKENS[row["kind"]], "temperature": 0}
        sent = client.post("/v1/completions", json={**body, "cache_salt": f"{way}, {salt}", **own})
        answer = sent.raise_for_status().json()
        tokens, told = answer["usage"]["completion_tokens"], answer["parlay"]
        steps = round(tokens / told["tokens_per_step"]) if told["tokens_per_step"] else 0
        return {"text": answer["choices"][0]["text"], "way": told["strategy"], "tokens": tokens, "steps": steps}

    with ThreadPoolExecutor(options.clients) as pool:
        return [*pool.map(ask, rows)]


def _metric(client: httpx.Client, name: str) -> float:
    """The sum of a metric of the server; 0 where it has none of that name."""
    lines = client.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.split("{")[0].split(" ")[0] == name)


def _served(way: str, rows: Sequence[Mapping[str, Any]], found: Mapping[str, Played], first: str) -> dict[str, Any]:
    """One row for the whole trace. ``right``: answers that are the only right one; ``same``: that are the ``first``
    way's. Both, and tokens and steps, are of all rounds. ``ratio``: the first way's seconds over this one's, by round.
    """
    own, plain = found[way], found[first]
    every = [
        (row, answer, exact)
        for answers, texts in zip(own.answers, plain.answers, strict=True)
        for row, answer, exact in zip(rows, answers, texts, strict=True)
    ]
    said: dict[str, Any] = {"strategy": way, "prompts": len(rows), "rounds": len(own.seconds)}
    said |= {name: sum(answer[name] for _, answer, _ in every) for name in ("tokens", "steps")}
    for name, mine, theirs in (
        ("seconds", own.seconds, plain.seconds),
        ("processor_seconds", own.processor, plain.processor),
    ):
        ratios = [round(b / a, 3) for a, b in zip(mine, theirs, strict=True)]
        said |= {name: [round(each, 3) for each in mine], f"{name}_ratios": ratios, f"{name}_ratio": median(ratios)}
    for kind in sorted({row["kind"] for row in rows}):
        each = [(row, answer, exact) for row, answer, exact in every if row["kind"] == kind]
        said[kind] = {
            "of": len(each),
            "right": sum(answer["text"].strip() == row["answer"].strip() for row, answer, _ in each),
            "same": sum(answer["text"] == exact["text"] for _, answer, exact in each),
            "steps": sum(answer["steps"] for _, answer, _ in each),
            "ways": dict(Counter(answer["way"] for _, answer, _ in each)),
        }
    return said


def _answers(llm: LLM, rows: list[dict[str, Any]], params: SamplingParams, strategy: str, *, chat: bool) -> list[Any]:
    if chat:
        return llm.chat([[{"role": "user", "content": row["prompt"]}] for row in rows], params, strategy=strategy)
    return llm.generate([row["prompt"] for row in rows], params, strategy=strategy)


@one_line_errors("canvases")
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
    mixing.add_argument("--count", type=int, default=30_000)
    mixing.add_argument("--held", type=int, default=1200)
    mixing.add_argument("--seed", type=int, default=0)
    serving = commands.add_parser("serve")
    serving.add_argument("--model", required=True)
    serving.add_argument("--data", type=Path, required=True)
    serving.add_argument("--certificate", type=Path, help="of parlay calibrate; without one nothing may be lossy")
    serving.add_argument("--strategies", nargs="+", default=["none", "auto"], help="the first one's texts are exact")
    serving.add_argument("--usual", default="auto", help="the server's strategy, for requests that name none")
    serving.add_argument("--floor", default="lossy:floor=0.95")
    serving.add_argument("--prompts", type=int, default=120, help="some others are asked before, unmeasured")
    serving.add_argument("--clients", type=int, default=1, help="requests at once")
    serving.add_argument("--rounds", type=int, default=5)
    serving.add_argument("--audit-share", type=float, default=0.02)
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
