"""Measures school maths answered by one chain of thought, by a full vote and by votes that stop early: accuracy and
time.

All votes draw the same chains, so the exact votes must have the same answer, which is checked. Problems come in the
random order of `reasoning_ids.json`, so the first ones are a sample of all. A later run continues where this one ends.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev

from benchmarks.commands import begin, one_line_errors, open_results, write_page
from benchmarks.options import add_run_flags, add_study_flags, command_parser
from benchmarks.vote_rules import Chains, append
from parlay import LLM, SamplingParams, VoteParams
from parlay.bench.records import Cell, Results, Row
from parlay.bench.summary import Interval, student_t
from parlay.llm.outputs import RequestOutput
from parlay.text.answers import NUMBER, find_answer

IDS = Path(__file__).with_name("reasoning_ids.json")
"""Line numbers, from 0, of gsm8k's train.jsonl. These problems were kept out of all training."""
SHOTS, SHORT = 4, 350
"""The number of solved problems before each question, and the most letters of a solution; short ones leave room."""
END = "\n\nQ:"
FULL = "full"
EXACT = (FULL, "decided")


def ways(chains: int, at_once: int | None) -> dict[str, VoteParams | None]:
    """Return the ways to answer, by name; None is greedy decoding. The full vote decodes all chains at once.

    With ``at_once``, an early vote decodes so many chains at once, and begins another whenever one ends.
    """
    early = VoteParams(n=chains, at_once=at_once, refill=at_once is not None)
    sure = {f"confidence {each:g}": replace(early, confidence=each) for each in (0.95, 0.9, 0.8)}
    return {"one": None, FULL: VoteParams(n=chains, early=False), "decided": early, **sure}


def read_all(data: Path) -> list[dict[str, str]]:
    """Read all of gsm8k's training problems, with ``question`` and ``answer``."""
    import zstandard

    with (data / "gsm8k" / "train.jsonl.zst").open("rb") as file, zstandard.open(file, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def read_problems(data: Path) -> list[tuple[int, str, str]]:
    """Return the number, question and correct answer of each problem, in the random order."""
    every = read_all(data)
    drawn: list[int] = json.loads(IDS.read_text(encoding="utf-8"))
    return [(place, every[place]["question"], find_answer(NUMBER, every[place]["answer"]) or "") for place in drawn]


def worked(problem: Mapping[str, str]) -> str:
    """Return the answer as one paragraph that ends with the number, without the marks of gsm8k's calculator."""
    steps, _, number = re.sub(r"<<[^>]*>>", "", problem["answer"]).rpartition("####")
    return f"{' '.join(steps.split())} The answer is {number.strip()}."


def read_shots(data: Path) -> str:
    """Return the first problems with short answers that are not asked, as a few-shot prompt (Wei et al. 2022)."""
    asked = set(json.loads(IDS.read_text(encoding="utf-8")))
    known = [problem for place, problem in enumerate(read_all(data)) if place not in asked]
    answers = [(problem["question"], worked(problem)) for problem in known]
    return "\n\n".join([f"Q: {asked}\nA: {answer}" for asked, answer in answers if len(answer) < SHORT][:SHOTS])


def ask(llm: LLM, prompt: str, vote: VoteParams | None, tokens: int, seed: int) -> tuple[RequestOutput, float]:
    """Return the output, and the CPU seconds that it took without reading the prompt.

    With one thread, other work hardly changes them.
    """
    params = SamplingParams(temperature=0.7 if vote else 0.0, top_p=0.95, max_tokens=tokens, seed=seed, stop=[END])
    llm.generate(prompt, replace(params, max_tokens=1), strategy="none")
    began = time.process_time()
    (output,) = llm.generate(prompt, params, False, strategy="none", vote=vote)
    return output, time.process_time() - began


def answer_of(output: RequestOutput) -> str | None:
    if output.vote is not None:
        return output.vote.answer
    return find_answer(NUMBER, output.chosen.text) if output.chosen.finish_reason == "stop" else None


def chains_of(place: int, right: str, output: RequestOutput) -> Chains:
    """Return the chains that `benchmarks.vote_rules` replays."""
    assert output.vote is not None
    return Chains(place, right, output.vote.answers, tuple(len(one.token_ids) for one in output.outputs))


def row(cell: Cell, place: int, output: RequestOutput, seconds: float, right: str) -> Row:
    begun = [one for one in output.outputs if one.token_ids]
    values = {"right": float(answer_of(output) == right), "begun": float(len(begun))}
    tokens = sum(len(one.token_ids) for one in output.outputs)
    return Row(cell=cell, round=place, requests=1, tokens=tokens, seconds=seconds, values=values)


def measure(llm: LLM, options: argparse.Namespace, results: Results, model: str) -> None:
    """Answer problem after problem in every way, in changing order, until the time is over."""
    until, shots = time.monotonic() + 60 * options.minutes, read_shots(options.data)
    votes = {name: vote for name, vote in ways(options.chains, options.at_once).items() if name in options.ways}
    cells = {name: Cell(part="vote", model=model, strategy=name, workload="gsm8k", temperature=0.7) for name in votes}
    done = {each.round for each in results.of(cells[FULL])}
    for turn, (place, question, right) in enumerate(read_problems(options.data)[: options.problems]):
        if time.monotonic() > until:
            return
        if place in done:
            continue
        names, prompt = list(votes), f"{shots}{END} {question}\nA:"
        order = names[turn % len(names) :] + names[: turn % len(names)]
        found = {name: ask(llm, prompt, votes[name], options.max_tokens, place) for name in order}
        if len({answer_of(found[name][0]) for name in EXACT if name in found}) > 1:
            raise ValueError(f"problem {place}: a vote that stopped early has another answer than the full one")
        results.add([row(cells[name], place, *found[name], right) for name in names])
        append(results.path.with_name(f"{results.path.stem}-chains.jsonl"), chains_of(place, right, found[FULL][0]))


def difference(pairs: Sequence[tuple[float, float]]) -> str:
    """Write the mean of paired differences in percentage points, with its 95 % interval by Student's t."""
    apart = [100 * (one - other) for one, other in pairs]
    if len(apart) < 2:
        return "-"
    away = student_t(len(apart) - 1) * stdev(apart) / math.sqrt(len(apart))
    return f"{fmean(apart):+.1f} ({fmean(apart) - away:+.1f} to {fmean(apart) + away:+.1f})"


def page(results: Results) -> str:
    """Write a row for each way to answer, compared with the full vote on the same problems."""
    rows = {cell.strategy: {each.round: each for each in results.of(cell)} for cell in results.cells}
    full = rows[FULL]
    lines = [
        "| answer by | problems | accuracy | against the full vote, points | seconds of the processor a problem | "
        "time of the full vote | tokens a problem | chains begun |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, own in rows.items():
        ratio = sum(each.seconds for each in own.values()) / sum(full[place].seconds for place in own)
        spread = Interval.of(own[place].seconds / full[place].seconds for place in own)
        between = f" ({spread.low:.2f} to {spread.high:.2f} per problem)" if spread and name != FULL else ""
        right = [own[place].values["right"] for place in own]
        pairs = [(own[place].values["right"], full[place].values["right"]) for place in own]
        lines.append(
            f"| {name} | {len(own)} | {100 * fmean(right):.1f} % | {difference(pairs) if name != FULL else ''} | "
            f"{fmean(each.seconds for each in own.values()):.1f} | {ratio:.2f}{between} | "
            f"{fmean(each.tokens for each in own.values()):.0f} | "
            f"{fmean(each.values['begun'] for each in own.values()):.1f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = command_parser("reasoning", __doc__)
    add_run_flags(parser, quick="two problems, short answers: to see that it works")
    add_study_flags(parser, data="gsm8k", many="problems", count=500, tokens=200, of="a chain")
    parser.add_argument("--chains", type=int, default=8, metavar="N", help="chains of a vote (default: 8)")
    parser.add_argument("--at-once", type=int, metavar="N", help="chains at a time of early votes (default: all)")
    parser.add_argument(
        "--ways",
        nargs="+",
        choices=list(ways(2, None)),
        default=list(ways(2, None)),
        help="ways to answer (default: all)",
    )
    parser.add_argument("--page", action="store_true", help="measure nothing; write the page of the existing rows")
    options = parser.parse_args()
    if options.quick:
        options.problems, options.max_tokens = min(options.problems, 2), 24
    with one_line_errors("reasoning"):
        begin(options)
        command = "python -m benchmarks.reasoning --data DIR --model FILE"
        if FULL not in options.ways:
            raise ValueError(f"--ways: name {FULL} too, which the others are compared with")
        setup = {"chains": options.chains, "at_once": options.at_once or "all", "max_tokens": options.max_tokens}
        results = open_results(options, "reasoning", command, setup)
        if not options.page:
            with LLM(options.model, router_memory="off", threads=options.threads) as llm:
                measure(llm, options, results, Path(options.model).stem)
        write_page(results.path, page(results))


if __name__ == "__main__":
    main()
