"""The page of `parlay plan --devices`: a line per split, and why the best one is best."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from parlay.simulate.report import Figures
from parlay.simulate.splits import Link, Split, SplitMemory, StepParts
from parlay.simulate.traffic import Traffic
from parlay.system.terminal import aligned, counted

BATCH = 16
"""Batch size of the larger step in the table, next to that of one sequence."""
_DRAFTER = "http://127.0.0.1:8001"
NO_LIMIT = 1 << 30
"""The size in tokens that stands for a cache of unknown size."""


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """A split: its memory; plain steps of one sequence and of several, and of reading a prompt; and the fleet's
    figures, or None if it does not fit."""

    split: Split
    memory: SplitMemory
    one: StepParts
    many: StepParts
    prompt: StepParts
    figures: Figures | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """All splits, the best one, and its command; ``source`` says where the devices' figures come from."""

    model: str
    source: str
    traffic: Traffic
    link: Link
    plans: Sequence[SplitPlan]
    best: SplitPlan
    command: str


def page(found: Comparison) -> str:
    """The traffic, a line per split, and why the best one is best."""
    traffic = found.traffic
    head = ["split", "devices", "GB each", "cache tokens", "1 row ms", f"{BATCH} rows ms", "links", "prompt s"]
    head += ["tokens/s", "first p90 s", "token p90 ms", "whole p90 s", "in time"]
    rows = [head, *map(_cells, found.plans)]
    header = (
        f"{found.model}, {traffic.name}: {len(traffic.arrivals):,} requests. Modelled for devices like {found.source}. "
        f"Links: {found.link.source}."
    )
    table = "\n".join(f"  {line}" for line in aligned(rows))
    return "\n\n".join([header, table, "\n".join(_why(found)), *traffic.notes])


def _cells(plan: SplitPlan) -> list[str]:
    own, memory = plan.figures, plan.memory
    cache = "no limit" if memory.cache_tokens >= NO_LIMIT else f"{memory.cache_tokens:,}"
    steps = [
        f"{1000 * plan.one.seconds:.2f}",
        f"{1000 * plan.many.seconds:.2f}",
        f"{plan.many.link / plan.many.seconds:.0%}",
        f"{plan.prompt.seconds:.3f}",
    ]
    served = ["DOES NOT FIT" if own is None else "DOES NOT DRAIN", *["-"] * 4]
    if own is not None and own.first_token and own.whole:
        token = f"{1000 * own.per_token.p90:.1f}" if own.per_token else "-"
        speed = f"{own.tokens_per_second:,.1f}" if not own.unfinished else "DOES NOT DRAIN"
        late = "-" if own.in_time is None else f"{own.in_time:.1%}"
        served = [speed, f"{own.first_token.p90:.3g}", token, f"{own.whole.p90:.3g}", late]
    return [str(plan.split), str(plan.split.devices), f"{memory.weights / 1e9:.1f}", cache, *steps, *served]


def _why(found: Comparison) -> Iterator[str]:
    """The numbers that decide, from the table or from what it is based on."""
    best, link = found.best, found.link
    yield f"best: {best.split}"
    yield f"  run: {found.command}"
    yield f"why: {_parts(best)}"
    for other in found.plans:
        if other is not best:
            yield f"  {other.split}: {_against(other, best)}"
    if best.split.ranks > 1:
        yield f"  An exchange takes {1e6 * link.latency:g} us and 1 us for each {link.bandwidth / 1e9:g} kB."


def _parts(plan: SplitPlan) -> str:
    one, many = plan.one, plan.many
    return (
        f"a step of 1 row computes {1000 * one.compute:.2f} ms and waits {1000 * one.link:.2f} ms for links, one "
        f"of {BATCH} rows {1000 * many.compute:.2f} and {1000 * many.link:.2f}; a mean prompt takes "
        f"{plan.prompt.seconds:.3f} s"
    )


def _against(other: SplitPlan, best: SplitPlan) -> str:
    """Why another split is worse."""
    own, ours, memory = other.figures, best.figures, other.memory
    if own is None:
        room = f"a cache of {memory.cache_tokens:,} tokens" if memory.cache_tokens else "no cache"
        return f"weights of {memory.weights / 1e9:.1f} GB leave {room} in {(memory.device or 0) / 1e9:.1f} GB: too few"
    assert ours is not None
    assert ours.whole is not None
    if own.unfinished:
        return f"it can't keep up: {own.unfinished:,} of {own.requests:,} requests were unfinished; {_parts(other)}"
    late = f"{own.in_time:.1%} in time and not {ours.in_time:.1%}, " if own.in_time != ours.in_time else ""
    wait = own.whole.p90 if own.whole is not None else 0.0
    return f"{late}nine tenths take {wait:.3g} s and not {ours.whole.p90:.3g}; {_parts(other)}"


def command(model: str, split: Split, strategy: str, draft_model: str | None) -> str:
    """The command that runs one replica; ``strategy`` is empty for the server's default."""
    words = ["parlay serve", model]
    words += [f"--tensor-parallel {split.tensor}"] if split.tensor > 1 else []
    words += [f"--pipeline-parallel {split.pipeline}"] if split.pipeline > 1 else []
    words += [f"--context-parallel {split.context}"] if split.context > 1 else []
    if split.drafter:
        words.append(f"--strategy remote:url={_DRAFTER}, beside parlay serve --drafter-only {draft_model} --port 8001")
    elif strategy:
        words.append(f"--strategy {strategy}")
        words += [f"--draft-model {draft_model}"] if draft_model else []
    each = f", on each of {split.replicas} groups of {counted(split.ranks, 'device')}" if split.replicas > 1 else ""
    return " ".join(words) + each
