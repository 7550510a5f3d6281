"""Models the speedup of trained draft heads with larger targets, from their tokens per step on SmolLM2.

    python -m benchmarks.drafters.modelled --data DIR
    python -m benchmarks.drafters.modelled --data DIR --head hydra=FOLDER --head eagle=FOLDER

Every step verifies drafts of 1 to 16 nodes (``policy=fixed``). The modelled speed is the measured tokens per step
divided by the time of a step, which is predicted from the device's data sheet. So the speedup shows what a head of this
accuracy would be worth with a larger target; it does not show how accurate a head of that target would be.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.commands import begin, one_line_errors, open_results, write_page
from benchmarks.drafters.trained import SPEC_BENCH, texts
from benchmarks.options import add_run_flags, command_parser
from benchmarks.pages import about, number, table
from benchmarks.setup import FULL, QUICK, SMOLLM2, Setup
from parlay.bench.plan.heads import HEADS
from parlay.bench.records import PLAIN, Row
from parlay.bench.runner import Bench, BenchPlan, lacks
from parlay.cost.devices import machine
from parlay.cost.roofline import ModelShape
from parlay.cost.speed import DraftPlan, Setting, TreeShape, speed_of
from parlay.drafters.options import HEADS_OF_OTHERS
from parlay.heads import store
from parlay.heads.hub import read_card

NODES = (1, 2, 4, 8, 16)
_LEVELS = 4
"""The greatest depth of a draft, as in the strategies' default."""
_CONTEXT = 1024
_DEPTHS = 3  # the table shows the acceptance of this many


@dataclass(frozen=True, slots=True)
class Large:
    """A larger target, and a device that holds it in bfloat16."""

    name: str
    device: str
    shape: ModelShape


def _llama(hidden: int, ffn: int, layers: int, heads: int, *, tied: bool = False) -> ModelShape:
    head_dim = hidden // heads
    return ModelShape(
        vocab_size=128_256,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=head_dim,
        tie_embeddings=tied,
    )


LARGE = (
    Large("1 B", "l4", _llama(2048, 8192, 16, 32, tied=True)),
    Large("8 B", "h100-sxm", _llama(4096, 14_336, 32, 32)),
    Large("70 B", "b200", _llama(8192, 28_672, 80, 64)),
)
"""Models of the sizes of the Llama 3 family."""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command's options."""
    parser = command_parser("drafters.modelled", __doc__)
    parser.add_argument("--data", type=Path, metavar="DIR", help="published sets of prompts; without it, built-in ones")
    parser.add_argument("--methods", nargs="+", choices=tuple(HEADS), default=["eagle3", "medusa"])
    parser.add_argument(
        "--head", action="append", default=[], metavar="METHOD=FOLDER", help="use this head instead of the target's own"
    )
    parser.add_argument("--prompts", type=int, default=1, help="prompts of each kind of text (default: 1)")
    parser.add_argument("--tokens", type=int, default=64, help="longest answer in tokens (default: 64)")
    add_run_flags(parser)
    return parser.parse_args(arguments)


def main() -> None:
    """Measure, and write the page."""
    options = parse()
    begin(options)
    with one_line_errors("drafters.modelled"):
        command = f"python -m benchmarks.drafters.modelled{' --data DIR' if options.data else ''}"
        results = open_results(options, "modelled", command, {"trained": trained(options.methods, heads(options))})
        setup = Setup(QUICK if options.quick else FULL, options.data, options.cache)
        plan = plan_of(setup, options)
        if lacks(results, plan):
            with setup.llm(SMOLLM2) as llm:
                Bench(llm, plan, results).run()
    write_page(results.path, page(results.header, results.rows))


def heads(options: argparse.Namespace) -> dict[str, str]:
    """Return the folder given with ``--head`` for each method."""
    return dict(each.split("=", 1) for each in options.head)


def trained(methods: Sequence[str], named: Mapping[str, str]) -> dict[str, Any]:
    """Return what each head's card says about its training, by method; an empty mapping for a card that says
    nothing."""
    found: dict[str, Any] = {}
    for method in methods:
        stored = store.candidates(HEADS_OF_OTHERS.get(method, method))
        folder = Path(named[method]) if method in named else stored[0].folder if stored else None
        said = read_card(folder)[0].get("parlay", {}) if folder else {}
        found[method] = {name: said[name] for name in ("rows", "acceptance") if name in said}
    return found


def plan_of(setup: Setup, options: argparse.Namespace) -> BenchPlan:
    """Plan a measurement of each method with each number of nodes."""
    named = heads(options)
    return BenchPlan(
        model=SMOLLM2,
        strategies=tuple(spec(name, nodes, named.get(name, "")) for name in options.methods for nodes in NODES),
        workloads=texts(SMOLLM2, setup, [SPEC_BENCH], options.prompts),
        rounds=1,
        max_tokens=min(options.tokens, QUICK.tokens) if options.quick else options.tokens,
    )


def spec(method: str, nodes: int, head: str) -> str:
    """Return a strategy that drafts the same number of nodes in every step."""
    return f"{method}:policy=fixed,k={nodes}" + (f",head={head}" if head else "")


def page(header: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """Return the page in Markdown."""
    kinds = dict.fromkeys(row.cell.workload for row in rows)
    head = (
        *("method", "trained on", "held-out"),
        *(f"k={nodes}" for nodes in NODES),
        *(f"{each.name}, {each.device}" for each in LARGE),
        "same",
    )
    intro = (
        "*Trained on*: tokens of the target's answers, counted in each pass, as the head's card says. *Held-out*: the "
        "share of most likely drafts that were right up to depths 1, 2 and 3 on held-out texts, in percent. "
        "The columns k= are tokens per step on SmolLM2-135M-Instruct (Q4_1), greedy, with drafts of k nodes in every "
        "step: the mean of "
        f"these kinds of text: {', '.join(kinds)}. The last columns are the "
        "**modelled** speedup over plain decoding of a larger target at batch 1 and 1,024 tokens of context, at "
        "its best number of nodes; `parlay plan` explains the model. Nothing was measured on these "
        "devices. *Same* counts texts equal to plain decoding's."
    )
    body = table(head, lines(rows, header.get("trained", {})))
    return "\n".join(["# Draft heads with larger targets", "", about(header), "", intro, "", *body])


def lines(rows: Sequence[Row], trained: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield a table row for each method. ``trained`` is what the card of each head says about its training."""
    names = dict.fromkeys(row.cell.strategy.partition(":")[0] for row in rows if row.cell.strategy != PLAIN)
    for name in names:
        own = [row for row in rows if row.cell.strategy.partition(":")[0] == name]
        tokens = {nodes: _tokens(own, nodes) for nodes in NODES}
        known = {nodes: each for nodes, each in tokens.items() if each is not None}
        gains = (f"{gain(name, large, known):.2f}" for large in LARGE)
        equal = f"{sum(row.same for row in own)}/{sum(row.of for row in own)}"
        said = trained.get(name, {})
        count, shares = said.get("rows", ""), said.get("acceptance", ())
        right = ", ".join(f"{100 * share:.1f}" for share in shares[:_DEPTHS])
        yield (
            f"`{name}`",
            f"{count:,}" if count else "",
            right,
            *(number(each) for each in tokens.values()),
            *gains,
            equal,
        )


def _tokens(rows: Sequence[Row], nodes: int) -> float | None:
    """Return the mean tokens per step over the kinds of text, with drafts of ``nodes`` nodes; None if nothing was
    measured."""
    own = [row for row in rows if f"k={nodes}" in row.cell.strategy.partition(":")[2].split(",") and row.steps]
    found = [row.tokens / row.steps for row in own]
    return sum(found) / len(found) if found else None


def gain(method: str, large: Large, tokens: Mapping[int, float]) -> float:
    """Return the modelled speedup over plain decoding at the best number of nodes, which may be 0."""
    cost = HEADS[method](large.shape)
    setting = Setting(machine(large.device, "bfloat16"), large.shape, 1, _CONTEXT)
    plan = DraftPlan(name=method, drafter=cost.shape, at_once=cost.at_once, probes=cost.probes)
    shapes = [TreeShape(0, 1.0, 0, 1)]
    shapes += [TreeShape(nodes, each, min(nodes, _LEVELS), 1) for nodes, each in tokens.items()]
    speeds = [speed_of(setting, plan, shape).tokens_per_second for shape in shapes]
    return max(speeds) / speeds[0]


if __name__ == "__main__":
    main()
