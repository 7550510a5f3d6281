"""Compares three superposed drafts with one greedy draft and three samples: time, and agreement with greedy text.

Cases are places in books that no n-gram model was built from. A case counts for w words if one of the drafts begins
with the first w words of the greedy text.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, median

from benchmarks.commands import begin, one_line_errors, open_results, write_page
from benchmarks.options import add_run_flags, add_study_flags, command_parser
from parlay import LLM, SamplingParams
from parlay.bench.records import Cell, Results, Row
from parlay.llm.outputs import RequestOutput
from parlay.llm.suggesting import SuggestParams
from parlay.ngrams import NgramModel
from parlay.system.terminal import counted
from parlay.text.prompts import TokensPrompt

ONE, DRAFTS = "one greedy draft", 3
WORDS = (1, 2, 3, 4)
BEFORE = 48
"""The number of tokens with which a case begins."""
Write = Callable[[LLM, tuple[int, ...], int], RequestOutput]


def ways(ngrams: NgramModel | None) -> dict[str, Write]:
    """Return the ways to write drafts, by name; one of them uses n-grams if there is a model."""
    found: dict[str, Write] = {ONE: _sampled(1, 0.0), "superposed, the model alone": _superposed(None)}
    if ngrams is not None:
        found["superposed, with n-grams"] = _superposed(ngrams)
    return found | {f"samples, temperature {heat:g}": _sampled(DRAFTS, heat) for heat in (0.7, 1.0)}


def _sampled(n: int, temperature: float) -> Write:
    """Return a function that samples drafts. The seed depends on the prompt, so cases are independent."""

    def write(llm: LLM, prompt: tuple[int, ...], tokens: int) -> RequestOutput:
        params = SamplingParams(n=n, temperature=temperature, max_tokens=tokens, ignore_eos=True, seed=sum(prompt))
        (output,) = llm.generate([TokensPrompt(prompt_token_ids=prompt)], params, False, strategy="none")
        return output

    return write


def _superposed(ngrams: NgramModel | None) -> Write:
    scores = SuggestParams() if ngrams is not None else SuggestParams(alpha=0)

    def write(llm: LLM, prompt: tuple[int, ...], tokens: int) -> RequestOutput:
        params = SamplingParams(n=DRAFTS, max_tokens=tokens, ignore_eos=True)
        (output,) = llm.suggest([TokensPrompt(prompt_token_ids=prompt)], params, scores, ngrams=ngrams)
        return output

    return write


def read_cases(llm: LLM, data: Path, count: int) -> list[tuple[int, ...]]:
    """Return the tokens before each place. The places are drawn from the held-out books, with a fixed seed."""
    import zstandard

    file = data / "books-pd" / "heldout.jsonl.zst"
    with file.open("rb") as stored, zstandard.open(stored, "rt", encoding="utf-8") as lines:
        texts = [str(json.loads(line)["text"]) for line in lines]
    draw = random.Random(0)
    places = [(text, draw.randrange(len(text) // 2)) for text in draw.choices(texts, k=count)]
    return [llm.token_ids(text[place : place + 12 * BEFORE])[1 : 1 + BEFORE] for text, place in places]


def begins(drafts: Sequence[str], greedy: str, words: int) -> bool:
    """Return whether a draft begins with the first ``words`` words of the greedy text; False if that has fewer."""
    wanted = greedy.split()[:words]
    return len(wanted) == words and any(draft.split()[:words] == wanted for draft in drafts)


def measure(llm: LLM, options: argparse.Namespace, results: Results) -> None:
    """Write drafts at place after place in every way, in changing order, until the time is over."""
    until, model = time.monotonic() + 60 * options.minutes, Path(options.model).stem
    found = ways(None if options.ngrams is None else NgramModel.open(options.ngrams))
    cells = {name: Cell(part="suggest", model=model, strategy=name, workload="books-pd") for name in found}
    done = {each.round for each in results.of(cells[ONE])}
    for place, prompt in enumerate(read_cases(llm, options.data, options.cases)):
        if time.monotonic() > until:
            return
        if place in done:
            continue
        names = list(found)
        timed: dict[str, tuple[RequestOutput, float]] = {}
        for name in names[place % len(names) :] + names[: place % len(names)]:
            llm.reset_prefix_cache()
            began = time.process_time()
            output = found[name](llm, prompt, options.max_tokens)
            timed[name] = (output, time.process_time() - began)
        greedy = timed[ONE][0].outputs[0].text
        results.add([_row(cells[name], place, *timed[name], greedy) for name in names])


def _row(cell: Cell, place: int, output: RequestOutput, seconds: float, greedy: str) -> Row:
    drafts = [each.text for each in output.outputs]
    values = {f"words_{words}": float(begins(drafts, greedy, words)) for words in WORDS}
    values["different"] = len(set(drafts)) / len(drafts)
    tokens = sum(len(each.token_ids) for each in output.outputs)
    return Row(cell=cell, round=place, requests=1, tokens=tokens, seconds=seconds, values=values)


def page(results: Results) -> str:
    """Write a table row for each way. Times are medians of the ratio to one greedy draft, case by case."""
    rows = {cell.strategy: {each.round: each for each in results.of(cell)} for cell in results.cells}
    one = rows[ONE]
    heads = " | ".join(counted(words, "word") for words in WORDS)
    lines = [f"| drafts | cases | time of one draft | {heads} | different |", "|---" * (4 + len(WORDS)) + "|"]
    for name, own in rows.items():
        ratio = median(own[place].seconds / one[place].seconds for place in own)
        shares = [100 * fmean(each.values[f"words_{words}"] for each in own.values()) for words in WORDS]
        apart = 100 * fmean(each.values["different"] for each in own.values())
        columns = [f"{share:.0f} %" for share in (*shares, apart)]
        lines.append(f"| {name} | {len(own)} | {ratio:.2f} | {' | '.join(columns)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = command_parser("suggestions", __doc__)
    add_run_flags(parser, quick="three cases, short drafts: to see that it works")
    add_study_flags(parser, data="books-pd", many="cases", count=60, tokens=10, of="a draft", minutes=30.0)
    parser.add_argument("--ngrams", type=Path, metavar="FILE", help="n-gram model of other books")
    options = parser.parse_args()
    if options.quick:
        options.cases, options.max_tokens = min(options.cases, 3), 4
    with one_line_errors("suggestions"):
        begin(options)
        command = "python -m benchmarks.suggestions --data DIR --model FILE --ngrams FILE"
        results = open_results(options, "suggestions", command, {"max_tokens": options.max_tokens})
        with LLM(options.model, router_memory="off", threads=options.threads) as llm:
            measure(llm, options, results)
        write_page(results.path, page(results))


if __name__ == "__main__":
    main()
