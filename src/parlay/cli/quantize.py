"""`parlay quantize`: writes a model as a GGUF file with fewer bits."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from parlay.models.gguf import SUFFIX
from parlay.models.gguf.mixtures import FILE_TYPES
from parlay.options import UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from parlay.models.gguf.quantizing import Written


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a folder, a GGUF file, or a name that parlay models lists")
    parser.add_argument(
        "--to", required=True, metavar="TYPE", type=str.upper, choices=tuple(FILE_TYPES), help=", ".join(FILE_TYPES)
    )
    parser.add_argument("-o", "--out", required=True, type=Path, metavar="FILE", help="the GGUF file to write")
    parser.add_argument(
        "--imatrix",
        type=Path,
        metavar="TEXTFILE",
        help="weight rounding errors by the size of each input on this text; its first 8,192 tokens are read",
    )
    parser.add_argument("--force", action="store_true", help="overwrite an existing file")
    parser.add_argument("--threads", type=int, help="number of threads (default: one per usable core)")


def run(options: argparse.Namespace) -> int:
    _check(options)
    from tqdm import tqdm  # here, as help needs none of it

    from parlay.models.fetch.resolving import resolve
    from parlay.models.gguf.quantizing import quantize, source_of
    from parlay.models.gguf.writing import record
    from parlay.system import threads

    threads.settle(options.threads)
    model, kind = resolve(options.model), FILE_TYPES[options.to]
    source = source_of(model)
    importance = _importance(options.imatrix, model) if options.imatrix else None
    used = {"dataset": options.imatrix.name, "entries_count": len(importance)} if importance else {}
    records = [record(f"quantize.imatrix.{name}", value) for name, value in used.items()]
    with tqdm(desc=options.out.name, unit=" tensors", file=sys.stderr, disable=None, leave=False) as bar:

        def progress(done: int, tensors: int) -> None:
            bar.total = tensors
            bar.update(done - bar.n)

        written = quantize(source, kind, options.out, importance=importance, records=records, done=progress)
    print(_summary(options.out, options.to, written))
    return 0


def _check(options: argparse.Namespace) -> None:
    """Refuse what can't work before the model is opened."""
    out: Path = options.out
    if out.suffix != SUFFIX:
        raise UsageError(f"-o must end in {SUFFIX}, got {out}")
    if out.is_dir():
        raise UsageError(f"-o must be a file, but {out} is a folder: name a file in it")
    if out.exists() and not options.force:
        raise UsageError(f"-o {out} exists already: name another file, or add --force to replace it")
    if options.imatrix is not None and not options.imatrix.is_file():
        raise UsageError(f"can't read the text {options.imatrix} of --imatrix: No such file or directory")


def _importance(text: Path, model: Path) -> dict[str, Tensor]:
    """Mean squares of the inputs of the model's matrices on the text."""
    from parlay.models.gguf.importance import MOST_TOKENS, ReadText, importance
    from parlay.models.loading import load_tokenizer, load_weights, read_config

    config = read_config(model)
    try:
        content = text.read_text(encoding="utf-8")[: 16 * MOST_TOKENS]  # no tokenizer has a longer mean token
    except (OSError, ValueError) as error:
        raise UsageError(f"can't read the text {text} of --imatrix: {error}") from None
    return importance(config, load_weights(model, config), ReadText.of(content, load_tokenizer(model)))


def _summary(out: Path, name: str, written: Written) -> str:
    formats = ", ".join(f"{count} {format}" for format, count in sorted(written.formats.items(), key=lambda of: -of[1]))
    lines = [f"wrote {out}: {written.bytes / 1e6:,.1f} MB, {written.bits:.2f} bits a weight ({formats})"]
    if written.fell_back:
        lines.append(f"{written.fell_back} matrices have rows that {name} does not fit: they got another format")
    if written.kept:
        lines.append(f"matrices that stayed as they were, with no more bits than {name} gives them: {written.kept}")
    return "\n".join(lines)
