"""`parlay plan`: how fast a model would be on a machine, and which strategy to take. All numbers are modelled."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from parlay.cli.flags import add_option_flags, strategy
from parlay.cost.devices import BANDWIDTH_SHARE, DEVICES, RATE_SHARE
from parlay.cost.devices import machine as known_machine
from parlay.options import LoadOptions
from parlay.system.terminal import aligned

if TYPE_CHECKING:
    from parlay.bench.plan.acceptance import Chances
    from parlay.bench.plan.report import PlanCase
    from parlay.bench.plan.strategies import Acceptance, Models
    from parlay.bench.plan.traffic import Traffic
    from parlay.cost.roofline import Machine
    from parlay.strategies.spelling import StrategySpec

_MOST = 1 << 20
_ASSUMED = (
    "Not measured: open chat without a trained drafter has much less, and gains little. "
    "--prompts FILE measures it on your own prompts, or on recorded traffic."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        default="parlay-mini",
        help="name that parlay models lists, Hugging Face Hub id, GGUF file, or local folder; config.json is enough "
        "(default: parlay-mini)",
    )
    parser.add_argument("--draft-model", metavar="MODEL", help="small model for strategies that draft with one")
    parser.add_argument(
        "--dtype", default="auto", help="number type of the weights: auto, float32, bfloat16, float16 or int8"
    )
    add_option_flags(
        parser,
        LoadOptions,
        {"quantize": "weights in eight bits (on this machine)", "threads": "threads that decode on this machine"},
    )
    _add_machine_flags(parser)
    _add_case_flags(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _add_machine_flags(parser: argparse.ArgumentParser) -> None:
    where = parser.add_argument_group("machine", "this machine, as calibrated, unless a device is named")
    where.add_argument(
        "--device", metavar="NAME", help=f"predict for this device by its maker's figures: {', '.join(DEVICES)}"
    )
    where.add_argument("--calibrate", action="store_true", help="measure this machine first; takes about a minute")
    where.add_argument("--calibration", metavar="FILE", type=Path, help="file of the measurement, to write or to read")


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
        "guess and the second best (default: 0.7)",
    )
    cases.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help='measure that chance on your own requests: a prompt on each line, {"prompt": TEXT} in a .jsonl file, or '
        'recorded traffic, {"prompt": TEXT, "answer": TEXT}, whose answers are replayed where a strategy permits',
    )


def run(options: argparse.Namespace) -> int:
    _check_flags(options)
    rows, contexts, batches = (_counts(options, name) for name in ("rows", "context", "batch"))
    from parlay.bench.plan.report import case
    from parlay.bench.plan.strategies import compared, plan, read_acceptance
    from parlay.system import threads

    threads.settle(options.threads)
    told, traffic = read_acceptance(options.acceptance), _traffic(options)
    ground = _table_device(options) if options.device else _this_machine(options)
    models = _models(options, ground)
    names = compared(options.strategy or (), models)
    chances = _measured(options, names, traffic) if traffic else _told(options, told)
    plans = [plan(name, models, chances.acceptance) for name in names]
    cases = [
        case(ground.machine, models.target, context=context, batch=batch, rows=rows, plans=plans)
        for context in contexts
        for batch in batches
    ]
    if options.json:
        print(json.dumps(_document(options.model, models, ground, cases) | _known(chances, names), indent=2))
    else:
        parts = [_header(options, models, ground), *map(_tables, cases), _assumed(chances, names)]
        print("\n\n".join(parts))
    return 0


def _header(options: argparse.Namespace, models: Models, ground: _Ground) -> str:
    size = models.target.parameters / 1e6
    why = ", which stands for the blocks of its file" if _stands_for_blocks(options) else ""
    return f"{options.model}: {size:,.0f} million parameters in {ground.weights}{why}. Modelled for {ground.source}."


def _stands_for_blocks(options: argparse.Namespace) -> bool:
    from parlay.bench.plan.machine import in_blocks

    asked = options.device or options.calibration or options.quantize or options.dtype != "auto"
    return not asked and in_blocks(options.model)


def _traffic(options: argparse.Namespace) -> Traffic | None:
    """What --prompts names; None without it."""
    from parlay.bench.plan.traffic import read_traffic

    if options.prompts and options.acceptance:
        raise ValueError("--prompts measures what --acceptance says: leave out one of them")
    return read_traffic(options.prompts) if options.prompts else None


def _told(options: argparse.Namespace, told: Acceptance) -> Chances:
    """Those of --acceptance, or what is assumed without it."""
    from parlay.bench.plan.acceptance import Chances

    return Chances(told, "as --acceptance says") if options.acceptance else Chances(told, "ASSUMED", _ASSUMED)


def _measured(options: argparse.Namespace, strategies: Sequence[StrategySpec], traffic: Traffic) -> Chances:
    from parlay.bench.plan.acceptance import measured
    from parlay.bench.plan.strategies import drafting
    from parlay.llm.llm import LLM

    def opened() -> LLM:
        load = LoadOptions(quantize=options.quantize, threads=options.threads)
        return LLM(options.model, draft_model=options.draft_model, load=load)

    return measured(drafting(strategies), traffic, options.model, opened, _say)


def _assumed(chances: Chances, strategies: Sequence[StrategySpec]) -> str:
    """Where the chances come from on which the tables stand."""
    figures = (f"{spec} {'+'.join(f'{rate:.2f}' for rate in rates)}" for spec, rates in _rates(chances, strategies))
    known = f"Chance that a drafted token is right, {chances.source}: {', '.join(figures) or 'none'}."
    return f"{known} {chances.note}".rstrip()


def _rates(chances: Chances, strategies: Sequence[StrategySpec]) -> list[tuple[str, tuple[float, ...]]]:
    from parlay.bench.plan.strategies import drafting

    return [(str(spec), chances.acceptance.of(spec)) for spec in drafting(strategies)]


@dataclass(frozen=True, slots=True)
class _Ground:
    """What predictions stand on.

    ``source`` says where the machine's constants come from. ``weights`` is the type in which weights are kept, the
    bytes are those of one of them and of one number of a key or value.
    """

    machine: Machine
    source: str
    weights: str
    weight_bytes: int
    kv_bytes: int


def _check_flags(options: argparse.Namespace) -> None:
    """Says what is wrong before torch is loaded and a machine is measured, which takes a minute."""
    from parlay.models.fetch.resolving import resolve_config

    _check_machine_flags(options)
    for model in (options.model, options.draft_model):
        if model is not None:
            resolve_config(model)


def _check_machine_flags(options: argparse.Namespace) -> None:
    if options.device and (options.calibrate or options.calibration):
        raise ValueError("--device names a machine that is not measured here: leave out --calibrate and --calibration")
    if options.device and options.quantize:
        raise ValueError("--quantize works for this machine only: leave it out with --device")
    if options.device:
        known_machine(options.device, "bfloat16")  # a wrong name is said before a model is looked for


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
    from parlay.bench.plan.machine import read_model, shape_of
    from parlay.bench.plan.strategies import Models
    from parlay.models.fetch.resolving import BUILT_IN_DRAFTS

    draft = options.draft_model or BUILT_IN_DRAFTS.get(options.model)
    target, *drafts = [
        shape_of(read_model(name), weight_bytes=ground.weight_bytes, kv_bytes=ground.kv_bytes)
        for name in (options.model, draft)
        if name
    ]
    return Models(target, *drafts)


def _table_device(options: argparse.Namespace) -> _Ground:
    """A known device, by its maker's figures."""
    from parlay.bench.plan.machine import bytes_of

    weights = options.dtype if options.dtype != "auto" else "bfloat16"
    source = (
        f"device {options.device.lower()} by its maker's figures, taken to reach {BANDWIDTH_SHARE:.0%} of its "
        f"bandwidth and {RATE_SHARE:.0%} of its arithmetic; nothing was measured"
    )
    size = bytes_of(weights)
    return _Ground(known_machine(options.device, weights), source, weights, size, size)


def _this_machine(options: argparse.Namespace) -> _Ground:
    """This machine, as it was calibrated now or before."""
    from parlay.bench.plan.machine import load_calibration

    weights = _wanted_weights(options)
    path = _calibration_file(options, weights)
    calibration = load_calibration(path)
    origin = calibration.provenance
    if weights not in ("auto", origin["weights"]):
        raise ValueError(f"{path} was measured for {origin['weights']} weights, not {weights}: calibrate for these too")
    source = (
        f"{origin['processor']}, {origin['threads']} threads, calibrated {origin['date']} "
        f"(median error of the fit {calibration.median_error:.0%}) in {path}"
    )
    sizes = int(origin["weight_bytes"]), int(origin["kv_bytes"])
    return _Ground(calibration.machine, source, str(origin["weights"]), *sizes)


def _wanted_weights(options: argparse.Namespace) -> str:
    """The type of the weights; ``auto``: as the named calibration says."""
    if options.calibration is not None and not options.calibrate:
        return str(options.quantize or options.dtype)
    load = _load(options)
    return str(load.quantize or load.dtype)


def _load(options: argparse.Namespace) -> LoadOptions:
    from parlay.bench.plan.machine import load_here

    asked = LoadOptions(dtype=options.dtype, quantize=options.quantize, threads=options.threads)
    return load_here(options.model, asked)


def _calibration_file(options: argparse.Namespace, weights: str) -> Path:
    """Where the calibration is, made first if that is asked for, or if there is none yet."""
    from parlay.bench.plan import machine

    path: Path = options.calibration or machine.calibration_path(weights)
    if options.calibrate or (options.calibration is None and not path.is_file()):
        if not options.calibrate:
            _say(f"this machine is not calibrated for {weights} yet: measuring it, which takes about a minute")
        measured = machine.calibrate_here(_load(options), log=_say)
        measured.save(path)
        _say(f"calibration kept in {path}")
    return path


def _say(line: str) -> None:
    print(line, file=sys.stderr)


# ----------------------------------------------------------------------------------------------------------- output


def _document(model: str, models: Models, ground: _Ground, cases: Sequence[PlanCase]) -> dict[str, object]:
    return {
        "model": model,
        "parameters": models.target.parameters,
        "weights": ground.weights,
        "machine": {"source": ground.source, **asdict(ground.machine)},
        "modelled": True,
        "cases": [asdict(each) for each in cases],
    }


def _known(chances: Chances, strategies: Sequence[StrategySpec]) -> dict[str, object]:
    rates = dict(_rates(chances, strategies))
    return {"acceptance": {"source": chances.source, "note": chances.note, "by_strategy": rates}}


def _tables(case: PlanCase) -> str:
    """Three parts: what was asked, verifies by rows, strategies."""
    verifies = [["rows", "milliseconds", "times one row"]] + [
        [str(verify.rows), f"{1000 * verify.seconds:.2f}", f"{verify.ratio:.2f}"] for verify in case.verifies
    ]
    offers = [["strategy", "nodes", "tokens a step", "step ms", "tokens/s", "times plain", "pays below batch"]] + [
        [
            offer.speed.name,
            str(offer.speed.nodes),
            f"{offer.speed.tokens_per_step:.2f}",
            f"{1000 * offer.speed.step_seconds:.2f}",
            f"{offer.speed.tokens_per_second:,.0f}",
            f"{offer.gain:.2f}",
            "-" if offer.pays_below is None else str(offer.pays_below),
        ]
        for offer in case.offers
    ]
    prefill = f"prefill {case.prefill_seconds:.3f} s" if case.context else "no prefill"
    title = f"context {case.context:,}, batch {case.batch}: {prefill}"
    return "\n".join([title, *_indented(verifies), "", *_indented(offers), f"pick: {case.pick}"])


def _indented(rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"  {line}" for line in aligned(rows)]
