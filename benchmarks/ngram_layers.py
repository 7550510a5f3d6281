"""Measures models whose first layers are looked up by n-gram: perplexity at equal work, share of hits, time of a
forward.

    python -m benchmarks.ngram_layers --data FOLDER --heldout FILE
    python -m benchmarks.ngram_layers --wide

It trains small models on the same tokens and measures each on a text of other authors. A finished model in the work
folder is used again. Two models are plain: one has as many layers as the others compute after a hit, and one as many as
they have in all. ``--wide`` only times a forward of wider models with random weights.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.commands import RESULTS, one_line_errors
from benchmarks.options import command_parser
from benchmarks.pages import about, table
from parlay import models
from parlay.bench.provenance import provenance
from parlay.models.config import DecoderConfig
from parlay.models.layer_lookup import LayerLookup
from parlay.models.loading import load_tokenizer, read_config
from parlay.models.native import NativeRunner
from parlay.models.state_table import STATES
from parlay.models.weights.shapes import weight_shapes
from parlay.options import LoadOptions
from parlay.system import threads
from parlay.train import lm
from parlay.train.ngram_layers import NgramLayersOptions, NgramLayersTrainer, NgramStatesOptions, compute_states, mark
from parlay.types import Segment

SHAPE, VOCAB, CONTEXT = "mini-draft", 2048, 512
LAYERS = 2
"""The number of the shape's own layers, which see the whole text."""
BEFORE, ROUNDS = 256, 300
"""The number of cached tokens before the timed row, and how often each way is timed, in turns."""
MOST_NGRAMS = 10_000_000
ABOUT = f"""Models of `parlay train` of the shape `{SHAPE}` ({LAYERS} layers, 128 wide, {VOCAB:,} tokens), and deeper
ones. *Work*: multiplications of a row's products in millions, with the LM head: where its state is there, and on
average over the text, where it is computed if it was not met before. *Hits*: rows whose n-gram was met before in the
text. *Ahead*: the same with a table of all n-grams that stand twice in the training texts. *Forward*: one row after
{BEFORE} cached tokens, float32, one thread, medians in turns: state there, and computed."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One model. It has ``first`` layers before the shape's own, each of which sees ``window`` tokens; 0 is the
    whole text."""

    name: str
    first: int = 0
    window: int = 0


KINDS = (
    Kind("plain, 2 layers"),
    Kind("plain, 4 layers", first=2),
    Kind("2 looked up by 3 tokens, 2 layers", first=2, window=2),
    Kind("2 looked up by 5 tokens, 2 layers", first=2, window=3),
)


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurements of one model on the text.

    ``work`` is in millions of multiplications: after a hit, on average, and on average with a table of n-grams.
    ``seconds`` are those of a forward, by way.
    """

    name: str
    seed: int
    perplexity: float
    work: tuple[float, float, float]
    hits: float | None
    hits_with_table: float | None
    seconds: Mapping[str, float]


WIDE = (
    Kind("plain, 4 layers"),
    Kind("plain, 8 layers", first=4),
    Kind("4 looked up by 5 tokens, 4 layers", first=4, window=2),
)


class PlainTrainer(lm.Trainer):
    """A training run whose model has ``more`` layers than its shape."""

    more = 0

    @property
    def kind(self) -> str:
        return f"{self.options.shape}-and-{self.more}"

    def make_model(self, config: Qwen3Config) -> Qwen3ForCausalLM:
        layers = config.num_hidden_layers + self.more
        changed = {"num_hidden_layers": layers, "layer_types": ["full_attention"] * layers}
        return super().make_model(Qwen3Config.from_dict({**config.to_dict(), **changed}))


class DeeperTrainer(PlainTrainer):
    """A training run of the plain model that has as many layers as the others have in all."""

    more = LAYERS


def trained(kind: Kind, options: argparse.Namespace, seed: int) -> Path:
    """Train a model, unless it is finished already, and return its folder."""
    out: Path = options.work / f"{kind.name.replace(',', '').replace(' ', '-')}-{seed}"
    record = out / "provenance.json"
    if record.exists() and json.loads(record.read_text())["tokens"] >= options.tokens:
        return out
    told = NgramLayersOptions(
        data=options.data,
        out=out,
        work=options.work / f"tokens-{seed}",
        tokens=options.tokens,
        shape=SHAPE,
        vocab_size=VOCAB,
        context=CONTEXT,
        seed=seed,
        threads=threads.count(),
        first_layers=kind.first or 1,
        window=kind.window or 2,
    )
    plain = DeeperTrainer if kind.first else PlainTrainer
    made = NgramLayersTrainer if kind.window else plain
    return lm.train(told, lambda _: made(told))


def opened(folder: Path, dtype: str = "float32") -> NativeRunner:
    runner = models.load(str(folder), LoadOptions(dtype=dtype, device="cpu"), cache_tokens=4096)
    assert isinstance(runner, NativeRunner)
    return runner


def loss(runner: NativeRunner, ids: Sequence[int]) -> float:
    """Return the mean loss per token in nats, in rows of the trained context's length."""
    total, count = 0.0, 0
    for begin in range(0, len(ids) - 1, CONTEXT):
        row = ids[begin : begin + CONTEXT + 1]
        runner.open(0, (), "alone")
        runner.reserve(0, CONTEXT)
        logits = runner.forward([Segment(0, tuple(row[:-1]))]).logits_RV
        runner.release(0)
        total += float(torch.nn.functional.cross_entropy(logits, torch.tensor(row[1:]), reduction="sum"))
        count += len(row) - 1
    return total / count


def met(lookup: LayerLookup) -> float:
    """Return the share of the rows so far whose state did not have to be computed."""
    return 1 - lookup.counts.computed / lookup.counts.rows


def work(config: DecoderConfig, computed: float) -> float:
    """Return millions of multiplications of a row. ``computed`` is the share of rows whose state has to be computed."""
    products = {name: math.prod(shape) for name, shape in weight_shapes(config).items() if len(shape) > 1}
    head = products["model.embed_tokens.weight"]
    layers = [
        sum(count for name, count in products.items() if name.startswith(f"model.layers.{layer}."))
        for layer in range(config.num_layers)
    ]
    first, tokens = config.ngram_layers or (0, 0)
    return (head + sum(layers[first:]) + computed * tokens * sum(layers[:first])) / 1e6


def ways(runner: NativeRunner, ids: Sequence[int]) -> dict[str, Callable[[], object]]:
    """Return the ways to run one row of the model, by name."""
    runner.open(0, ids[:BEFORE])
    runner.reserve(0, BEFORE + 16)
    runner.forward([Segment(0, tuple(ids[:BEFORE]))])
    runner.keep(0, ())
    row = [Segment(0, (ids[BEFORE],))]
    if runner.lookup is None:
        return {"forward": lambda: runner.forward(row)}
    kept = runner.lookup.kept

    def computed() -> None:
        kept.clear()
        runner.forward(row)

    return {"forward": lambda: runner.forward(row), "computed": computed}


def timed(found: Mapping[str, Mapping[str, Callable[[], object]]]) -> dict[str, dict[str, float]]:
    """Return the median seconds of each way of each model, in turns."""
    seconds: dict[str, dict[str, list[float]]] = {name: {way: [] for way in own} for name, own in found.items()}
    for _ in range(ROUNDS):
        for name, own in found.items():
            for way, call in own.items():
                call()  # fills the processor's caches with this model; the state is kept
                began = time.perf_counter()
                call()
                seconds[name][way].append(time.perf_counter() - began)
    return {name: {way: statistics.median(own[way]) for way in own} for name, own in seconds.items()}


def timed_wide() -> dict[str, dict[str, float]]:
    """Return the median seconds of models 768 wide with random weights, in bfloat16."""
    found = {}
    for kind in WIDE:
        slides = ["sliding_attention" if kind.window else "full_attention"] * kind.first
        config = Qwen3Config(
            vocab_size=4096,
            hidden_size=768,
            intermediate_size=2048,
            num_hidden_layers=4 + kind.first,
            num_attention_heads=12,
            num_key_value_heads=4,
            head_dim=64,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
            use_sliding_window=kind.window > 0,
            sliding_window=kind.window or None,
            layer_types=slides + ["full_attention"] * 4,
        )
        with TemporaryDirectory() as folder:
            Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
            if kind.window:
                mark(Path(folder), kind.first)
            found[kind.name] = ways(opened(Path(folder), "bfloat16"), range(BEFORE + 1))
    return timed(found)


def measured(seed: int, options: argparse.Namespace) -> Iterator[Measured]:
    """Train and measure models of all kinds."""
    folders = {kind.name: trained(kind, options, seed) for kind in KINDS}
    text = options.heldout.read_text(encoding="utf-8")[: options.characters]
    ids = {name: load_tokenizer(folder).encode(text) for name, folder in folders.items()}
    for folder in folders.values():
        (folder / STATES).unlink(missing_ok=True)
    seconds = timed({name: ways(opened(folder), ids[name]) for name, folder in folders.items()})
    for name, folder in folders.items():
        runner, config = opened(folder), read_config(folder)
        perplexity, hits, with_table = math.exp(loss(runner, ids[name])), None, None
        if runner.lookup is not None:
            hits = met(runner.lookup)
            told = NgramStatesOptions(model=str(folder), data=options.data, dtype="float32", ngrams=MOST_NGRAMS)
            compute_states(told)
            runner = opened(folder)
            assert math.exp(loss(runner, ids[name])) == perplexity, "a table changes no bit"
            assert runner.lookup is not None, "it has looked up before"
            with_table = met(runner.lookup)
        shares = (0.0, 1 - (1 if hits is None else hits), 1 - (1 if with_table is None else with_table))
        first, average, ahead = (work(config, share) for share in shares)
        sizes = first, average, ahead
        yield Measured(name, seed, perplexity, sizes, hits, with_table, seconds[name])


def lines(found: Sequence[Measured]) -> Iterator[tuple[str, ...]]:
    """Yield a table row for each model."""

    def share(value: float | None) -> str:
        return "-" if value is None else f"{value:.0%}"

    for one in found:
        micros = [f"{one.seconds[way] * 1e6:.0f} µs" if way in one.seconds else "-" for way in ("forward", "computed")]
        sizes = [f"{each:.2f}" for each in one.work]
        hits = share(one.hits), share(one.hits_with_table)
        yield (one.name, str(one.seed), f"{one.perplexity:.1f}", *hits, *sizes, *micros)


@one_line_errors("ngram_layers")
def main() -> None:
    """Run the command."""
    parser = command_parser("ngram_layers", __doc__)
    parser.add_argument("--wide", action="store_true", help="time wider models, and nothing else")
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="texts to train on")
    parser.add_argument("--heldout", type=Path, metavar="FILE", help="a text of other authors")
    parser.add_argument(
        "--characters", type=int, default=100_000, metavar="N", help="length of the part of it that is read"
    )
    parser.add_argument("--work", type=Path, default=Path("ngram-layers-work"), metavar="FOLDER")
    parser.add_argument("--tokens", type=int, default=1_280_000, metavar="N", help="tokens of each training run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], metavar="N")
    parser.add_argument("--out", type=Path, default=RESULTS / "ngram-layers.json", metavar="FILE")
    options = parser.parse_args()
    threads.use(1)
    if options.wide:
        print(json.dumps({"origin": provenance("python -m benchmarks.ngram_layers --wide"), **timed_wide()}, indent=1))
        return
    if options.data is None or options.heldout is None:
        parser.error("name --data and --heldout, or give --wide")
    found = [one for seed in options.seeds for one in measured(seed, options)]
    seeds = " ".join(map(str, options.seeds))
    what = f"--data FOLDER --heldout FILE --tokens {options.tokens} --characters {options.characters} --seeds {seeds}"
    record: dict[str, Any] = provenance(f"python -m benchmarks.ngram_layers {what}")
    options.out.write_text(json.dumps({"origin": record, "rows": [asdict(one) for one in found]}, indent=1) + "\n")
    head = ("model", "seed", "perplexity", "hits", "ahead", "work", "average", "ahead", "forward", "computed")
    title = ["# What layers that are looked up bring", "", about(record), "", ABOUT, ""]
    options.out.with_suffix(".md").write_text("\n".join([*title, *table(head, lines(found))]), encoding="utf-8")


if __name__ == "__main__":
    main()
