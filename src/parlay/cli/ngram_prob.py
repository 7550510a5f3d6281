"""`parlay ngram prob`: scores texts with an n-gram model, alone or mixed with a target, or with a datastore."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from parlay.cli.ngram_texts import refuse, tell, texts, tokenizer_of
from parlay.options import UsageError

if TYPE_CHECKING:
    from parlay.llm.llm import LLM
    from parlay.ngrams.infinity import Support
    from parlay.ngrams.mixture import Numbers
    from parlay.ngrams.model import NgramModel, Scores
    from parlay.text.corpus import CorpusSource
    from parlay.types import Tokenizer

_WINDOW = 512
"""Tokens that the target reads in one forward."""


def run(options: argparse.Namespace) -> int:
    """Score texts with an n-gram model, with one and a target, or with a datastore."""
    from parlay.ngrams.model import NgramModel
    from parlay.ngrams.model_file import is_ngram_file
    from parlay.text import corpus

    sources = corpus.sources(options.texts)
    if not is_ngram_file(options.file) and _is_datastore(options.file):
        return _prob_by_corpus(options, sources)
    model = NgramModel.open(options.file)
    if options.target is not None:
        return _prob_mixed(options, model, sources)
    refuse("no --target is mixed with", {"--weight": options.weight, "--window": options.window})
    if model.header.words:
        refuse(f"{options.file} is a model of words", {"--tokenizer": options.tokenizer})
    tokenizer = None if model.header.words else tokenizer_of(str(options.file), model.header, options.tokenizer)
    for source in sources:
        parts: list[Scores] = []
        for text in texts(source, tokenizer):
            parts.append(model.scores(text))
            if options.per_token:
                _print_tokens(options, model, tokenizer, text, parts[-1])
        _print_scores(options, source, model, parts)
    return 0


def _is_datastore(path: Path) -> bool:
    from parlay.drafters.stores.datastore_file import MAGIC

    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def _print_scores(
    options: argparse.Namespace, source: CorpusSource, model: NgramModel, parts: Sequence[Scores]
) -> None:
    """Print totals; scores of stupid back-off sum to more than 1 over the vocabulary, so they give no perplexity."""
    from parlay.ngrams.model import Scores
    from parlay.ngrams.model_file import STUPID_BACKOFF

    if not parts:
        raise UsageError(f"{source.path} contains no text to score: name another file")
    scores = Scores.joined(parts)
    name = "perplexity of scores" if model.header.smoothing == STUPID_BACKOFF else "perplexity"
    tell(
        options,
        str(source.path),
        {
            name: scores.perplexity,
            "tokens": len(scores.log10),
            "unknown": int(scores.unknown.sum()),
            f"{name} without unknown": scores.perplexity_known,
            "log10": scores.total,
        },
    )


def _print_tokens(
    options: argparse.Namespace, model: NgramModel, tokenizer: Tokenizer | None, text: str | list[int], scores: Scores
) -> None:
    """Print a line for each token: the token, the length of the n-gram used, and log10 of its probability."""
    shown = (
        text.split() if isinstance(text, str) else [tokenizer.decode([token]) for token in text] if tokenizer else []
    )
    for token, length, log in zip([*shown, "</s>"], scores.lengths.tolist(), scores.log10.tolist(), strict=True):
        if options.json:
            print(json.dumps({"token": token, "length": length, "log10": log}))
        else:
            print(f"{log:9.4f}  {length}  {token if isinstance(text, str) else json.dumps(token, ensure_ascii=False)}")


def _prob_mixed(options: argparse.Namespace, model: NgramModel, sources: Sequence[CorpusSource]) -> int:
    """Compare the target alone, the n-gram model alone, and both mixed as in `Mixed`, on the same tokens."""
    from parlay.drafters.counting.ngram_lm import check_fits
    from parlay.drafters.stores.datastore_file import fingerprint
    from parlay.llm.llm import LLM
    from parlay.ngrams.mixture import best_weight, mixed_perplexity

    window = _WINDOW if options.window is None else options.window
    given = {"--tokenizer": options.tokenizer, "--per-token": options.per_token}
    refuse("--target reads the text, and only sums are told", given)
    if options.weight is not None and not 0 <= options.weight < 1:
        raise UsageError(f"--weight, the n-gram model's share, must be at least 0 and below 1, got {options.weight:g}")
    if window < 2:
        raise UsageError(f"--window must be at least 2, got {window}")
    with LLM(options.target, router_memory="off") as llm:
        tokenizer = llm.vocabulary.required_tokenizer
        vocab_size = llm.runner.spec.vocab_size
        check_fits(f"--target {options.target}", str(options.file), model, vocab_size, fingerprint(tokenizer))
        for source in sources:
            ours, theirs = _chances(llm, model, tokenizer, source, window)
            weight = best_weight(ours, theirs) if options.weight is None else options.weight
            values = {name: mixed_perplexity(ours, theirs, share) for name, share in _SHARES.items()}
            mixed = mixed_perplexity(ours, theirs, weight)
            tell(options, str(source.path), {"perplexity": mixed, "weight": weight, **values, "tokens": len(ours)})
    return 0


def _chances(
    llm: LLM, model: NgramModel, tokenizer: Tokenizer, source: CorpusSource, window: int
) -> tuple[Numbers, Numbers]:
    """Probabilities of all tokens but the first, by the n-gram model and by the target."""
    import numpy as np

    from parlay.llm.likelihood import in_windows
    from parlay.ngrams.mixture import chances

    ours, theirs = [], []
    for ids in texts(source, tokenizer):
        assert not isinstance(ids, str)
        if len(ids) > 1:
            ours.append(chances(model, ids))
            theirs.append(np.exp(in_windows(llm, tuple(ids), window)))
    if not ours:
        raise UsageError(f"{source.path} contains no text of two or more tokens to score: name another file")
    return np.concatenate(ours), np.concatenate(theirs)


_SHARES = {"target alone": 0.0, "n-grams alone": 1.0}


def _prob_by_corpus(options: argparse.Namespace, sources: Sequence[CorpusSource]) -> int:
    """Score texts with the infinity-gram model of a datastore."""
    from parlay.drafters.stores.datastore_file import Datastore
    from parlay.ngrams.infinity import InfinityGram

    why = f"{options.file} is a datastore, and only n-gram models are mixed"
    refuse(why, {"--target": options.target, "--weight": options.weight, "--window": options.window})
    store = Datastore.open(options.file)
    tokenizer = tokenizer_of(str(options.file), store.header, options.tokenizer)
    corpus = InfinityGram(store)
    for source in sources:
        found: list[Support] = []
        for ids in texts(source, tokenizer):
            assert not isinstance(ids, str)
            found += corpus.scores(ids)
            if options.per_token:
                for token, each in zip(ids, found[-len(ids) :], strict=True):
                    _print_support(options, tokenizer.decode([token]), each)
        if not found:
            raise UsageError(f"{source.path} contains no text to score: name another file")
        tell(
            options,
            str(source.path),
            {
                "tokens": len(found),
                "mean length": sum(each.length for each in found) / len(found),
                "seen so": sum(each.times > 0 for each in found) / len(found),
                "mean probability": sum(each.probability for each in found) / len(found),
            },
        )
    return 0


def _print_support(options: argparse.Namespace, token: str, support: Support) -> None:
    """Print a line for a token: how often it followed the longest matching suffix, how often that suffix occurs, and
    its length."""
    if options.json:
        print(json.dumps({"token": token, **asdict(support)}))
    else:
        shown = json.dumps(token, ensure_ascii=False)
        print(f"{support.times:9}/{support.total:<9} {support.length:4}  {shown}")
