"""All predictions for a model on a machine, as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from parlay.bench.plan.kinds import kinds, rates_of
from parlay.cost.roofline import ForwardShape, Machine, ModelShape, flops, moved_bytes
from parlay.cost.speed import DraftPlan, Setting, Speed, choose, crossover, predict

USABLE = 0.9
"""Of a device's memory, the share that weights and cache may take: programs and activations need the rest."""
_GAIN = 1.02
"""Nothing is picked below this speedup over plain decoding."""
BETTER = 1.05
"""Another strategy than the first is picked only at this speedup over it: a few prompts don't tell closer ones
apart."""
_CHANCES = tuple(place / 50 for place in range(1, 50))


@dataclass(frozen=True, slots=True)
class Verify:
    """One forward of ``rows`` rows for each sequence. ``ratio``: its seconds divided by those of one row.

    ``fetched`` bytes are of weights that memory does not hold.
    """

    rows: int
    seconds: float
    ratio: float
    flops: int
    bytes: int
    fetched: int = 0


@dataclass(frozen=True, slots=True)
class StrategySpeed:
    """A strategy's speed; ``gain`` is its speedup over plain decoding. ``pays_below`` is the batch at which its drafts
    stop paying.

    None: its drafts pay at every batch examined, or it has none.
    """

    speed: Speed
    gain: float
    pays_below: int | None


@dataclass(frozen=True, slots=True)
class KindSpeed:
    """Times plain decoding on a kind of work: over the texts on which the strategy was measured, lowest and highest.

    ``texts`` says how many tokens a step had on each. ``gains``: the speed on those texts alone on which all that the
    strategy chooses from was measured, so that others can be compared with it there.
    """

    kind: str
    strategy: str
    low: float
    high: float
    texts: Mapping[str, float]
    gains: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of all ``parameters``, of all cached keys and values, and of the device; None where that is not known.

    With ``streamed`` bytes of them read in a forward of one row, from disk or ``from_host`` memory, ``weights`` are
    those in memory. ``draft``: those of a draft model that is named, and of its keys and values.
    """

    parameters: int
    weights: int
    cache: int
    device: int | None
    streamed: int = 0
    from_host: bool = False
    draft: int = 0

    @property
    def fits(self) -> bool | None:
        return None if self.device is None else self.weights + self.draft + self.cache <= USABLE * self.device


@dataclass(frozen=True, slots=True)
class PlanCase:
    """The predictions at one context and batch.

    ``offers`` stand on chances that were given or measured, and ``pick`` is the name of the fastest; ``kinds`` stand on
    what was measured elsewhere, by kind of work, and ``picks`` names the strategy to take for each. One pair is empty.
    ``break_even``: of strategies never measured, the least chance that a drafted token is right at which they gain.
    """

    context: int
    batch: int
    memory: Memory
    fits: bool | None
    prefill_seconds: float
    plain_tokens_per_second: float
    verifies: tuple[Verify, ...]
    offers: tuple[StrategySpeed, ...] = ()
    pick: str = ""
    kinds: tuple[KindSpeed, ...] = ()
    picks: Mapping[str, str] | None = None
    break_even: Mapping[str, float | None] | None = None


Plans = Mapping[str, Sequence[DraftPlan]]
"""By the name of a strategy: its plan, or those of all that it chooses from."""


def case(
    setting: Setting,
    rows: Sequence[int],
    memory: int | None,
    *,
    from_host: bool = False,
    draft: ModelShape | None = None,
) -> PlanCase:
    """Memory, prefill of the context, and verifying forwards by their number of rows. ``memory`` is the device's, in
    bytes.

    ``from_host``: layers beyond it come from the host's. ``draft``: a draft model that is loaded too.
    """
    machine, shape, batch, context = setting.machine, setting.shape, setting.batch, setting.context
    read = round(shape.fetched_bytes(batch))
    cache = shape.text_bytes(context) * batch
    beside = 0 if draft is None else round(draft.resident_bytes) + draft.text_bytes(context) * batch
    need = Memory(shape.parameters, round(shape.resident_bytes), cache, memory, read, from_host, beside)
    works = [ForwardShape(batch=batch, rows=count, context=context) for count in rows]
    return PlanCase(
        context=context,
        batch=batch,
        memory=need,
        fits=need.fits,
        prefill_seconds=machine.prefill(shape, context, batch=batch) if context else 0.0,
        plain_tokens_per_second=_plain(setting),
        verifies=tuple(_verify(machine, shape, work) for work in works),
    )


def with_offers(found: PlanCase, setting: Setting, plans: Plans) -> PlanCase:
    """The case with each strategy's speed at its plan's acceptance probabilities."""
    offers = []
    for name, own in plans.items():
        speed = choose([replace(predict(setting, plan), name=name) for plan in own])
        pays = max((crossover(setting, plan) or _EVERY for plan in own if plan.nodes), default=_EVERY)
        gain = speed.tokens_per_second / found.plain_tokens_per_second
        offers.append(StrategySpeed(speed, gain, None if pays == _EVERY else pays))
    return replace(found, offers=tuple(offers), pick=choose([offer.speed for offer in offers]).name)


_EVERY = 1 << 30


def with_kinds(found: PlanCase, setting: Setting, plans: Plans, pickable: Sequence[str]) -> PlanCase:
    """The case with each strategy's range of speeds by kind of work, from what was measured of it.

    Picked are those that are ``pickable``: the first there, until another is clearly faster on texts of both.
    """
    speeds = [
        speed for kind in kinds() for name, own in plans.items() if (speed := _kind_speed(setting, kind, name, own))
    ]
    picks = {}
    for kind in kinds():
        own = {each.strategy: each for each in speeds if each.kind == kind}
        picks[kind] = _pick([own[name] for name in pickable if name in own])
    known = {each.strategy for each in speeds}
    unknown = {name: own for name, own in plans.items() if name not in known and any(plan.nodes for plan in own)}
    even = {name: _break_even(setting, own[0]) for name, own in unknown.items()}
    return replace(found, kinds=tuple(speeds), picks=picks, break_even=even)


def _pick(speeds: Sequence[KindSpeed]) -> str:
    """The first, or what is clearly faster on the same texts; plain decoding where that gains nothing."""
    if not speeds:
        return "none"
    best = speeds[0]
    for other in speeds[1:]:
        common = best.gains.keys() & other.gains.keys()
        times = prod(other.gains[text] / best.gains[text] for text in common)
        if times > BETTER ** len(common):
            best = other
    return best.strategy if best.low * best.high > _GAIN**2 else "none"


def _kind_speed(setting: Setting, kind: str, name: str, plans: Sequence[DraftPlan]) -> KindSpeed | None:
    """None where it was not measured on the kind. Of several plans the best value of each end counts."""
    plain = _plain(setting)
    rates = [(plan, rates_of(plan.name.partition(":")[0], kind)) for plan in plans if plan.nodes]
    gains = [{rate.same_texts: _rate(setting, plan, rate.chance) / plain for rate in own} for plan, own in rates]
    known = [each for each in gains if each]
    if not known:
        return None
    low, high = (max(end(each.values()) for each in known) for end in (min, max))
    shared = {text: max(each[text] for each in gains) for text in gains[0] if all(text in each for each in gains)}
    steps = {rate.texts: rate.tokens_per_step for _, own in rates for rate in own}
    return KindSpeed(kind, name, low, high, steps, shared)


def _break_even(setting: Setting, plan: DraftPlan) -> float | None:
    """The least acceptance probability at which drafts gain; None if they never do."""
    plain = _plain(setting)
    return next((chance for chance in _CHANCES if _rate(setting, plan, chance) > _GAIN * plain), None)


def _rate(setting: Setting, plan: DraftPlan, chance: float) -> float:
    return predict(setting, replace(plan, ranks=(chance,))).tokens_per_second


def _plain(setting: Setting) -> float:
    return predict(setting, DraftPlan(name="plain")).tokens_per_second


def _verify(machine: Machine, shape: ModelShape, work: ForwardShape) -> Verify:
    plain = machine.forward(shape, ForwardShape(batch=work.batch, context=work.context))
    seconds = machine.forward(shape, work)
    fetched = round(shape.fetched_bytes(work.batch * work.rows))
    return Verify(work.rows, seconds, seconds / plain, flops(shape, work), moved_bytes(shape, work), fetched)
