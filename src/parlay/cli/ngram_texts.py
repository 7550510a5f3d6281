"""Helpers for the actions of `parlay ngram`: tokenizers, texts as words or ids, and a line of numbers per text."""

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
    """Open a tokenizer, of a model or alone, and its vocabulary's description."""
    from parlay.drafters.stores.datastore_file import fingerprint, vocabulary
    from parlay.models.fetch.resolving import resolve_tokenizer
    from parlay.models.loading import load_tokenizer
    from parlay.ngrams.building import Vocabulary

    tokenizer = load_tokenizer(resolve_tokenizer(name))
    return tokenizer, Vocabulary(vocabulary(tokenizer), name, fingerprint(tokenizer))


def tokenizer_of(file: str, whose: Whose, named: str | None) -> Tokenizer:
    """The tokenizer for the ids in a file: the one that is ``named``, else the file's own. Raises UsageError if it does
    not fit or is missing."""
    name = named or whose.tokenizer
    if not name:
        raise UsageError(f"{file} does not name its tokenizer: add --tokenizer")
    tokenizer, vocabulary = opened(name)
    if whose.fingerprint not in ("", vocabulary.fingerprint):
        raise UsageError(
            f"{file} was built with another tokenizer ({whose.tokenizer}) than {name}: name that tokenizer"
        )
    if whose.vocab_size > vocabulary.size:
        raise UsageError(
            f"{file} has a vocabulary of {whose.vocab_size} tokens and {name} one of {vocabulary.size}: name the "
            "tokenizer that it was built with"
        )
    return tokenizer


def texts(source: CorpusSource, tokenizer: Tokenizer | None) -> Iterator[str | list[int]]:
    """Yield the lines that contain words, or the ids of documents."""
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
    """Raises UsageError for the first of these flags that has a value; ``why`` says why it would have no effect."""
    for flag, value in given.items():
        if value is not None and value is not False:
            raise UsageError(f"{flag} has no effect here, because {why}: remove it")


def tell(options: argparse.Namespace, file: str, numbers: Mapping[str, float]) -> None:
    """Print a file's numbers in one line; in JSON, NaN and infinity become null, as strict parsers need."""
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
