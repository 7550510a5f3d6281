"""`parlay score`: measures the perplexity of a text, or accuracy on multiple-choice questions."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from parlay.cli.ensemble_flags import add_ensemble_flags, chosen_ensemble
from parlay.cli.flags import add_model_flags, options_from, whole
from parlay.cli.opening import read_text
from parlay.options import LoadOptions, UsageError
from parlay.system.terminal import counted, shown

if TYPE_CHECKING:
    from parlay.llm.likelihood import Perplexity, Question
    from parlay.llm.llm import LLM

QUESTIONS = ".jsonl"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files",
        nargs="+",
        type=Path,
        metavar="FILE",
        help='texts, whose perplexity is told, or .jsonl of questions: {"prompt": ..., "choices": [...], "answer": 0}',
    )
    parser.add_argument("--window", type=whole, default=512, metavar="N", help="tokens read together (default: 512)")
    parser.add_argument("--json", action="store_true", help="print one JSON object for each file")
    add_model_flags(parser)
    add_ensemble_flags(parser)


def run(options: argparse.Namespace) -> int:
    if options.window < 2:
        raise UsageError(f"--window must be at least 2, got {options.window}")
    questions = {file: list(_questions(file)) for file in options.files if file.suffix == QUESTIONS}
    texts = {file: read_text(str(file), "text") for file in options.files if file not in questions}
    from parlay.llm.likelihood import choose  # here, as help needs none of it
    from parlay.llm.llm import LLM

    load, ensemble = options_from(LoadOptions, options), chosen_ensemble(options)
    with LLM(options.model, load=load, router_memory="off", ensemble=ensemble) as llm:
        for file in options.files:
            if file in texts:
                found = _perplexity(llm, file, texts[file], options.window)
                _tell(options, file, {"perplexity": found.value, "tokens": found.tokens})
                continue
            chosen = [(question.answer, choose(llm, question)) for question in questions[file]]
            right = sum(answer == choice.likeliest for answer, choice in chosen) / len(chosen)
            per_byte = sum(answer == choice.likeliest_per_byte for answer, choice in chosen) / len(chosen)
            _tell(options, file, {"acc": right, "acc_norm": per_byte, "questions": len(chosen)})
    return 0


def _perplexity(llm: LLM, file: Path, text: str, window: int) -> Perplexity:
    """Measure a file's text. Raises UsageError, which names the file, for a text that is too short."""
    from parlay.llm.likelihood import perplexity

    try:
        return perplexity(llm, text, window)
    except ValueError as error:
        raise UsageError(f"{file}: {error}") from None


def _tell(options: argparse.Namespace, file: Path, numbers: dict[str, float | int]) -> None:
    if options.json:
        print(json.dumps({"file": str(file), **numbers}), flush=True)
        return
    parts = [
        f"{name} {value:.4f}" if isinstance(value, float) else counted(value, name.removesuffix("s"))
        for name, value in numbers.items()
    ]
    print(shown(f"{file}: {', '.join(parts)}", sys.stdout), flush=True)


def _questions(file: Path) -> Iterator[Question]:
    """Read questions. Raises UsageError for a line that is not a question, and for a file without any."""
    from parlay.llm.likelihood import Question

    lines = [line for line in read_text(str(file), "file of questions").splitlines() if line.strip()]
    if not lines:
        raise UsageError(f"{file} contains no question: name another file")
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            choices = tuple(row["choices"])
            question = Question(row["prompt"], choices, row["answer"])
            if not (isinstance(question.prompt, str) and all(isinstance(choice, str) and choice for choice in choices)):
                raise TypeError("texts")
            if not 0 <= question.answer < len(choices):
                raise ValueError("answer")
        except (ValueError, KeyError, TypeError):
            raise UsageError(
                f'{file}, line {number} must be a question: {{"prompt": TEXT, "choices": [TEXT, ...], "answer": N}}, '
                "where N is the right choice's place, and the first one's is 0"
            ) from None
        yield question
