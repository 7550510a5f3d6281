"""`parlay plan`: how fast a model would be on a machine, and which strategy to take. Everything it says is modelled."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from parlay.cost.devices import BANDWIDTH_SHARE, DEVICES, RATE_SHARE
from parlay.cost.devices import machine as known_machine

if TYPE_CHECKING:
    from parlay.cost.roofline import Machine
    from parlay.plan.report import Case
    from parlay.plan.strategies import Models

_MOST = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        default="parlay-mini",
        help="built-in name, Hugging Face Hub id, or local folder; config.json is enough (default: parlay-mini)",
    )
    parser.add_argument("--draft-model", metavar="MODEL", help="small model for strategies that draft with one")
    parser.add_argument("--dtype", default="auto", help="of the weights: auto, float32, bfloat16 or float16")
    where = parser.add_argument_group("machine", "this one, as calibrated, unless a device is named")
    where.add_argument("--device", metavar="NAME", help=f"one of {', '.join(DEVICES)}")
    where.add_argument("--calibrate", action="store_true", help="measure this machine first; takes about a minute")
    where.add_argument("--calibration", metavar="FILE", type=Path, help="where the measurement is kept")
    cases = parser.add_argument_group("cases")
    cases.add_argument("--rows", default="1,2,4,8,16", metavar="N,...", help="rows of a verify (default: 1,2,4,8,16)")
    cases.add_argument("--context", default="1024", metavar="N,...", help="tokens cached (default: 1024)")
    cases.add_argument("--batch", default="1", metavar="N,...", help="sequences at once (default: 1)")
    cases.add_argument(
        "--acceptance",
        action="append",
        default=[],
        metavar="[NAME=]RATE",
        help="chance that a drafted token is right, of all strategies or of one; 0.6+0.2: of the best guess and the "
        "second best (default: 0.7)",
    )
    cases.add_argument(
        "--strategy", action="append", metavar="NAME[:KEY=VALUE,...]", help="to compare with plain decoding; repeatable"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(options: argparse.Namespace) -> int:
    _check_machine_flags(options)
    rows, contexts, batches = (_counts(options, name) for name in ("rows", "context", "batch"))
    from parlay.llm import DEFAULT_STRATEGY  # here, because these load torch
    from parlay.plan.report import case
    from parlay.plan.strategies import compared, plan, read_acceptance

    acceptance = read_acceptance(options.acceptance)
    ground = _ground(options)
    names = compared(options.strategy or (), DEFAULT_STRATEGY, ground.models)
    plans = [plan(name, ground.models, acceptance) for name in names]
    cases = [
        case(ground.machine, ground.models.target, context=context, batch=batch, rows=rows, plans=plans)
        for context in contexts
        for batch in batches
    ]
    if options.json:
        print(json.dumps(_document(options.model, ground, cases), indent=2))
    else:
        print("\n\n".join([_header(options.model, ground), *map(_tables, cases)]))
    return 0


@dataclass(frozen=True, slots=True)
class _Ground:
    """What predictions stand on; ``source`` says where the machine's constants come from."""

    machine: Machine
    models: Models
    dtype: str
    source: str


def _check_machine_flags(options: argparse.Namespace) -> None:
    if options.device and (options.calibrate or options.calibration):
        raise ValueError("--device names a machine that is not measured: leave out --calibrate and --calibration")
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


def _ground(options: argparse.Namespace) -> _Ground:
    from parlay.plan.machine import read_model, shape_of
    from parlay.plan.strategies import Models
    from parlay.strategies import BUILT_IN_DRAFTS

    config = read_model(options.model)
    draft = options.draft_model or BUILT_IN_DRAFTS.get(options.model)
    if options.device:
        dtype = options.dtype if options.dtype != "auto" else "bfloat16"
        machine, on_cpu = known_machine(options.device, dtype), False
        source = (
            f"device {options.device.lower()} by its maker's figures, taken to reach {BANDWIDTH_SHARE:.0%} of its "
            f"bandwidth and {RATE_SHARE:.0%} of its arithmetic; nothing was measured"
        )
    else:
        machine, dtype, on_cpu, source = _measured(options)
    draft_shape = shape_of(read_model(draft), dtype, on_cpu=on_cpu) if draft else None
    return _Ground(machine, Models(shape_of(config, dtype, on_cpu=on_cpu), draft_shape), dtype, source)


def _measured(options: argparse.Namespace) -> tuple[Machine, str, bool, str]:
    """Constants of this machine, by a measurement made now or before."""
    from parlay.cost.calibrate import load
    from parlay.plan.machine import calibrate_here, calibration_path, dtype_here

    wanted = options.dtype
    if options.calibration is None and wanted == "auto":
        wanted = dtype_here(options.model)
    path: Path = options.calibration or calibration_path(wanted)
    if options.calibrate:
        measured = calibrate_here(wanted, log=lambda line: print(line, file=sys.stderr))
        measured.save(path)
        print(f"calibration kept in {path}", file=sys.stderr)
    elif options.calibration is None and not path.is_file():
        raise ValueError(
            f"this machine is not calibrated for {wanted}: run with --calibrate (a minute), or name one of the known "
            f"devices with --device: {', '.join(DEVICES)}"
        )
    calibration = load(path)
    origin = calibration.provenance
    if wanted not in ("auto", origin["dtype"]):
        raise ValueError(f"{path} was measured in {origin['dtype']}, not in {wanted}: calibrate with --dtype {wanted}")
    source = (
        f"{origin['processor']}, {origin['threads']} threads, {origin['dtype']}, calibrated {origin['date']} "
        f"(median error of the fit {calibration.median_error:.0%}) in {path}"
    )
    return calibration.machine, str(origin["dtype"]), origin["device"] == "cpu", source


# ----------------------------------------------------------------------------------------------------------- output


def _document(model: str, ground: _Ground, cases: Sequence[Case]) -> dict[str, object]:
    return {
        "model": model,
        "parameters": ground.models.target.parameters,
        "dtype": ground.dtype,
        "machine": {"source": ground.source, **asdict(ground.machine)},
        "modelled": True,
        "cases": [asdict(each) for each in cases],
    }


def _header(model: str, ground: _Ground) -> str:
    size = ground.models.target.parameters / 1e6
    return f"{model}: {size:,.0f} million parameters in {ground.dtype}. Modelled for {ground.source}."


def _tables(case: Case) -> str:
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
    return "\n".join([title, *_aligned(verifies), "", *_aligned(offers), f"pick: {case.pick}"])


def _aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """Lines of two-blank columns: the first to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  "
        + "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in table
    ]
