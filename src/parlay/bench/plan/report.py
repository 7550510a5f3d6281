"""All predictions for a model on a machine, as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parlay.cost.roofline import ForwardShape, Machine, ModelShape, flops, moved_bytes
from parlay.cost.speed import DraftPlan, Setting, Speed, choose, crossover, predict


@dataclass(frozen=True, slots=True)
class Verify:
    """One forward of ``rows`` rows for each sequence. ``ratio``: its seconds over those of one row."""

    rows: int
    seconds: float
    ratio: float
    flops: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Offer:
    """A strategy's speed; ``gain`` is to plain decoding. ``pays_below`` is the batch at which its drafts stop paying.

    None there: they pay at any batch that was looked at, or there are none.
    """

    speed: Speed
    gain: float
    pays_below: int | None


@dataclass(frozen=True, slots=True)
class PlanCase:
    """What is predicted at one context and batch. ``pick`` is the name of the fastest strategy."""

    context: int
    batch: int
    prefill_seconds: float
    verifies: tuple[Verify, ...]
    offers: tuple[Offer, ...]
    pick: str


def case(
    machine: Machine, shape: ModelShape, *, context: int, batch: int, rows: Sequence[int], plans: Sequence[DraftPlan]
) -> PlanCase:
    """Prefill of ``context`` tokens, verifies of so many rows, and every plan's speed behind that context."""
    setting = Setting(machine, shape, batch, context)
    plain = predict(setting, DraftPlan(name="plain")).tokens_per_second
    speeds = [predict(setting, plan) for plan in plans]
    offers = [
        Offer(speed, speed.tokens_per_second / plain, crossover(setting, plan) if plan.nodes else None)
        for speed, plan in zip(speeds, plans, strict=True)
    ]
    return PlanCase(
        context=context,
        batch=batch,
        prefill_seconds=machine.prefill(shape, context, batch=batch) if context else 0.0,
        verifies=tuple(
            _verify(machine, shape, ForwardShape(batch=batch, rows=count, context=context)) for count in rows
        ),
        offers=tuple(offers),
        pick=choose(speeds).name,
    )


def _verify(machine: Machine, shape: ModelShape, work: ForwardShape) -> Verify:
    plain = machine.forward(shape, ForwardShape(batch=work.batch, context=work.context))
    seconds = machine.forward(shape, work)
    return Verify(work.rows, seconds, seconds / plain, flops(shape, work), moved_bytes(shape, work))
