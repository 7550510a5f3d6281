"""`parlay plan`: how fast a model would be on a machine, and which strategy to take. All numbers are modelled."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from parlay.cli import plan_page
from parlay.cli.flags import add_option_flags, strategy
from parlay.cost.devices import BANDWIDTH_SHARE, DEVICES, RATE_SHARE, find_device
from parlay.cost.devices import machine as known_machine
from parlay.models.fetch.pulled import DEFAULT_MODEL, default_model
from parlay.options import LoadOptions

if TYPE_CHECKING:
    from parlay.bench.plan.acceptance import Chances, Traffic
    from parlay.bench.plan.report import PlanCase
    from parlay.bench.plan.strategies import Acceptance, Models
    from parlay.bench.plan.weights import WeightType
    from parlay.cost.roofline import Machine
    from parlay.cost.speed import DraftPlan
    from parlay.llm.llm import LLM
    from parlay.strategies.spelling import StrategySpec

_MOST = 1 << 20
_BUSY = 0.5
"""Cores; with more of them busy during a calibration its page says so."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        help="name that parlay models lists, name of a common model such as llama-3.1-8b or qwen2.5-7b, Hugging Face "
        "Hub id, GGUF file, or local folder; config.json is enough "
        f"(default: {DEFAULT_MODEL}, fetched at the first use)",
    )
    parser.add_argument("--draft-model", metavar="MODEL", help="small model for strategies that draft with one")
    parser.add_argument(
        "--dtype", default="auto", help="number type of the weights: auto, float32, bfloat16, float16 or int8"
    )
    parser.add_argument(
        "--quantize",
        metavar="TYPE",
        help="weights in fewer bits: int8, or as in GGUF files q8_0, q6_k, q5_k_m, q4_k_m, q4_0, iq4_xs, mxfp4; on a "
        "named device also awq, gptq, nf4, fp8, q3_k_m, q2_k (default: as the model's file has them)",
    )
    of_loading = {
        "threads": "threads that decode on this machine",
        "kv_cache_dtype": "number type of cached keys and values; auto is the machine's own",
    }
    add_option_flags(parser, LoadOptions, of_loading)
    _add_machine_flags(parser)
    _add_case_flags(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _add_machine_flags(parser: argparse.ArgumentParser) -> None:
    where = parser.add_argument_group("machine", "this machine, as calibrated, unless a device is named")
    where.add_argument(
        "--device",
        "--machine",
        metavar="NAME",
        help=f"predict for this device by its maker's figures: {', '.join(DEVICES)}; h100, a100, 4090 and the like too",
    )
    where.add_argument("--calibrate", action="store_true", help="measure this machine first; takes about a minute")
    where.add_argument(
        "--calibration",
        metavar="FILE",
        type=Path,
        help="file of the measurement: read, or where it is not there, measured and written",
    )


def _add_case_flags(parser: argparse.ArgumentParser) -> None:
    cases = parser.add_argument_group("cases")
    cases.add_argument(
        "--rows", default="1,2,4,8,16", metavar="N,...", help="rows of each sequence in a verify (default: 1,2,4,8,16)"
    )
    cases.add_argument("--context", default="1024", metavar="N,...", help="tokens cached (default: 1024)")
    cases.add_argument("--batch", default="1", metavar="N,...", help="sequences at once (default: 1)")
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
        help="chance that a drafted token is right, for all strategies or the one named; 0.6+0.2: chances of the best "
        "guess and the second best (default: what was measured elsewhere, by kind of work)",
    )
    cases.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="measure that chance on your own requests: a prompt on each line, JSON as parlay bench reads it, or "
        'recorded traffic, {"prompt": TEXT, "answer": TEXT}, whose answers are replayed where a strategy permits',
    )


def run(options: argparse.Namespace) -> int:
    rows, contexts, batches = (_counts(options, name) for name in ("rows", "context", "batch"))
    _check_flags(options)
    from parlay.bench.plan.report import case, with_kinds, with_offers
    from parlay.bench.plan.strategies import read_acceptance
    from parlay.cost.speed import Setting
    from parlay.system import threads

    threads.settle(options.threads)
    told, traffic = read_acceptance(options.acceptance), _traffic(options)
    ground = _table_device(options) if options.device else _this_machine(options)
    models = _models(options, ground)
    names = _compared(options, told, models)
    chances = _measured(options, names, models, traffic) if traffic else _told(options, told)
    plans = _plans(names, models, chances)
    settings = [Setting(ground.machine, models.target, batch, context) for context in contexts for batch in batches]
    bare = [(setting, case(setting, rows, ground.memory)) for setting in settings]
    if chances is None:
        pickable = _pickable(options, names)
        cases = [with_kinds(found, setting, plans, pickable) for setting, found in bare]
    else:
        cases = [with_offers(found, setting, plans) for setting, found in bare]
    if options.json:
        print(json.dumps(_document(options.model, models, ground, cases) | _known(chances), indent=2))
    else:
        header = plan_page.header(options.model, models.target, ground.weights.name, ground.source)
        notes = plan_page.by_kind_notes(cases) if chances is None else plan_page.chances_note(chances)
        print("\n\n".join([header, *map(plan_page.tables, cases), notes]))
    return 0


def _compared(options: argparse.Namespace, told: Acceptance, models: Models) -> list[StrategySpec]:
    """Strategies that --strategy names, else --acceptance, else the usual; heads only where nothing is measured."""
    from parlay.bench.plan.heads import HEADS
    from parlay.bench.plan.strategies import compared
    from parlay.strategies.spelling import parse

    named = options.strategy or ([parse(name) for name in told.by_strategy] if told.default is None else ())
    found = compared(named, models)
    return [spec for spec in found if named or not options.prompts or spec.name not in HEADS]


def _pickable(options: argparse.Namespace, names: Sequence[StrategySpec]) -> list[str]:
    """Names that may be recommended, the default first: nothing that has yet to be trained, unless it is named."""
    from parlay.bench.plan.heads import HEADS
    from parlay.strategies.entry import DEFAULT_STRATEGY

    found = [str(spec) for spec in names if options.strategy or spec.name not in HEADS]
    return sorted(found, key=lambda name: name != DEFAULT_STRATEGY)


def _plans(names: Sequence[StrategySpec], models: Models, chances: Chances | None) -> Mapping[str, Sequence[DraftPlan]]:
    """Plans by strategy: its own, or those of what it chooses from."""
    from parlay.bench.plan.strategies import Acceptance, members, plan

    acceptance = chances.acceptance if chances is not None else Acceptance()
    return {str(spec): [plan(each, models, acceptance) for each in members(spec, models)] for spec in names}


def _traffic(options: argparse.Namespace) -> Traffic | None:
    """Read the file that --prompts names; None without it."""
    from parlay.bench.plan.acceptance import read_traffic

    if options.prompts and options.acceptance:
        raise ValueError("--prompts measures what --acceptance says: leave out one of them")
    return read_traffic(options.prompts) if options.prompts else None


def _told(options: argparse.Namespace, told: Acceptance) -> Chances | None:
    """The chances of --acceptance; None without it."""
    from parlay.bench.plan.acceptance import Chances

    return Chances(told, "as --acceptance says") if options.acceptance else None


def _measured(options: argparse.Namespace, names: list[StrategySpec], models: Models, traffic: Traffic) -> Chances:
    """The chances on the user's own prompts, by the model, or by a small one where it has no weights here.

    Raises ValueError for a strategy that is named and reads more than the text where another model stands in.
    """
    from parlay.bench.plan.acceptance import measured
    from parlay.bench.plan.strategies import drafting, members
    from parlay.llm.llm import LLM
    from parlay.strategies.catalogue import find

    here = _has_weights(options.model)
    model = options.model if here else default_model()
    wanted = drafting(list(dict.fromkeys(each for spec in names for each in members(spec, models))))
    unread = [spec for spec in wanted if not here and not find(spec.name).replayable]
    if options.strategy and unread:
        raise ValueError(
            f"{unread[0]} reads {options.model} itself, which has no weights here: say --acceptance instead"
        )

    def opened() -> LLM:
        load = LoadOptions(quantize="int8" if options.quantize == "int8" else None, threads=options.threads)
        return LLM(model, draft_model=options.draft_model if here else None, load=load)

    chances = measured([spec for spec in wanted if spec not in unread], traffic, model, opened, _say)
    return chances if here else chances.beside(f"{options.model} has no weights here: {model} stands in for it.")


def _has_weights(model: str) -> bool:
    """Whether the model can decode on this machine. Nothing is fetched for a name whose shape is known."""
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


@dataclass(frozen=True, slots=True)
class _Ground:
    """Facts that predictions stand on.

    ``source`` says where the machine's constants come from. ``kv_bytes`` are those of one number of a key or value,
    ``memory`` those of the device; None where they are not known.
    """

    machine: Machine
    source: str
    weights: WeightType
    kv_bytes: float
    memory: int | None


def _check_flags(options: argparse.Namespace) -> None:
    """Raise for what is wrong before torch is loaded and a machine is measured, which takes a minute."""
    from parlay.bench.plan.shapes import known_name
    from parlay.models.fetch.resolving import resolve_config

    if options.device and (options.calibrate or options.calibration):
        raise ValueError("--device names a machine that is not measured here: leave out --calibrate and --calibration")
    if options.device:
        find_device(options.device)
    options.model = options.model or default_model()
    for model in (options.model, options.draft_model):
        if model is not None and not known_name(model):
            resolve_config(model)


def _counts(options: argparse.Namespace, name: str) -> list[int]:
    """The numbers of a flag. Raises ValueError for what is none."""
    text: str = vars(options)[name]
    least = 0 if name == "context" else 1
    numbers = [int(part) if part.strip().isdecimal() else -1 for part in text.split(",")]
    if not all(least <= number <= _MOST for number in numbers):
        raise ValueError(f"--{name} {text}: give whole numbers from {least} to {_MOST}, joined by commas")
    return numbers


# ---------------------------------------------------------------------------------------------------------- machine


def _models(options: argparse.Namespace, ground: _Ground) -> Models:
    """Shapes of the model and of the one that drafts for it: the named one, or the one that goes with it."""
    from parlay.bench.plan.shapes import CACHED_BYTES, read_model, shape_of
    from parlay.bench.plan.strategies import Models
    from parlay.models.fetch.resolving import BUILT_IN_DRAFTS

    draft = options.draft_model or BUILT_IN_DRAFTS.get(options.model)
    kv_bytes = CACHED_BYTES.get(options.kv_cache_dtype, ground.kv_bytes)
    target, *drafts = [
        shape_of(read_model(name), weight_bytes=ground.weights.bytes, kv_bytes=kv_bytes)
        for name in (options.model, draft)
        if name
    ]
    return Models(target, *drafts)


def _weights(options: argparse.Namespace) -> WeightType | None:
    """The type that flags name, else how the model's file stores its weights; None for plain numbers of any type."""
    from parlay.bench.plan.shapes import known_name
    from parlay.bench.plan.weights import stored_type, weight_type
    from parlay.models.fetch.resolving import resolve_config

    named = options.quantize or (options.dtype if options.dtype != "auto" else None)
    if named is not None:
        return weight_type(named)
    found = None if known_name(options.model) else resolve_config(options.model)
    return stored_type(found) if found is not None and found.is_file() else None


def _table_device(options: argparse.Namespace) -> _Ground:
    """A known device, by its maker's figures. Keys and values are cached in two bytes, unless weights have more."""
    from parlay.bench.plan.weights import weight_type

    weights = _weights(options) or weight_type("bfloat16")
    source = (
        f"device {options.device.lower()} by its maker's figures, taken to reach {BANDWIDTH_SHARE:.0%} of its "
        f"bandwidth and {RATE_SHARE:.0%} of its arithmetic; nothing was measured"
    )
    memory = round(1e9 * find_device(options.device).memory)
    return _Ground(known_machine(options.device, weights.name), source, weights, max(2, round(weights.bytes)), memory)


def _this_machine(options: argparse.Namespace) -> _Ground:
    """The machine here, as it was calibrated now or before."""
    from parlay.bench.plan.machine import load_calibration
    from parlay.bench.plan.weights import weight_type

    path, weights = _calibration_file(options)
    calibration = load_calibration(path)
    origin = calibration.provenance
    kept = str(origin["weights"])
    if weights is not None and kept not in (weights.name, weights.blocks.name if weights.blocks else ""):
        raise ValueError(f"{path} was measured for {kept} weights, not {weights.name}: calibrate for these too")
    source = (
        f"{origin['processor']}, {origin['threads']} threads, calibrated {origin['date']} "
        f"(median error of the fit {calibration.median_error:.0%}) in {path}"
    )
    busy = float(origin.get("busy_cores", 0))
    if busy > _BUSY:
        source += f", while {busy:g} cores were busy with other work: --calibrate again when they are idle"
    memory = int(origin["memory_bytes"]) if "memory_bytes" in origin else None
    return _Ground(calibration.machine, source, weights or weight_type(kept), float(origin["kv_bytes"]), memory)


def _calibration_file(options: argparse.Namespace) -> tuple[Path, WeightType | None]:
    """Where the calibration is, made first if that is asked for or there is none, and the weights that are wanted.

    None for the weights: as the named calibration says.
    """
    from parlay.bench.plan import machine
    from parlay.bench.plan.weights import weight_type

    weights = _weights(options)
    named: Path | None = options.calibration
    if named is not None and named.exists() and not options.calibrate:
        return named, weights
    if weights is not None:
        machine.check_here(weights)
    load = LoadOptions(
        dtype="auto" if weights is None or weights.blocks or weights.name == "int8" else weights.name,
        quantize="int8" if weights is not None and weights.name == "int8" else None,
        threads=options.threads,
    )
    load = machine.load_here(options.model, load)
    weights = weights or weight_type(load.dtype)
    kept = weights.blocks.name if weights.blocks else weights.name
    path = named or machine.calibration_path(kept)
    if options.calibrate or not path.is_file():
        if not options.calibrate:
            _say(f"this machine is not calibrated for {kept} yet: measuring it, which takes about a minute")
        machine.calibrate_here(load, blocks=weights.blocks, log=_say).save(path)
        _say(f"calibration kept in {path}")
    return path, weights


def _say(line: str) -> None:
    print(line, file=sys.stderr)


# ------------------------------------------------------------------------------------------------------------- JSON


def _document(model: str, models: Models, ground: _Ground, cases: Sequence[PlanCase]) -> dict[str, object]:
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
