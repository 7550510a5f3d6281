"""`parlay plan --devices`: compares ways to use several devices for given traffic, as a table with reasons."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, replace

from parlay.cli.plan_devices_page import BATCH, NO_LIMIT, Comparison, SplitPlan, command, page
from parlay.cli.plan_machine import Ground, check_flags, ground_of, models_of
from parlay.cli.simulate import add_goal_flags, add_traffic_flags, check_traffic_flags
from parlay.options import UsageError
from parlay.simulate.drafting import PLAIN, Drafting
from parlay.simulate.fleet import Setup, simulate
from parlay.simulate.jobs import ReplicaLimits
from parlay.simulate.policies import Fleet
from parlay.simulate.report import Goals, figures
from parlay.simulate.splits import Link, SplitSteps, StepParts, beside, memory_of, splits
from parlay.simulate.traffic import Traffic, within

_MOST = 1024
_ASSUMED = Link(25e9, 10e-6, "25 GB/s and 10 us, which is assumed: say --link")
MEMORY = "shared memory"


def add_devices_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags for the number of devices, their link, and the traffic."""
    group = parser.add_argument_group(
        "devices", "find the split of the model over several devices that serves traffic best"
    )
    group.add_argument(
        "--devices", metavar="N", help="number of devices like this one; auto: the GPUs of this machine; needs traffic"
    )
    group.add_argument(
        "--link",
        metavar="GB/S:US",
        help="bandwidth and latency (microseconds) between two devices; with --device and --memory, between the host's "
        "memory and the device (default: calibrated between two processes of this machine; for a named device 25:10, "
        "an assumption)",
    )
    add_goal_flags(group)
    add_traffic_flags(parser)


def run(options: argparse.Namespace) -> int:
    """Print the table, or JSON. Raises ValueError for flags that contradict each other, and if no split fits."""
    count, given_link = _devices(options.devices), None if options.link is None else read_link(options.link)
    check_traffic_flags(options)
    check_flags(options)
    from parlay.bench.plan.shapes import read_model
    from parlay.cli.simulate_inputs import traffic_of

    ground = ground_of(options)
    link = given_link or measured_link(ground) or _ASSUMED
    traffic = within(traffic_of(options), read_model(options.model).max_context, NO_LIMIT, options.too_long)
    plans = _plans(options, ground, count, link, traffic)
    fitting = [plan for plan in plans if plan.figures is not None]
    if not fitting:
        raise ValueError(
            f"{options.model} does not fit on {count} devices of {(ground.memory or 0) / 1e9:,.0f} GB: use more "
            "devices, or a smaller type with --quantize"
        )
    best = max(fitting, key=_rank)
    strategy = str(options.strategy[0]) if options.strategy else ""
    words = command(options.model, best.split, strategy, options.draft_model)
    if options.json:
        rows = [{**asdict(plan), "devices": plan.split.devices, "best": plan is best} for plan in plans]
        document = {"model": options.model, "modelled": True, "link": asdict(link), "splits": rows}
        print(json.dumps(document | {"command": words}, indent=2))
    else:
        print(page(Comparison(options.model, ground.source, traffic, link, plans, best, words)))
    return 0


def _devices(text: str) -> int:
    if text == "auto":
        import torch

        count = torch.cuda.device_count()
        if not count:
            raise UsageError("--devices auto needs a GPU in this machine: give the number of devices instead")
        return count
    if not text.isdecimal() or not 1 <= int(text) <= _MOST:
        raise UsageError(f"--devices must be a whole number between 1 and {_MOST}, or auto, got {text}")
    return int(text)


def measured_link(ground: Ground) -> Link | None:
    """The link between two processes on this machine; None if it was not calibrated."""
    found = ground.links.get(MEMORY)
    if found is None:
        return None
    bandwidth, latency = found["bandwidth"], found["latency"]
    source = f"{bandwidth / 1e9:.1f} GB/s and {1e6 * latency:.1f} us, measured between two processes here by {MEMORY}"
    return Link(bandwidth, latency, source)


def read_link(text: str) -> Link:
    """Parse --link. Raises UsageError for an invalid one."""
    first, _, second = text.partition(":")
    try:
        bandwidth, latency = float(first), float(second or 10)
    except ValueError:
        bandwidth = latency = -1.0
    if not (0 < bandwidth < 1e6 and 0 <= latency < 1e9):
        raise UsageError(f"--link must be gigabytes per second and microseconds, as in 64:10, got {text}")
    return Link(1e9 * bandwidth, 1e-6 * latency, f"{bandwidth:g} GB/s and {latency:g} us, as --link says")


def _plans(options: argparse.Namespace, ground: Ground, count: int, link: Link, traffic: Traffic) -> list[SplitPlan]:
    from parlay.bench.plan.report import USABLE

    models = models_of(options, ground)
    shape = models.target
    drafting = _drafting(options, ground, traffic)
    drafter = models.draft if drafting.nodes and options.draft_model else None
    usable = None if ground.memory is None else USABLE * ground.memory
    prompt, output = traffic.mean_prompt, traffic.mean_output
    longest = max(each.prompt + each.output for each in traffic.arrivals)
    found = []
    for split in splits(count, shape, drafter=drafter is not None):
        memory = memory_of(shape, split, usable, drafter)
        steps = SplitSteps(ground.machine, shape, split, link)
        keys, rows = prompt + output / 2, min(512, round(prompt))
        one, many = (steps.parts(batch, batch, batch, batch * keys, batch * keys) for batch in (1, BATCH))
        chunk = steps.parts(1, rows, 1, rows, rows * rows)
        times = prompt / rows
        read = StepParts(times * chunk.compute, times * chunk.link)
        own = None
        if memory.cache_tokens >= longest:
            apart = beside(drafting.seconds, steps, link)
            setup = Setup(
                cost=steps,
                limits=ReplicaLimits(cache_tokens=memory.cache_tokens),
                drafting=replace(drafting, seconds=apart) if split.drafter else drafting,
                fleet=Fleet(replicas=split.replicas),
                seed=options.seed,
            )
            own = figures(simulate(traffic, setup), Goals(options.ttft_goal, options.tpot_goal))
        found.append(SplitPlan(split, memory, one, many, read, own))
    return found


def _drafting(options: argparse.Namespace, ground: Ground, traffic: Traffic) -> Drafting:
    """The first named strategy, else plain decoding."""
    from parlay.bench.plan.strategies import read_acceptance
    from parlay.cli.simulate_inputs import Ranks, drafting_of, measured_ranks

    if not options.strategy:
        return PLAIN
    if len(options.strategy) > 1:
        raise UsageError("--devices needs exactly one strategy: name it with --strategy")
    spec = options.strategy[0]

    def ranks_of(names: Sequence[str], label: str) -> Ranks:
        if options.acceptance:
            return {"": read_acceptance(options.acceptance).of(spec)}
        return measured_ranks(traffic, names, label)

    return drafting_of(spec, ground.machine, models_of(options, ground), ranks_of)


def _rank(plan: SplitPlan) -> tuple[bool, float, float, int]:
    """A sort key, larger for better plans: all requests finish, more are in time, shorter 90th percentile, fewer
    ranks."""
    own = plan.figures
    assert own is not None
    wait = own.whole.p90 if own.whole is not None else float("inf")
    return not own.unfinished, own.in_time or 0.0, -wait, -plan.split.ranks
