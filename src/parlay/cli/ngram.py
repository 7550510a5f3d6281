"""`parlay ngram`: builds n-gram language models, scores texts with them, and tells what a text repeats."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from parlay.cli.flags import add_option_flags, options_from, whole
from parlay.models.fetch.pulled import DEFAULT_MODEL, default_model
from parlay.ngrams.building import NgramOptions, Vocabulary
from parlay.options import UsageError

if TYPE_CHECKING:
    from parlay.ngrams.infinity import Support
    from parlay.ngrams.model import NgramModel, Scores
    from parlay.text.corpus import CorpusSource
    from parlay.types import Tokenizer

_CORPUS = "text file, .jsonl file (texts under text, output or content), folder of such files, or - for standard input"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(title="actions", metavar="ACTION", dest="action", required=True)
    say = "build a model from texts, or from an ARPA file"
    build = actions.add_parser("build", help=say, description=f"{say[0].upper()}{say[1:]}.")
    build.add_argument("corpus", nargs="+", metavar="CORPUS", help=f"{_CORPUS}; or one .arpa or .arpa.gz file")
    build.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE", help="file to write; as ARPA if it ends in .arpa"
    )
    _add_tokenizer_flags(build)
    add_option_flags(build, NgramOptions)

    say = "score texts: log-probabilities and perplexity"
    prob = actions.add_parser("prob", help=say, description=f"{say[0].upper()}{say[1:]}.")
    prob.add_argument(
        "file", type=Path, metavar="FILE", help="n-gram model, or datastore: the infinity-gram of its texts"
    )
    prob.add_argument("texts", nargs="+", metavar="TEXT", help=_CORPUS)
    prob.add_argument("--tokenizer", help="tokenizer of the model's ids (default: the one it was built with)")
    prob.add_argument("--per-token", action="store_true", help="print a line for each token")
    prob.add_argument("--target", metavar="MODEL", help="mix the model into this one's distribution, and compare")
    prob.add_argument("--weight", type=float, help="share of the n-gram model in that (default: the best one)")
    prob.add_argument("--window", type=whole, default=512, metavar="N", help="tokens the target reads (default: 512)")
    prob.add_argument("--json", action="store_true", help="print JSON, one object for each line of output")

    say = "write a text by the model alone"
    generate = actions.add_parser("generate", help=say, description=f"{say[0].upper()}{say[1:]}.")
    generate.add_argument("file", type=Path, metavar="FILE", help="n-gram model")
    generate.add_argument("prompt", nargs="?", default="", metavar="PROMPT")
    generate.add_argument("--tokenizer", help="tokenizer of the model's ids (default: the one it was built with)")
    generate.add_argument("--max-tokens", type=whole, default=50, metavar="N", help="most tokens (default: 50)")
    generate.add_argument("--temperature", type=float, default=1.0, help="0: always the likeliest (default: 1)")
    generate.add_argument("--seed", type=whole, metavar="N", help="the same text for the same number")

    say = "check a model and say what it holds; or tell which n-grams of a text say what follows them"
    info = actions.add_parser("info", help=say, description=f"{say[0].upper()}{say[1:]}.")
    info.add_argument("file", metavar="FILE", help="n-gram model, text file, or - for standard input")
    _add_tokenizer_flags(info)
    info.add_argument("--longest", type=whole, default=8, metavar="N", help="of a text: longest n-grams (default: 8)")
    info.add_argument("--json", action="store_true", help="print one JSON object")


def _add_tokenizer_flags(parser: argparse.ArgumentParser) -> None:
    whose = parser.add_mutually_exclusive_group()
    whose.add_argument(
        "--model", help=f"target model, whose tokens are counted (default: {DEFAULT_MODEL}, fetched at the first use)"
    )
    whose.add_argument("--tokenizer", help="folder or Hub id of the target's tokenizer, if the model does not hold it")
    whose.add_argument("--words", action="store_true", help="count words, which whitespace parts; a line is a text")


def run(options: argparse.Namespace) -> int:
    return {"build": _build, "prob": _prob, "generate": _generate, "info": _info}[options.action](options)


# ---------------------------------------------------------------------------------------------------------------- build


def _build(options: argparse.Namespace) -> int:
    from parlay.cli.datastore import check_output, progress_bar, say_left_out
    from parlay.ngrams import arpa
    from parlay.ngrams.building import build, convert
    from parlay.text import corpus

    declared = options_from(NgramOptions, options)
    output: Path = options.output
    check_output(output)
    given = [Path(name) for name in options.corpus]
    if any(map(arpa.is_arpa, given)):
        if len(given) > 1:
            raise UsageError(f"{len(given)} files, one of them ARPA: build a model from one ARPA file, or from texts")
        named = options.model or options.tokenizer
        whose = _opened(named)[1] if named else None
        built = convert(given[0], output, declared.bits, vocabulary=whose, memory=declared.memory << 20)
    else:
        sources = corpus.sources(options.corpus)
        name = None if options.words else options.tokenizer or options.model or default_model()
        tokenizer, vocabulary = _opened(name) if name else (None, None)
        skipped: list[CorpusSource] = []
        documents = (document for source in sources for document in corpus.streams(source, skipped))
        try:
            with progress_bar("reading", " tokens") as reading, progress_bar("counting", " tokens") as counting:
                built = build(
                    output,
                    documents,
                    declared,
                    tokenizer=tokenizer,
                    vocabulary=vocabulary,
                    progress=lambda what, done: (reading if what == "reading" else counting).update(done),
                )
        finally:  # an error that no text was found should say why
            say_left_out(skipped, len(sources))
    for n in built.guessed:
        print(f"{n}-grams are too few to estimate discounts of: they are 0.5, 1 and 1.5", file=sys.stderr)
    counted = f"{built.header.tokens:,} tokens of {built.header.texts:,} texts, " if built.header.tokens else ""
    print(f"{output}: {counted}{sum(built.ngrams):,} n-grams, {output.stat().st_size:,} bytes")
    if not built.header.words and not arpa.is_arpa(output):
        print(f"Use it: parlay generate --strategy ngram-lm:file={output}")
    return 0


def _opened(name: str) -> tuple[Tokenizer, Vocabulary]:
    from parlay.drafters.stores.datastore_file import fingerprint, vocabulary
    from parlay.models.fetch.resolving import resolve_tokenizer
    from parlay.models.loading import load_tokenizer

    tokenizer = load_tokenizer(resolve_tokenizer(name))
    return tokenizer, Vocabulary(vocabulary(tokenizer), name, fingerprint(tokenizer))


# ----------------------------------------------------------------------------------------------------------------- prob


def _prob(options: argparse.Namespace) -> int:
    from parlay.ngrams.model import NgramModel
    from parlay.ngrams.model_file import is_ngram_file
    from parlay.text import corpus

    sources = corpus.sources(options.texts)
    if not is_ngram_file(options.file) and _is_datastore(options.file):
        return _prob_by_corpus(options, sources)
    model = NgramModel.open(options.file)
    if options.target is not None:
        return _prob_mixed(options, model, sources)
    if options.weight is not None:
        raise UsageError(f"--weight {options.weight}: give --target too, the model to mix with")
    tokenizer = None if model.header.words else _tokenizer_of(model, options.tokenizer)
    for source in sources:
        parts: list[Scores] = []
        for text in _texts(source, tokenizer):
            parts.append(model.scores(text))
            if options.per_token:
                _print_tokens(options, model, tokenizer, text, parts[-1])
        _print_scores(options, source, parts)
    return 0


def _is_datastore(path: Path) -> bool:
    from parlay.drafters.stores.datastore_file import MAGIC

    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def _tokenizer_of(model: NgramModel, named: str | None) -> Tokenizer:
    """The tokenizer whose ids the model counts. Raises UsageError for another one."""
    header = model.header
    name = named or header.tokenizer
    if not name:
        raise UsageError("the model does not say whose token ids it counts: name the tokenizer by --tokenizer")
    tokenizer, vocabulary = _opened(name)
    if header.fingerprint not in ("", vocabulary.fingerprint):
        raise UsageError(f"the model was built with another tokenizer ({header.tokenizer}) than {name}: give that one")
    return tokenizer


def _texts(source: CorpusSource, tokenizer: Tokenizer | None) -> Iterator[str | list[int]]:
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


def _print_scores(options: argparse.Namespace, source: CorpusSource, parts: list[Scores]) -> None:
    from parlay.ngrams.model import Scores

    if not parts:
        raise UsageError(f"{source.path} holds no text: nothing can be scored")
    scores = Scores.joined(parts)
    _tell(
        options,
        str(source.path),
        {
            "perplexity": scores.perplexity,
            "tokens": len(scores.log10),
            "unknown": int(scores.unknown.sum()),
            "perplexity without unknown": scores.perplexity_known,
            "log10": scores.total,
        },
    )


def _print_tokens(
    options: argparse.Namespace, model: NgramModel, tokenizer: Tokenizer | None, text: str | list[int], scores: Scores
) -> None:
    """A line for each token: itself, the length of the n-gram that says so, and log10 of its probability."""
    shown = (
        text.split() if isinstance(text, str) else [tokenizer.decode([token]) for token in text] if tokenizer else []
    )
    for token, length, log in zip([*shown, "</s>"], scores.lengths.tolist(), scores.log10.tolist(), strict=True):
        if options.json:
            print(json.dumps({"token": token, "length": length, "log10": log}))
        else:
            print(f"{log:9.4f}  {length}  {token if isinstance(text, str) else json.dumps(token, ensure_ascii=False)}")


def _prob_mixed(options: argparse.Namespace, model: NgramModel, sources: list[CorpusSource]) -> int:
    """Compare the target alone, the n-gram model alone, and both mixed, on the same tokens."""
    import numpy as np

    from parlay.drafters.stores.datastore_file import fingerprint
    from parlay.llm.likelihood import in_windows
    from parlay.llm.llm import LLM
    from parlay.ngrams.mixture import best_weight, mixed_perplexity

    if model.header.words:
        raise UsageError(f"--target {options.target}: {options.file} is a model of words, which no target has")
    if options.weight is not None and not 0 <= options.weight < 1:
        raise UsageError(f"--weight {options.weight}: give at least 0 and less than 1, the n-gram model's share")
    if options.window < 2:
        raise UsageError(f"--window {options.window}: give at least 2")
    with LLM(options.target, router_memory="off") as llm:
        tokenizer = llm.get_tokenizer()
        if model.header.fingerprint not in ("", fingerprint(tokenizer)):
            raise UsageError(f"{options.file} was built with another tokenizer than {options.target}'s: build it again")
        for source in sources:
            ngram, target = [], []
            for ids in _texts(source, tokenizer):
                assert not isinstance(ids, str)
                if len(ids) > 1:
                    ngram.append(10 ** model.scores(ids, end=False).log10[1:])
                    target.append(np.exp(in_windows(llm, tuple(ids), options.window)))
            if not ngram:
                raise UsageError(f"{source.path} holds no text of two tokens: nothing can be scored")
            ours, theirs = np.concatenate(ngram), np.concatenate(target)
            weight = best_weight(ours, theirs) if options.weight is None else options.weight
            values = {name: mixed_perplexity(ours, theirs, share) for name, share in _SHARES.items()}
            mixed = mixed_perplexity(ours, theirs, weight)
            _tell(options, str(source.path), {"perplexity": mixed, "weight": weight, **values, "tokens": len(ours)})
    return 0


_SHARES = {"target alone": 0.0, "n-grams alone": 1.0}


def _prob_by_corpus(options: argparse.Namespace, sources: list[CorpusSource]) -> int:
    """Print what the infinity-gram of a datastore says of texts."""
    from parlay.drafters.stores.datastore_file import Datastore
    from parlay.ngrams.infinity import InfinityGram

    if options.target is not None:
        raise UsageError(f"--target {options.target}: {options.file} is a datastore, and only n-gram models are mixed")
    store = Datastore.open(options.file)
    tokenizer, vocabulary = _opened(options.tokenizer or store.header.tokenizer)
    if store.header.fingerprint not in ("", vocabulary.fingerprint):
        raise UsageError(f"{options.file} was built with another tokenizer ({store.header.tokenizer}): give that one")
    corpus = InfinityGram(store)
    for source in sources:
        found: list[Support] = []
        for ids in _texts(source, tokenizer):
            assert not isinstance(ids, str)
            found += corpus.scores(ids)
            if options.per_token:
                for token, each in zip(ids, found[-len(ids) :], strict=True):
                    shown = json.dumps(tokenizer.decode([token]), ensure_ascii=False)
                    print(f"{each.times:9}/{each.total:<9} {each.length:4}  {shown}")
        if not found:
            raise UsageError(f"{source.path} holds no text: nothing can be scored")
        _tell(
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


def _tell(options: argparse.Namespace, file: str, numbers: dict[str, float]) -> None:
    if options.json:
        print(json.dumps({"file": file, **{name.replace(" ", "_"): value for name, value in numbers.items()}}))
        return
    parts = [
        f"{name} {value:,.4f}" if isinstance(value, float) else f"{name} {value:,}" for name, value in numbers.items()
    ]
    print(f"{file}: {', '.join(parts)}", flush=True)


# --------------------------------------------------------------------------------------------------- generate and info


def _generate(options: argparse.Namespace) -> int:
    from parlay.ngrams.model import NgramModel

    if options.max_tokens < 1:
        raise UsageError(f"--max-tokens {options.max_tokens}: give at least 1")
    if not 0 <= options.temperature < float("inf"):
        raise UsageError(f"--temperature {options.temperature}: give 0 or more")
    if options.seed is not None and options.seed < 0:
        raise UsageError(f"--seed {options.seed}: give 0 or more")
    model = NgramModel.open(options.file)
    tokenizer = None if model.header.words else _tokenizer_of(model, options.tokenizer)
    prompt = options.prompt if tokenizer is None else tokenizer.encode(options.prompt, add_special_tokens=False)
    tokens = model.continuation(prompt, options.max_tokens, options.temperature, options.seed)
    if tokenizer is None:
        print(" ".join([*options.prompt.split(), *(model.words[token] for token in tokens)]))
    else:
        print(options.prompt + tokenizer.decode(tokens))
    return 0


def _info(options: argparse.Namespace) -> int:
    from parlay.ngrams.model_file import is_ngram_file

    path = Path(options.file)
    return _info_of_model(options, path) if is_ngram_file(path) else _info_of_text(options)


def _info_of_model(options: argparse.Namespace, path: Path) -> int:
    from parlay.ngrams.model import NgramModel

    model = NgramModel.open(path)  # which checks every byte
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
    """For each length: how often the last tokens had occurred before, and whether what followed came again."""
    from parlay.ngrams.in_context import LIMIT, rewards
    from parlay.text import corpus

    if not 1 <= options.longest <= LIMIT:
        raise UsageError(f"--longest {options.longest}: give 1 to {LIMIT}")
    name = None if options.words else options.tokenizer or options.model or default_model()
    sources = corpus.sources([options.file])
    ids: dict[str, int] = {}
    tokens: list[int] = []
    tokenizer, vocabulary = _opened(name) if name else (None, None)
    for source in sources:
        for text in _texts(source, tokenizer):
            tokens += [ids.setdefault(word, len(ids)) for word in text.split()] if isinstance(text, str) else text
    if not tokens:
        raise UsageError(f"{options.file} holds no text: name a file with some words in it")
    found = rewards(tokens, vocabulary.size if vocabulary else len(ids), options.longest)
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
