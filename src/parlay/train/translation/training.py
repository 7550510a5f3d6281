"""`parlay train translator|cmlm|nat|glat|ctc|da`: small translators, trained on pairs of texts."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from parlay.options import Options, option
from parlay.system.user_cache import saved_whole
from parlay.train.lm import anonymous, rounded
from parlay.train.lm_model import SHAPES, Shape, export, machine_record
from parlay.train.optimizers import Optimizers, learning_rate, mixed
from parlay.train.translation.objectives import Frames, Glancing, Graph, MaskedTarget, Objective, OnePass, TokenByToken
from parlay.train.translation.pairs import (
    LENGTHS,
    Pair,
    PairBatches,
    Texts,
    Words,
    divided,
    make_tokenizer,
    read_pairs,
    tokenized,
    words_of,
)
from parlay.train.watching import Watch
from parlay.types import SamplingParams

CONTEXT = 512
TRANSLATORS: Mapping[str, Shape] = MappingProxyType(
    {
        "small": Shape(hidden=256, layers=5, heads=4, kv_heads=2, head_dim=64, ffn=768),
        "mini": Shape(hidden=128, layers=4, heads=4, kv_heads=2, head_dim=32, ffn=384),
        "tiny": SHAPES["tiny"],
    }
)
"""Sizes, in all with 4096 tokens: 5.0 and 1.3 million parameters, and a toy."""
MOST_GRADIENT = 1.0
_CHECKED = 256
"""Held-out pairs on which the loss is measured at the end."""
_LOG_SECONDS = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TranslatorTrainOptions(Options):
    """Pairs that a translator learns from, and how long it does."""

    data: Path = option(help="file of pairs: a source, a tab and its translation on each line; may be packed as .zst")
    out: Path = option(Path("translator"), "folder of the finished model")
    minutes: float = option(60.0, "how long to train", low=0.001)
    updates: int = option(0, "so many updates of the weights, whatever time they take; 0: --minutes", low=0)
    shape: str = option("small", "size of a new model", choices=tuple(TRANSLATORS))
    vocab_size: int = option(4096, "tokens of a new vocabulary, those of its own included", low=512, high=65_536)
    batch_tokens: int = option(2048, "tokens of a batch, of both sides and padding", low=8)
    longest: int = option(60, "pairs of which a side has more tokens are left out", low=1, high=LENGTHS - 1)
    init: Path | None = option(None, "a translator of parlay train to begin from: its weights and its vocabulary")
    seed: int = option(0, "seed of weights and batches", low=0)
    threads: int = option(0, "CPU threads; 0 leaves torch's choice", low=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CanvasTranslatorTrainOptions(TranslatorTrainOptions):
    """From whom a translator learns that writes in parallel."""

    teacher: Path | None = option(
        None,
        "a translator whose translations of the sources are learned from, in place of those of the file "
        "(sequence-level distillation)",
    )
    distilled: int = option(0, "sources that the teacher translates, each once; 0: all", low=0)
    work: Path = option(Path("translation-work"), "folder of the teacher's translations, for later runs as well")


@dataclass(frozen=True, slots=True, kw_only=True)
class CmlmTrainOptions(CanvasTranslatorTrainOptions):
    """How much it learns to draft."""

    drafts: float = option(0.3, "share of batches that teach it to go on with an answer, as a drafter", low=0, high=1)
    block: int = option(8, "places that it then fills", low=1, high=64)


@dataclass(frozen=True, slots=True, kw_only=True)
class GlancingTrainOptions(CanvasTranslatorTrainOptions):
    """How much is shown."""

    ratio: float = option(0.5, "tokens shown at first, for each wrong one; falls to 0.1", low=0, high=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class FramesTrainOptions(CanvasTranslatorTrainOptions):
    """How long a canvas is."""

    scale: int = option(3, "frames for each token of the source", low=1, high=16)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphTrainOptions(GlancingTrainOptions):
    """How large a graph is."""

    scale: int = option(4, "vertices for each token of the source", low=2, high=16)


class _Made(NamedTuple):
    """An objective, and what config.json says of its canvases; nothing of a model that writes token by token."""

    objective: Objective
    canvas: Mapping[str, Any] | None = None


class Method(NamedTuple):
    """A way to train: what it makes, its options, and how to make it of them."""

    summary: str
    options: type[TranslatorTrainOptions]
    make: Callable[[Any, Words], _Made]


def _length(words: Words, *, copies: bool = False) -> Mapping[str, Any]:
    return {**_numbers(words), "ends": "length", "copies": copies}


def _numbers(words: Words) -> Mapping[str, Any]:
    return {"mask_token_id": words.mask, "first_number_id": words.first_length, "numbers": LENGTHS}


def _cmlm(asked: CmlmTrainOptions, words: Words) -> _Made:
    return _Made(MaskedTarget(words, asked.drafts, asked.block), {**_length(words), "drafts": asked.drafts > 0})


def _frames(asked: FramesTrainOptions, words: Words) -> _Made:
    own = {"ends": "frames", "scale": asked.scale, "blank_token_id": words.blank, "copies": True}
    return _Made(Frames(words, asked.scale), {**_numbers(words), **own})


def _graph(asked: GraphTrainOptions, words: Words) -> _Made:
    return _Made(Graph(words, asked.scale, asked.ratio), {**_numbers(words), "ends": "graph", "scale": asked.scale})


METHODS: Mapping[str, Method] = MappingProxyType(
    {
        "translator": Method(
            "train a small translator that writes token by token",
            TranslatorTrainOptions,
            lambda asked, words: _Made(TokenByToken(words)),
        ),
        "cmlm": Method("train a translator that fills masks (Mask-Predict)", CmlmTrainOptions, _cmlm),
        "nat": Method(
            "train a translator that writes all tokens in one pass",
            CanvasTranslatorTrainOptions,
            lambda asked, words: _Made(OnePass(words), _length(words, copies=True)),
        ),
        "glat": Method(
            "train a one-pass translator that is shown some tokens while it learns",
            GlancingTrainOptions,
            lambda asked, words: _Made(Glancing(words, asked.ratio), _length(words)),
        ),
        "ctc": Method("train a one-pass translator with repeats and blanks (CTC)", FramesTrainOptions, _frames),
        "da": Method("train a one-pass translator over a graph (DA-Transformer)", GraphTrainOptions, _graph),
    }
)
CANVAS_ARCHITECTURE = "ParlayCanvasLM"


def train(kind: str, asked: TranslatorTrainOptions) -> Path:
    """Train a translator and return its folder. Raises ValueError for data, or a folder to begin from, of no use."""
    torch.set_num_threads(asked.threads or torch.get_num_threads())
    torch.manual_seed(asked.seed)
    training, heldout = divided(read_pairs(asked.data))
    if not training or not heldout:
        raise ValueError(f"{asked.data} has {len(training) + len(heldout)} pairs: too few to hold some out, give more")
    begin = asked.init or (asked.teacher if isinstance(asked, CanvasTranslatorTrainOptions) else None)
    tokenizer = _tokenizer_of(begin) if begin else make_tokenizer(training, asked.vocab_size, CONTEXT)
    if isinstance(asked, CanvasTranslatorTrainOptions) and asked.teacher is not None:
        training = distilled(training, asked.teacher, asked)
    words = words_of(tokenizer)
    made = METHODS[kind].make(asked, words)
    run = Run(asked, made.objective, _model(asked, tokenizer))
    run.loop(kind, [pair for pair in tokenized(training, tokenizer, asked.longest) if made.objective.fits(pair)])
    record = {
        **machine_record(),
        "recipe": kind,
        "options": asdict(asked),
        "parameters": run.model.num_parameters(),
        "updates": run.updates,
        "tokens": run.tokens,
        "minutes": run.seconds / 60,
        "train_loss": statistics.fmean(run.losses[-50:] or [0.0]),
        "heldout_loss": run.check([pair for pair in tokenized(heldout, tokenizer, asked.longest) if run.fits(pair)]),
    }
    export(run.model, tokenizer, asked.out, anonymous(rounded(record)))
    if made.canvas is not None:
        _name_canvas(asked.out, made.canvas)
    return asked.out


def _tokenizer_of(folder: Path) -> PreTrainedTokenizerFast:
    if not (folder / "tokenizer.json").is_file():
        raise ValueError(f"no translator in {folder}: it has no tokenizer.json")
    found: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(folder)
    return found


def _model(asked: TranslatorTrainOptions, tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """A new model, or the one to begin from, in float32. A new one's states are as in `parlay train lm`."""
    if asked.init is not None:
        return Qwen3ForCausalLM.from_pretrained(asked.init, dtype=torch.float32)
    config = TRANSLATORS[asked.shape].config(len(tokenizer), tokenizer.eos_token_id)
    config.max_position_embeddings = CONTEXT
    return Qwen3ForCausalLM(config)


def _name_canvas(folder: Path, canvas: Mapping[str, Any]) -> None:
    """Say in config.json that the model fills canvases, and how."""
    path = folder / "config.json"
    said = json.loads(path.read_text(encoding="utf-8"))
    said |= {"architectures": [CANVAS_ARCHITECTURE], "canvas": dict(canvas)}
    path.write_text(json.dumps(said, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def distilled(pairs: Sequence[Texts], teacher: Path, asked: CanvasTranslatorTrainOptions) -> list[Texts]:
    """Each source once, with the teacher's greedy translation in place of those of people.

    They are kept in ``asked.work``, and written anew for another teacher, file or number of sources. Raises ValueError
    for a teacher whose translations reach no end.
    """
    sources = list(dict.fromkeys(source for source, _ in pairs))
    order = torch.randperm(len(sources), generator=torch.Generator().manual_seed(0)).tolist()
    chosen = [sources[at] for at in order][: asked.distilled or len(sources)]
    file = asked.work / "distilled.json"
    stamp = [str(teacher), (teacher / "config.json").stat().st_mtime_ns, str(asked.data), len(chosen)]
    if file.is_file():
        kept = json.loads(file.read_text(encoding="utf-8"))
        if kept["stamp"] == stamp:
            return [(source, text) for source, text in kept["pairs"]]
    if not (found := _translated(chosen, teacher, asked)):
        raise ValueError(
            f"{teacher} ends no translation of {len(chosen)} within {asked.longest} tokens: train it longer"
        )
    asked.work.mkdir(parents=True, exist_ok=True)
    with saved_whole(file) as partial:
        partial.write_text(json.dumps({"stamp": stamp, "pairs": found}, ensure_ascii=False), encoding="utf-8")
    return found


def _translated(sources: Sequence[str], teacher: Path, asked: CanvasTranslatorTrainOptions) -> list[Texts]:
    """Sources with their translations, without those that reach no end."""
    from parlay.llm.llm import LLM

    params = SamplingParams(temperature=0, max_tokens=asked.longest)
    with LLM(str(teacher), threads=asked.threads or None, router_memory="off") as llm:
        outputs = llm.generate(list(sources), params, strategy="none")
    each = [(source, output.outputs[0]) for source, output in zip(sources, outputs, strict=True)]
    return [(source, one.text) for source, one in each if one.finish_reason == "stop" and one.text.strip()]


class Run:
    """A run under way: weights, optimizers and what was done so far."""

    def __init__(self, asked: TranslatorTrainOptions, objective: Objective, model: Qwen3ForCausalLM) -> None:
        self._asked, self._objective, self.model = asked, objective, model.train()
        self._optimizers = Optimizers(model)
        self._draw = torch.Generator().manual_seed(asked.seed)
        self.updates, self.tokens, self.seconds, self.losses = 0, 0, 0.0, list[float]()

    def fits(self, pair: Pair) -> bool:
        return self._objective.fits(pair)

    def loop(self, kind: str, pairs: Sequence[Pair]) -> None:
        """Update until the time or the number of updates is used up. Raises ValueError if no pair can be learned."""
        if not pairs:
            raise ValueError(f"{self._asked.data}: no pair fits; raise longest, or scale")
        batches = PairBatches(pairs, self._asked.batch_tokens, self._asked.seed)
        began = time.monotonic()
        due = _LOG_SECONDS
        with Watch(f"Training {kind}") as watch:
            while (share := self.share) < 1:
                self._update(batches.draw(self.updates), share)
                self.seconds = time.monotonic() - began
                recent = statistics.fmean(self.losses[-20:])
                watch.step(self.share, self.seconds, self.tokens, recent)
                if not watch.shown and self.seconds >= due:
                    rate = self.tokens / self.seconds
                    print(
                        f"{self.share:6.1%}  update {self.updates}  loss {recent:.3f}  {rate:,.0f} tokens/s", flush=True
                    )
                    due = self.seconds + _LOG_SECONDS

    @property
    def share(self) -> float:
        """How much of the run is over."""
        if self._asked.updates:
            return self.updates / self._asked.updates
        return self.seconds / (60 * self._asked.minutes)

    def _update(self, pairs: Sequence[Pair], share: float) -> None:
        with mixed():
            loss = self._objective(self.model, pairs, share, self._draw)
        if loss.isfinite():
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(self.model.parameters(), MOST_GRADIENT)
            self._optimizers.step(learning_rate(share))
        self.losses.append(float(loss.detach()))
        self.updates += 1
        self.tokens += sum(pair.size for pair in pairs)

    @torch.no_grad()
    def check(self, pairs: Sequence[Pair]) -> float:
        """The loss of held-out pairs at the end of the run; 0 without any."""
        chosen, draw = pairs[:: max(1, len(pairs) // _CHECKED)], torch.Generator().manual_seed(0)
        losses = [float(self._objective(self.model, [pair], 1.0, draw)) for pair in chosen]
        return statistics.fmean(losses or [0.0])


__all__ = ["METHODS", "train"]
