"""Measures what `auto` gains when a new request uses what the router has learned from earlier requests of its kind.

Short requests for new text alternate with requests for edits. Two models in one process decode the same requests one
after another, each with a router that starts with no experience. One router is told the kinds of requests, the other is
not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from benchmarks.commands import one_line_errors
from benchmarks.options import command_parser
from parlay import LLM, SamplingParams
from parlay.bench.workloads import Item, load
from parlay.types import Metrics

PROSE = ("spec-bench/writing", "spec-bench/stem", "spec-bench/humanities")
EDITS = ("editeval",)
FIRST = 8
"""The number of first steps whose tokens are counted: they show how soon the router chooses well."""


@dataclass(frozen=True, slots=True)
class Told:
    """One request on both models, with kinds and without: tokens in the first steps, and tokens per second of
    decoding."""

    kind: str
    early: tuple[int, int]
    rates: tuple[float, float]


def requests(data: Path, pairs: int) -> list[Item]:
    """Return ``pairs`` prompts for new text, each followed by one for an edit."""
    prose = [item for workload in load(PROSE, data=data) for item in workload.items]
    edits = [item for workload in load(EDITS, data=data) for item in workload.items]
    edits.sort(key=lambda item: -len(item.messages[-1].content))  # the longest first: they have the most to copy
    return [item for pair in zip(prose[:pairs], edits[:pairs], strict=True) for item in pair]


def decode(llm: LLM, item: Item, tokens: int, *, told: bool) -> tuple[str, Metrics]:
    """Decode one request. Return its kind and the metrics of its answer."""
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    job = llm.job([message._asdict() for message in item.messages], params)
    (sample,) = job.samples
    kind = sample.request.kind
    if not told:
        sample.request = replace(sample.request, kind="")
    llm.add(job)
    while not job.finished:
        for event in llm.engine.step():
            job.event(sample, event)
    return kind, job.output().outputs[0].metrics


def early(metrics: Metrics) -> int:
    """Return the number of tokens in the first steps."""
    assert metrics.router is not None
    tokens = steps = 0
    for each in metrics.router.life:
        if steps + each.steps > FIRST:
            break
        tokens, steps = tokens + each.tokens, steps + each.steps
    return tokens


def measure(model: str, items: Sequence[Item], tokens: int) -> list[Told]:
    found: list[Told] = []
    with (
        LLM(model, strategy="auto", router_memory="off") as one,
        LLM(model, strategy="auto", router_memory="off") as other,
    ):
        for place, item in enumerate(items):
            step = -1 if place // 2 % 2 else 1  # alternates by pairs, so that each model goes first with either kind
            turns = ((one, True), (other, False))[::step]
            (kind, told), (_, untold) = [decode(llm, item, tokens, told=told) for llm, told in turns][::step]
            rates = told.tokens_per_second, untold.tokens_per_second
            found.append(Told(kind, (early(told), early(untold)), rates))
    return found


def report(found: Sequence[Told], skipped: int) -> str:
    """Write a table by kind, without the first ``skipped`` requests, when the router still knew too little about the
    kinds."""
    lines = [f"{'kind':12}{'requests':>9}{f'tokens in {FIRST} steps':>22}{'without':>9}{'tokens/s':>10}{'without':>9}"]
    kept = found[skipped:]
    for kind in (*sorted({each.kind for each in kept}), "all"):
        own = [each for each in kept if kind in (each.kind, "all")]
        early_steps = [fmean(each.early[place] for each in own) for place in range(2)]
        rates = [fmean(each.rates[place] for each in own) for place in range(2)]
        lines.append(f"{kind:12}{len(own):9}{early_steps[0]:22.2f}{early_steps[1]:9.2f}{rates[0]:10.1f}{rates[1]:9.1f}")
    return "\n".join(lines)


def main() -> None:
    parser = command_parser("kinds_in_turn", __doc__)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="folder of published prompt sets")
    parser.add_argument("--model", default="smollm2-135m", help="the model (default: smollm2-135m)")
    parser.add_argument(
        "--pairs", type=int, default=12, metavar="N", help="pairs of a request for new text and an edit (default: 12)"
    )
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="tokens of each answer (default: 64)")
    options = parser.parse_args()
    with one_line_errors("kinds_in_turn"):
        print(report(measure(options.model, requests(options.data, options.pairs), options.tokens), skipped=4))


if __name__ == "__main__":
    main()
