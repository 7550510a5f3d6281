"""`parlay ngram`: builds n-gram language models, scores texts with them, and says what a text repeats."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from parlay.cli.datastore import target_flag
from parlay.cli.flags import add_option_flags, options_from, whole
from parlay.cli.parser import add_action, unicode_text
from parlay.models.fetch.pulled import DEFAULT_MODEL, named_or_default
from parlay.ngrams.building import Built, NgramOptions
from parlay.options import UsageError

if TYPE_CHECKING:
    from parlay.text.corpus import CorpusSource

_CORPUS = "text file, .jsonl file (texts under text, output or content), folder of such files, or - for standard input"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(title="actions", metavar="ACTION", dest="action", required=True)
    build = add_action(actions, "build", "build a model from texts, or from an ARPA file")
    build.add_argument("corpus", nargs="+", metavar="CORPUS", help=f"{_CORPUS}; or one .arpa or .arpa.gz file")
    build.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE", help="file to write; as ARPA if it ends in .arpa"
    )
    _add_tokenizer_flags(build)
    add_option_flags(build, NgramOptions)

    prob = add_action(actions, "prob", "score texts: log-probabilities and perplexity")
    prob.add_argument(
        "file", type=Path, metavar="FILE", help="n-gram model, or datastore: the infinity-gram of its texts"
    )
    prob.add_argument("texts", nargs="+", metavar="TEXT", help=_CORPUS)
    prob.add_argument("--tokenizer", help="tokenizer of the model's ids (default: the one it was built with)")
    prob.add_argument("--per-token", action="store_true", help="print a line for each token")
    prob.add_argument("--target", metavar="MODEL", help="mix the model into this one's distribution, and compare")
    prob.add_argument("--weight", type=float, help="share of the n-gram model in that (default: the best one)")
    prob.add_argument("--window", type=whole, metavar="N", help="tokens the target reads (default: 512)")
    prob.add_argument("--json", action="store_true", help="print JSON, one object for each line of output")

    generate = add_action(actions, "generate", "write a text by the model alone")
    generate.add_argument("file", type=Path, metavar="FILE", help="n-gram model")
    generate.add_argument("prompt", nargs="?", type=unicode_text, default="", metavar="PROMPT")
    generate.add_argument("--tokenizer", help="tokenizer of the model's ids (default: the one it was built with)")
    generate.add_argument("--max-tokens", type=whole, default=50, metavar="N", help="most tokens (default: 50)")
    generate.add_argument("--temperature", type=float, default=1.0, help="0: always the likeliest (default: 1)")
    generate.add_argument("--seed", type=whole, metavar="N", help="the same text for the same number")

    say = "check a model and say what it holds; or say how well the n-grams of a text predict its next tokens"
    info = add_action(actions, "info", say)
    info.add_argument("file", metavar="FILE", help="n-gram model, text file, or - for standard input")
    _add_tokenizer_flags(info)
    info.add_argument("--longest", type=whole, metavar="N", help="of a text: longest n-grams (default: 8)")
    info.add_argument("--json", action="store_true", help="print one JSON object")


def _add_tokenizer_flags(parser: argparse.ArgumentParser) -> None:
    whose = parser.add_mutually_exclusive_group()
    whose.add_argument(
        "--model", help=f"target model, whose tokens are counted (default: {DEFAULT_MODEL}, fetched at the first use)"
    )
    whose.add_argument("--tokenizer", help="folder or Hub id of the target's tokenizer, if the model does not hold it")
    whose.add_argument("--words", action="store_true", help="count words, which whitespace parts; a line is a text")


def run(options: argparse.Namespace) -> int:
    from parlay.cli import ngram_info, ngram_prob

    return {"build": _build, "prob": ngram_prob.run, "generate": _generate, "info": ngram_info.run}[options.action](
        options
    )


def _build(options: argparse.Namespace) -> int:
    from parlay.ngrams import arpa
    from parlay.system.user_cache import check_output

    declared = options_from(NgramOptions, options)
    output: Path = options.output
    check_output(output)
    if any(arpa.is_arpa(Path(name)) for name in options.corpus):
        built = _from_arpa(options, declared)
    else:
        built = _from_texts(options, declared)
    if built.guessed:
        lengths = ", ".join(map(str, built.guessed))
        few = f"the corpus has too few n-grams of length {lengths} to estimate their discounts"
        print(f"{few}, so the discounts 0.5, 1 and 1.5 are used", file=sys.stderr)
    counted = f"{built.header.tokens:,} tokens of {built.header.texts:,} texts, " if built.header.tokens else ""
    print(f"{output}: {counted}{sum(built.ngrams):,} n-grams, {output.stat().st_size:,} bytes")
    if not built.header.words and not arpa.is_arpa(output):
        print(f"Use it: parlay generate {target_flag(options)}--strategy ngram-lm:file={output}")
    return 0


def _from_texts(options: argparse.Namespace, declared: NgramOptions) -> Built:
    from parlay.cli.datastore import progress_bar, say_left_out
    from parlay.cli.ngram_texts import opened
    from parlay.ngrams.building import build
    from parlay.text import corpus

    sources = corpus.sources(options.corpus)
    name = None if options.words else named_or_default(options.tokenizer, options.model)
    tokenizer, vocabulary = (None, None) if name is None else opened(name)
    skipped: list[CorpusSource] = []
    documents = (document for source in sources for document in corpus.streams(source, skipped))
    try:
        with progress_bar("reading", " tokens") as reading, progress_bar("counting", " tokens") as counting:
            return build(
                options.output,
                documents,
                declared,
                tokenizer=tokenizer,
                vocabulary=vocabulary,
                progress=lambda what, done: (reading if what == "reading" else counting).update(done),
            )
    finally:  # if there was no text, this says why
        say_left_out(skipped, len(sources))


def _from_arpa(options: argparse.Namespace, declared: NgramOptions) -> Built:
    from parlay.cli.ngram_texts import opened
    from parlay.ngrams.building import convert

    files = options.corpus
    if len(files) > 1:
        raise UsageError(
            f"{len(files)} files are given, and one of them is an ARPA file: give it alone, or give texts only"
        )
    _refuse_for_arpa(declared)
    named = options.model or options.tokenizer
    vocabulary = opened(named)[1] if named else None
    return convert(Path(files[0]), options.output, declared.bits, vocabulary=vocabulary, memory=declared.memory << 20)


def _refuse_for_arpa(declared: NgramOptions) -> None:
    """Raises UsageError for options that would change which n-grams there are, which the ARPA file determines."""
    usual = asdict(NgramOptions())
    for name, value in asdict(declared).items():
        if name not in ("bits", "memory") and value != usual[name]:
            raise UsageError(
                f"--{name} has no effect with an ARPA file, which fixes it: remove it, or build from texts"
            )


def _generate(options: argparse.Namespace) -> int:
    from parlay.cli.ngram_texts import refuse, tokenizer_of
    from parlay.ngrams.model import NgramModel

    if options.max_tokens < 1:
        raise UsageError(f"--max-tokens must be at least 1, got {options.max_tokens}")
    if not 0 <= options.temperature < float("inf"):
        raise UsageError(f"--temperature must be at least 0, got {options.temperature:g}")
    if options.seed is not None and options.seed < 0:
        raise UsageError(f"--seed must be at least 0, got {options.seed}")
    model = NgramModel.open(options.file)
    if model.header.words:
        refuse(f"{options.file} is a model of words", {"--tokenizer": options.tokenizer})
    tokenizer = None if model.header.words else tokenizer_of(str(options.file), model.header, options.tokenizer)
    prompt = options.prompt if tokenizer is None else tokenizer.encode(options.prompt, add_special_tokens=False)
    tokens = model.continuation(prompt, options.max_tokens, options.temperature, options.seed)
    if tokenizer is None:
        print(" ".join([*options.prompt.split(), *(model.words[token] for token in tokens)]))
    else:
        print(options.prompt + tokenizer.decode(tokens))
    return 0
