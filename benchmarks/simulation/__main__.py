"""Compares `parlay simulate` with the engine in virtual time, the engine in this process, and a server; simulates a
fleet.

`virtual`: the real scheduler with simulated steps, five servers at four loads. `process`: the engine with a model in
one thread, with CPU time as the clock; the simulator gets the means of that run's own steps. `server`: `parlay serve`
with CPU time as the clock; the simulator gets measurements of the machine and of HTTP made beforehand. `fleet`: a
thousand replicas and a day of traffic.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.commands import begin, one_line_errors, open_results, write_page
from benchmarks.options import add_run_flags, command_parser
from benchmarks.simulation import cases
from benchmarks.simulation.report import report
from benchmarks.simulation.virtual import run as run_engine
from parlay.bench.host import busy_cores
from parlay.bench.records import Cell, Results, Row
from parlay.simulate.costs import MeasuredSteps, RooflineSteps, StepCost
from parlay.simulate.fleet import Outcome, Setup, simulate
from parlay.simulate.jobs import ReplicaLimits
from parlay.simulate.mixtures import mixture
from parlay.simulate.policies import Autoscaling, Failures, Fleet

logger = logging.getLogger("benchmarks")
PARTS = ("virtual", "process", "server", "fleet")
DAY = 86_400.0
_REAL_LOADS = (0.5, 0.9)
_REAL_REQUESTS = 60
_TAIL_REQUESTS = 200
"""The number of requests for a stable 90th percentile. With 60, a single prompt chunk next to a short answer could
double it."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the parts that have no rows yet, and write the page."""
    options = parse(arguments)
    begin(options)
    with one_line_errors("simulation"):
        results = open_results(options, "simulation", "python -m benchmarks.simulation")
        for part in options.only:
            if not any(row.cell.part == part for row in results.rows):
                _PARTS[part](options, results)
    write_page(results.path, report(results))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command's options."""
    parser = command_parser("simulation", __doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--model", default="smollm2-135m", help="model of process and server (default: smollm2-135m)")
    parser.add_argument("--calibration", type=Path, metavar="FILE", help="calibration of this machine, for server")
    add_run_flags(parser)
    return parser.parse_args(arguments)


def virtual(options: argparse.Namespace, results: Results) -> None:
    """Measure each server at each load."""
    count = 60 if options.quick else 500
    for server in cases.SERVERS:
        sizes = cases.lengths(count, 1)
        full = cases.capacity(server, sizes)
        for load in cases.LOADS:
            traffic = cases.arrivals(sizes, load * full, 1)
            began = time.perf_counter()
            real = run_engine(traffic.arrivals, server.cost, server.limits, server.drafting)
            ended = time.perf_counter()
            predicted = cases.simulated(server, traffic)
            took = {"engine seconds": ended - began, "simulator seconds": time.perf_counter() - ended}
            cell = Cell(part="virtual", model=server.name, strategy=server.drafting.name, workload=f"load {load:g}")
            _add(results, cell, real, predicted, took)


def _add(results: Results, cell: Cell, real: Outcome, predicted: Outcome, more: dict[str, float]) -> None:
    differences = {f"difference {name}": value for name, value in cases.differences(real, predicted).items()}
    values = {**cases.shown(real), **differences, **more, "preemptions": float(real.preemptions)}
    results.add([Row(cell=cell, requests=real.requests, tokens=real.tokens, seconds=real.span, values=values)])
    worst = max(differences.values(), key=abs)
    logger.info("%s, %s, %s: largest difference %+.2f %%", cell.part, cell.model, cell.workload, 100 * worst)


def process(options: argparse.Namespace, results: Results) -> None:
    """Measure the engine with a model, and simulate it with the means of its own steps."""
    from benchmarks.simulation.real import InProcess
    from parlay import LLM

    with LLM(options.model, strategy="none", router_memory="off", threads=1) as llm:
        engine = InProcess(llm.runner)
        limits = ReplicaLimits(cache_tokens=llm.runner.capacity())
        few = _real_sizes(options, _REAL_REQUESTS)
        together = [arrival._replace(seconds=0.0) for arrival in cases.arrivals(few, 1.0, 1).arrivals]
        full = len(few) / engine.run(together, "warm").span
        sizes = _real_sizes(options, _TAIL_REQUESTS)
        for load in _REAL_LOADS:
            traffic = cases.arrivals(sizes, load * full, 1)
            busy = busy_cores()
            real = engine.run(traffic.arrivals, f"load {load}")
            predicted = simulate(traffic, Setup(cost=MeasuredSteps(engine.steps), limits=limits))
            cell = Cell(part="process", model=options.model, strategy="none", workload=f"load {load:g}")
            _add(results, cell, real, predicted, {"busy cores": round(busy, 1), "steps": float(len(engine.steps))})


def _real_sizes(options: argparse.Namespace, count: int) -> list[tuple[int, int]]:
    """Return requests' sizes, half as long as usual, so that a run takes minutes."""
    count = 8 if options.quick else count
    return [
        (max(8, min(1000, prompt // 2)), max(8, min(200, output // 2))) for prompt, output in cases.lengths(count, 2)
    ]


def server(options: argparse.Namespace, results: Results) -> None:
    """Measure `parlay serve`, and simulate it with a calibration of the machine."""
    asyncio.run(_server(options, results))


async def _server(options: argparse.Namespace, results: Results) -> None:
    from benchmarks.simulation.real import measure, over_http, with_http

    steps, vocabulary = _calibrated(options)
    sizes = _real_sizes(options, _REAL_REQUESTS)
    with over_http(options.model, 2048) as (send, close, clock):
        warm = cases.arrivals(sizes[:8], 100.0, 3)
        await measure(warm.arrivals, send, vocabulary, "warm", clock)
        cost = await with_http(steps, send, vocabulary, clock)
        full = cases.capacity(cases.Server("calibrated", cost), sizes)
        for load in _REAL_LOADS:
            traffic = cases.arrivals(sizes, load * full, 1)
            busy, began = busy_cores(), clock.computed()
            real, spoken = await measure(traffic.arrivals, send, vocabulary, f"load {load}", clock)
            real.busy = clock.computed() - began
            predicted = simulate(traffic, Setup(cost=cost))
            said = cost.token * real.tokens + cost.prompt * sum(prompt for prompt, _ in sizes)
            cell = Cell(part="server", model=options.model, strategy="none", workload=f"load {load:g}")
            more = {
                "busy cores": round(busy, 1),
                "difference of decoding": (predicted.busy - said) / (real.busy - spoken) - 1,
                "difference of http": said / spoken - 1,
                "http": spoken / real.busy,
            }
            _add(results, cell, real, predicted, more)
        await close()


def _calibrated(options: argparse.Namespace) -> tuple[StepCost, int]:
    """Return the step costs by this machine's roofline, measured now unless a file is given, and the vocabulary
    size."""
    from parlay.cli import parser_of
    from parlay.cli.plan_machine import ground_of, models_of

    words = ["--calibrate"] if options.calibration is None else ["--calibration", str(options.calibration)]
    told = parser_of("simulate").parse(["--model", options.model, "--threads", "1", *words])
    ground = ground_of(told)
    shape = models_of(told, ground).target
    return RooflineSteps(ground.machine, shape), shape.vocab_size


def fleet(options: argparse.Namespace, results: Results) -> None:
    """Simulate a day of varying traffic on a thousand replicas, also with failures and with autoscaling."""
    seconds, replicas = (600.0, 20) if options.quick else (DAY, 1000)
    rate = replicas * 0.006
    shares = {"chat": 5, "code": 3, "documents": 1, "summaries": 1}
    traffic = mixture(shares, rate=rate, seconds=seconds, seed=1, daily=0.6)
    cost = cases.large_cpu
    fleets = {
        "least-loaded": Fleet(replicas=replicas),
        "prefix-affinity, each dies once a day": Fleet(
            replicas=replicas, routing="prefix-affinity", failures=Failures(mtbf=DAY, on_failure="continue")
        ),
        "autoscaling": Fleet(
            autoscaling=Autoscaling(min_replicas=replicas // 10, max_replicas=replicas, target_ongoing=4)
        ),
    }
    for name, each in fleets.items():
        began, computed = time.perf_counter(), time.process_time()
        out = simulate(traffic, Setup(cost=cost, limits=ReplicaLimits(cache_tokens=100_000), fleet=each))
        took, computed = time.perf_counter() - began, time.process_time() - computed
        cell = Cell(part="fleet", model="14 billion parameters on a processor", strategy="none", workload=name)
        values = {
            **cases.shown(out),
            "simulator seconds": took,
            "computed seconds": computed,
            "utilisation": out.busy / out.paid,
            "deaths": out.deaths,
        }
        values |= {"unfinished": out.requests - out.finished, "mean replicas": out.paid / out.span}
        values |= {"found": out.found / max(1, out.asked)}
        results.add(
            [Row(cell=cell, requests=out.requests, tokens=out.tokens, seconds=out.span, values=values, modelled=True)]
        )
        logger.info("fleet, %s: %.0f s for %d requests", name, took, out.requests)


_PARTS = {"virtual": virtual, "process": process, "server": server, "fleet": fleet}


if __name__ == "__main__":
    main()
