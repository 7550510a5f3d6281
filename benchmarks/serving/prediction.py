"""Predicted outputs on edits: the text before the edit is the prediction, plain decoding is the yardstick.

Prompts are drawn from held-out documents in wordings never trained on. Systems run interleaved, tokens before any loop
count only, and every text is held against that of plain decoding.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from benchmarks.figures import summary
from benchmarks.figures.compare import Comparison
from benchmarks.figures.ours import PLAIN
from benchmarks.figures.prompts import ANSWER_TOKENS, Prompt, draw_texts
from benchmarks.figures.report import about, models, table
from benchmarks.figures.results import Results, Row
from benchmarks.figures.setup import FULL, MINI, QUICK, WIDE, Setup
from benchmarks.figures.systems import Stopwatch, System, Timed
from benchmarks.options import add_run_flags
from parlay import threads
from parlay.bench.provenance import ROOT, provenance
from parlay.drafters.copying.prediction import SOURCE
from parlay.llm import DEFAULT_STRATEGY, LLM
from parlay.train.corpus import read_corpus
from parlay.train.edits import Edit
from parlay.train.tasks import Task, TaskMaker, make_sources
from parlay.types import SamplingParams

CHARS = (280, 480)
GOAL = 4.0


@dataclass(frozen=True, slots=True)
class EditMaker(TaskMaker):
    """Remembers the text before the edit of every prompt that it made."""

    before: dict[str, str] = field(default_factory=dict)

    def edit(self, name: str, kind: str, edit: Edit | None, rng: random.Random, wordings: Sequence[str]) -> Task | None:
        task = TaskMaker.edit(self, name, kind, edit, rng, wordings)
        if task is not None and edit is not None:
            self.before[task.prompt] = edit.before
        return task


def draw(data: Path, tokenizer: PreTrainedTokenizerBase, count: int) -> tuple[dict[str, list[Prompt]], dict[str, str]]:
    """``count`` prompts of each kind of edit, and for each prompt's text the text before the edit."""
    maker = EditMaker(make_sources(read_corpus(data), heldout=True), heldout=True)
    low, high = ANSWER_TOKENS

    def texts(kind: str) -> list[str]:
        make = {"replace a word": maker.replace, "rename": maker.rename, "fix a typo": maker.typo}[kind]

        def one(rng: random.Random) -> str | None:
            task = make(rng, rng.randint(*CHARS))
            return task.prompt if task is not None and low <= len(tokenizer.encode(task.answer)) <= high else None

        return draw_texts(one, count)

    prompts = {
        kind: [Prompt(kind, number, text, tuple(tokenizer.encode(text))) for number, text in enumerate(texts(kind))]
        for kind in ("replace a word", "rename", "fix a typo")
    }
    return prompts, maker.before


def predicting(llm: LLM, strategy: str, before: Mapping[str, str]) -> System:
    """A strategy whose requests carry the text before the edit. Nothing is learned from one request for the next."""

    def decode(prompt: Prompt, most: int) -> Timed:
        params = SamplingParams(temperature=0.0, max_tokens=most)
        prediction = before[prompt.text] if strategy != PLAIN else None
        watch = Stopwatch()
        stream = llm.stream(
            {"prompt_token_ids": prompt.ids}, params, strategy=strategy, prediction=prediction, store=False
        )
        for event in stream:
            watch.emit(event.token_ids)
        sample = stream.output.outputs[0]
        metrics, use = sample.metrics, sample.prediction
        timed = watch.read(
            steps=metrics.steps,
            draft_tokens=metrics.draft_tokens,
            accepted_tokens=metrics.accepted_tokens,
            note=llm.runner.spec.dtype,
        )
        return replace(timed, values={"accepted": use.accepted, "rejected": use.rejected} if use else None)

    return System(strategy, decode)


def measure(
    setup: Setup, results: Results, model: str, prompts: Mapping[str, Sequence[Prompt]], before: Mapping[str, str]
) -> None:
    """All systems on one model."""
    comparison = Comparison(
        part="prediction", model=model, prompts=prompts, most_tokens=ANSWER_TOKENS[1], rounds=setup.scale.rounds
    )
    if comparison.pending(results):
        with setup.llm(model) as llm:
            others = [predicting(llm, name, before) for name in (SOURCE, DEFAULT_STRATEGY)]
            comparison.run(results, predicting(llm, PLAIN, before), others)


def report(results: Results) -> str:
    """The page: a table for each model, a line for each strategy and kind of edit."""
    lines = ["# Predicted outputs on edits", "", *about(results.header)]
    lines += [
        f"The prediction is the text before the edit. Goal: {GOAL:g} times plain decoding. `{DEFAULT_STRATEGY}` has it "
        "as its first document.",
        "",
    ]
    head = ("strategy", "edit", f"times `{PLAIN}`", "tokens per step", "same", "looped")
    for model in models(results.rows):
        rows = [row for row in results.rows if row.model == model]
        named = [(system, kind) for system in (SOURCE, DEFAULT_STRATEGY) for kind in ("", *summary.kinds(rows))]
        lines += [f"## {model}", "", *table(head, [line(rows, system, kind) for system, kind in named])]
    return "\n".join(lines)


def line(rows: Sequence[Row], system: str, kind: str) -> list[str]:
    """One strategy on one kind of edit, or on all."""
    chosen = [row for row in rows if kind in ("", row.kind)]
    own = [row for row in chosen if row.system == system]
    return [
        f"`{system}`",
        kind or "all",
        str(summary.ratio(chosen, system, PLAIN)),
        f"{summary.tokens_per_step(own):.1f}",
        summary.same(own),
        f"{summary.mean_looped(own):.2f}",
    ]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options of the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving.prediction", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="held-out documents")
    parser.add_argument("--models", nargs="+", choices=(WIDE, MINI), default=[WIDE, MINI], metavar="MODEL")
    parser.add_argument("--count", type=int, default=FULL.prompts, help="prompts of each kind (default: 8)")
    add_run_flags(parser)
    return parser.parse_args(arguments)


def main() -> int:
    """Measure, and write the page."""
    options = parse()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    threads.use(options.threads)
    out = options.out or ROOT / "benchmarks" / "results" / f"prediction{'-quick' if options.quick else ''}.jsonl"
    try:
        results = Results(out, provenance("python -m benchmarks.serving.prediction --data DIR"), fresh=options.fresh)
    except ValueError as error:
        print(f"benchmarks.serving.prediction: {error}", file=sys.stderr)
        return 1
    setup = Setup(QUICK if options.quick else FULL, options.data, options.cache)
    prompts, before = draw(options.data, setup.tokenizer(), QUICK.prompts if options.quick else options.count)
    for model in options.models:
        measure(setup, results, model, prompts, before)
    out.with_suffix(".md").write_text(report(results), encoding="utf-8")
    print(f"wrote {out} and {out.with_suffix('.md').name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
