"""A model's tokenizer and what was derived from it, which may outlive the loaded model."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch

from parlay import models
from parlay.cache import Budget
from parlay.drafters.stores.datastore_file import fingerprint
from parlay.models.choosing import CacheRefused, CompileRefused
from parlay.models.fetch.pulled import default_model
from parlay.models.fetch.resolving import BUILT_IN_DRAFTS, resolve, resolve_tokenizer
from parlay.models.loading import load_tokenizer, read_config, tokenizer_digest
from parlay.models.tokenizers.folder import has_tokenizer
from parlay.models.tokenizers.plain import PlainTokenizer
from parlay.models.tokenizers.transformers_form import in_transformers
from parlay.models.weights.fused import QuantizeRefused
from parlay.options import LoadOptions
from parlay.structured.grammars import Grammars
from parlay.text.detokenizer import TextStream
from parlay.text.end_tokens import end_tokens, read_end_tokens
from parlay.text.template_sandbox import prepare as prepare_template
from parlay.text.tokenize import Encoder
from parlay.types import FieldError, ParlayError, Runner, RunnerSpec, SamplingParams, Tokenizer, check_kind

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

T = TypeVar("T")

logger = logging.getLogger(__name__)

_LOOKED_AT = 200
"""How many tokens are compared to tell vocabularies apart; one in twenty may differ."""
_SAMPLE = "The 12 naïve foxes (vulpes) ran;\n\tdef f(x): return x != 'über' — 数字 🙂"


class Vocabulary:
    """Everything with which a model reads and writes texts. Any thread may use it.

    ``eos_ids``: the end tokens that the model names. ``end_ids``: the tokens that end texts; these are ``eos_ids`` and
    the tokenizer's own (`parlay.text.end_tokens`), or the tokens that ``ends`` spells. Reading a vocabulary holds
    Python's lock for up to a second, in which no other thread runs. So servers keep it.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, vocab_size: int, eos_ids: Sequence[int], ends: str | None = None
    ) -> None:
        self.tokenizer, self.size = tokenizer, vocab_size
        self.end_ids = (
            end_tokens(tokenizer, eos_ids, vocab_size) if ends is None else read_end_tokens(ends, tokenizer, vocab_size)
        )
        self.encoder = Encoder(tokenizer) if tokenizer is not None else None
        self.grammars = Grammars(tokenizer, vocab_size, self.end_ids)
        self._made_for = (vocab_size, tuple(eos_ids), ends)

    def fits(self, vocab_size: int, eos_ids: Sequence[int], ends: str | None = None) -> bool:
        """Whether it was made for a model with this vocabulary size and these end tokens."""
        return self._made_for == (vocab_size, tuple(eos_ids), ends)

    @property
    def required_tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises ParlayError if there is none."""
        if self.tokenizer is None:
            raise ParlayError("this model came without a tokenizer: name one with LLM(tokenizer=...)")
        return self.tokenizer

    @cached_property
    def in_transformers(self) -> PreTrainedTokenizerBase | Tokenizer:
        """`required_tokenizer` as transformers' class, made at the first use."""
        return in_transformers(self.required_tokenizer)

    @cached_property
    def special_texts(self) -> frozenset[str]:
        """The texts of special tokens, which a text leaves out if special tokens are skipped."""
        if self.tokenizer is None:
            return frozenset()
        marked = (str(token.content) for token in self.tokenizer.added_tokens_decoder.values() if token.special)
        return frozenset((*self.tokenizer.all_special_tokens, *marked))

    @cached_property
    def end_marks(self) -> frozenset[int]:
        """The ``end_ids`` that are added tokens, not plain text."""
        added = {} if self.tokenizer is None else self.tokenizer.added_tokens_decoder
        return frozenset(token for token in self.end_ids if token in added)

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the tokenizer, as datastores have it; empty without one. Computed once, in half a second."""
        return "" if self.tokenizer is None else fingerprint(self.tokenizer)

    def text_after(
        self, before: Sequence[int], params: SamplingParams, *, marks: bool, given: int = 0
    ) -> TextStream | None:
        """The text stream of a sample that continues after the tokens ``before``; None without a tokenizer.

        With ``marks``, it includes all special tokens except those that end it. ``given``: see `TextStream`.
        """
        if self.tokenizer is None:
            return None
        return TextStream(self.tokenizer, params, before, self.end_marks, marks=marks, given=given)

    def prepare(self) -> None:
        """Build all lazily built tables now, so that no request has to wait for them."""
        if self.encoder is not None:
            self.encoder.prepare()
        template = self.tokenizer.chat_template if self.tokenizer is not None else None
        if isinstance(template, str):
            prepare_template(template)
        self.grammars.prepare()

    def rest(self) -> None:
        """Free the objects that were made for requests. The files' contents stay, for later use without loading."""
        self.grammars.rest()


class Vocabularies:
    """Keeps the vocabularies of the ``most`` models loaded last, by a key that identifies their files."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._vocabularies: OrderedDict[Hashable, Vocabulary] = OrderedDict()

    def get(self, files: Hashable) -> Vocabulary | None:
        return self._vocabularies.get(files)

    def put(self, files: Hashable, vocabulary: Vocabulary) -> None:
        """Keep a vocabulary. If there are too many, the oldest is dropped."""
        self._vocabularies[files] = vocabulary
        self._vocabularies.move_to_end(files)
        if len(self._vocabularies) > self._most:
            self._vocabularies.popitem(last=False)


def as_name(given: T | Path) -> T | str:
    """A path as text, which is how models are named; any other value as it is."""
    return str(given) if isinstance(given, Path) else given


def vocabulary_of(
    model: str | PreTrainedModel, given: str | Path | Tokenizer | Vocabulary | None, spec: RunnerSpec, ends: str | None
) -> Vocabulary:
    """The given vocabulary if it fits the model, else a new one, with the given tokenizer or the model's own."""
    if isinstance(given, Vocabulary) and given.fits(spec.vocab_size, spec.eos_ids, ends):
        return given
    own = as_name(given)
    tokenizer = own.tokenizer if isinstance(own, Vocabulary) else _tokenizer(model, own, spec.vocab_size)
    return Vocabulary(tokenizer, spec.vocab_size, spec.eos_ids, ends)


def _tokenizer(model: str | PreTrainedModel, tokenizer: str | Tokenizer | None, vocab_size: int) -> Tokenizer | None:
    """The given tokenizer, or the model's own. Raises UsageError for a named one whose ids differ from the model's."""
    if tokenizer is not None and not isinstance(tokenizer, str):
        return tokenizer
    found = resolve(model) if isinstance(model, str) else None
    own = None if found is None or (found.is_dir() and not has_tokenizer(found)) else found
    if tokenizer is None:
        return None if own is None else load_tokenizer(own)
    named = load_tokenizer(resolve_tokenizer(tokenizer))
    why = _why_other(named, None if own is None else load_tokenizer(own), vocab_size)
    if why:
        raise FieldError("tokenizer", f"{tokenizer} is not the model's: {why}; name one of the same vocabulary")
    return named


def _why_other(named: Tokenizer, own: Tokenizer | None, vocab_size: int) -> str:
    """Why a tokenizer does not belong to the model's vocabulary; empty if it may.

    It compares sizes, the tokens at which texts begin and end, and a sample of the other tokens. Added tokens may
    differ.
    """
    if len(named) > vocab_size:
        return f"it has {len(named):,} tokens, and the model {vocab_size:,}"
    if own is None:
        return ""
    most = min(len(named), len(own))
    ids = [most * place // _LOOKED_AT for place in range(_LOOKED_AT)]
    differ = [token for token in ids if named.decode([token]).strip() != own.decode([token]).strip()]
    marks = (own.eos_token_id, own.bos_token_id)
    ends = [token for token in marks if token is not None and named.decode([token]) != own.decode([token])]
    if len(differ) <= _LOOKED_AT // 20 and not ends:
        return ""
    token = (ends or differ)[0]
    return f"token {token} is {named.decode([token])!r:.40} in it, and {own.decode([token])!r:.40} in the model's own"


def model_or_default(
    model: str | Path | PreTrainedModel | None, draft_model: str | Path | None
) -> tuple[str | PreTrainedModel, str | None]:
    """The model, or the default model for None, and the draft model; both by name. Raises ParlayError now if the draft
    model does not exist."""
    if model is not None:
        check_kind("model", model, (str, Path, torch.nn.Module), "a name, a path, or a loaded transformers model")
    if draft_model is not None:
        check_kind("draft_model", draft_model, (str, Path), "a name or a path")
    draft = as_name(draft_model)
    if draft is not None:
        resolve(draft)
    return default_model() if model is None else as_name(model), draft


def open_draft(
    target: RunnerSpec, tokenizer: Tokenizer | None, load: LoadOptions, budget: Budget, draft: str
) -> Runner:
    """Load a draft model. If it can hardly gain anything, log why.

    Reasons are another tokenizer, so that few drafts can be right, and more weights in layers than the target has. If
    its vocabulary has another size, or it only fills canvases, the strategy decides whether it is usable. If its cache
    can't have the target's type, or torch.compile does not apply, it is loaded without that. ``load`` is the target's,
    but a draft model has its own quantisation (``draft_quantize``), no adapter and the usual n-gram states; llama.cpp
    runs it only if it is a GGUF file.
    """
    if load.runner != "auto" and not resolve(draft).is_file():
        load = replace(load, runner="auto")
    quantize = load.draft_quantize if load.runner == "auto" else None
    load = replace(load, quantize=quantize, lora=None, ngram_states=None)
    runner = _load_draft(draft, load, budget)
    spec = runner.spec
    if tokenizer is not None and draft not in BUILT_IN_DRAFTS.values() and spec.vocab_size == target.vocab_size:
        _note_other_tokenizer(draft, tokenizer)
    if spec.num_layers * spec.hidden_size**2 > target.num_layers * target.hidden_size**2:
        logger.warning(
            "the draft model %s is larger than its target (%d layers of %d numbers, and %d of %d), so drafting takes "
            "longer than it saves: choose a smaller one, or swap the two",
            *(draft, spec.num_layers, spec.hidden_size, target.num_layers, target.hidden_size),
        )
    return runner


def _load_draft(draft: str, load: LoadOptions, budget: Budget) -> Runner:
    """Load it with as many of the options as it supports, and log the others."""
    try:
        return models.load(draft, load, budget=budget)
    except (QuantizeRefused, CacheRefused, CompileRefused) as refused:
        logger.info("%s: %s", draft, refused)
        rounded = isinstance(refused, QuantizeRefused)
        left = replace(load, quantize=None) if rounded else replace(load, kv_cache_dtype="auto", compile=False)
    return _load_draft(draft, left, budget)


def _note_other_tokenizer(draft: str, own: Tokenizer) -> None:
    """Log if the draft model's tokenizer differs.

    It is loaded only if its bytes differ, because loading holds Python's lock and delays a server's streams.
    """
    with suppress(ParlayError, OSError):  # a draft model needs no tokenizer of its own
        found = resolve_tokenizer(draft)
        if isinstance(own, PlainTokenizer) and own.digest and own.digest == tokenizer_digest(found):
            return
        other = load_tokenizer(found)
        if list(other.encode(_SAMPLE)) != list(own.encode(_SAMPLE)):
            logger.warning("the tokenizer of %s differs from the target's, so few of its drafts can be right", draft)


def ends_of(model: str) -> list[str]:
    """The texts of the tokens that end a model's texts, read from its files.

    Raises ParlayError or OSError for files that can't be read.
    """
    found = resolve(model)
    config, tokenizer = read_config(found), load_tokenizer(found)
    ids = end_tokens(tokenizer, config.eos_ids, config.vocab_size)
    return [tokenizer.convert_ids_to_tokens(token) or str(token) for token in ids]
