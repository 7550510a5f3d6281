"""Loads an ensemble of models that write one text together, or a model and its datastore, as one runner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from parlay import models
from parlay.cache import Budget, MemoryBounds
from parlay.drafters.other_vocabularies.letters import TokenLetters
from parlay.drafters.other_vocabularies.vocabularies import spelled
from parlay.drafters.stores.state_store import MappedStates, need_faiss, read_header
from parlay.heads.deferral import facts_of_deferral, open_deferral
from parlay.llm.vocabulary import as_name
from parlay.models.ensembles.ensemble import EnsembleRunner
from parlay.models.ensembles.nest import NestRunner
from parlay.models.ensembles.translated import TranslatedRunner, Translation
from parlay.models.fetch.resolving import resolve, resolve_tokenizer
from parlay.models.loading import load_tokenizer
from parlay.models.native import NativeRunner
from parlay.options import Ensemble, LoadOptions, Nest, RankOptions, UsageError, user_path
from parlay.ranks.starting import open_target
from parlay.system.progress import Progress, advance, bar
from parlay.text.tokenize import encode
from parlay.types import FieldError, ParlayError, Runner, Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LEAST_COMMON = 0.5
"""Share of a model's most common tokens that each other model of its ensemble must have."""
_OFTEN = 20_000
Members = Ensemble | Nest | str | Path | Sequence[str] | None
"""The other models of an ensemble, or a datastore. Names alone mean the average of all models' distributions."""


def ensemble_of(members: Members, alone: Mapping[str, object]) -> Ensemble | Nest | None:
    """The ensemble that an argument describes. ``alone``: other arguments, by name, that apply to one model only.

    Raises UsageError if one of these is given too, and for members that can't be used.
    """
    members = as_name(members)
    ensemble = members if members is None or isinstance(members, Ensemble | Nest) else Ensemble(members)
    if ensemble is not None and any(alone.values()):
        named = next(name for name, value in alone.items() if value)
        raise UsageError(f"{_kind(ensemble)}: {named} is for one model alone: remove one of them")
    if isinstance(ensemble, Nest):
        need_faiss()
        read_header(user_path(ensemble.datastore))
    for name in ensemble.models if ensemble is not None else ():
        resolve(name)  # a missing model is an error now, not after the first one is loaded
    if isinstance(ensemble, Ensemble) and ensemble.head:
        facts_of_deferral(ensemble.head)
    return ensemble


def open_budget(memory: int | str | None, ensemble: Ensemble | Nest | None) -> Budget:
    """Make the budget of all caches.

    Members of an ensemble never take each other's running texts. Raises ValueError.
    """
    targets, bounds = 1 if ensemble is None else 1 + len(ensemble.models), MemoryBounds.parse(memory)
    if bounds.weights is not None and targets > 1:
        raise FieldError("memory", "weights=SIZE is for one model alone: remove it, or remove ensemble", "ensemble")
    return Budget(bounds.requests, targets, bounds.weights)


def open_runner(
    model: str | PreTrainedModel,
    load: LoadOptions,
    ranks: RankOptions,
    budget: Budget,
    *,
    progress: Progress,
    longest: int | None,
    ensemble: Ensemble | Nest | None,
) -> Runner:
    """Load a model, and the rest of its ensemble (each with its own cache in one budget) or its datastore.

    The other models are loaded with the options of the first, but without its adapter. Raises UsageError for members
    with another vocabulary, BadStates for a datastore of another model.
    """
    if ensemble is not None and ranks.ranks > 1:
        raise UsageError(f"{_kind(ensemble)}: all must run in one process; remove {ranks.asked}")
    with bar(None, "Loading", "matrix", progress, delay=0.5) as shown:
        first = open_target(model, load, ranks, budget, partial(advance, shown), longest=longest)
        return first if ensemble is None else _joined(first, model, load, budget, longest=longest, ensemble=ensemble)


def _joined(
    first: Runner,
    model: str | PreTrainedModel,
    load: LoadOptions,
    budget: Budget,
    *,
    longest: int | None,
    ensemble: Ensemble | Nest,
) -> Runner:
    """Load the other models, or the datastore, and join all of them in one runner."""
    if isinstance(ensemble, Nest):
        return NestRunner(first, MappedStates.open(user_path(ensemble.datastore), model, first.spec), ensemble)
    if ensemble.rule == "defer":
        check_vocabulary(model, ensemble.models[0])
    translations = [translation_of(model, name, first.spec.vocab_size) for name in ensemble.models]
    others = [models.load(name, replace(load, lora=None), budget=budget, longest=longest) for name in ensemble.models]
    one_budget = all(
        isinstance(runner, NativeRunner) for runner in (first, *others)
    )  # runners of other kinds have memory of their own
    runners = [first] + [
        other if words is None else TranslatedRunner(other, words)
        for other, words in zip(others, translations, strict=True)
    ]
    deferral = None
    if ensemble.head:
        sizes = first.spec.vocab_size, others[0].spec.vocab_size
        deferral = open_deferral(ensemble.head, model, ensemble.models[0], sizes, ensemble.threshold)
    return EnsembleRunner(runners, ensemble, one_budget=one_budget, deferral=deferral)


def _kind(ensemble: Ensemble | Nest) -> str:
    """The name of the ensemble's argument or flag."""
    return type(ensemble).__name__.lower()


def check_vocabulary(model: str | PreTrainedModel, other: str) -> None:
    """Raises UsageError if an id stands for different tokens in the two models. One of them may have more ids."""
    if not isinstance(model, str):
        return
    first, second = _tokens(_tokenizer(model)), _tokens(_tokenizer(other))
    if (token := _first_difference(first, second)) is not None:
        raise FieldError(
            "ensemble",
            f": id {token} is {second[token]!r:.40} in {other} and {first[token]!r:.40} in {model}: models "
            "between which a head chooses need one tokenizer",
        )


def translation_of(model: str | PreTrainedModel, other: str, vocab_size: int) -> Translation | None:
    """How the model's tokens are written in the other's vocabulary. None if ids are the same in both.

    Raises UsageError if the two have too little in common.
    """
    ours, theirs = _tokenizer(model) if isinstance(model, str) else None, _tokenizer(other)
    if ours is None or theirs is None or _first_difference(_tokens(ours), _tokens(theirs)) is None:
        return None
    known, speller = spelled(theirs), TokenLetters(ours)
    texts = {number: speller.spell(token) for number, token in _tokens(ours).items() if number < vocab_size}
    roles = ((ours.eos_token_id, theirs.eos_token_id), (ours.bos_token_id, theirs.bos_token_id))
    same = {token: known[text] for token, text in texts.items() if text in known}
    common = same | {own: there for own, there in roles if own is not None and there is not None}
    often = [token for token in texts if token < _OFTEN]  # more frequent merges have lower ids
    shared = sum(token in same for token in often) / max(1, len(often))
    if shared < _LEAST_COMMON:
        raise FieldError(
            "ensemble",
            f": {other} has {shared:.0%} of the commonest tokens of {model}, and {_LEAST_COMMON:.0%} are "
            "needed: name a model whose tokenizer is closer",
        )
    filler = (theirs.eos_token_id or 0,)  # for ids that have no text
    own = [
        (common[each],) if each in common else _spelling(texts.get(each, b""), known) or filler
        for each in range(vocab_size)
    ]
    head = () if encode(ours, "", special=True) else tuple(encode(theirs, "", special=True))
    return Translation(own, common, head, sum(len(own[token]) for token in often) / len(often))


def _spelling(text: bytes, known: Mapping[bytes, int]) -> tuple[int, ...]:
    """Ids that spell a text, greedily by longest tokens; characters that no token spells are left out."""
    ids: list[int] = []
    place = 0
    while place < len(text):
        end = next((end for end in range(len(text), place, -1) if text[place:end] in known), None)
        ids += [] if end is None else [known[text[place:end]]]
        place = place + 1 if end is None else end
    return tuple(ids)


def _first_difference(first: Mapping[int, str], second: Mapping[int, str]) -> int | None:
    """The lowest id that stands for different tokens in the two vocabularies."""
    return min((token for token in first.keys() & second.keys() if first[token] != second[token]), default=None)


def _tokenizer(model: str) -> Tokenizer | None:
    with suppress(OSError, ParlayError):
        return load_tokenizer(resolve_tokenizer(model))
    return None


def _tokens(tokenizer: Tokenizer | None) -> dict[int, str]:
    """The spelling of each token by id; empty without a tokenizer."""
    return {} if tokenizer is None else {number: token for token, number in tokenizer.get_vocab().items()}
