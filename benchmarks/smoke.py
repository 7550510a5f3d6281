"""Checks whether a strategy has become slower, by its paired ratios to plain decoding on the built-in workloads.

The bounds in `smoke.json` are well below what an idle machine reaches, so a ratio below its bound is a fault and not
noise. Ratios hardly depend on the machine; speeds do, and are not checked.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.commands import one_line_errors
from benchmarks.options import add_threads_flag, command_parser
from parlay.bench import workloads
from parlay.bench.provenance import provenance
from parlay.bench.records import PLAIN, Results
from parlay.bench.runner import Bench, BenchPlan
from parlay.bench.summary import CellSummary, summarise
from parlay.bench.table import table
from parlay.llm import LLM
from parlay.system import threads

BOUNDS = Path(__file__).with_name("smoke.json")


@dataclass(frozen=True, slots=True)
class Bounds:
    """The plan of the measurement, and the least ratio by workload and strategy."""

    plan: BenchPlan
    least: dict[str, dict[str, float]]

    @staticmethod
    def read(path: Path) -> Bounds:
        settings: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        least: dict[str, dict[str, float]] = settings["bounds"]
        strategies = dict.fromkeys(name for own in least.values() for name in own)
        plan = BenchPlan(
            model=settings["model"],
            strategies=tuple(strategies),
            workloads=tuple(workloads.load(list(least), settings["prompts"])),
            rounds=settings["rounds"],
            max_tokens=settings["max_tokens"],
        )
        return Bounds(plan, least)


def failures(bounds: Bounds, summaries: Sequence[CellSummary]) -> list[str]:
    """Return a line for each cell that did not run, whose text differs, or whose median ratio is below its bound."""
    found: list[str] = []
    for each in summaries:
        name = f"{each.cell.strategy} on {each.cell.workload}"
        least = bounds.least[each.cell.workload].get(each.cell.strategy)
        if each.error or each.ratio is None:
            found.append(f"{name} was not measured: {each.error or each.note}")
        elif each.same is not None and each.same[0] < each.same[1]:
            found.append(f"{name}: the text differs, {each.same[0]} of {each.same[1]} are the same")
        elif least is not None and each.cell.strategy != PLAIN and each.ratio.median < least:
            found.append(f"{name}: {each.ratio.median:.2f} times {PLAIN}, at least {least:.2f} is wanted")
    return found


@one_line_errors("smoke")
def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and judge. Return 1 if anything failed."""
    parser = command_parser("smoke", __doc__)
    parser.add_argument("--bounds", type=Path, default=BOUNDS, metavar="FILE", help="default: smoke.json beside this")
    add_threads_flag(parser)
    options = parser.parse_args(arguments)
    threads.use(options.threads)
    bounds = Bounds.read(options.bounds)
    with tempfile.TemporaryDirectory() as folder, LLM(bounds.plan.model, router_memory="off") as llm:
        results = Results(Path(folder) / "smoke.jsonl", provenance("python -m benchmarks.smoke"))
        Bench(llm, bounds.plan, results).run()
    summaries = summarise(results.rows, bounds.plan.cells())
    print(table(summaries))
    faults = failures(bounds, summaries)
    print("\n".join(["", *faults]) if faults else "\nno ratio is below its bound, every text is the same")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
