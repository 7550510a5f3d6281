"""Measures school maths written by a large and a small model together (big-little decoding, Co-LLM) and by each alone.

First comes accuracy: problems are answered greedily in batches; a batch changes no text if rows do not depend on each
other. Then comes time: a few problems are answered one by one, with the ways in changing order. Problems come in the
order of `reasoning_ids.json`; a later run continues where this one ends.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from benchmarks.commands import begin, one_line_errors, open_results, write_page
from benchmarks.options import add_run_flags, add_study_flags, command_parser
from benchmarks.reasoning import END, IDS, answer_of, difference, read_all, read_problems, read_shots, worked
from parlay import LLM, Ensemble, SamplingParams
from parlay.bench.records import Cell, Results, Row
from parlay.llm.outputs import RequestOutput
from parlay.models.fetch.origin import public_name

LARGE, SMALL, DEFER = "the large model alone", "the small model alone", "Co-LLM"
TOGETHER = 16
FIRST, TEXTS = 40, 160
"""A deferral head learns from ``TEXTS`` problems after the first ``FIRST``, none of which is asked; the few-shot
examples come before them."""
Problem = tuple[int, str, str]
"""Number, question and correct answer."""


def big_little(thresholds: Sequence[str]) -> dict[str, str]:
    """Return the strategies by the name of their way. Each pair is FALLBACK/NATS."""
    found = {}
    for pair in thresholds:
        fallback, _, nats = pair.partition("/")
        found[f"big-little {pair}"] = f"big-little:fallback={fallback},rollback.nats={nats},policy=fixed"
    return found


@contextmanager
def opened(name: str, options: argparse.Namespace) -> Iterator[LLM]:
    """Open the model, or the pair of models, that writes in this way."""
    threads = options.threads
    if name == SMALL:
        llm = LLM(options.draft_model, router_memory="off", threads=threads)
    elif name == DEFER:
        both = Ensemble(options.model, "defer", head=str(options.head))
        llm = LLM(options.draft_model, ensemble=both, router_memory="off", threads=threads)
    else:
        llm = LLM(options.model, draft_model=options.draft_model, router_memory="off", threads=threads)
    with llm:
        yield llm


def ask(
    llm: LLM, problems: Sequence[Problem], shots: str, strategy: str, tokens: int
) -> tuple[list[RequestOutput], float]:
    """Answer all problems greedily at once. Return the outputs and the CPU seconds, without those for reading the
    shots."""
    params = SamplingParams(temperature=0, max_tokens=tokens, stop=[END])
    llm.reset_prefix_cache()
    llm.generate(shots, replace(params, max_tokens=1), strategy=strategy)
    began = time.process_time()
    asked = [f"{shots}{END} {question}\nA:" for _, question, _ in problems]
    return list(llm.generate(asked, params, strategy=strategy)), time.process_time() - began


def row(cell: Cell, problem: Problem, output: RequestOutput, seconds: float, small: float) -> Row:
    """Return a row. ``small`` is the share of tokens that the small model wrote."""
    place, _, right = problem
    values = {"right": float(answer_of(output) == right), "small": small}
    steps, tokens = output.chosen.metrics.steps, len(output.chosen.token_ids)
    return Row(cell=cell, round=place, requests=1, tokens=tokens, seconds=seconds, steps=steps, values=values)


def share_of_small(name: str, output: RequestOutput, small: str) -> float:
    """Return the share of tokens that the small model chose."""
    if name in (LARGE, SMALL):
        return float(name == SMALL)
    writers = output.chosen.writers
    return sum(writer in (small, "big-little") for writer in writers) / max(1, len(output.chosen.token_ids))


def write_texts(data: Path, path: Path) -> None:
    """Write solved problems that are not asked, for `parlay train defer --texts`."""
    asked = set(json.loads(IDS.read_text(encoding="utf-8")))
    known = [problem for place, problem in enumerate(read_all(data)) if place >= FIRST and place not in asked]
    texts = [{"prompt": f"Q: {one['question']}\nA:", "answer": f" {worked(one)}{END}"} for one in known[:TEXTS]]
    path.write_text("".join(json.dumps(text) + "\n" for text in texts), encoding="utf-8")


def measure_answers(
    ways: Mapping[str, str], problems: Sequence[Problem], options: argparse.Namespace, results: Results, until: float
) -> None:
    """Answer batch after batch with each way that lacks them, until the time is over."""
    shots = read_shots(options.data)
    for name, strategy in ways.items():
        cell = _cell("answers", name, options)
        done = {each.round for each in results.of(cell)}
        left = [problem for problem in problems if problem[0] not in done]
        if not left or time.monotonic() > until:
            continue
        with opened(name, options) as llm:
            small = public_name(options.draft_model) if name == DEFER else ""
            while left and time.monotonic() < until:
                batch, left = left[:TOGETHER], left[TOGETHER:]
                outputs, seconds = ask(llm, batch, shots, strategy, options.max_tokens)
                each = zip(batch, outputs, strict=True)
                part = seconds / len(batch)
                results.add([row(cell, one, output, part, share_of_small(name, output, small)) for one, output in each])


def measure_seconds(
    ways: Mapping[str, str], problems: Sequence[Problem], options: argparse.Namespace, results: Results, until: float
) -> None:
    """Answer one problem after another in all ways, in changing order."""
    shots = read_shots(options.data)
    names = [name for name in ways if name not in (SMALL, DEFER)]
    done = {each.round for each in results.of(_cell("seconds", LARGE, options))}
    with opened(LARGE, options) as llm:
        for turn, problem in enumerate(problems):
            if problem[0] in done:
                continue
            if time.monotonic() > until:
                return
            rows = []
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                (output,), seconds = ask(llm, [problem], shots, ways[name], options.max_tokens)
                share = share_of_small(name, output, "")
                rows.append(row(_cell("seconds", name, options), problem, output, seconds, share))
            results.add(rows)


def _cell(part: str, name: str, options: argparse.Namespace) -> Cell:
    model = f"{Path(options.model).stem} and {Path(options.draft_model).stem}"
    return Cell(part=part, model=model, strategy=name, workload="gsm8k")


def against(own: Mapping[int, Row], other: Mapping[int, Row]) -> float:
    """Return the ratio of one way's seconds to another's, on the problems of the first."""
    return sum(each.seconds for each in own.values()) / sum(other[place].seconds for place in own)


def page(results: Results) -> str:
    """Write a table row for each way, compared with the large model alone on the same problems."""
    rows: dict[str, dict[str, dict[int, Row]]] = {"answers": {}, "seconds": {}}
    for cell in results.cells:
        rows[cell.part][cell.strategy] = {each.round: each for each in results.of(cell)}
    large, timed = rows["answers"][LARGE], rows["seconds"].get(LARGE, {})
    lines = [
        "| way | problems | accuracy | against the large model, points | tokens by the small model | "
        "time of the large model alone |",
        "|---|---|---|---|---|---|",
    ]
    for name, own in rows["answers"].items():
        common = [place for place in own if place in large]
        pairs = [(own[place].values["right"], large[place].values["right"]) for place in common]
        alone = rows["seconds"].get(name, {})
        took = f"{against(alone, timed):.2f} ({len(alone)} problems)" if alone else ""
        lines.append(
            f"| {name} | {len(common)} | {100 * fmean(right for right, _ in pairs):.1f} % | "
            f"{difference(pairs) if name != LARGE else ''} | "
            f"{100 * fmean(each.values['small'] for each in own.values()):.0f} % | "
            f"{took} |"
        )
    return "\n".join(lines) + "\n"


@one_line_errors("two_models")
def main() -> None:
    parser = command_parser("two_models", __doc__)
    add_run_flags(parser, quick="two problems, short answers: to see that it works")
    add_study_flags(parser, data="gsm8k", many="problems", count=96, tokens=256, of="an answer")
    parser.add_argument("--draft-model", required=True, help="the smaller model of the same tokenizer")
    parser.add_argument(
        "--thresholds",
        nargs="+",
        default=["0.6/2"],
        metavar="FALLBACK/NATS",
        help="thresholds of big-little (default: 0.6/2)",
    )
    parser.add_argument("--head", type=Path, metavar="DIR", help="a deferral head of parlay train defer: adds Co-LLM")
    parser.add_argument(
        "--write-texts", type=Path, metavar="FILE", help="only write the texts from which the published head learned"
    )
    parser.add_argument("--timed", type=int, default=0, metavar="N", help="problems that are timed, one by one")
    options = parser.parse_args()
    if options.quick:
        options.problems, options.max_tokens = min(options.problems, 2), 24
    if options.write_texts is not None:
        write_texts(options.data, options.write_texts)
        return
    begin(options)
    command = "python -m benchmarks.two_models --data DIR --model FILE --draft-model FILE"
    results = open_results(options, "two-models", command, {"max_tokens": options.max_tokens})
    problems, until = read_problems(options.data)[: options.problems], time.monotonic() + 60 * options.minutes
    ways = {LARGE: "none", SMALL: "none", **big_little(options.thresholds)}
    ways |= {} if options.head is None else {DEFER: "none"}
    measure_answers(ways, problems, options, results, until)
    measure_seconds(ways, problems[: options.timed], options, results, until)
    write_page(results.path, page(results))


if __name__ == "__main__":
    main()
