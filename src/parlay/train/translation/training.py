"""`parlay train translator|gad|cmlm|nat|glat|ctc|da`: trains small translators on pairs of texts."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from parlay.system.terminal import undivided
from parlay.train.canvases.decoders import set_block_config
from parlay.train.lm import anonymous, log, rounded
from parlay.train.lm_model import export, machine_record
from parlay.train.optimizers import Optimizers, learning_rate, mixed
from parlay.train.saving import make_folder
from parlay.train.translation import objectives
from parlay.train.translation.align import aligned
from parlay.train.translation.distilling import distilled
from parlay.train.translation.options import (
    CONTEXT,
    TRANSLATORS,
    CanvasTranslatorTrainOptions,
    CmlmTrainOptions,
    FramesTrainOptions,
    GraphTrainOptions,
    NatTrainOptions,
    TranslatorTrainOptions,
)
from parlay.train.translation.pairs import (
    HELDOUT_ONE_IN,
    LENGTHS,
    Pair,
    PairBatches,
    Words,
    divided,
    make_tokenizer,
    read_pairs,
    tokenized,
    words_of,
)
from parlay.train.translation.rows import Laid, Network, Rows
from parlay.train.watching import Watch

_ROW = 64
"""The length of a batch's rows is a multiple of this, and at least twice this."""
MOST_GRADIENT = 1.0
_CHECKED = 256
"""About this many held-out pairs are measured at the end."""
_MOST_NONFINITE = 20
"""Updates whose loss is infinite or NaN are left out; after this many in a row the run ends."""
_LOG_SECONDS = 20.0


class _Made(NamedTuple):
    """An objective, and its model's config.json entries ``says``.

    ``ready`` prepares pairs for the objective, for example by aligning them.
    """

    objective: objectives.Objective
    says: Mapping[str, Any] = MappingProxyType({})
    ready: Callable[[Sequence[Pair]], list[Pair]] = list


def _canvas(words: Words, own: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config.json entries that all canvas models have, and ``own``."""
    numbers = {"mask_token_id": words.mask, "first_number_id": words.first_length, "numbers": LENGTHS}
    return {"architectures": [CANVAS_ARCHITECTURE], "canvas": {**numbers, **own}}


def _cmlm(asked: CmlmTrainOptions, words: Words) -> _Made:
    own = {"ends": "length", "drafts": asked.drafts > 0}
    return _Made(objectives.MaskedTarget(words, asked.drafts, asked.block), _canvas(words, own))


def _frames(asked: FramesTrainOptions, words: Words) -> _Made:
    own = {"ends": "frames", "scale": asked.scale, "blank_token_id": words.blank, "copies": True}
    return _Made(objectives.Frames(words, asked.scale), _canvas(words, own))


def _graph(asked: GraphTrainOptions, words: Words) -> _Made:
    own = {"ends": "graph", "scale": asked.scale, "heads": asked.heads}
    return _Made(objectives.Graph(words, asked.scale, asked.ratio, asked.heads), _canvas(words, own))


def _nat(asked: NatTrainOptions, words: Words) -> _Made:
    if asked.fertilities:
        return _Made(objectives.Fertile(words), _canvas(words, {"ends": "fertilities"}), aligned)
    return _Made(objectives.OnePass(words), _canvas(words, {"ends": "length", "copies": True}))


METHODS: Mapping[str, Callable[[Any, Words], _Made]] = MappingProxyType(
    {
        "translator": lambda asked, words: _Made(objectives.TokenByToken(words)),
        "gad": lambda asked, words: _Made(
            objectives.Ahead(words, asked.block), set_block_config(words.mask, asked.block)
        ),
        "cmlm": _cmlm,
        "nat": _nat,
        "glat": lambda asked, words: _Made(objectives.Glancing(words, asked.ratio), _canvas(words, {"ends": "length"})),
        "ctc": _frames,
        "da": _graph,
    }
)
"""The function that makes each method's objective; it is called with the method's options."""
CANVAS_ARCHITECTURE, SHALLOW_ARCHITECTURE = "ParlayCanvasLM", "DeepShallowForCausalLM"
ANSWER_LAYERS = "answer_layers"
"""The config.json key for the number of layers that an answer's rows run through."""


def train(kind: str, asked: TranslatorTrainOptions) -> Path:
    """Train a translator, and return its folder. Raises ValueError for data or an initial model that can't be used."""
    make_folder(asked.out)
    torch.set_num_threads(asked.threads or torch.get_num_threads())
    torch.manual_seed(asked.seed)
    training, heldout = divided(read_pairs(asked.data))
    if not training or not heldout:
        pairs, enough = len(training) + len(heldout), 10 * HELDOUT_ONE_IN
        raise ValueError(f"{asked.data} has {pairs} pairs: too few to hold some out, give {enough} or more")
    begin = asked.init or asked.teacher
    tokenizer = _tokenizer_of(begin) if begin else make_tokenizer(training, asked.vocab_size, CONTEXT)
    if asked.teacher is not None:
        training = distilled(training, asked.teacher, asked)
    words = words_of(tokenizer)
    made = METHODS[kind](asked, words)
    model = _model(asked, tokenizer)
    shallow = int(model.config.to_dict().get(ANSWER_LAYERS, 0))
    network = Network(model, shallow, compiled=asked.compile)
    run = Run(asked, made.objective, network)
    learned, checked = (tokenized(texts, tokenizer, asked.longest) for texts in (training, heldout))
    ready = made.ready([*learned, *checked])

    def keep() -> None:
        """Write the folder of the model with its current weights."""
        record = _record(kind, asked, run, ready[len(learned) :])
        export(network.model, tokenizer, asked.out, anonymous(rounded(record)))
        _add_to_config(asked.out, {**made.says, **({"architectures": [SHALLOW_ARCHITECTURE]} if shallow else {})})

    try:
        run.loop(kind, ready[: len(learned)])
    except KeyboardInterrupt:
        if run.updates:  # hours of learning may be in it
            keep()
            log(f"stopped after {run.updates} updates; --init {asked.out} goes on from there")
        raise
    keep()
    return asked.out


def _record(kind: str, asked: TranslatorTrainOptions, run: Run, heldout: Sequence[Pair]) -> dict[str, Any]:
    """Return the contents of provenance.json."""
    return {
        **machine_record(),
        "recipe": kind,
        "options": asdict(asked),
        "parameters": run.network.model.num_parameters(),
        "updates": run.updates,
        "tokens": run.tokens,
        "minutes": run.seconds / 60,
        "train_loss": statistics.fmean(run.losses[-50:] or [0.0]),
        "heldout_loss": run.check(heldout),
    }


def _tokenizer_of(folder: Path) -> PreTrainedTokenizerFast:
    if not (folder / "tokenizer.json").is_file():
        raise ValueError(f"no translator in {folder}: it has no tokenizer.json")
    found: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(folder)
    return found


def _model(asked: TranslatorTrainOptions, tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Make a new model, or open the initial one, in float32.

    Raises ValueError if the model runs answers through few layers, but the method fills canvases.
    """
    if asked.init is not None:
        model = deepened(Qwen3ForCausalLM.from_pretrained(asked.init, dtype=torch.float32), asked.deepen)
        shallow = ANSWER_LAYERS in model.config.to_dict()
    else:
        shape = TRANSLATORS[asked.shape]
        config, shallow = shape.sizes.config(len(tokenizer), tokenizer.eos_token_id), shape.shallow > 0
        config.max_position_embeddings = CONTEXT
        if shallow:
            config.update({ANSWER_LAYERS: shape.shallow, "answer_after": words_of(tokenizer).separator})
        model = Qwen3ForCausalLM(config)
    if shallow and isinstance(asked, CanvasTranslatorTrainOptions):
        raise ValueError(f"{asked.init or asked.shape} is for translators that write token by token: choose another")
    return model


def deepened(model: Qwen3ForCausalLM, more: int) -> Qwen3ForCausalLM:
    """Return the model with ``more`` new layers after each of its own. New layers add nothing yet, so it writes the
    same."""
    if not more:
        return model
    layers = model.config.num_hidden_layers
    sizes = {**model.config.to_dict(), "num_hidden_layers": layers * (1 + more), "layer_types": None}
    deep = Qwen3ForCausalLM(Qwen3Config.from_dict(sizes))
    for number, layer in enumerate(deep.model.layers):
        if number % (1 + more) == 0:
            layer.load_state_dict(model.model.layers[number // (1 + more)].state_dict())
        else:
            nn.init.zeros_(layer.self_attn.o_proj.weight)
            nn.init.zeros_(layer.mlp.down_proj.weight)
    deep.model.embed_tokens.load_state_dict(model.model.embed_tokens.state_dict())
    deep.model.norm.load_state_dict(model.model.norm.state_dict())
    return deep


def _add_to_config(folder: Path, more: Mapping[str, Any]) -> None:
    """Add entries to a folder's config.json."""
    path = folder / "config.json"
    whole = json.loads(path.read_text(encoding="utf-8")) | more
    path.write_text(json.dumps(whole, indent=2, sort_keys=True) + "\n", encoding="utf-8")


class Run:
    """A training run: network, optimizers and progress."""

    def __init__(self, asked: TranslatorTrainOptions, objective: objectives.Objective, network: Network) -> None:
        self._asked, self._objective, self.network = asked, objective, network
        self._nonfinite = 0  # updates in a row that gave no number
        self._optimizers = Optimizers(network.model.train())
        self._draw = torch.Generator().manual_seed(asked.seed)
        self.updates, self.tokens, self.seconds, self.losses = 0, 0, 0.0, list[float]()

    def loop(self, kind: str, pairs: Sequence[Pair]) -> None:
        """Update the weights until the time or the number of updates is used up."""
        batches = self._batches(pairs)
        began = time.monotonic()
        due = _LOG_SECONDS
        with Watch(f"Training {kind}") as watch:
            while (share := self.share) < 1:
                self._update(batches.draw(self._draw), batches, share)
                self.seconds = time.monotonic() - began
                recent = statistics.fmean(self.losses[-20:] or [math.nan])
                watch.step(self.share, self.seconds, self.tokens, recent)
                if not watch.shown and self.seconds >= due:
                    rate = self.tokens / self.seconds
                    print(
                        f"{self.share:6.1%}  update {self.updates}  loss {recent:.3f}  {rate:,.0f} tokens/s", flush=True
                    )
                    due = self.seconds + _LOG_SECONDS

    def _batches(self, pairs: Sequence[Pair]) -> PairBatches:
        """Return batches long enough for the longest pair. Raises ValueError if no pair can be trained on."""
        fitting = [pair for pair in pairs if self._objective.fits(pair)]
        if not fitting:
            raise ValueError(f"{self._asked.data}: no pair fits; raise longest, or scale")
        longest = max(self._objective.lay(pair, self._draw).size for pair in fitting)
        length = max(2 * _ROW, -(-longest // _ROW) * _ROW)
        return PairBatches(fitting, self._objective.lay, max(1, self._asked.batch_tokens // length), length)

    @property
    def share(self) -> float:
        """How much of the run is done, from 0 to 1."""
        if self._asked.updates:
            return self.updates / self._asked.updates
        return self.seconds / (60 * self._asked.minutes)

    def _update(self, batch: Sequence[tuple[Pair, Laid]], batches: PairBatches, share: float) -> None:
        with mixed():
            loss = self._loss(batch, batches, share, self._draw)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(self.network.model.parameters(), MOST_GRADIENT)
        value = float(loss.detach())
        with undivided():
            if math.isfinite(value) and bool(norm.isfinite()):
                self._optimizers.step(self._asked.rate * learning_rate(share))
                self.losses.append(value)
                self._nonfinite = 0
            else:
                self.network.model.zero_grad(set_to_none=True)
                self._nonfinite += 1
            self.updates += 1
            self.tokens += sum(pair.size for pair, _ in batch)
        if self._nonfinite == _MOST_NONFINITE:
            raise ValueError(
                f"the loss was no finite number in {_MOST_NONFINITE} updates in a row: train again with a lower --rate"
            )

    def _loss(
        self, batch: Sequence[tuple[Pair, Laid]], batches: PairBatches, share: float, draw: torch.Generator
    ) -> Tensor:
        pairs, laid = zip(*batch, strict=True)
        rows = Rows.of(laid, batches.length, batches.rows)
        return self._objective(self.network, objectives.Batch(pairs, laid, rows, share, draw))

    @torch.no_grad()
    def check(self, pairs: Sequence[Pair]) -> float | None:
        """Return the loss on the held-out pairs that fit, at the end of the run; None if none fits."""
        fitting = [pair for pair in pairs if self._objective.fits(pair)]
        if not fitting:
            return None
        checked, draw, losses = fitting[:: max(1, len(fitting) // _CHECKED)], torch.Generator().manual_seed(0), []
        batches = self._batches(checked)
        for first in range(0, len(checked), batches.rows):  # a row has room for each
            if batch := batches.filled(checked[first : first + batches.rows], draw):
                losses.append(float(self._loss(batch, batches, 1.0, draw)))
        return statistics.fmean(losses) if losses else None


__all__ = ["METHODS", "train"]
