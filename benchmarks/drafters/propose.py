"""Microseconds per step of every strategy of the catalogue whose drafter needs no model.

    OMP_NUM_THREADS=1 taskset -c 1 python -m benchmarks.drafters.propose
    python -m benchmarks.drafters.propose --text BOOK.txt --write FILE.md
    python -m benchmarks.drafters.propose --strategies prompt-lookup lookup-decoding --history 8000

A step commits one token of the text, tells the drafter of it (`observe`) and asks for the next draft (`propose`). Time
is that of the thread's processor, so that other processes on the machine count for little; the first proposal, which
reads the whole history, stands apart. Memory is what Python allocated for it, by tracemalloc.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
import tracemalloc
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles

from benchmarks.drafters.texts import VOCAB_SIZE, markov, of_file
from parlay.bench.provenance import provenance
from parlay.drafters.resources import Resources
from parlay.strategies.building import build
from parlay.strategies.catalogue import catalogue, find
from parlay.strategies.spelling import parse
from parlay.types import Draft, Drafter, NoiseKey, Observation, ParlayError, Request, Runner, SamplingParams, Verdict

HISTORIES = (8_000, 100_000)
BUDGET = 10
STEPS = 300
REFERRING = {"reference-copy", "reference-copy:resync=true"}
"""Specs that are nothing without references: they get the history as one."""
EXTRA = ("reference-copy:resync=true",)


@dataclass(frozen=True, slots=True)
class Cell:
    """One strategy at one history and budget: microseconds, but for the first proposal's milliseconds."""

    strategy: str
    history: int
    budget: int
    first_ms: float
    propose: float
    propose_p95: float
    observe: float
    nodes: float
    bytes_per_token: float


@dataclass
class Sight:
    """A sequence as drafters see it."""

    sequence: int
    tokens: list[int]
    request: Request
    prompt_length: int
    layers: None = None


def no_model(name: str) -> Runner:
    raise ParlayError(f"needs the model {name!r}")


def make(spec: str) -> Drafter:
    """A drafter that opens no model. Raises ParlayError for one that can't be had without."""
    drafter = build(parse(spec), Resources(VOCAB_SIZE, no_model))
    if drafter is None:
        raise ParlayError("drafts nothing")
    return drafter


def sight(spec: str, history: Sequence[int]) -> Sight:
    """A sequence whose prompt is the history."""
    references = (tuple(history),) if spec in REFERRING else ()
    params, prompt = SamplingParams(temperature=0.0), tuple(history)
    request = Request(id="r", prompt=prompt, params=params, key=NoiseKey(0), references=references)
    return Sight(0, list(history), request, len(history))


def measure(spec: str, text: Sequence[int], history: int, budget: int) -> Cell:
    """Decode the text's last tokens one by one behind its first ``history``."""
    bytes_held = memory(spec, text[:history], budget)
    drafter, view = make(spec), sight(spec, text[:history])
    chance = random.Random(0)
    clock = time.thread_time_ns
    began = clock()
    (draft,) = drafter.propose([view], [budget])
    first = clock() - began
    proposing: list[int] = []
    observing: list[int] = []
    nodes: list[int] = []
    for token in text[history:]:
        view.tokens.append(token)
        seen = observation(drafter, view, draft, token, chance)
        began = clock()
        drafter.observe([seen])
        told = clock()
        (draft,) = drafter.propose([view], [budget])
        ended = clock()
        observing.append(told - began)
        proposing.append(ended - told)
        nodes.append(len(draft))
    p95 = quantiles(proposing, n=20)[-1]
    return Cell(
        spec, history, budget, first / 1e6, median(proposing) / 1e3, p95 / 1e3, median(observing) / 1e3,
        sum(nodes) / len(nodes), bytes_held / history,
    )  # fmt: skip


def observation(drafter: Drafter, view: Sight, draft: Draft, token: int, chance: random.Random) -> Observation:
    """The target took ``token`` and nothing of the draft; what it would have said at drafted nodes is anything."""
    width = drafter.needs.top_k
    choices = [tuple(chance.sample(range(VOCAB_SIZE), width)) for _ in range(len(draft) + 1 if width else 0)]
    if choices:
        choices[0] = (token, *choices[0][1:])
    return Observation(view, draft, Verdict((), (token,)), top_k=tuple(choices))


def memory(spec: str, history: Sequence[int], budget: int) -> int:
    """Bytes held after the first proposal that were not held before, the sequence's own list left out."""
    drafter, view = make(spec), sight(spec, history)
    gc.collect()
    tracemalloc.start()
    drafter.propose([view], [budget])
    gc.collect()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return held


def without_model(specs: Iterable[str]) -> tuple[list[str], dict[str, str]]:
    """The specs that need no model, and why the others are left out."""
    found: list[str] = []
    left_out: dict[str, str] = {}
    for spec in specs:
        try:
            make(spec)
        except ParlayError as error:
            left_out[spec] = str(error)
        else:
            found.append(spec)
    return found, left_out


def default_budget(spec: str) -> int:
    """The strategy's own k."""
    default = find(parse(spec).name).parameters["k"].default
    assert isinstance(default, int)
    return default


def table(cells: Sequence[Cell]) -> str:
    """Markdown: a line per strategy and budget, columns for each history."""
    histories = sorted({cell.history for cell in cells})
    parts = ("propose", "p95", "observe", "nodes", "first ms", "bytes/token")
    head = ["strategy", "k", *(f"{part} @ {history // 1000}k" for history in histories for part in parts)]
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * 2 + " ---: |" * (len(head) - 2)]
    for spec, budget in dict.fromkeys((cell.strategy, cell.budget) for cell in cells):
        row = [spec, str(budget)]
        for history in histories:
            cell = next(one for one in cells if (one.strategy, one.budget, one.history) == (spec, budget, history))
            row += [f"{cell.propose:.1f}", f"{cell.propose_p95:.1f}", f"{cell.observe:.1f}", f"{cell.nodes:.1f}"]
            row += [f"{cell.first_ms:.1f}", f"{cell.bytes_per_token:.0f}"]
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def page(cells: Sequence[Cell], left_out: dict[str, str], command: str) -> str:
    """The table, where it comes from, and what is not in it."""
    origin = provenance(command)
    machine = origin["machine"]
    lines = [
        "# What drafting costs without a model",
        f"{machine['cpu']}, {machine['cores']} cores; commit {origin['commit']}, {origin['date']}",
        f"    {command}",
        "Microseconds of processor time per step with one new token; median and 95th percentile.",
        table(cells),
    ]
    if left_out:
        lines += ["Left out:", "\n".join(f"- {spec}: {why}" for spec, why in left_out.items())]
    return "\n\n".join(lines) + "\n"


def main() -> None:
    """Command line."""
    drafting = [name for name, entry in catalogue().items() if entry.factory]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.drafters.propose", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--strategies", nargs="+", metavar="SPEC", default=[*drafting, *EXTRA])
    parser.add_argument("--text", type=Path, metavar="FILE", help="text to draft from; else a random one")
    parser.add_argument("--history", nargs="+", type=int, default=list(HISTORIES), metavar="TOKENS")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the page there too")
    options = parser.parse_args()
    specs, left_out = without_model(options.strategies)
    length = max(options.history) + options.steps
    text = of_file(options.text, length) if options.text else markov(length, seed=1)
    cells = [
        measure(spec, text[: history + options.steps], history, budget)
        for spec in specs
        for budget in dict.fromkeys((BUDGET, default_budget(spec)))
        for history in options.history
    ]
    command = "python -m benchmarks.drafters.propose" + (" --text FILE" if options.text else "")
    result = page(cells, left_out, command)
    print(result)
    if options.write:
        options.write.write_text(result, encoding="utf-8")


if __name__ == "__main__":
    main()
