"""Makes all predictions for a model on a machine, as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from parlay.bench.plan.kinds import kinds, rates_of
from parlay.cost.roofline import ForwardShape, Machine, ModelShape, flops, moved_bytes
from parlay.cost.speed import DraftPlan, Setting, Speed, choose, crossover, predict

USABLE = 0.9
"""The share of a device's memory that weights and cache may take. Programs and activations need the rest."""
_MIN_GAIN = 1.02
"""A strategy is picked only at a speedup over plain decoding above this."""
BETTER = 1.05
"""A later strategy is picked instead of an earlier one only at a speedup over it above this. A few prompts can't rank
closer strategies."""
_PROBABILITIES = tuple(place / 50 for place in range(1, 50))


@dataclass(frozen=True, slots=True)
class Verify:
    """One forward with ``rows`` rows for each sequence. ``ratio`` divides its seconds by a one-row forward's.

    The forward reads ``fetched`` bytes of weights from outside memory.
    """

    rows: int
    seconds: float
    ratio: float
    flops: int
    bytes: int
    fetched: int = 0


@dataclass(frozen=True, slots=True)
class StrategySpeed:
    """A strategy's predicted speed. ``gain`` is its speedup over plain decoding.

    Its drafts are faster than plain decoding below the batch ``pays_below``. None means at every batch examined, or
    that the strategy drafts nothing.
    """

    speed: Speed
    gain: float
    pays_below: int | None


@dataclass(frozen=True, slots=True)
class KindSpeed:
    """A strategy's predicted speed on a kind of work, as a multiple of plain decoding's.

    ``low`` and ``high`` are the extremes over the sets of texts on which its acceptance was measured. ``texts`` gives
    the measured tokens per step on each set. ``gains`` gives the speed on each set on which every strategy that it
    chooses from was measured. On these sets it can be compared with other strategies.
    """

    kind: str
    strategy: str
    low: float
    high: float
    texts: Mapping[str, float]
    gains: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory that a case needs, in bytes, and the number of the model's ``parameters``.

    ``weights`` are the weights in memory, ``cache`` all cached keys and values. ``draft`` is for a draft model's
    weights, keys and values. ``device`` is the memory of the device; None if it is not known. A forward of one row
    reads ``streamed`` bytes of further weights from disk or, with ``from_host``, from the host's memory.
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
        """Whether everything fits into the device's memory; None if that memory is not known."""
        return None if self.device is None else self.weights + self.draft + self.cache <= USABLE * self.device


@dataclass(frozen=True, slots=True)
class PlanCase:
    """The predictions at one context and batch, from one of two sources of acceptance probabilities.

    If the user gives or measures them, ``offers`` are the strategies' speeds, and ``pick`` is the fastest one's name.
    Otherwise ``kinds`` are the speeds by kind of work, from measurements on other machines, and ``picks`` names the
    strategy to use for each kind. For strategies without measurements, ``break_even`` is the lowest acceptance
    probability at which they are faster than plain decoding.
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
"""Plans by the name of a strategy: its own, or one for each strategy that it chooses from."""


def case(
    setting: Setting,
    rows: Sequence[int],
    memory: int | None,
    *,
    from_host: bool = False,
    draft: ModelShape | None = None,
) -> PlanCase:
    """Predict memory, the prefill of the context, and verifying forwards of each number of ``rows``.

    ``memory`` is the device's, in bytes. With ``from_host``, layers that do not fit into it are in the host's memory.
    ``draft`` is the shape of a draft model that is loaded, too.
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
    """Return the case with each strategy's speed at its plan's acceptance probabilities."""
    offers = []
    for name, own in plans.items():
        speed = choose([replace(predict(setting, plan), name=name) for plan in own])
        pays = max((crossover(setting, plan) or _ALWAYS for plan in own if plan.nodes), default=_ALWAYS)
        gain = speed.tokens_per_second / found.plain_tokens_per_second
        offers.append(StrategySpeed(speed, gain, None if pays == _ALWAYS else pays))
    return replace(found, offers=tuple(offers), pick=choose([offer.speed for offer in offers]).name)


_ALWAYS = 1 << 30


def with_kinds(found: PlanCase, setting: Setting, plans: Plans, pickable: Sequence[str]) -> PlanCase:
    """Return the case with each strategy's range of speeds by kind of work, from measured acceptance.

    The pick is one of the ``pickable`` strategies: the first one, unless a later one is clearly faster on the same
    texts; see `BETTER`.
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
    """Return the name of the first strategy, or of a later one that is clearly faster on the same texts.

    If that strategy's gain over plain decoding is too small (see `_MIN_GAIN`), plain decoding's name is returned.
    """
    if not speeds:
        return "none"
    best = speeds[0]
    for other in speeds[1:]:
        common = best.gains.keys() & other.gains.keys()
        times = prod(other.gains[text] / best.gains[text] for text in common)
        if times > BETTER ** len(common):
            best = other
    return best.strategy if best.low * best.high > _MIN_GAIN**2 else "none"


def _kind_speed(setting: Setting, kind: str, name: str, plans: Sequence[DraftPlan]) -> KindSpeed | None:
    """Predict a strategy's speed on a kind of work; None if its acceptance was not measured on the kind.

    If the strategy chooses among several, its lowest gain is the best of their lowest gains, and its highest gain the
    best of their highest.
    """
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
    """Return the lowest acceptance probability at which drafts beat plain decoding; None if they never do."""
    plain = _plain(setting)
    return next((chance for chance in _PROBABILITIES if _rate(setting, plan, chance) > _MIN_GAIN * plain), None)


def _rate(setting: Setting, plan: DraftPlan, chance: float) -> float:
    return predict(setting, replace(plan, ranks=(chance,))).tokens_per_second


def _plain(setting: Setting) -> float:
    return predict(setting, DraftPlan(name="plain")).tokens_per_second


def _verify(machine: Machine, shape: ModelShape, work: ForwardShape) -> Verify:
    plain = machine.forward(shape, ForwardShape(batch=work.batch, context=work.context))
    seconds = machine.forward(shape, work)
    fetched = round(shape.fetched_bytes(work.batch * work.rows))
    return Verify(work.rows, seconds, seconds / plain, flops(shape, work), moved_bytes(shape, work), fetched)
