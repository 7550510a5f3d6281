"""`parlay datastore`: builds a datastore from a corpus, and describes one."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parlay.models.fetch.pulled import DEFAULT_MODEL, default_model
from parlay.types import ParlayError, Tokenizer

if TYPE_CHECKING:
    from tqdm import tqdm

    from parlay.drafters.stores.datastore_file import Datastore
    from parlay.text.corpus import CorpusSource, Document


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(title="actions", metavar="ACTION", dest="action", required=True)
    build = actions.add_parser("build", help="make a datastore from texts", description="Make a datastore from texts.")
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
    info = actions.add_parser(
        "info", help="check a datastore and say what it holds", description="Check a datastore and say what it holds."
    )
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
    name = options.tokenizer or options.model or default_model()
    store = _make(sources, load_tokenizer(resolve_tokenizer(name)), name)
    try:
        store.write(output)
    except OSError as error:
        raise ParlayError(f"can't write {output}: {error.strerror}") from error
    header = store.header
    print(
        f"{output}: {header.suffixes:,} tokens of {header.documents:,} documents, {output.stat().st_size:,} bytes\n"
        f"Use it: parlay generate --strategy datastore:file={output}"
    )
    return 0


def check_output(path: Path) -> None:
    """Raises ValueError now for what would otherwise fail after a long time."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder: name a file to write")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"no folder {path.parent} to write {path.name} to: make it first")


def _make(sources: list[CorpusSource], tokenizer: Tokenizer, name: str) -> Datastore:
    from parlay.drafters.stores.datastore_file import Datastore, fingerprint, vocabulary
    from parlay.text import corpus

    skipped: list[CorpusSource] = []
    with progress_bar("tokenising", "B", sum(source.size for source in sources)) as bar:
        ids = list(corpus.encode(_texts(sources, skipped), tokenizer, bar.update))
    say_left_out(skipped, len(sources))
    with progress_bar("sorting", " tokens", sum(map(len, ids)) + len(ids)) as bar:
        return Datastore.build(
            ids,
            vocabulary(tokenizer),
            tokenizer=name,
            fingerprint=fingerprint(tokenizer),
            sorted_more=bar.update,
        )


def _texts(sources: list[CorpusSource], skipped: list[CorpusSource]) -> Iterator[Document]:
    """The documents of all sources. Those that hold no text join ``skipped``."""
    from parlay.text import corpus

    for source in sources:
        found = corpus.documents(source)
        if found is None:
            skipped.append(source)
        else:
            yield from found


def say_left_out(skipped: list[CorpusSource], files: int) -> None:
    """Name the files of folders that hold no text, on standard error."""
    if skipped:
        which = f"{len(skipped)} of {files} files ({skipped[0].path} the first)"
        print(f"left out {which}: not UTF-8 text", file=sys.stderr)


def progress_bar(what: str, unit: str, total: int = 0) -> tqdm[Any]:
    """Progress with rate and time left on standard error, if that is a terminal."""
    from tqdm import tqdm

    return tqdm(desc=what, total=total or None, unit=unit, unit_scale=True, disable=not sys.stderr.isatty())


def _info(options: argparse.Namespace) -> int:
    from parlay.drafters.stores.datastore_file import VERSION, Datastore

    file: Path = options.file
    header = Datastore.open(file).header  # which checks every byte
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
    }
    if options.json:
        print(json.dumps(facts))
        return 0
    for name, value in facts.items():
        print(f"{name:11} {f'{value:,}' if isinstance(value, int) else value}")
    return 0
