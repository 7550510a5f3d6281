"""Runs `parlay train mdlm`, `bd3`, `set-block`, `cdlm` and `cllm`: from texts to a folder that Parlay opens."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerFast

from parlay.drafters.options import SET_BLOCK
from parlay.models.fetch.origin import licence, public_name
from parlay.models.fetch.resolving import resolve
from parlay.models.gguf.tokenizer import load_tokenizer as load_gguf_tokenizer
from parlay.options import UsageError
from parlay.system import threads
from parlay.system.terminal import undivided
from parlay.train.canvases import cdlm, cllm
from parlay.train.canvases.decoders import Decoder, load_decoder, mask_of, new_decoder
from parlay.train.canvases.diffusion import Bd3, Mdlm
from parlay.train.canvases.options import (
    Bd3TrainOptions,
    CanvasTrainOptions,
    CdlmTrainOptions,
    CllmTrainOptions,
    MdlmTrainOptions,
    SetBlockTrainOptions,
)
from parlay.train.canvases.recipe import CanvasRecipe
from parlay.train.canvases.rows import Drawn, RowBatch, Words, batch_of, common_ids, parted, rows_of
from parlay.train.canvases.set_block import SetBlockRecipe
from parlay.train.canvases.set_block_adapter import MaskAdapterRecipe
from parlay.train.data.prompts import ChatFrame
from parlay.train.data.user_texts import TrainingText, UserTexts, read_user_texts
from parlay.train.lm_data import END_OF_TEXT, train_tokenizer, wrap_tokenizer
from parlay.train.lm_model import CONTEXT, SHAPES
from parlay.train.optimizers import learning_rate, mixed
from parlay.train.saving import make_folder
from parlay.train.watching import Watch
from parlay.types import ParlayError

MASK = "<|mask|>"
_MOST_GRADIENT = 1.0
_LOG_SECONDS = 20.0
_RECENT = 20
"""The reported loss is the mean of this many updates."""
_CHECK_SECONDS = 240.0
"""Held-out rows are first measured after this time, and again each time the run has become twice as long."""
_MEASURED_BATCHES, _MEASURED_ROWS = 4, 8
"""At least this many batches of held-out rows, and at least this many rows, are measured, if there are so many."""
_NO_BYTE = ("<0xFF>", "ÿ", "<0xFE>", "þ")
"""Spellings, in byte-level vocabularies, of bytes that never occur in UTF-8."""


@dataclass(frozen=True, slots=True)
class Begun:
    """A run ready to start: its recipe, tokenizer, training rows and held-out rows.

    ``origin``: the model that training starts from; empty: random weights.
    """

    recipe: CanvasRecipe
    tokenizer: PreTrainedTokenizerFast
    rows: list[TrainingText]
    held_out: list[TrainingText]
    origin: str = ""


@dataclass(frozen=True, slots=True)
class Reached:
    """Where a run ended. ``stopped``: the user's interrupt, if there was one."""

    updates: int
    tokens: int
    seconds: float
    loss: float
    stopped: KeyboardInterrupt | None


def begin_diffusion(options: MdlmTrainOptions) -> Begun:
    """Start `mdlm` or `bd3`: a new model with its own tokenizer, or a model to train further."""
    texts = read_user_texts(options.data)
    if options.model:
        tokenizer, mask_id = open_tokenizer(options.model), mask_of(options.model)
        decoder = Decoder(load_decoder(options.model), mask_id)
    else:
        decoder, tokenizer = _new(texts, options)
    rows, held_out = parted(rows_of(texts, words_of(tokenizer, texts), options.length))
    recipe = Bd3(options, decoder) if isinstance(options, Bd3TrainOptions) else Mdlm(options, decoder)
    return Begun(recipe, tokenizer, rows, held_out, options.model)


def _new(texts: UserTexts, options: MdlmTrainOptions | SetBlockTrainOptions) -> tuple[Decoder, PreTrainedTokenizerFast]:
    """Make a model with random weights, and a tokenizer trained on the texts."""
    tokenizer = new_tokenizer(texts, options.vocab_size)
    torch.manual_seed(options.seed)
    end = tokenizer.eos_token_id
    inner = new_decoder(SHAPES[options.shape].config(len(tokenizer), end, end))
    return Decoder(inner, int(tokenizer.convert_tokens_to_ids(MASK))), tokenizer


def begin_set_block(options: SetBlockTrainOptions) -> Begun:
    """Start `set-block`: an existing causal model gets a mask token or an adapter, or a new model is trained in both
    modes."""
    if not options.model:
        if options.lora or options.layers or options.mask_token:
            raise UsageError("--lora, --layers and --mask-token need an existing model: name it with --model")
        texts = read_user_texts(options.data)
        decoder, tokenizer = _new(texts, options)
        rows, held_out = parted(rows_of(texts, words_of(tokenizer, texts), options.length))
        return Begun(SetBlockRecipe(options, decoder, new=True), tokenizer, rows, held_out)
    inner, tokenizer, rows, held_out = _tuned(options.model, options)
    mask_id = choose_mask(tokenizer, inner.config.vocab_size, options.mask_token)
    if options.lora and options.layers:
        raise UsageError("--lora trains an adapter of all layers: remove --layers")
    if options.lora:
        common_W = common_ids(rows, options.top_vocab, inner.config.vocab_size) if options.top_vocab else None
        recipe = MaskAdapterRecipe(options, Decoder(inner, mask_id), common_W)
        return Begun(recipe, tokenizer, rows, held_out, options.model)
    original = Decoder(load_decoder(options.model)).requires_grad_(False).eval() if options.keep else None
    return Begun(SetBlockRecipe(options, Decoder(inner, mask_id), original), tokenizer, rows, held_out, options.model)


def begin_cdlm(options: CdlmTrainOptions) -> Begun:
    """Start `cdlm`: the teacher answers the prompts, and the student starts as the teacher."""
    inner, tokenizer, rows, held_out = _tuned(options.model, options)
    mask_id = mask_of(options.model)
    teacher = Decoder(load_decoder(options.model), mask_id).requires_grad_(False)
    asked = batch_of(rows[: options.prompts], tokenizer.eos_token_id, 1)
    with mixed(options.precision):
        known = cdlm.write(teacher, asked, options.block)
    return Begun(cdlm.Cdlm(options, Decoder(inner, mask_id), teacher, known), tokenizer, rows, held_out, options.model)


def begin_cllm(options: CllmTrainOptions) -> Begun:
    """Start `cllm`: the causal model first writes its own texts."""
    inner, tokenizer, rows, held_out = _tuned(options.model, options)
    original = Decoder(load_decoder(options.model)).requires_grad_(False).eval()
    known = cllm.write(options.model, rows, options)
    recipe = cllm.Cllm(options, Decoder(inner), original, known, tokenizer.eos_token_id)
    return Begun(recipe, tokenizer, rows, held_out, options.model)


def _tuned(
    model: str, options: CanvasTrainOptions
) -> tuple[Any, PreTrainedTokenizerFast, list[TrainingText], list[TrainingText]]:
    inner, tokenizer = load_decoder(model), open_tokenizer(model)
    texts = read_user_texts(options.data)
    rows, held_out = parted(rows_of(texts, words_of(tokenizer, texts), options.length))
    return inner, tokenizer, rows, held_out


def open_tokenizer(model: str) -> PreTrainedTokenizerFast:
    """Open the tokenizer of a folder or GGUF file. Raises ParlayError if it has no end-of-text token."""
    found = resolve(model)
    if found.is_dir():
        tokenizer = PreTrainedTokenizerFast.from_pretrained(found)
    else:
        plain = load_gguf_tokenizer(found)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain.backend_tokenizer, **plain.special_tokens_map)
        tokenizer.chat_template = plain.chat_template
    if tokenizer.eos_token_id is None:
        raise ParlayError(f"the tokenizer of {model} names no end of text (eos_token), which texts here need")
    return tokenizer


def new_tokenizer(texts: UserTexts, size: int) -> PreTrainedTokenizerFast:
    """Train a tokenizer of at most ``size`` tokens, including the mask."""
    spoken = [*texts.documents, *(part for each in texts.conversations for part in (each.prompt, each.answer))]
    core = train_tokenizer((piece for text in spoken for piece in text.split("\n\n")), size - 1)
    tokenizer = wrap_tokenizer(core, CONTEXT)
    tokenizer.add_special_tokens({"mask_token": MASK})
    return tokenizer


def words_of(tokenizer: PreTrainedTokenizerFast, texts: UserTexts) -> Words:
    """Return how the model reads these texts; end-of-text and mask tokens spelled in them become line ends.

    Raises ParlayError if the model's chat template changes prompts.
    """

    def encode(text: str) -> Sequence[int]:
        ids: list[int] = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    unframed = any(not each.framed for each in texts.conversations)
    frame = ChatFrame.of_prompts(tokenizer) if unframed else ChatFrame((), ())
    marks = (END_OF_TEXT, str(tokenizer.eos_token), *([str(tokenizer.mask_token)] if tokenizer.mask_token else []))
    return Words(encode, tuple(tokenizer.encode("")), tokenizer.eos_token_id, frame, marks)


def choose_mask(tokenizer: PreTrainedTokenizerFast, vocab_size: int, named: str) -> int:
    """Return the mask token's id: of the token ``named``, else an unused id or the id of a token that no text contains.

    Raises ParlayError if there is none.
    """
    known = tokenizer.get_vocab()
    if named:
        if named not in known:
            raise ParlayError(
                f"mask_token={named!r} is not a token of the model: name one that no text has", "mask_token"
            )
        return int(known[named])
    free = sorted(set(range(vocab_size)).difference(known.values()))
    found = free[:1] or [known[token] for token in _NO_BYTE if token in known]
    if not found:
        raise ParlayError("the model has no token that texts never have: name one by --mask-token")
    return int(found[0])


METHODS: Mapping[str, Callable[[Any], Begun]] = {
    "mdlm": begin_diffusion,
    "bd3": begin_diffusion,
    SET_BLOCK: begin_set_block,
    "cdlm": begin_cdlm,
    "cllm": begin_cllm,
}
"""The function that starts each method; it is called with the method's options."""


def train(method: str, options: CanvasTrainOptions) -> str:
    """Train, measure and save a model; return the result in one line.

    If the user stops the run, the model is saved without a last measurement. Raises ParlayError for texts or a model
    that can't be used, and if the loss becomes infinite or NaN.
    """
    threads.settle(options.threads)
    make_folder(options.out)
    begun = METHODS[method](options)
    before = measured(begun, options)
    reached = fit(begun, options, f"Training {method}")
    figures = {"before": before} if reached.stopped else {"before": before, "after": measured(begun, options)}
    card = _card(method, options, begun, reached, figures)
    begun.recipe.save(options.out, begun.tokenizer, card)
    if reached.stopped:
        print(f"stopped after {reached.updates} updates: {options.out} has the model as it was then", flush=True)
        raise reached.stopped
    return f"{options.out}: {reached.updates} updates, loss {reached.loss:.3f}, held out {_said(figures['after'])}"


def fit(begun: Begun, options: CanvasTrainOptions, title: str = "Training") -> Reached:
    """Update the weights until the run is over, or the user stops it after at least one update.

    Raises ParlayError if loss or gradient becomes infinite or NaN.
    """
    recipe, optimizer = begun.recipe, begun.recipe.optimizer()
    drawn = Drawn(begun.rows, begun.tokenizer.eos_token_id, recipe.multiple, options.seed)
    recipe.decoder.train()
    updates = tokens = 0
    recent: deque[float] = deque(maxlen=_RECENT)
    began = time.monotonic()
    logged, check = 0.0, _CHECK_SECONDS
    stopped = None
    try:
        with Watch(title) as watch:
            while (share := options.share(updates, time.monotonic() - began)) < 1:
                batch = drawn.batch(updates, options.rows)
                recent.append(_update(recipe, batch, options, updates))
                with undivided():
                    optimizer.step(learning_rate(share))
                    updates, tokens = updates + 1, tokens + int(batch.text_BT.sum())
                seconds = time.monotonic() - began
                watch.step(share, seconds, tokens, recent[-1])
                if not watch.shown and seconds > logged + _LOG_SECONDS:
                    logged = seconds
                    print(f"{share:6.1%}  update {updates}  loss {fmean(recent):.3f}", flush=True)
                if not watch.shown and seconds > check and begun.held_out:
                    check *= 2
                    print(f"{share:6.1%}  held out: {_said(measured(begun, options))}", flush=True)
                    recipe.decoder.train()
    except KeyboardInterrupt as interrupt:
        if not updates:  # there is nothing to keep
            raise
        stopped = interrupt if share < 1 else None
    return Reached(updates, tokens, time.monotonic() - began, fmean(recent or (0.0,)), stopped)


def _update(recipe: CanvasRecipe, batch: RowBatch, options: CanvasTrainOptions, step: int) -> float:
    """Compute the gradient of one batch, and return the loss."""
    with mixed(options.precision):
        loss = recipe.loss(batch)
    loss.backward()  # type: ignore[no-untyped-call]
    norm = float(nn.utils.clip_grad_norm_(recipe.decoder.parameters(), _MOST_GRADIENT))
    value = float(loss.detach())
    if not (math.isfinite(value) and math.isfinite(norm)):
        raise ParlayError(f"the loss became {value} at update {step}: train again with a lower --rate")
    return value


def measured(begun: Begun, options: CanvasTrainOptions) -> dict[str, float]:
    """Measure the recipe on held-out rows, without changing its random state."""
    rows = begun.held_out[: max(_MEASURED_ROWS, _MEASURED_BATCHES * options.rows)]
    groups = [rows[start : start + options.rows] for start in range(0, len(rows), options.rows)]
    batches = [batch_of(group, begun.tokenizer.eos_token_id, begun.recipe.multiple) for group in groups]
    begun.recipe.decoder.eval()
    drawn = begun.recipe.draw.get_state()
    with torch.no_grad(), mixed(options.precision):
        figures = begun.recipe.measure(batches)
    begun.recipe.draw.set_state(drawn)
    return figures


def _said(figures: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.3f}" for name, value in figures.items())


def _card(
    method: str, options: CanvasTrainOptions, begun: Begun, reached: Reached, figures: dict[str, dict[str, float]]
) -> str:
    """Return the folder's README."""
    after = _said(figures["after"]) if "after" in figures else "not measured, the run was stopped"
    source = f"- Begun from: {public_name(begun.origin)}" if begun.origin else "- Begun from: random weights"
    allowed = f"; licence: {licence(begun.origin) or 'not known'}" if begun.origin else ""
    return (
        f"# {method}\n\n"
        f"{source}{allowed}.\n"
        f"- Texts: {options.data.name}, {len(begun.rows)} rows of at most {options.length} tokens "
        f"(seed {options.seed}).\n"
        f"- Training: {reached.updates} updates, {reached.tokens:,} tokens, {reached.seconds:.0f} s; "
        f"loss {reached.loss:.3f}.\n"
        f"- Held out, before: {_said(figures['before'])}.\n"
        f"- Held out, after: {after}.\n"
    )
