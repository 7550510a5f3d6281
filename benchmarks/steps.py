"""Measures school maths with drafted tokens, with steps drafted ahead, and with steps that a judge accepts: accuracy,
time.

The texts of exact ways are compared with plain decoding's. Problems come in the order of `reasoning_ids.json`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from benchmarks.commands import begin, one_line_errors, open_results, write_page
from benchmarks.options import add_run_flags, add_study_flags, command_parser
from benchmarks.reasoning import read_problems
from parlay import LLM, SamplingParams
from parlay.bench.records import PLAIN, Cell, Results, Row
from parlay.llm.steps_ahead import AheadParams
from parlay.text.answers import NUMBER, find_answer

ASK = "{question}\nThink step by step. The last line shall be: The answer is NUMBER."


class Way(NamedTuple):
    """One way to answer: a strategy, and steps drafted ahead if ``ahead`` is given."""

    strategy: str | None
    ahead: AheadParams | None = None
    keeps: bool = True
    """Whether its text equals plain decoding's."""


WAYS: Mapping[str, Way] = {
    PLAIN: Way(PLAIN),
    "draft-model": Way("draft-model:policy=fixed"),
    "superposed-draft": Way("superposed-draft:policy=fixed"),
    "steps ahead, no tokens drafted": Way(PLAIN, AheadParams()),
    "steps ahead": Way(None, AheadParams()),
    "steps ahead, sentences": Way(None, AheadParams(until="sentence")),
    "steps ahead, the model judges": Way(None, AheadParams(judge="model"), keeps=False),
    "spec-reason": Way("spec-reason", keeps=False),
}


@dataclass(frozen=True, slots=True)
class Written:
    """An answer, the target's batches or steps that it took, and the CPU seconds."""

    text: str
    token_ids: tuple[int, ...]
    ended: bool
    rounds: int
    drafted: int
    accepted: int
    seconds: float


def write(llm: LLM, small: LLM, question: str, way: Way, tokens: int) -> Written:
    """Answer greedily. On one thread, other work hardly changes the CPU seconds.

    The answer is not stored, because the next way would find its own text there.
    """
    params = SamplingParams(temperature=0, max_tokens=tokens)
    messages = [{"role": "user", "content": ASK.format(question=question)}]
    llm.reset_prefix_cache()
    small.reset_prefix_cache()
    began = time.process_time()
    if way.ahead is None:
        (output,) = llm.chat(messages, params, False, strategy=way.strategy, store=False)
        seconds, one = time.process_time() - began, output.chosen
        steps, drafted, accepted = one.metrics.steps, one.metrics.draft_tokens, one.metrics.accepted_tokens
        return Written(one.text, one.token_ids, one.finish_reason == "stop", steps, drafted, accepted, seconds)
    ahead = llm.reason_ahead(messages, params, way.ahead, drafter=small, strategy=way.strategy, store=False)
    seconds, ended = time.process_time() - began, ahead.finish_reason == "stop"
    return Written(ahead.text, ahead.token_ids, ended, ahead.rounds, ahead.drafted, ahead.accepted, seconds)


def row(cell: Cell, place: int, written: Written, right: str, *, same: bool | None) -> Row:
    answer = find_answer(NUMBER, written.text) if written.ended else None
    share = written.accepted / written.drafted if written.drafted else 0.0
    return Row(
        cell=cell,
        round=place,
        requests=1,
        tokens=len(written.token_ids),
        seconds=written.seconds,
        steps=written.rounds,
        same=int(bool(same)),
        of=int(same is not None),
        values={"right": float(answer == right), "stood": share},
    )


def measure(llm: LLM, small: LLM, options: argparse.Namespace, results: Results) -> None:
    """Answer problem after problem in every way, in changing order, until the time is over."""
    until, model = time.monotonic() + 60 * options.minutes, Path(options.model).stem
    cells = {name: Cell(part="steps", model=model, strategy=name, workload="gsm8k") for name in WAYS}
    done = {each.round for each in results.of(cells[PLAIN])}
    for turn, (place, question, right) in enumerate(read_problems(options.data)[: options.problems]):
        if time.monotonic() > until:
            return
        if place in done:
            continue
        names = list(WAYS)
        order = names[turn % len(names) :] + names[: turn % len(names)]
        found = {name: write(llm, small, question, WAYS[name], options.max_tokens) for name in order}
        plain = found[PLAIN].token_ids
        for name, way in WAYS.items():
            if way.keeps and found[name].token_ids != plain:
                raise ValueError(f"problem {place}: {name} has another text than plain decoding")
        results.add(
            [
                row(cells[name], place, found[name], right, same=found[name].token_ids == plain if way.keeps else None)
                for name, way in WAYS.items()
            ]
        )


def page(results: Results) -> str:
    """Write a table row for each way, compared with plain decoding of the same problems."""
    rows = {cell.strategy: {each.round: each for each in results.of(cell)} for cell in results.cells}
    plain = rows[PLAIN]
    lines = [
        "| way | problems | same text | accuracy | time of plain decoding | tokens a round | drafts that stood |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, own in rows.items():
        same = f"{sum(each.same for each in own.values())}/{len(own)}" if WAYS[name].keeps else "lossy"
        ratio = sum(each.seconds for each in own.values()) / sum(plain[place].seconds for place in own)
        per = sum(each.tokens for each in own.values()) / sum(each.steps for each in own.values())
        lines.append(
            f"| {name} | {len(own)} | {same} | {100 * fmean(each.values['right'] for each in own.values()):.0f} % | "
            f"{ratio:.2f} | {per:.1f} | {100 * fmean(each.values['stood'] for each in own.values()):.0f} % |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = command_parser("steps", __doc__)
    add_run_flags(parser, quick="two problems, short answers: to see that it works")
    add_study_flags(parser, data="gsm8k", many="problems", count=40, tokens=320, of="an answer")
    parser.add_argument("--draft-model", required=True, help="the smaller model of the same tokenizer")
    options = parser.parse_args()
    if options.quick:
        options.problems, options.max_tokens = min(options.problems, 2), 24
    with one_line_errors("steps"):
        begin(options)
        command = "python -m benchmarks.steps --data DIR --model FILE --draft-model FILE"
        results = open_results(options, "steps", command, {"max_tokens": options.max_tokens})
        with (
            LLM(options.model, draft_model=options.draft_model, router_memory="off", threads=options.threads) as llm,
            LLM(options.draft_model, router_memory="off", threads=options.threads) as small,
        ):
            measure(llm, small, options, results)
        write_page(results.path, page(results))


if __name__ == "__main__":
    main()
