"""`parlay ngram info`: checks and describes an n-gram model, or says what a text repeats."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from parlay.cli.ngram_texts import opened, refuse
from parlay.models.fetch.pulled import named_or_default
from parlay.options import UsageError

if TYPE_CHECKING:
    from parlay.text.corpus import CorpusSource
    from parlay.types import Tokenizer

_LONGEST = 8
_MOST = 2_000_000
"""Most n-grams of a text that are counted, over all lengths: about 250 bytes each."""


def run(options: argparse.Namespace) -> int:
    """Check and describe a model, or print what a text repeats."""
    from parlay.ngrams.model_file import is_ngram_file

    path = Path(options.file)
    return _info_of_model(options, path) if is_ngram_file(path) else _info_of_text(options)


def _info_of_model(options: argparse.Namespace, path: Path) -> int:
    from parlay.ngrams.model import NgramModel

    whose = {"--model": options.model, "--tokenizer": options.tokenizer, "--words": options.words}
    refuse(f"{path} is an n-gram model", {**whose, "--longest": options.longest})
    model = NgramModel.open(path)  # checks every byte
    facts: dict[str, object] = {"file": str(path), **asdict(model.header)}
    facts |= {f"{n}-grams": model.trie.count(n) for n in range(1, model.order + 1)}
    facts |= {"counts": bool(model.counts), "bytes": path.stat().st_size, "checksum": "ok"}
    if options.json:
        print(json.dumps(facts))
        return 0
    for name, value in facts.items():
        print(f"{name:11} {f'{value:,}' if type(value) is int else value}")
    return 0


def _info_of_text(options: argparse.Namespace) -> int:
    """For each length n: how often the last n tokens had occurred before, and how often the same token followed."""
    from parlay.ngrams.in_context import LIMIT, rewards
    from parlay.text import corpus

    longest = _LONGEST if options.longest is None else options.longest
    if not 1 <= longest <= LIMIT:
        raise UsageError(f"--longest must be between 1 and {LIMIT}, got {longest}")
    name = None if options.words else named_or_default(options.tokenizer, options.model)
    sources = corpus.sources([options.file])
    tokenizer, vocabulary = (None, None) if name is None else opened(name)
    most = _MOST // longest
    tokens = list(islice((token for source in sources for token in _tokens(source, tokenizer)), most + 1))
    if not tokens:
        raise UsageError(f"{options.file} contains no text: name another file")
    if len(tokens) > most:
        tokens.pop()
        print(f"{options.file} is long: only its first {most:,} tokens are counted", file=sys.stderr)
    found = rewards(tokens, vocabulary.size if vocabulary else max(tokens) + 1, longest)
    best = max((each.size for each in found if each.gain >= 0.001), default=0)
    if options.json:
        rows = list(map(asdict, found))
        print(json.dumps({"file": options.file, "tokens": len(tokens), "best": best, "sizes": rows}))
        return 0
    print(
        f"{options.file}: {len(tokens):,} tokens. After the last N tokens, by what followed them earlier in the text:"
    )
    print(f"{'N':>3}  {'known':>6}  {'right':>6}  {'right up to N':>13}  {'gain':>6}")
    for each in found:
        print(f"{each.size:3}  {each.known:6.1%}  {each.right:6.1%}  {each.guessed:13.1%}  {each.gain:+6.1%}")
    if best:
        print(f"It rewards n-grams of up to {best + 1} tokens, the guessed one included.")
    else:
        print("It does not repeat itself: no n-gram of it tells what follows.")
    return 0


def _tokens(source: CorpusSource, tokenizer: Tokenizer | None) -> Iterator[int]:
    """Yield the token ids of a source's texts, or numbers for its words."""
    from parlay.text import corpus
    from parlay.text.tokenize import encode_all

    ids: dict[str, int] = {}
    for document in corpus.streams(source):
        for piece in document:
            if tokenizer is None:
                yield from (ids.setdefault(word, len(ids)) for word in piece.split())
            else:
                for part in encode_all(tokenizer, list(corpus.cut(piece)), special=False):
                    yield from part
