"""The cost of training EAGLE-3's head for SmolLM2, beside what can't be saved: forwards and a backward.

    python -m benchmarks.drafters.training
    python -m benchmarks.drafters.training --conversations 64 --passes 3

The target writes conversations, then reads them once for its states, and a head is trained on them. The page compares
one pass of both with a forward of the target over these texts, without keeping any state, and the head's own forward
and backward over their rows. Seconds are those of the process's threads together, so other processes hardly count.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.commands import RESULTS, begin
from benchmarks.options import add_threads_flag
from benchmarks.pages import about, table
from benchmarks.setup import SMOLLM2
from parlay import models
from parlay.bench.provenance import provenance
from parlay.llm import LLM
from parlay.train.data.batches import endless
from parlay.train.data.features import Featured, FeatureStore
from parlay.train.data.texts import load_shard, save_shard, shard_path, shards
from parlay.train.data.writing import Writer, WritingPlan
from parlay.train.loop import Loop
from parlay.train.optimizers import mixed
from parlay.train.options import Eagle3TrainOptions
from parlay.train.recipes import eagle3
from parlay.train.recipes.target import Target
from parlay.train.watching import Watch
from parlay.types import Runner, Segment

_ROWS = 512
"""Tokens of a forward, as features are computed."""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options of the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.drafters.training",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--model", default=SMOLLM2, help=f"the target (default: {SMOLLM2})")
    parser.add_argument("--conversations", type=int, default=128, help="that the target writes (default: 128)")
    parser.add_argument("--passes", type=int, default=2, help="over them; the first is not counted (default: 2)")
    parser.add_argument("--out", type=Path, metavar="FILE", default=RESULTS / "training.md", help="the page")
    add_threads_flag(parser)
    return parser.parse_args(arguments)


def main() -> None:
    """Measure, and write the page."""
    options = parse()
    begin(options)
    with TemporaryDirectory() as scratch:
        texts, seconds = measure(options, Path(scratch))
    header = provenance("python -m benchmarks.drafters.training")
    options.out.write_text(page(about(header), texts, seconds), encoding="utf-8")
    print(f"wrote {options.out}")


def measure(options: argparse.Namespace, work: Path) -> tuple[list[Featured], dict[str, float]]:
    """The texts, and the seconds of each part over all of them."""
    target = Target.named(options.model)
    with LLM(options.model, max_num_seqs=64) as llm:
        save_shard(shard_path(work, 0), Writer(llm, WritingPlan(own_share=1.0)).shard(0)[: options.conversations])
    runner = models.load(options.model)
    plain = spent(lambda: read(runner, work))
    store = FeatureStore(work, target.stored_layers())
    features = spent(lambda: store.compute(runner))
    texts = store.load()
    return texts, {"plain": plain, "features": features, **train(target, texts, options.passes)}


def spent(work: Callable[[], object]) -> float:
    """Seconds that this process's threads took for it."""
    began = time.process_time()
    work()
    return time.process_time() - began


def read(runner: Runner, folder: Path) -> None:
    """Forwards over all texts, one after another, of which nothing is kept."""
    for number, text in enumerate(text for path in shards(folder) for text in load_shard(path)):
        runner.open(number, (), salt=f"plain {number}")
        runner.reserve(number, len(text.ids))
        for at in range(0, len(text.ids), _ROWS):
            ids = text.ids[at : at + _ROWS]
            runner.forward([Segment(number, ids, logits_from=len(ids))])
            runner.keep(number, ())
        runner.truncate(number, 0)
        runner.release(number)


def train(target: Target, texts: Sequence[Featured], passes: int) -> dict[str, float]:
    """Seconds of one pass: of forwards and backwards alone, and of the whole loop with them."""
    options = Eagle3TrainOptions(updates=1)
    recipe = eagle3.start(options, target, texts)
    rows = sum(len(text.ids_T) - text.answer for text in texts)
    updates = max(1, rows // options.batch_tokens)
    batches = endless(texts, options.batch_tokens, options.longest, 0)

    def forwards() -> None:
        for _ in range(updates):
            with mixed(options.precision):
                loss = recipe.loss(next(batches))
            loss.backward()  # type: ignore[no-untyped-call]
            recipe.module.zero_grad()

    own = min(spent(forwards) for _ in range(passes))
    with TemporaryDirectory() as scratch:
        whole = replace(options, updates=updates, interval=1e9)
        loop = spent(lambda: _run(Loop(recipe, whole, Path(scratch) / "state"), texts))
    scale = rows / (updates * options.batch_tokens)
    return {"head": own * scale, "loop": loop * scale}


def _run(loop: Loop, texts: Sequence[Featured]) -> None:
    with Watch("training", None) as watch:
        loop.run(texts, texts[:1], watch)


def page(machine: str, texts: Sequence[Featured], seconds: dict[str, float]) -> str:
    """Markdown."""
    tokens = sum(len(text.ids_T) for text in texts)
    rows = sum(len(text.ids_T) - text.answer for text in texts)
    least, taken = seconds["plain"] + seconds["head"], seconds["features"] + seconds["loop"]
    told = (
        ("the target's forward", "can't be saved", seconds["plain"]),
        ("the head's forward and backward", "can't be saved", seconds["head"]),
        ("states, computed and written", "taken", seconds["features"]),
        ("the loop: forward, backward, update, held-out check", "taken", seconds["loop"]),
    )
    lines = [(part, kind, f"{each:.1f}", f"{1000 * each / tokens:.2f}") for part, kind, each in told]
    head = ("part", "", "thread seconds", "ms per token")
    end = f"Taken over what can't be saved: **{taken / least:.2f}** (goal: 1.3)."
    intro = f"{len(texts)} conversations of {tokens:,} tokens, of which the target wrote {rows:,}; these are the rows."
    return "\n".join(["# Training a head", "", machine, "", intro, "", *table(head, lines), end, ""])


if __name__ == "__main__":
    main()
