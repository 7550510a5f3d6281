"""`parlay plan`: predicts how fast a model would be on a machine, and which strategy to use. All numbers come from
models."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from parlay.cli import plan_devices, plan_page
from parlay.cli.flags import strategy
from parlay.cli.plan_machine import Ground, add_machine_flags, at_present, check_flags, ground_of, models_of, say
from parlay.cost.devices import BANDWIDTH_SHARE, find_device
from parlay.models.fetch.pulled import default_model
from parlay.options import LoadOptions

if TYPE_CHECKING:
    from parlay.bench.plan.acceptance import Chances, Traffic
    from parlay.bench.plan.report import PlanCase
    from parlay.bench.plan.strategies import Acceptance, Models
    from parlay.cost.speed import DraftPlan
    from parlay.llm.llm import LLM
    from parlay.strategies.spelling import StrategySpec

_MOST = 1 << 20
_CONTEXT = 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_machine_flags(parser)
    _add_case_flags(parser)
    plan_devices.add_devices_flags(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _add_case_flags(parser: argparse.ArgumentParser) -> None:
    cases = parser.add_argument_group("cases")
    cases.add_argument(
        "--rows", default="1,2,4,8,16", metavar="N,...", help="rows of each sequence in a forward (default: 1,2,4,8,16)"
    )
    cases.add_argument(
        "--context", metavar="N,...", help="cached tokens of each sequence (default: 1024, or the model's limit)"
    )
    cases.add_argument("--batch", default="1", metavar="N,...", help="concurrent sequences (default: 1)")
    cases.add_argument(
        "--memory",
        metavar="weights=SIZE",
        help="memory for the weights; layers that do not fit, or a mixture's experts, are read from disk, or on a "
        "named device copied from the host's memory",
    )
    cases.add_argument(
        "--disk",
        type=float,
        metavar="GB/S",
        help="speed of direct reads from disk (default: measured); with --device: read layers from disk instead of the "
        "host's memory",
    )
    _add_acceptance_flags(cases)
    cases.add_argument(
        "--strategy",
        type=strategy,
        action="append",
        metavar="NAME[:KEY=VALUE,...]",
        help="strategy to compare with plain decoding; may be given several times",
    )


def _add_acceptance_flags(cases: argparse._ActionsContainer) -> None:
    cases.add_argument(
        "--acceptance",
        action="append",
        default=[],
        metavar="[NAME=]RATE",
        help="probability that a drafted token is right, for all strategies or the one named; 0.6+0.2: probabilities "
        "of the best and the second best guess (default: Parlay's own measurements, by kind of work)",
    )
    cases.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="measure the acceptance on your own requests: a prompt on each line, JSON as parlay bench reads it, or "
        'recorded traffic, {"prompt": TEXT, "answer": TEXT}, whose answers are replayed where a strategy permits',
    )


def run(options: argparse.Namespace) -> int:
    if options.devices is not None:
        if options.memory or options.disk:
            raise ValueError("--memory and --disk can't be used with --devices: remove one of them")
        return plan_devices.run(options)
    if options.trace or options.mixture:
        raise ValueError("--trace and --mixture work only with --devices, the number of devices: add it")
    if options.link and (options.disk or not (options.device and options.memory)):
        raise ValueError(
            "--link works only with --devices, or with --device NAME and --memory weights=SIZE, and not with --disk: "
            "remove it"
        )
    rows, batches = (_counts(options, name) for name in ("rows", "batch"))
    check_flags(options)
    contexts = _contexts(options)
    from parlay.bench.plan.report import case, with_kinds, with_offers
    from parlay.bench.plan.strategies import read_acceptance
    from parlay.cost.speed import Setting
    from parlay.system import threads

    threads.settle(options.threads)
    acceptance, traffic = read_acceptance(options.acceptance), _traffic(options)
    ground, models = _with_memory(options)
    names = _compared(options, acceptance, models)
    chances = _measured(options, names, models, traffic) if traffic else _from_acceptance(options, acceptance)
    plans = _plans(names, models, chances)
    settings = [Setting(ground.machine, models.target, batch, context) for context in contexts for batch in batches]
    bare_case = partial(case, draft=models.draft if options.draft_model else None, from_host=ground.from_host)
    bare = [(setting, bare_case(setting, rows, ground.memory)) for setting in settings]
    if chances is None:
        pickable = _pickable(options, names, models)
        cases = [with_kinds(found, setting, plans, pickable) for setting, found in bare]
    else:
        cases = [with_offers(found, setting, plans) for setting, found in bare]
    if options.json:
        print(json.dumps(_document(options.model, models, ground, cases) | _known(chances), indent=2))
    else:
        header = plan_page.header(options.model, models.target, ground.weights.name, ground.source)
        notes = plan_page.by_kind_notes(cases, models.heads) if chances is None else plan_page.chances_note(chances)
        print("\n\n".join([header, *map(plan_page.tables, cases), notes]))
    return 0


def _with_memory(options: argparse.Namespace) -> tuple[Ground, Models]:
    """The machine and the models, some of whose layers are read from elsewhere if --memory is too small."""
    from parlay.bench.plan.streaming import sizes_of, stored_sizes, streamed
    from parlay.cache import MemoryBounds

    room = MemoryBounds.parse(options.memory)
    if room.requests is not None or (options.disk is not None and not 0 < options.disk < math.inf):
        raise ValueError(
            "--memory must be weights=SIZE here (--context and --batch set the size of the cache), and --disk must be "
            "above 0"
        )
    ground = at_present(ground_of(options), options)
    models = models_of(options, ground, experts=True)
    if room.weights is None:
        return ground, models
    stored = None if options.quantize or options.dtype != "auto" else stored_sizes(options.model)
    target = streamed(models.target, stored or sizes_of(models.target), room.weights)
    models = replace(models, target=target)
    if not models.target.fetched_bytes(1):
        return ground, models
    bandwidth, note = _way_of_layers(options)
    from_host = options.device is not None and options.disk is None
    machine = replace(ground.machine, disk_bandwidth=bandwidth)
    return replace(ground, machine=machine, source=f"{ground.source}; {note}", from_host=from_host), models


def _way_of_layers(options: argparse.Namespace) -> tuple[float, str]:
    """Bytes per second at which weights outside of memory arrive, and from where: disk, or a link."""
    from parlay.bench.plan.streaming import measure_disk

    if options.disk is not None or not options.device:
        bandwidth, path = (1e9 * options.disk, None) if options.disk else measure_disk(options.model)
        how = "as --disk says" if path is None else f"measured on {path.name}"
        return bandwidth, f"direct reads of the disk give {bandwidth / 1e9:.2f} GB/s, {how}"
    if options.link:
        bandwidth, how = plan_devices.read_link(options.link).bandwidth, "as --link says"
    else:
        device = find_device(options.device)
        bandwidth = BANDWIDTH_SHARE * 1e9 * device.host_bandwidth
        how = f"{BANDWIDTH_SHARE:.0%} of PCI Express {device.pcie}: --link says it better"
    return bandwidth, f"copies from the host's memory take {bandwidth / 1e9:.2f} GB/s, {how}"


def _compared(options: argparse.Namespace, acceptance: Acceptance, models: Models) -> list[StrategySpec]:
    """The strategies of --strategy, else of --acceptance, else the usual ones; where acceptance is measured, heads only
    if they are on this machine."""
    from parlay.bench.plan.strategies import compared
    from parlay.strategies.spelling import parse

    named = options.strategy or ([parse(name) for name in acceptance.by_strategy] if acceptance.default is None else ())
    found = compared(named, models)
    return [spec for spec in found if named or not options.prompts or _usable(spec, models)]


def _usable(spec: StrategySpec, models: Models) -> bool:
    """Whether the strategy needs no head, or one that is on this machine."""
    from parlay.bench.plan.heads import HEADS

    return spec.name not in HEADS or spec.name in models.heads


def _pickable(options: argparse.Namespace, names: Sequence[StrategySpec], models: Models) -> list[str]:
    """Strategies that may be recommended, the default first; those that still need training only if named."""
    from parlay.strategies.entry import DEFAULT_STRATEGY

    found = [str(spec) for spec in names if options.strategy or _usable(spec, models)]
    return sorted(found, key=lambda name: name != DEFAULT_STRATEGY)


def _plans(names: Sequence[StrategySpec], models: Models, chances: Chances | None) -> Mapping[str, Sequence[DraftPlan]]:
    """Plans by strategy: its own, or those of the strategies that it chooses from."""
    from parlay.bench.plan.strategies import Acceptance, members, plan

    acceptance = chances.acceptance if chances is not None else Acceptance()
    return {str(spec): [plan(each, models, acceptance) for each in members(spec, models)] for spec in names}


def _traffic(options: argparse.Namespace) -> Traffic | None:
    """Read the file that --prompts names; None without it."""
    from parlay.bench.plan.acceptance import read_traffic

    if options.prompts and options.acceptance:
        raise ValueError("--prompts can't be used with --acceptance, which it measures: remove one of them")
    return read_traffic(options.prompts) if options.prompts else None


def _from_acceptance(options: argparse.Namespace, acceptance: Acceptance) -> Chances | None:
    """The acceptance given by --acceptance; None without it."""
    from parlay.bench.plan.acceptance import Chances

    return Chances(acceptance, "as --acceptance says") if options.acceptance else None


def _measured(options: argparse.Namespace, names: list[StrategySpec], models: Models, traffic: Traffic) -> Chances:
    """Measure acceptance on the user's prompts with the model, or with a small one if the model has no weights here.

    Raises ValueError if another model stands in, for a named strategy that needs more than the text.
    """
    from parlay.bench.plan.acceptance import measured
    from parlay.bench.plan.strategies import drafting, members
    from parlay.llm.llm import LLM
    from parlay.strategies.catalogue import find

    here = _has_weights(options.model)
    model = options.model if here else default_model()
    wanted = drafting(list(dict.fromkeys(each for spec in names for each in members(spec, models))))
    unread = [spec for spec in wanted if not here and not find(spec.name).replayable]
    named = [each for spec in options.strategy or () for each in (spec, *spec.members)]
    refused = [spec for spec in unread if options.strategy and (spec in named or spec.name not in models.heads)]
    if refused:
        raise ValueError(
            f"{refused[0]} needs the weights of {options.model}, which are not on this machine: use --acceptance "
            "instead"
        )

    def opened() -> LLM:
        load = LoadOptions(quantize="int8" if options.quantize == "int8" else None, threads=options.threads)
        return LLM(model, draft_model=options.draft_model if here else None, load=load)

    chances = measured([spec for spec in wanted if spec not in unread], traffic, model, opened, say)
    return chances if here else chances.beside(f"{options.model} has no weights here: {model} stands in for it.")


def _has_weights(model: str) -> bool:
    """Whether the model can decode on this machine. Nothing is downloaded if the model's shape is known."""
    from parlay.bench.plan.shapes import known_name
    from parlay.models.fetch.resolving import resolve
    from parlay.types import ParlayError

    if known_name(model):
        return False
    try:
        found = resolve(model)
    except ParlayError:
        return False
    return found.is_file() or any(found.glob("*.safetensors"))


def _contexts(options: argparse.Namespace) -> list[int]:
    """Parse --context. Raises ValueError for more tokens than the model holds."""
    from parlay.bench.plan.shapes import read_model

    wanted = _counts(options, "context") if options.context is not None else []
    most = read_model(options.model).max_context
    if wanted and max(wanted) > most:
        raise ValueError(f"--context must be at most {most}, the context of {options.model}, got {max(wanted)}")
    return wanted or [min(_CONTEXT, most)]


def _counts(options: argparse.Namespace, name: str) -> list[int]:
    """Parse a flag's list of counts. Raises ValueError for anything else."""
    text: str = vars(options)[name]
    least = 0 if name == "context" else 1
    numbers = [int(part) if part.strip().isdecimal() else -1 for part in text.split(",")]
    if not all(least <= number <= _MOST for number in numbers):
        raise ValueError(f"--{name} must be whole numbers between {least} and {_MOST}, joined by commas, got {text}")
    return numbers


def _document(model: str, models: Models, ground: Ground, cases: Sequence[PlanCase]) -> dict[str, object]:
    return {
        "model": model,
        "parameters": models.target.parameters,
        "weights": ground.weights.name,
        "machine": {"source": ground.source, **asdict(ground.machine)},
        "modelled": True,
        "cases": [asdict(each) for each in cases],
    }


def _known(chances: Chances | None) -> dict[str, object]:
    if chances is None:
        return {
            "acceptance": {
                "source": "measured elsewhere, by kind of work",
                "note": "",
                "by_strategy": {},
                "default": None,
            }
        }
    rates, default = dict(chances.acceptance.by_strategy), chances.acceptance.default
    known = {"source": chances.source, "note": chances.note, "by_strategy": rates, "default": default}
    return {"acceptance": known}
