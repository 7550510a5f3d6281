"""`parlay train ngram-layers`: a small language model whose first layers see only the last few tokens.

So their output depends on these tokens alone, and can be looked up. `parlay train ngram-states` precomputes a table of
it for the frequent n-grams of a corpus.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from parlay.models.config import LONGEST_NGRAM, UnsupportedModel, read_json
from parlay.models.families.qwen import NGRAM_LAYERS
from parlay.models.fetch.resolving import resolve
from parlay.models.loading import load_tokenizer, load_weights, read_config
from parlay.models.lookup_index import frequent_windows
from parlay.models.native import NativeRunner
from parlay.models.opening import settled
from parlay.models.state_table import StateTable
from parlay.options import LoadOptions, Options, option
from parlay.system import threads
from parlay.text import corpus
from parlay.train import lm
from parlay.types import FieldError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramLayersOptions(lm.TrainOptions):
    """Options of `parlay train ngram-layers`: those of `parlay train lm`, and number and window of the first layers."""

    first_layers: int = option(2, "layers before the shape's own, which are looked up", low=1, high=LONGEST_NGRAM - 1)
    window: int = option(2, "tokens that each of these layers sees, its own included", low=2, high=LONGEST_NGRAM)

    def __post_init__(self) -> None:
        lm.TrainOptions.__post_init__(self)
        if self.tokens_seen > LONGEST_NGRAM:
            raise FieldError(
                "first_layers",
                f"={self.first_layers}, window={self.window}: together they see {self.tokens_seen} tokens, "
                f"and {LONGEST_NGRAM} can be looked up; give fewer layers, or a smaller window",
                "window",
            )

    @property
    def tokens_seen(self) -> int:
        """Return how many of the last tokens the output of the first layers depends on."""
        return 1 + self.first_layers * (self.window - 1)


class NgramLayersTrainer(lm.Trainer):
    """A run whose model has additional sliding-window layers before the shape's own."""

    options: NgramLayersOptions

    @property
    def kind(self) -> str:
        return f"ngram-layers-{self.options.first_layers}-{self.options.window}-{self.options.shape}"

    def make_model(self, config: Qwen3Config) -> Qwen3ForCausalLM:
        first, own = self.options.first_layers, config.num_hidden_layers
        changed = {
            "num_hidden_layers": first + own,
            "layer_types": ["sliding_attention"] * first + ["full_attention"] * own,
            "use_sliding_window": True,
            "sliding_window": self.options.window,
        }
        return super().make_model(Qwen3Config.from_dict({**config.to_dict(), **changed}))

    def write(self, record: dict[str, Any]) -> None:
        """Write the checkpoint, a Qwen3 for transformers, with the number of first layers in its config."""
        super().write(record)
        mark(self.options.out, self.options.first_layers)


def mark(folder: Path, layers: int) -> None:
    """Record in a checkpoint's config.json how many first layers can be looked up."""
    fields = {"architectures": [NGRAM_LAYERS.architecture], "ngram_layers": layers}
    text = json.dumps(read_json(folder / "config.json") | fields, indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")


def train(options: NgramLayersOptions) -> Path:
    """Train a model whose first layers can be looked up, and return the folder of its checkpoint."""
    return lm.train(options, lambda _: NgramLayersTrainer(options))


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramStatesOptions(Options):
    """Options of `parlay train ngram-states`: the model, the corpus, and the number type, on which states depend."""

    model: str = option(help="folder of a model of parlay train ngram-layers; the table is written into it")
    data: Path = option(help="folder of text files and .jsonl files with texts under text, output or content")
    ngrams: int = option(100_000, "how many of the texts' most frequent n-grams have states", low=1)
    dtype: str = option("auto", "number type that the model will run in", choices=("auto", *_DTYPES))
    threads: int | None = option(None, "number of threads (default: one per usable core)", low=1)


def compute_states(options: NgramStatesOptions) -> Path:
    """Write the states of a corpus's frequent n-grams into the model's folder, and return the table's path."""
    threads.settle(options.threads)
    folder = resolve(options.model)
    config = read_config(folder)
    if config.ngram_layers is None:
        raise UnsupportedModel(f"no layers of {options.model} are looked up: name a model of parlay train ngram-layers")
    load = settled(options.model, LoadOptions(dtype=options.dtype, device="cpu"))
    weights, cpu = load_weights(folder, config), torch.device("cpu")
    runner = NativeRunner(config, weights, dtype=_DTYPES[load.dtype], device=cpu, max_tokens_cached=64)
    assert runner.lookup is not None, "its config says so"
    documents = (each for source in corpus.sources([str(options.data)]) for each in corpus.documents(source) or ())
    texts = list(corpus.encode(documents, load_tokenizer(folder)))
    tokens = np.concatenate([np.empty(0, np.uint32), *texts])
    index, count = frequent_windows(tokens, config.vocab_size, length=runner.lookup.tokens, most=options.ngrams)
    if not count:
        raise ValueError(f"no {runner.lookup.tokens} tokens stand twice in {options.data}: more text is needed")
    lm.log(f"{count:,} n-grams of {runner.lookup.tokens} tokens")
    grams = [index.gram(number) for number in range(len(index) - count, len(index))]
    return StateTable.write(folder, config, weights, index, runner.lookup.compute(grams))
