"""The inputs of `parlay simulate`: the server's steps and memory, the traffic, acceptance, and prices."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from statistics import fmean

from parlay.bench.plan.kinds import kinds, rates_of
from parlay.bench.plan.report import USABLE
from parlay.bench.plan.strategies import Acceptance, Models, members, plan
from parlay.bench.records import read as read_rows
from parlay.cache.budget import parse_bytes
from parlay.cli.flags import options_from
from parlay.cli.plan_machine import Ground, say
from parlay.cost.devices import find_device, power
from parlay.cost.measured import MeasuredCost
from parlay.cost.roofline import ForwardShape, Machine, ModelShape
from parlay.cost.speed import DraftPlan
from parlay.models.config import DecoderConfig
from parlay.options import UsageError, nearest, override
from parlay.simulate.costs import LearnedSteps, RooflineSteps, StepCost
from parlay.simulate.drafting import PLAIN, Drafting, DraftSeconds
from parlay.simulate.jobs import ReplicaLimits
from parlay.simulate.mixtures import KINDS, mixture, read_mixture, timed
from parlay.simulate.report import Prices
from parlay.simulate.traces import read_trace
from parlay.simulate.traffic import Arrival, Traffic
from parlay.strategies.catalogue import find
from parlay.strategies.spelling import StrategySpec
from parlay.types import PowerModel

_UNLIMITED = 1 << 30
_MANY = 32  # rows of the larger of two forwards, whose difference gives the cost of a row


@dataclass(frozen=True, slots=True)
class Server:
    """A replica: the cost of its steps and its source, its limits, and its longest text."""

    cost: StepCost
    machine: Machine
    source: str
    limits: ReplicaLimits
    context: int


def server_of(options: argparse.Namespace, ground: Ground, models: Models) -> Server:
    """The server described by the flags. Raises ValueError if weights leave no memory for a cache."""
    from parlay.bench.plan.shapes import read_model

    shape = models.target
    cost: StepCost = RooflineSteps(ground.machine, shape)
    source = ground.source
    if options.learned_costs:
        cost, source = _learned(options.model), "this machine, by what it learned of the model's steps"
    room = None
    if options.memory is not None:
        room = parse_bytes(options.memory)
    elif ground.memory is not None:
        room = round(USABLE * ground.memory - shape.stored_bytes)
    config = read_model(options.model)
    tokens = _UNLIMITED if room is None else _tokens_in(room, config, shape)
    if tokens < 2:
        raise ValueError(
            f"the weights of {options.model} take {shape.stored_bytes / 1e9:,.1f} GB and leave no memory for a cache: "
            "use a smaller type with --quantize, a larger --device, or set --memory"
        )
    limits = override(options_from(ReplicaLimits, options), cache_tokens=min(tokens, _UNLIMITED))
    context = options.max_model_len or config.max_context
    return Server(cost, ground.machine, source, limits, context)


def _tokens_in(room: int, config: DecoderConfig, shape: ModelShape) -> int:
    """How many tokens a cache of ``room`` bytes holds; layers with windows keep only the last tokens."""
    if not any(form.window for form in config.layers):
        return int(room // shape.token_bytes)
    from parlay.models.forward import cache_room  # here, as it imports torch

    return cache_room(config, shape.kv_bytes).tokens_in(room)


def _learned(model: str) -> LearnedSteps:
    """The latest cost that this machine has measured for the model. Raises UsageError if the command has no such
    flag."""
    from parlay.llm.router_file import entries, is_here

    names = (model, Path(model).name)
    kept = next((each for each in entries() if each.cost and each.model in names and is_here(each)), None)
    if kept is None:
        raise UsageError(
            f"this machine has learned no step costs of {model}: run it for a while, or remove --learned-costs"
        )
    return LearnedSteps(MeasuredCost.restored(kept.cost))


# ----------------------------------------------------------------------------------------------------------- traffic


def traffic_of(options: argparse.Namespace) -> Traffic:
    """The requests described by the flags. Raises ValueError for an unusable file or flag."""
    if options.mixture is not None:
        shares = read_mixture(options.mixture)
        found = mixture(shares, rate=options.rate, seconds=options.duration, seed=options.seed, daily=options.daily)
    elif (lengths := _recorded(options)) is not None:
        found = timed(lengths, options.rate, options.seed)
    else:
        if options.rate is not None:
            raise UsageError(f"{options.trace} has its own times: remove --rate, or use --speedup")
        found = read_trace(options.trace, options.requests)
    if options.requests is not None:
        found = found.first(options.requests)
    if options.kind is not None:
        kind = _kind(options.kind, kinds(), "--kind")
        found = Traffic(
            found.name, [each if each.kind else each._replace(kind=kind) for each in found.arrivals], found.notes
        )
    if options.speedup != 1:
        found = found.faster(options.speedup)
    return found


def _recorded(options: argparse.Namespace) -> Traffic | None:
    """Lengths of recorded prompts and answers in the model's tokens; None for another kind of file."""
    from parlay.bench.replay.answers import OUTPUTS, read_answers
    from parlay.bench.replay.tokens import open_tokens
    from parlay.bench.workloads.files import records

    path: Path = options.trace
    files = sorted(path.glob("*.jsonl*")) if path.is_dir() else [path]
    if not files:
        raise UsageError(f"no recorded traffic in {path}: name a file, or a folder that parlay serve --record wrote")
    if not files[0].name.endswith((".jsonl", ".json", ".zst", ".gz")):
        return None
    _, first = next(records(files[0]), ("", None))
    if not isinstance(first, Mapping) or not {*OUTPUTS} & first.keys() or "prompt" not in first:
        return None
    if options.rate is None:
        raise UsageError(f"{path} has no times: add --rate, the number of requests per second")
    tokens = open_tokens(options.model)
    answers = islice((each for file in files for each in read_answers(file)), options.requests)
    lengths = [(len(tokens.encode(each.prompt)), len(tokens.encode(each.output))) for each in answers]
    arrivals = [Arrival(0.0, prompt, output) for prompt, output in lengths if prompt and output]
    return Traffic(path.name, arrivals, (f"Lengths are those of {options.model}'s tokenizer.",))


def _kind(word: str, known: Sequence[str], label: str) -> str:
    """A kind of work, by its own name or by its name in mixtures."""
    if not any(known):
        raise UsageError(f"{label} {word}: the traffic has no kinds of work: leave out {word}")
    name = KINDS[word].name if word in KINDS and KINDS[word].name in known else word
    if name not in known:
        raise UsageError(f"{label} {word}: {nearest(word, [each for each in known if each])}")
    return name


# ---------------------------------------------------------------------------------------------------------- strategy


Ranks = Mapping[str, tuple[float, ...]]
"""By kind of work, the probabilities that the best guess is right, the second best, and so on."""


def drafting_of(
    spec: StrategySpec | None, machine: Machine, models: Models, ranks_of: Callable[[Sequence[str], str], Ranks]
) -> Drafting:
    """The strategy for a simulation; ``ranks_of`` returns how often drafts of the strategies that it is given are
    right.

    Raises ValueError for a strategy whose cost is not modelled.
    """
    if spec is None:
        return PLAIN
    plans = [plan(each, models, Acceptance()) for each in members(spec, models)]
    if find(spec.name).routes:  # as the best of the strategies that draft by look-up
        plans = [each for each in plans if each.drafter is None]
    plans = [each for each in plans if each.nodes]
    if not plans:
        return Drafting(name=str(spec))
    if any(each.probes for each in plans):
        raise ValueError(f"strategy {spec} drafts during verification, which is not simulated: choose another strategy")
    first = max(plans, key=lambda each: each.nodes)
    ranks = ranks_of([each.name.partition(":")[0] for each in plans], str(spec))
    return Drafting(str(spec), first.nodes, ranks, first.adapts, _draft_seconds(first, machine))


def ranks_by_flags(options: argparse.Namespace, traffic: Traffic, names: Sequence[str], label: str) -> Ranks:
    """Probabilities by kind: from flags, else from rows of a bench, else from published measurements."""
    if options.acceptance and options.bench_rows:
        raise UsageError("--bench-rows can't be used with --acceptance: remove one of them")
    if options.acceptance:
        return _told(options.acceptance, traffic)
    if options.bench_rows:
        return _of_rows(options.bench_rows, names, traffic)
    return measured_ranks(traffic, names, label)


def measured_ranks(traffic: Traffic, names: Sequence[str], label: str) -> Ranks:
    """Probabilities measured elsewhere, averaged over the texts of a kind.

    Of several strategies the first one counts, unless another was right more often on texts that both were measured on.
    Raises UsageError for a kind on which none of them was measured.
    """
    found: dict[str, tuple[float, ...]] = {}
    for kind in traffic.kinds:
        rates = [{rate.same_texts: rate.chance for rate in own} for name in names if (own := rates_of(name, kind))]
        if not rates:
            of = f"{kind!r}" if kind else "requests whose kind is not known"
            raise UsageError(
                f"the acceptance of {label} in {of} was not measured: add --acceptance RATE"
                + ("" if kind else ", or --kind NAME")
            )
        best = rates[0]
        for other in rates[1:]:
            if sum(other[text] - best[text] for text in best.keys() & other.keys()) > 0:
                best = other
        found[kind] = (fmean(best.values()),)
    return found


def _told(texts: Sequence[str], traffic: Traffic) -> Ranks:
    found: dict[str, tuple[float, ...]] = {}
    for text in texts:
        kind, equals, chance = text.rpartition("=")
        try:
            rate = float(chance)
        except ValueError:
            rate = -1.0
        if not 0 <= rate <= 1:
            raise UsageError(f"--acceptance must be a probability, as in 0.6, or KIND=0.6, got {text}")
        found[_kind(kind.strip(), list(traffic.kinds), "--acceptance") if equals else ""] = (rate,)
    missing = [kind for kind in traffic.kinds if kind not in found and "" not in found]
    if missing:
        raise UsageError(
            f"--acceptance has no rate for the kind {missing[0]!r}: add it, or one RATE for all other kinds"
        )
    return found


def _of_rows(path: Path, names: Sequence[str], traffic: Traffic) -> Ranks:
    """The probability that gives the rows' tokens per step, by workload, and over all rows for other kinds."""
    rows = [row for row in read_rows(path)[1] if row.steps and row.cell.strategy.partition(":")[0] in names]
    if not rows:
        raise UsageError(f"{path} has no rows of {' or '.join(names)}: name another file")
    found = {}
    for kind in ("", *traffic.kinds):
        own = [row for row in rows if kind in ("", row.cell.workload)]
        if own:
            tokens = sum(row.tokens for row in own) / sum(row.steps for row in own)
            found[kind] = (1 - 1 / max(1.0, tokens),)
    return found


def _draft_seconds(plan: DraftPlan, machine: Machine) -> DraftSeconds:
    """Seconds of drafting: the draft model's forwards, and the engine's work on drafts."""
    engine = machine.engine

    @cache
    def forward(sequences: int, context: int) -> float:
        if plan.drafter is None:
            return 0.0
        work = ForwardShape(batch=sequences, rows=1, context=context)
        return machine.forward(plan.drafter, work) + engine.of_level(sequences)

    def seconds(sequences: int, nodes: int, context: float) -> float:
        levels = 1 if plan.at_once else nodes
        rounded = round(context / 256) * 256
        return levels * forward(sequences, rounded) + sequences * (engine.drafted + engine.node * nodes)

    return seconds


# ------------------------------------------------------------------------------------------------------------ prices


def prices_of(options: argparse.Namespace, server: Server) -> Prices:
    """The price and power of a replica, from flags, else from the table of devices."""
    found: PowerModel | None = None
    if options.watts is not None:
        found = PowerModel(options.watts, 0.0, f"modelled from --watts {options.watts:g}")
    elif options.device:
        row = (server.cost(1, 2 * _MANY, 2 * _MANY, 0, 0) - server.cost(1, _MANY, _MANY, 0, 0)) / _MANY
        found = power(find_device(options.device).called[0], max(0.0, row))
    else:
        say("joules are not known: say --watts")
    return Prices(hour=options.price, power=found, idle_watts=options.idle_watts)
