"""`parlay datastore`: builds a datastore from a corpus, or describes one."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parlay.cli.parser import add_action
from parlay.models.fetch.pulled import DEFAULT_MODEL, named_or_default
from parlay.system.user_cache import check_output
from parlay.types import ParlayError, Tokenizer

_CACHED = 4096
"""The model's cache in tokens while states are written; windows are much shorter."""

if TYPE_CHECKING:
    from tqdm import tqdm

    from parlay.drafters.stores.datastore_file import Datastore
    from parlay.text.corpus import CorpusSource, Document


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(title="actions", metavar="ACTION", dest="action", required=True)
    build = add_action(actions, "build", "make a datastore from texts")
    build.add_argument(
        "corpus",
        nargs="+",
        metavar="CORPUS",
        help="text file, .jsonl file (texts under text, output or content), folder of such files, or - for standard "
        "input",
    )
    build.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE", help="file to write the datastore to"
    )
    whose = build.add_mutually_exclusive_group()
    whose.add_argument(
        "--model", help=f"target model, whose tokenizer is used (default: {DEFAULT_MODEL}, fetched at the first use)"
    )
    whose.add_argument("--tokenizer", help="folder or Hub id of the target's tokenizer, if the model does not hold it")
    build.add_argument(
        "--states",
        action="store_true",
        help="also run the texts through the model and keep its hidden states in the folder FILE.states, for --nest: "
        "twice the model's hidden size in bytes for each token",
    )
    info = add_action(actions, "info", "check a datastore and say what it holds")
    info.add_argument("file", type=Path, metavar="FILE")
    info.add_argument("--json", action="store_true", help="print one JSON object")


def run(options: argparse.Namespace) -> int:
    return _build(options) if options.action == "build" else _info(options)


def _build(options: argparse.Namespace) -> int:
    from parlay.models.fetch.resolving import resolve_tokenizer
    from parlay.models.loading import load_tokenizer
    from parlay.text import corpus

    output: Path = options.output
    check_output(output)
    sources = corpus.sources(options.corpus)
    name = named_or_default(options.tokenizer, options.model)
    if options.states:
        _check_states(output, options.tokenizer)
    tokenizer = load_tokenizer(resolve_tokenizer(name))
    store, names = _make(sources, tokenizer, name)
    try:
        store.write(output)
        header = store.header
        what = f"{header.suffixes:,} tokens of {header.documents:,} documents, {output.stat().st_size:,} bytes"
        print(f"{output}: {what}\nUse it: parlay generate {target_flag(options)}--strategy datastore:file={output}")
        if options.states:
            built = _write_states(output, names, name, tokenizer)
            print(f"{built}\nUse them: parlay generate {target_flag(options)}--nest {output}")
    except OSError as error:
        raise ParlayError(f"can't write {output}: {error.strerror}") from error
    return 0


def target_flag(options: argparse.Namespace) -> str:
    """Return the flag that names the target whose tokens a file holds, and a blank; nothing for the default model.

    ``options`` has ``model`` and ``tokenizer``, of which at most one is set.
    """
    if options.model is None and options.tokenizer is None:
        return ""
    return f"--model {shlex.quote(options.model or 'MODEL')} "


def _check_states(output: Path, tokenizer: str | None) -> None:
    """Raises ValueError early for what would fail only after a long time, and ParlayError if faiss is missing."""
    from parlay.drafters.stores.state_building import check_place
    from parlay.drafters.stores.state_store import need_faiss

    if tokenizer is not None:
        raise ValueError("--states needs a model, not only a tokenizer: add --model")
    check_place(output)
    need_faiss()


def _write_states(output: Path, names: list[str], model: str, tokenizer: Tokenizer) -> str:
    """Run the datastore's texts through the model, write the states, and say how many.

    Raises ParlayError or OSError if that fails.
    """
    from parlay import models
    from parlay.drafters.stores.state_building import Built, write_states
    from parlay.drafters.stores.state_store import folder_of
    from parlay.models.fetch.origin import public_name, weights_fingerprint
    from parlay.text.tokenize import encode_pieces

    prefix = tuple(encode_pieces(tokenizer, [""], special=True)[:1])
    built = Built(models.load(model, cache_tokens=_CACHED), public_name(model), weights_fingerprint(model), prefix)
    with progress_bar("reading", " tokens") as bar:
        header = write_states(output, names, built, bar.update)
    return f"{folder_of(output)}: {header.states:,} states of {header.hidden_size:,} numbers"


def _make(sources: list[CorpusSource], tokenizer: Tokenizer, name: str) -> tuple[Datastore, list[str]]:
    """The datastore, and the names of its documents."""
    from parlay.drafters.stores.datastore_file import Datastore, fingerprint, vocabulary
    from parlay.text import corpus

    skipped: list[CorpusSource] = []
    names: list[str] = []
    with progress_bar("tokenising", "B", sum(source.size for source in sources)) as bar:
        ids = list(corpus.encode(_texts(sources, skipped, names), tokenizer, bar.update))
    say_left_out(skipped, len(sources))
    with progress_bar("sorting", " tokens", sum(map(len, ids)) + len(ids)) as bar:
        store = Datastore.build(
            ids,
            vocabulary(tokenizer),
            tokenizer=name,
            fingerprint=fingerprint(tokenizer),
            sorted_more=bar.update,
        )
    return store, [name for name, document in zip(names, ids, strict=True) if len(document)]


def _texts(sources: list[CorpusSource], skipped: list[CorpusSource], names: list[str]) -> Iterator[Document]:
    """Yield the documents of all sources; their names are added to ``names``. Sources without text are added to
    ``skipped``.

    A document is named after its file; in a .jsonl file its number follows.
    """
    from parlay.text import corpus

    for source in sources:
        found = corpus.documents(source)
        if found is None:
            skipped.append(source)
            continue
        for number, document in enumerate(found, start=1):
            names.append(f"{source.path}:{number}" if source.path.suffix == ".jsonl" else str(source.path))
            yield document


def say_left_out(skipped: list[CorpusSource], files: int) -> None:
    """Report files without text, in folders, on standard error."""
    if skipped:
        which = f"{len(skipped)} of {files} files ({skipped[0].path} the first)"
        print(f"skipped {which}: it is not UTF-8 text", file=sys.stderr)


def progress_bar(what: str, unit: str, total: int = 0) -> tqdm[Any]:
    """A progress bar with rate and remaining time on standard error, if that is a terminal."""
    from tqdm import tqdm

    return tqdm(desc=what, total=total or None, unit=unit, unit_scale=True, disable=not sys.stderr.isatty())


def _states_facts(file: Path) -> dict[str, str | int]:
    """Describe a datastore's states after checking every byte; empty if it has none."""
    from parlay.drafters.stores.state_store import folder_of, read_header, verify

    if not folder_of(file).exists():
        return {}
    header = read_header(file)
    verify(folder_of(file), header)
    return {"states": header.states, "of model": header.model, "layer": header.layer, "numbers": header.hidden_size}


def _info(options: argparse.Namespace) -> int:
    from parlay.drafters.stores.datastore_file import VERSION, Datastore

    file: Path = options.file
    header = Datastore.open(file).header  # checks every byte
    facts = {
        "file": str(file),
        "version": VERSION,
        "tokens": header.suffixes,
        "documents": header.documents,
        "vocabulary": header.vocab_size,
        "bytes": file.stat().st_size,
        "tokenizer": header.tokenizer,
        "fingerprint": header.fingerprint,
        "checksum": "ok",
        **_states_facts(file),
    }
    if options.json:
        print(json.dumps(facts))
        return 0
    for name, value in facts.items():
        print(f"{name:11} {f'{value:,}' if isinstance(value, int) else value}")
    return 0
