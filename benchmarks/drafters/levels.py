"""Milliseconds in which draft models write a tree, here and in other versions of the source, in turns.

    python -m benchmarks.drafters.levels
    python -m benchmarks.drafters.levels --draft FOLDER --source ../before/src src --write FILE.md

Each strategy writes trees of 16 nodes and about depth 5 below a random text, batch 1. Between two trees the text grows
by three tokens, of which the first is the last tree's first node: so some of what the draft model cached stays true.
Each version runs in a process of its own, which measures whenever the others do not; times are medians over all trees.
Versions must have the modules that are imported here.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from benchmarks.drafters.propose import Sight
from benchmarks.drafters.texts import markov
from parlay.bench.provenance import provenance
from parlay.drafters.resources import Resources
from parlay.models import load
from parlay.strategies.building import build
from parlay.strategies.spelling import parse
from parlay.types import Drafter, NoiseKey, Observation, Request, Runner, SamplingParams, Verdict, trees

NODES = 16
STRATEGIES = {
    "draft-model:min_p=0,shape=tree,width=3": 0.0,
    "sequoia:level_cost=0.02": 0.0,
    "draft-model:branching=2+2+1,min_p=0,rule=multi-candidate": 1.0,
    "draft-model:min_p=0,rule=without-replacement,shape=beam,width=3": 1.0,
}
"""And the temperature of the request."""
CONTEXTS = (300, 3000)
TREES = 8  # of each strategy and context in one round
ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Measured:
    """Trees of one strategy behind a text of so many tokens."""

    strategy: str
    context: int
    seconds: tuple[float, ...]
    nodes: float
    depth: float


def trees_of(spec: str, runner: Runner, context: int) -> Measured:
    """Write some trees, the first of them unmeasured."""
    drafter = build(parse(spec), Resources(runner.spec.vocab_size, lambda name: runner, default_draft="draft"))
    assert drafter is not None
    tokens = [token % runner.spec.vocab_size for token in markov(context, seed=1)]
    params = SamplingParams(temperature=STRATEGIES[spec])
    view = Sight(0, tokens, Request(id="r", prompt=tuple(tokens), params=params, key=NoiseKey(0)), context)
    steps = list(_steps(drafter, view))[1:]
    drafter.release(0)
    sizes = [(len(parents), max(depths, default=0)) for _, parents, depths in steps]
    return Measured(
        spec,
        context,
        tuple(seconds for seconds, _, _ in steps),
        sum(nodes for nodes, _ in sizes) / len(sizes),
        sum(depth for _, depth in sizes) / len(sizes),
    )


def _steps(drafter: Drafter, view: Sight) -> Iterator[tuple[float, tuple[int, ...], list[int]]]:
    """Seconds, parents and depths of each tree."""
    for _ in range(TREES + 1):
        began = time.perf_counter()
        (draft,) = drafter.propose([view], [NODES])
        seconds = time.perf_counter() - began
        committed = (*draft.tree.tokens[:1], 5, 6)
        view.tokens.extend(committed)
        drafter.observe([Observation(view, draft, Verdict((), committed[:1]))])
        yield seconds, draft.tree.parents, trees.depths(draft.tree)


def work(draft: str) -> None:
    """Answer each line that comes in with one round of measurements."""
    runner = load(draft)
    for _ in sys.stdin:
        found = [asdict(trees_of(spec, runner, context)) for spec in STRATEGIES for context in CONTEXTS]
        print(json.dumps({"kernels": runner.spec.kernels, "found": found}), flush=True)


class Version:
    """A process that runs one version of the source."""

    def __init__(self, source: Path, draft: str) -> None:
        self.source = source
        command = [sys.executable, "-m", "benchmarks.drafters.levels", "--draft", draft, "--work"]
        path = os.pathsep.join([str(source.resolve()), str(Path.cwd())])
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
        )
        self.rounds: list[list[Measured]] = []

    def measure(self) -> None:
        """One round. Raises RuntimeError if the process has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the process that measures {self.source} has ended: see what it wrote above")
        self.rounds.append([Measured(**found) for found in json.loads(answer)["found"]])

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def milliseconds(rounds: Sequence[Sequence[Measured]], cell: int) -> float:
    return 1e3 * median(seconds for found in rounds for seconds in found[cell].seconds)


def table(names: Sequence[str], rounds: Sequence[Sequence[Sequence[Measured]]]) -> str:
    """Markdown: a line per strategy and context, a column per version, and the first over the last."""
    head = ["strategy", "context", "nodes", "depth", *names, *(["ratio"] if len(names) > 1 else [])]
    lines = ["| " + " | ".join(head) + " |", "| --- |" + " ---: |" * (len(head) - 1)]
    for cell, one in enumerate(rounds[-1][0]):
        times = [milliseconds(own, cell) for own in rounds]
        row = [one.strategy, str(one.context), f"{one.nodes:.1f}", f"{one.depth:.1f}", *(f"{ms:.2f}" for ms in times)]
        lines.append("| " + " | ".join([*row, *([f"{times[0] / times[-1]:.2f}"] if len(names) > 1 else [])]) + " |")
    return "\n".join(lines)


def page(command: str, draft: str, result: str) -> str:
    """The table and where it comes from."""
    origin = provenance(command)
    machine = origin["machine"]
    return "\n\n".join(
        [
            "# What a draft model's trees cost",
            f"{machine['cpu']}, {machine['cores']} cores; commit {origin['commit']}, {origin['date']}",
            f"    {command}",
            f"Draft model {draft}. Milliseconds per tree of at most {NODES} nodes, median of {ROUNDS} rounds of "
            f"{TREES} trees in which the versions took turns; batch 1. Drawn drafts at temperature 1, others at 0.",
            result,
        ]
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.drafters.levels", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--draft", default="parlay-mini-draft", metavar="MODEL", help="the draft model")
    parser.add_argument("--source", nargs="+", type=Path, default=[Path("src")], help="folders that hold `parlay`")
    parser.add_argument("--names", nargs="+", help="what the versions are called in the table")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the page there too")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.draft)
        return
    versions = [Version(source, options.draft) for source in options.source]
    for _ in range(options.rounds):
        for version in versions:
            version.measure()
    for version in versions:
        version.close()
    names = options.names or [str(source) for source in options.source]
    draft = Path(options.draft).name
    command = f"python -m benchmarks.drafters.levels --draft {draft} --source {' '.join(names)}"
    result = page(command, draft, table(names, [version.rounds for version in versions])) + "\n"
    print(result)
    if options.write:
        options.write.write_text(result, encoding="utf-8")


if __name__ == "__main__":
    main()
