"""The page of `parlay simulate`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from parlay.system.terminal import aligned

if TYPE_CHECKING:
    from parlay.cli.simulate_inputs import Server
    from parlay.simulate.fleet import Setup
    from parlay.simulate.report import Figures, Percentiles, Prices
    from parlay.simulate.traffic import Traffic

_ENOUGH = 0.99
"""The share of requests in time at which a fleet is large enough."""

_NOTHING = {"-", "0", "0.0%"}
Found = Sequence[tuple["Setup", "Figures"]]


def page(model: str, traffic: Traffic, server: Server, found: Found, prices: Prices) -> str:
    """The traffic, what the simulation is based on, tables with a line per fleet, and notes."""
    cache = "without a limit" if server.limits.cache_tokens >= 1 << 30 else f"of {server.limits.cache_tokens:,} tokens"
    header = (
        f"{model}, {traffic.name}: {len(traffic.arrivals):,} requests in {traffic.span:,.0f} s, "
        f"{traffic.mean_prompt:,.0f} prompt tokens and {traffic.mean_output:,.0f} of the answer in the mean. "
        f"Simulated; steps cost as modelled for {server.source}. Each replica has a cache {cache}."
    )
    parts = [header, _latencies(found), _costs(found)]
    if any(each.deaths or each.preemptions or each.found for _, each in found):
        parts.append(_events(found))
    notes = [*_pick(found), *traffic.notes, *_survivors(found), *_acceptance(found), *_power(prices)]
    parts += ["\n".join(lines) for lines in (_warnings(found), notes) if lines]
    return "\n\n".join(parts)


def _table(head: Sequence[str], found: Found, cells: Sequence[Sequence[str]]) -> str:
    """A line per fleet, without columns that are empty or zero."""
    kept = [at for at, column in enumerate(zip(*cells, strict=True)) if not set(column) <= _NOTHING]
    names = _names(found)
    rows = [[*names[0], *(head[at] for at in kept)]]
    rows += [[*name, *(row[at] for at in kept)] for name, row in zip(names[1:], cells, strict=True)]
    return "\n".join(f"  {line}" for line in aligned(rows, len(names[0])))


def _names(found: Found) -> list[list[str]]:
    """A header and each fleet's name: its replicas, and routing and strategy where they differ."""
    rows = [[_size(setup, each), setup.fleet.routing, setup.drafting.name] for setup, each in found]
    columns = [0, *(at for at in (1, 2) if len({row[at] for row in rows}) > 1)]
    return [[row[at] for at in columns] for row in [["replicas", "routing", "strategy"], *rows]]


def _size(setup: Setup, each: Figures) -> str:
    scaling = setup.fleet.autoscaling
    if scaling is None:
        return str(setup.fleet.replicas)
    return f"{scaling.min_replicas}-{scaling.max_replicas} (mean {each.mean_replicas:.1f})"


def _latencies(found: Found) -> str:
    head = [
        "requests/s",
        "tokens/s",
        "first p50",
        "p90",
        "p99",
        "token p50",
        "p90",
        "p99",
        "whole p50",
        "p90",
        "p99",
        "in time",
    ]
    return "seconds to the first token, for each later one in milliseconds, and for the whole answer:\n" + _table(
        head,
        found,
        [
            [
                f"{each.requests_per_second:.3g}",
                f"{each.tokens_per_second:,.1f}",
                *_three(each.first_token, 1),
                *_three(each.per_token, 1000),
                *_three(each.whole, 1),
                "-" if each.in_time is None else f"{each.in_time:.1%}",
            ]
            for _, each in found
        ],
    )


def _three(values: Percentiles | None, times: float) -> list[str]:
    if values is None:
        return ["-"] * 3
    return [_short(times * value) for value in (values.p50, values.p90, values.p99)]


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _costs(found: Found) -> str:
    head = ["utilisation", "rows a step", "dollars", "tokens/dollar", "joules", "joules/token"]
    return _table(
        head,
        found,
        [
            [
                f"{each.utilisation:.1%}",
                f"{each.batch_rows:.1f}",
                _or_dash(each.dollars, ",.2f"),
                _or_dash(each.tokens_per_dollar, ",.0f"),
                _or_dash(each.joules, ",.0f"),
                _or_dash(each.joules_per_token, ".3g"),
            ]
            for _, each in found
        ],
    )


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _events(found: Found) -> str:
    head = ["prompt found cached", "preemptions", "deaths", "requests failed over", "tokens written in vain"]
    return _table(
        head,
        found,
        [
            [
                f"{each.found:.1%}",
                f"{each.preemptions:,}",
                f"{each.deaths:,}",
                f"{each.failed_over:,}",
                f"{each.lost_tokens:,}",
            ]
            for _, each in found
        ],
    )


def _warnings(found: Found) -> list[str]:
    return [
        f"{', '.join(name)}: THE LOAD DOES NOT DRAIN: {each.unfinished:,} of {each.requests:,} requests are unfinished "
        f"{each.unfinished_after:,.0f} s after the last one came; the queue grew by {each.backlog:.3g} requests a "
        "second. Figures are of those that finished."
        for name, (_, each) in zip(_names(found)[1:], found, strict=True)
        if each.unfinished
    ]


def _pick(found: Found) -> Iterator[str]:
    """The smallest fleet that is large enough, if there are goals."""
    if found[0][1].in_time is None:
        return
    names = _names(found)[1:]
    good = [
        (each.mean_replicas, -(each.in_time or 0), name)
        for name, (_, each) in zip(names, found, strict=True)
        if (each.in_time or 0) >= _ENOUGH
    ]
    if good:
        yield f"pick: {', '.join(min(good)[2])}: the fewest replicas with {_ENOUGH:.0%} of the requests in time"
    else:
        yield f"pick: none of these has {_ENOUGH:.0%} of the requests in time: take more replicas"


def _survivors(found: Found) -> Iterator[str]:
    """Names the fleets that no failure hit, though some was asked for."""
    for name, (setup, each) in zip(_names(found)[1:], found, strict=True):
        if setup.fleet.failures is not None and setup.fleet.failures.any and not each.deaths:
            yield f"{', '.join(name)}: no replica died before the last answer ended."


def _acceptance(found: Found) -> Iterator[str]:
    for setup, _ in {setup.drafting.name: (setup, each) for setup, each in found}.values():
        if setup.drafting.ranks:
            chances = ", ".join(
                f"{kind or 'others'} {'+'.join(f'{chance:.2f}' for chance in ranks)}"
                for kind, ranks in setup.drafting.ranks.items()
            )
            yield f"Chance that a token drafted by {setup.drafting.name} is right: {chances}."


def _power(prices: Prices) -> Iterator[str]:
    if prices.power is not None:
        idle = f", {prices.idle_watts:g} W while idle" if prices.idle_watts else "; idle power is not counted"
        yield f"Joules by {prices.power}{idle}."
