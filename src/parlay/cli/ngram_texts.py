"""Helps the actions of `parlay ngram`: tokenizers, texts as words or ids, and a line of numbers for each text."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from parlay.options import UsageError

if TYPE_CHECKING:
    from parlay.drafters.stores.datastore_file import Whose
    from parlay.ngrams.building import Vocabulary
    from parlay.text.corpus import CorpusSource
    from parlay.types import Tokenizer


def opened(name: str) -> tuple[Tokenizer, Vocabulary]:
    """The tokenizer of this name, of a model or alone, and what is written down of it."""
    from parlay.drafters.stores.datastore_file import fingerprint, vocabulary
    from parlay.models.fetch.resolving import resolve_tokenizer
    from parlay.models.loading import load_tokenizer
    from parlay.ngrams.building import Vocabulary

    tokenizer = load_tokenizer(resolve_tokenizer(name))
    return tokenizer, Vocabulary(vocabulary(tokenizer), name, fingerprint(tokenizer))


def tokenizer_of(file: str, whose: Whose, named: str | None) -> Tokenizer:
    """The tokenizer whose ids a file holds: the one that is ``named``, or the file's own. Raises UsageError."""
    name = named or whose.tokenizer
    if not name:
        raise UsageError(f"{file} does not say whose token ids it counts: name the tokenizer by --tokenizer")
    tokenizer, vocabulary = opened(name)
    if whose.fingerprint not in ("", vocabulary.fingerprint):
        raise UsageError(f"{file} was built with another tokenizer ({whose.tokenizer}) than {name}: give that one")
    if whose.vocab_size > vocabulary.size:
        raise UsageError(
            f"{file} has a vocabulary of {whose.vocab_size} tokens and {name} one of {vocabulary.size}: give the "
            "tokenizer that it was built with"
        )
    return tokenizer


def texts(source: CorpusSource, tokenizer: Tokenizer | None) -> Iterator[str | list[int]]:
    """The lines with words in them, or the ids of the documents."""
    from parlay.text import corpus
    from parlay.text.tokenize import encode_all

    for document in corpus.streams(source):
        if tokenizer is None:
            yield from (line for piece in document for line in piece.split("\n") if line.split())
            continue
        parts = [part for piece in document for part in corpus.cut(piece)]
        ids = [token for part in encode_all(tokenizer, parts, special=False) for token in part]
        if ids:
            yield ids


def refuse(why: str, given: Mapping[str, object]) -> None:
    """Raises UsageError for the first of these flags that has a value: ``why`` says that it would do nothing here."""
    for flag, value in given.items():
        if value is not None and value is not False:
            raise UsageError(f"{flag} does nothing here: {why}; leave it out")


def tell(options: argparse.Namespace, file: str, numbers: Mapping[str, float]) -> None:
    """Print the numbers of a file in one line; in JSON, null for what is no number, which strict readers need."""
    if options.json:
        known = {name.replace(" ", "_"): value if math.isfinite(value) else None for name, value in numbers.items()}
        print(json.dumps({"file": file, **known}))
        return
    parts = [
        f"{name} {value:,.4f}" if isinstance(value, float) else f"{name} {value:,}"
        for name, value in numbers.items()
        if not math.isnan(value)
    ]
    print(f"{file}: {', '.join(parts)}", flush=True)
