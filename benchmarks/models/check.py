"""Measures a checkpoint on held-out text and prints the tables of docs/models.md.

    python benchmarks/models/check.py src/parlay/checkpoints/parlay-mini --data DIR

DIR is the training data directory: the held-out part of it is a function of its contents, the same for every
run. Nothing measured here was trained on, and the wordings and layouts of the tasks are not those of training.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Iterable
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from parlay.train import checks
from parlay.train.corpus import Document, read_corpus
from parlay.train.store import Stream, make_stream
from parlay.train.tasks import Task, TaskMaker, make_sources

KIND_CHARS = 400_000
LENGTH = 512
LONG_TOKENS = (1200, 1950)
PROMPTS = (
    "The old man looked at the sea and",
    "def read_lines(path):\n",
    "<|user|>Translate to French: The house is very big.<|end|><|assistant|>",
    "<|user|>Tom has 12 apples and buys 5 more. How many apples does he have now?<|end|><|assistant|>",
    "<|system|>You take coffee orders. Answer with a JSON call, or with a short reply.<|end|>"
    "<|user|>I would like a small latte please.<|end|><|assistant|>",
)


def heldout_streams(corpus: dict[str, list[Document]], tokenizer: PreTrainedTokenizerFast) -> dict[str, Stream]:
    """The first held-out text of every kind."""
    streams = {}
    for kind, documents in corpus.items():
        texts, room = [], KIND_CHARS
        for document in documents:
            if document.heldout and room > 0:
                texts.append(document.text[:room])
                room -= len(texts[-1])
        streams[kind] = make_stream(texts, tokenizer.backend_tokenizer)
    return streams


def bytes_per_token(stream: Stream, tokenizer: PreTrainedTokenizerFast) -> float:
    """Mean bytes of text per token."""
    ids = stream.tokens[:50_000].tolist()
    return len(tokenizer.decode(ids).encode()) / len(ids)


def long_quotes(maker: TaskMaker, tokenizer: PreTrainedTokenizerFast, count: int) -> list[Task]:
    """Tasks that copy one paragraph out of a page that nearly fills the trained context."""
    rng = random.Random(3)
    tasks: list[Task] = []
    while len(tasks) < count:
        task = maker.quote(rng, rng.randint(1900, 3200))
        if task and LONG_TOKENS[0] <= len(tokenizer.encode(task.text)) <= LONG_TOKENS[1]:
            tasks.append(task)
    return tasks


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def percent(value: float) -> str:
    """A share as a percentage."""
    return f"{100 * value:.1f} %"


def print_losses(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, data: Path, rows: int) -> None:
    """Loss by kind of text, in nats per token and bits per byte."""
    streams = heldout_streams(read_corpus(data), tokenizer)
    losses = checks.losses(model, streams, kinds=list(streams), rows=rows, length=LENGTH)
    bits = {kind: loss / math.log(2) / bytes_per_token(streams[kind], tokenizer) for kind, loss in losses.items()}
    cells = [(kind, f"{loss:.3f}", f"{bits[kind]:.3f}") for kind, loss in losses.items()]
    print(table(("held-out text", "nats per token", "bits per byte"), cells))


def print_tasks(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, data: Path, each: int) -> None:
    """Exact copies and edits, and JSON calls."""
    made = checks.make_checks(data, tokenizer, copies=each, edits=max(1, each // 2), dialogues=each, seed=11)
    by_length, by_kind = checks.copy_rates(model, tokenizer, made.copies)
    print_rates("exact copy, by length in tokens", by_length)
    print_rates("exact copy, by text", by_kind)
    _, by_sort = checks.copy_rates(model, tokenizer, made.edits)
    print_rates("edit and text", by_sort)
    rates = checks.call_rates(model, tokenizer, made.calls)
    print(
        table(
            (f"JSON calls ({len(made.calls)} in {each} dialogues)", "share"),
            [(k, percent(v)) for k, v in rates.items()],
        )
    )


def print_rates(title: str, rates: checks.Rates) -> None:
    """A table of shares."""
    rows = [(name, percent(right), percent(ends)) for name, (right, ends) in rates.items()]
    print(table((title, "exactly right", "and ends there"), rows))


def print_samples(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Greedy continuations of fixed prompts."""
    for prompt in PROMPTS:
        answer = checks.generate(model, tokenizer, [prompt], tokens=80)[0]
        print(f"```text\n{prompt}[...]{answer}\n```\n")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Measure a checkpoint on held-out text.")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--each", type=int, default=100, help="tasks of each length or sort, and dialogues")
    parser.add_argument("--rows", type=int, default=64, help=f"rows of {LENGTH} tokens for each kind's loss")
    options = parser.parse_args()
    model = Qwen3ForCausalLM.from_pretrained(options.checkpoint, dtype=torch.float32).eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(options.checkpoint)
    print(f"{options.checkpoint.name}: {model.num_parameters():,} parameters\n")
    print_losses(model, tokenizer, options.data, options.rows)
    print_tasks(model, tokenizer, options.data, options.each)
    maker = TaskMaker(make_sources(read_corpus(options.data), heldout=True))
    quotes = checks.exact(model, tokenizer, long_quotes(maker, tokenizer, options.each))
    share = percent(checks.mean([one.right for one in quotes]))
    print(f"A paragraph quoted exactly from a page of {LONG_TOKENS} tokens: {share}\n")
    print_samples(model, tokenizer)


if __name__ == "__main__":
    main()
