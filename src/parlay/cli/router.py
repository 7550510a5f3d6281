"""`parlay router`: shows what this machine has learned about drafters and the cost of steps."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from parlay.cli.parser import add_action
from parlay.system.terminal import aligned, counted, printable

if TYPE_CHECKING:
    from parlay.llm.router_file import RouterFileEntry
    from parlay.router.acceptance import Record
    from parlay.router.saved_state import KeptArm
    from parlay.types import KeptCost

_NODES = 8  # size of the proposals whose time is shown
_ALL = "all"
_SHOWN = (2, 4, 8)  # batch rows whose cost is shown next to that of one row


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(title="actions", metavar="ACTION", dest="action", required=True)
    show = add_action(actions, "show", "show what was learned, model by model")
    show.add_argument("--model", default="", metavar="MODEL", help="of this model only, by the name that show prints")
    show.add_argument("--json", action="store_true", help="print one JSON array")
    reset = add_action(actions, "reset", "forget it, so that it is learned anew")
    reset.add_argument("--model", default="", metavar="MODEL", help="of this model only, by the name that show prints")


def run(options: argparse.Namespace) -> int:
    from parlay.llm.router_file import entries, forget, place
    from parlay.types import ParlayError

    if options.action == "reset":
        try:
            print(f"forgot what was learned of {counted(forget(options.model), 'model')}")
        except OSError as error:
            raise ParlayError(f"can't change {place()}: {error.strerror}") from error
        return 0
    found = [each for each in entries() if options.model in ("", each.model)]
    if options.json:
        print(json.dumps([asdict(each) for each in found]))
    else:
        print("\n\n".join(map(_table, found)) or f"nothing was learned yet: {place()} holds nothing of it")
    return 0


def _table(entry: RouterFileEntry) -> str:
    """The model and strategy, then a line for each drafter and kind of request."""
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.saved))
    whose = f", requests of key {entry.owner}" if entry.owner else ""
    head = ["drafter", "requests", "levels lately", "accepted", "gains per step", f"ms for {_NODES} tokens"]
    rows = [row for name, arm in entry.arms.items() for row in _rows(name, arm)]
    drafters = aligned([head, *rows], 2) if rows else []
    return "\n".join([printable(f"{entry.model} on {entry.machine}{whose}, {when}"), *drafters, *_steps(entry.cost)])


def _steps(cost: KeptCost) -> Iterator[str]:
    """Lines about the known cost of steps, after the shortest texts."""
    from parlay.cost.measured import MeasuredCost

    if cost:
        known, context = MeasuredCost.restored(cost), min(map(int, cost))
        one = known.forward(1, context)
        more = ", ".join(f"{rows} rows {known.forward(rows, context) / one:.2f}" for rows in _SHOWN)
        yield f"a step of one row takes {1000 * one:.2f} ms; in such steps, {more}"


def _rows(name: str, arm: KeptArm) -> Iterator[list[str]]:
    """Rows for all requests and then each kind: draft levels tested lately, and the share that was right."""
    from parlay.router.acceptance import Record
    from parlay.router.prices import DraftDepth, DraftSeconds

    whole, seconds, depth = Record(), DraftSeconds(), DraftDepth()
    whole.restore(arm.record)
    seconds.restore(arm.seconds)
    depth.share = arm.depth
    yield [printable(name), _ALL, *_shown(whole, arm.gain), f"{1000 * seconds.of(depth.of(_NODES)):.2f}"]
    for kind, (gain, *record) in sorted(arm.kinds.items()):
        known = whole.of_kind()
        known.restore(record)
        yield ["", printable(kind) or "unknown", *_shown(known, gain), ""]


def _shown(record: Record, gain: float) -> list[str]:
    return [f"{record.weight:.0f}", f"{100 * record.share:.0f} %", f"{gain:.2f}"]
