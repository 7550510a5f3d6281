"""`parlay simulate`: predicts what a server or a fleet would do under given traffic. No model runs; all numbers come
from cost models."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from parlay.cli import simulate_page
from parlay.cli.flags import add_option_flags, options_from, strategy, whole
from parlay.cli.plan_machine import add_machine_flags, check_flags, ground_of, models_of
from parlay.options import UsageError, nearest, override
from parlay.simulate.jobs import ReplicaLimits
from parlay.simulate.mixtures import KINDS, read_mixture
from parlay.simulate.policies import Autoscaling, Failures, Fleet, read_range
from parlay.simulate.routing import ROUTERS

if TYPE_CHECKING:
    from parlay.cli.simulate_inputs import Server
    from parlay.simulate.fleet import Setup
    from parlay.simulate.report import Figures
    from parlay.simulate.traffic import Traffic

_MOST, _MOST_REPLICAS, _MOST_REQUESTS = 1e9, 100_000, 10_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_traffic_flags(parser)
    add_machine_flags(parser)
    _add_server_flags(parser)
    _add_fleet_flags(parser)
    _add_strategy_flags(parser)
    _add_result_flags(parser)


def add_traffic_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags for the requests and their arrival."""
    group = parser.add_argument_group("traffic", "a file of requests, or a generated mixture")
    group.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="times and lengths: CSV or JSON lines with time, prompt_tokens, output_tokens, maybe kind and session; "
        "Azure's public traces; the log of parlay serve --log-format json; or recorded traffic, with --rate",
    )
    group.add_argument(
        "--mixture",
        metavar="KIND[=SHARE],...",
        help=f"generate requests of these kinds: {', '.join(KINDS)}",
    )
    group.add_argument("--rate", type=float, metavar="X", help="mean number of requests per second")
    group.add_argument(
        "--duration", type=float, default=3600.0, metavar="SECONDS", help="length of a mixture (default: 3600)"
    )
    group.add_argument(
        "--daily", type=float, default=0.0, metavar="X", help="how far a mixture's rate swings over a day, 0 to 1"
    )
    group.add_argument("--requests", type=whole, metavar="N", help="use only the first N requests")
    group.add_argument(
        "--speedup", type=float, default=1.0, metavar="X", help="let requests arrive X times as fast (default: 1)"
    )
    group.add_argument("--kind", metavar="NAME", help="kind of work of requests, if the trace names none")
    group.add_argument(
        "--too-long",
        choices=("refuse", "drop", "cut"),
        default="refuse",
        help="what to do with requests that are longer than the context (default: refuse)",
    )
    group.add_argument("--seed", type=whole, default=0, metavar="N", help="seed of the random numbers (default: 0)")


def _add_server_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    add_option_flags(group, ReplicaLimits, ["max_num_seqs", "max_num_batched_tokens"])
    group.add_argument("--max-model-len", type=whole, metavar="N", help="most tokens of prompt and output together")
    group.add_argument(
        "--memory",
        metavar="SIZE",
        help="room for cached keys and values of each replica, as in 2GiB (default: what the device's memory leaves)",
    )
    group.add_argument(
        "--learned-costs",
        action="store_true",
        help="use the costs of steps that this machine has learned for the model (parlay router show)",
    )


def _add_fleet_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("fleet")
    group.add_argument("--replicas", default="1", metavar="N,...", help="number of servers (default: 1)")
    group.add_argument(
        "--routing",
        default="least-loaded",
        metavar="NAME,...",
        help="least-loaded (default), round-robin, two-choices or prefix-affinity",
    )
    group.add_argument("--autoscale", metavar="MIN:MAX", help="start and stop replicas by their unfinished requests")
    scaling = ("target_ongoing", "scale_interval", "up_delay", "down_delay", "start_delay")
    add_option_flags(group, Autoscaling, scaling)
    add_option_flags(parser.add_argument_group("failures"), Failures)


def _add_strategy_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("strategies")
    group.add_argument(
        "--strategy",
        type=strategy,
        action="append",
        metavar="NAME[:KEY=VALUE,...]",
        help="decoding strategy; may be given several times, to compare them (default: none)",
    )
    group.add_argument(
        "--acceptance",
        action="append",
        default=[],
        metavar="[KIND=]RATE",
        help="probability that a drafted token is right, for all requests or those of a kind; may be given several "
        "times (default: Parlay's own measurements, by kind of work)",
    )
    group.add_argument(
        "--bench-rows", type=Path, metavar="FILE", help="take the acceptance from rows of parlay bench, by workload"
    )


def add_goal_flags(group: argparse._ActionsContainer) -> None:
    """Add the flags for when a request counts as in time."""
    group.add_argument("--ttft-goal", type=float, metavar="SECONDS", help="goal for a request's time to first token")
    group.add_argument(
        "--tpot-goal",
        type=float,
        metavar="SECONDS",
        help="goal for the time of each later token; a request must meet both",
    )


def _add_result_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("results")
    add_goal_flags(group)
    group.add_argument("--price", type=float, metavar="X", help="price of a replica, in dollars per hour")
    group.add_argument("--watts", type=float, metavar="X", help="power of a replica while it decodes, in watts")
    group.add_argument(
        "--idle-watts",
        type=float,
        default=0.0,
        metavar="X",
        help="power of a replica while it is idle, in watts (default: 0)",
    )
    group.add_argument("--json", action="store_true", help="print one JSON object")


def run(options: argparse.Namespace) -> int:
    check_traffic_flags(options)
    fleets = _fleets(options)
    _check_numbers(options)
    check_flags(options)
    from parlay.cli.simulate_inputs import drafting_of, prices_of, ranks_by_flags, server_of, traffic_of
    from parlay.simulate.fleet import Setup, simulate
    from parlay.simulate.report import Goals, figures
    from parlay.simulate.traffic import within
    from parlay.system import threads

    threads.settle(options.threads)
    ground = ground_of(options)
    models = models_of(options, ground)
    server = server_of(options, ground, models)
    traffic = within(traffic_of(options), server.context, server.limits.cache_tokens, options.too_long)
    ranks_of = partial(ranks_by_flags, options, traffic)
    draftings = [drafting_of(spec, server.machine, models, ranks_of) for spec in options.strategy or [None]]
    goals, prices = Goals(options.ttft_goal, options.tpot_goal), prices_of(options, server)
    found = []
    for fleet, drafting in product(fleets, draftings):
        setup = Setup(cost=server.cost, limits=server.limits, drafting=drafting, seed=options.seed, fleet=fleet)
        found.append((setup, figures(simulate(traffic, setup), goals, prices)))
    if options.json:
        print(json.dumps(_document(options.model, traffic, server, found), indent=2))
    else:
        print(simulate_page.page(options.model, traffic, server, found, prices))
    return 0


def check_traffic_flags(options: argparse.Namespace) -> None:
    """Raises UsageError for traffic flags that contradict each other."""
    if (options.trace is None) == (options.mixture is None):
        raise UsageError("no requests are given: add --trace FILE, or --mixture, as in chat=3,code=1, with --rate")
    if options.trace is not None and not options.trace.exists():  # before a model is fetched or measured
        raise UsageError(f"can't read {options.trace}: No such file or directory")
    if options.mixture is not None:
        read_mixture(options.mixture)
        if options.rate is None:
            raise UsageError("--mixture needs --rate, the mean number of requests per second: add it")
    for name in ("rate", "duration", "speedup", "requests"):
        number = vars(options)[name]
        if number is not None and not 0 < number < _MOST:
            raise UsageError(f"--{name} must be above 0 and below {_MOST:g}, got {number:g}")
    if options.mixture is not None and options.rate * options.duration > _MOST_REQUESTS:
        raise UsageError(
            f"--rate {options.rate:g} and --duration {options.duration:g} make {options.rate * options.duration:.2g} "
            f"requests: at most {_MOST_REQUESTS:,} are simulated"
        )
    if not 0 <= options.daily <= 1:
        raise UsageError(f"--daily must be between 0 and 1, got {options.daily:g}")


def _check_numbers(options: argparse.Namespace) -> None:
    for name in ("ttft_goal", "tpot_goal", "price", "watts", "idle_watts", "max_model_len"):
        number = vars(options)[name]
        if number is not None and not (0 <= number < _MOST if name == "idle_watts" else 0 < number < _MOST):
            raise UsageError(f"--{name.replace('_', '-')} must be above 0 and below {_MOST:g}, got {number:g}")


def _fleets(options: argparse.Namespace) -> list[Fleet]:
    """The fleets to compare. Raises UsageError for no replicas, an unknown policy, or a value out of range."""
    routings = [part.strip() for part in options.routing.split(",")]
    for routing in routings:
        if routing not in ROUTERS:
            raise UsageError(f"--routing {routing}: {nearest(routing, ROUTERS)}")
    failures = options_from(Failures, options)
    scaling = None
    if options.autoscale is not None:
        low, high = read_range(options.autoscale)
        scaling = override(options_from(Autoscaling, options), min_replicas=low, max_replicas=high)
        sizes = [low]
    else:
        sizes = [int(part) if part.strip().isdecimal() else 0 for part in options.replicas.split(",")]
    if not all(1 <= size <= _MOST_REPLICAS for size in sizes):
        raise UsageError(
            f"--replicas must be whole numbers between 1 and {_MOST_REPLICAS}, joined by commas, got {options.replicas}"
        )
    return [
        Fleet(replicas=size, routing=routing, autoscaling=scaling, failures=failures if failures.any else None)
        for size, routing in product(sizes, routings)
    ]


def _document(
    model: str, traffic: Traffic, server: Server, found: Sequence[tuple[Setup, Figures]]
) -> dict[str, object]:
    return {
        "model": model,
        "modelled": True,
        "traffic": {
            "name": traffic.name,
            "requests": len(traffic.arrivals),
            "seconds": traffic.span,
            "kinds": list(traffic.kinds),
            "notes": list(traffic.notes),
        },
        "server": {
            "source": server.source,
            "context": server.context,
            **asdict(server.limits),
        },
        "fleets": [
            {
                **asdict(setup.fleet),
                "strategy": setup.drafting.name,
                "acceptance": dict(setup.drafting.ranks),
                **asdict(each),
            }
            for setup, each in found
        ],
    }
