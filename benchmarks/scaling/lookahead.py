"""Command line: the scaling law of lookahead decoding (Fu et al. 2024, arXiv:2402.02057, section 4) on real text.

The paper's claim: with n-grams of one length and as many guesses as columns, the number of steps falls linearly in the
logarithm of the work per step. Here the work is the rows of a forward, counted, not timed; the text is the same at
every size, because the strategy is exact. Only tokens before the first verbatim loop count, and only steps after
prefill. Each size runs under the ``fixed`` policy, so that nothing is saved that does not pay.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.options import add_threads_flag
from benchmarks.scaling.fit import Line, fit
from benchmarks.setup import FULL, KINDS, Setup
from parlay import models
from parlay.bench.loops import first_loop
from parlay.bench.prepare import first_ids
from parlay.bench.provenance import provenance
from parlay.bench.wave import Ids
from parlay.drafters.resources import Resources
from parlay.engine import Engine, Limits
from parlay.llm import LLM
from parlay.models.fetch.resolving import resolve
from parlay.models.loading import load_tokenizer
from parlay.strategies.built import RunnerCache, StrategyCache
from parlay.system import threads
from parlay.types import NoiseKey, Request, Runner, SamplingParams, Strategy

SIZES = (0, 1, 2, 4, 8, 16, 32, 64)
SHORTEST = 16
"""Fewest tokens before a loop for a text to count."""


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt decoded at one size: tokens before the loop, the steps they took, and the rows of these steps."""

    size: int
    kind: str
    prompt: int
    tokens: int
    steps: float
    rows: float


@dataclass(frozen=True, slots=True)
class Point:
    """All prompts at one size."""

    size: int
    rows: float
    tokens_per_step: float

    @property
    def steps(self) -> float:
        """Steps for 100 tokens."""
        return 100 / self.tokens_per_step


class RowCount:
    """Keeps the rows of every forward; a price of nothing, which no fixed budget asks for."""

    revision = 0

    def __init__(self) -> None:
        self.rows: list[int] = []

    def forward(self, rows: int, context: int) -> float:
        return 0.0

    def record(self, rows: int, context: int, seconds: float) -> None:
        self.rows.append(rows)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options of the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling.lookahead", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where rows, table and plot go")
    parser.add_argument("--data", type=Path, metavar="DIR", help="published sets of prompts; without it, built-in ones")
    parser.add_argument("--model", default="parlay-mini", help="model (default: parlay-mini)")
    parser.add_argument("--prompts", type=int, default=3, help="prompts of each kind (default: 3)")
    parser.add_argument("--tokens", type=int, default=128, help="longest text (default: 128)")
    parser.add_argument("--ngram", type=int, default=5, help="N, the same at every size (default: 5)")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, metavar="W", help="W = G; 0: plain decoding")
    parser.add_argument("--copy", action="store_true", help="n-grams of prompt and output, too")
    add_threads_flag(parser)
    parser.add_argument("--no-plot", action="store_true", help="rows and table only; needs no matplotlib")
    return parser.parse_args(arguments)


def main() -> int:
    """Measure, and write ``lookahead.jsonl``, ``lookahead.md`` and ``lookahead.png``."""
    options = parse()
    if not options.no_plot and not plots():
        print("benchmarks.scaling: plots need matplotlib: pip install 'parlay[plot]', or --no-plot", file=sys.stderr)
        return 1
    threads.use(options.threads)
    runner = models.load(options.model)
    prompts = drawn(options)
    rows: list[Row] = []
    for size in sorted(set(options.sizes)):
        rows += measure(runner, options, prompts, size)
        print(f"W = G = {size}: {total(rows, size)}", flush=True)
    write(options, rows)
    return 0


def plots() -> bool:
    """Whether there is anything to plot with."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def measure(runner: Runner, options: argparse.Namespace, prompts: Mapping[str, Sequence[Ids]], size: int) -> list[Row]:
    """Every prompt at one size, one after the other."""
    tokenizer = load_tokenizer(resolve(options.model))
    counter = RowCount()
    engine = Engine(runner, counter, Limits(max_draft_rows=1 << 20))
    resources = Resources(runner.spec.vocab_size, RunnerCache(models.load), tokenizer=tokenizer)
    strategy = StrategyCache(resources, counter).get(spec(options, size))
    rows: list[Row] = []
    for kind, number, ids in ((kind, at, ids) for kind, own in prompts.items() for at, ids in enumerate(own)):
        steps, end = decode(engine, counter, strategy, ids, options.tokens)
        if end >= SHORTEST:
            rows.append(before(steps, end, Row(size, kind, number, 0, 0, 0)))
    return rows


def drawn(options: argparse.Namespace) -> dict[str, list[Ids]]:
    """The prompts of each kind as ids."""
    setup = Setup(FULL, options.data, options.out)
    with LLM(options.model, strategy="none") as llm:
        return {kind: [first_ids(llm, item) for item in setup.drawn(kind, options.prompts).items] for kind in KINDS}


def spec(options: argparse.Namespace, size: int) -> str:
    """The strategy: every guess of the pool is verified, whatever it costs."""
    copy = str(options.copy).lower()
    return f"lookahead:window={size},ngram={options.ngram},guesses={size},copy={copy},k=1024,policy=fixed"


def decode(
    engine: Engine, counter: RowCount, strategy: Strategy, prompt: tuple[int, ...], most: int
) -> tuple[list[tuple[int, int]], int]:
    """Committed tokens and rows of every step, and how many tokens come before the first loop."""
    params = SamplingParams(temperature=0.0, max_tokens=most)
    stops = frozenset(engine.runner.spec.eos_ids)
    engine.add(Request(id="r", prompt=prompt, params=params, key=NoiseKey(0), stop_ids=stops), strategy)
    output: list[int] = []
    steps: list[tuple[int, int]] = []
    while not engine.idle:
        for event in engine.step():
            output += [one.token for one in event.committed]
            steps.append((len(event.committed), counter.rows[-1]))
    return steps, first_loop(output)


def before(steps: Sequence[tuple[int, int]], end: int, of: Row) -> Row:
    """Tokens, steps and rows up to token ``end``; of the step that crosses it, the part before. The first is prefill's.

    ``steps`` are committed tokens and rows; ``of`` names the size and the prompt.
    """
    done, taken, rows = steps[0][0], 0.0, 0.0
    for committed, count in steps[1:]:
        part = min(1.0, max(0, end - done) / committed) if committed else 0.0
        taken += part
        rows += part * count
        done += committed
    return replace(of, tokens=end - steps[0][0], steps=taken, rows=rows)


def total(rows: Iterable[Row], size: int) -> Point:
    """The sum over all prompts of one size."""
    chosen = [row for row in rows if row.size == size]
    steps = sum(row.steps for row in chosen)
    if not steps:
        raise SystemExit("benchmarks.scaling: no text has enough tokens before its first loop: ask for more --prompts")
    return Point(size, sum(row.rows for row in chosen) / steps, sum(row.tokens for row in chosen) / steps)


def write(options: argparse.Namespace, rows: Sequence[Row]) -> None:
    """Rows, table, plot."""
    options.out.mkdir(parents=True, exist_ok=True)
    words = [f"--prompts {options.prompts} --tokens {options.tokens} --ngram {options.ngram}"]
    words += ["--copy"] if options.copy else []
    header = provenance(" ".join(["python -m benchmarks.scaling.lookahead", *words]))
    lines = [json.dumps({"provenance": header}), *(json.dumps(asdict(row)) for row in rows)]
    (options.out / "lookahead.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    points = [total(rows, size) for size in sorted({row.size for row in rows})]
    line = fit([(point.rows, point.steps) for point in points])
    (options.out / "lookahead.md").write_text(table(rows, points, line, options), encoding="utf-8")
    if not options.no_plot:
        plot(points, line, options.out / "lookahead.png")
    print(f"wrote {options.out / 'lookahead.jsonl'} and what is made of it")


def table(rows: Sequence[Row], points: Sequence[Point], line: Line | None, options: argparse.Namespace) -> str:
    """In Markdown: all texts, then tokens per step by kind of text."""
    kinds = [kind for kind in KINDS if any(row.kind == kind for row in rows)]
    head = ["W = G", "rows per step", "steps per 100 tokens", "tokens per step", *kinds]
    lines = ["| " + " | ".join(head) + " |", "|" + "---:|" * len(head)]
    for point in points:
        cells = [str(point.size), f"{point.rows:.1f}", f"{point.steps:.1f}", f"{point.tokens_per_step:.2f}"]
        cells += [by_kind([row for row in rows if (row.kind, row.size) == (kind, point.size)]) for kind in kinds]
        lines.append("| " + " | ".join(cells) + " |")
    texts = len({(row.kind, row.prompt) for row in rows})
    pool = "window, prompt and output" if options.copy else "the window alone"
    about = f"{options.model}, {texts} texts of up to {options.tokens} tokens, N = {options.ngram}, n-grams of {pool}."
    law = f"Steps per 100 tokens = {line.words('rows')}." if line else "Too few sizes for a line."
    return "\n".join(["# Lookahead decoding: steps by rows per step", "", about, "", *lines, "", law, ""])


def by_kind(rows: Sequence[Row]) -> str:
    """Tokens per step of some texts."""
    steps = sum(row.steps for row in rows)
    return f"{sum(row.tokens for row in rows) / steps:.2f}" if steps else ""


def plot(points: Sequence[Point], line: Line | None, path: Path) -> None:
    """Steps per 100 tokens over rows per step, the latter on a logarithmic axis, and the line fitted to them."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    xs = [point.rows for point in points]
    axes.plot(xs, [point.steps for point in points], "o", label="measured")
    if line is not None:
        axes.plot(xs, [line.at(x) for x in xs], "-", label=line.words("rows"))
    for point in points:
        axes.annotate(f"{point.size}", (point.rows, point.steps), textcoords="offset points", xytext=(5, 5))
    axes.set_xscale("log", base=2)
    axes.set_xlabel("rows per step (labels: W = G)")
    axes.set_ylabel("steps per 100 tokens")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    sys.exit(main())
