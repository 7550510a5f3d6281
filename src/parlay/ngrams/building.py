"""Builds an n-gram language model from texts of any size, within a given memory, and writes its file."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count as numbers
from itertools import islice
from pathlib import Path

import numpy as np

from parlay.ngrams import arpa, counting, estimating, model_file
from parlay.ngrams.counting import LONGEST
from parlay.ngrams.estimating import Estimated
from parlay.ngrams.model import NgramModel
from parlay.ngrams.model_file import KNESER_NEY, STUPID_BACKOFF, Header
from parlay.ngrams.trie import BEGIN, END, FIRST, UNKNOWN, Scratch
from parlay.options import Options, UsageError, option
from parlay.text.corpus import cut
from parlay.text.tokenize import encode_all
from parlay.types import FieldError, ParlayError, Tokenizer

Document = Iterator[str]
"""The text of a document, in pieces of whole lines."""

MEBIBYTE = 1 << 20
_BATCH = 1 << 20  # characters that are tokenised together


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramOptions(Options):
    """Options of `build`: length and smoothing of n-grams, and the contents of the file."""

    order: int = option(5, "tokens of the longest n-grams", low=1, high=LONGEST)
    smoothing: str = option(
        KNESER_NEY,
        "modified Kneser-Ney, as KenLM estimates it, or stupid back-off: relative frequencies, whose counts are kept",
        choices=(KNESER_NEY, STUPID_BACKOFF),
    )
    prune: str = option(
        "",
        "drop n-grams that occurred so often or less, for each length from 1 on; the last number holds for all "
        "longer ones: 0,0,1 drops trigrams and longer ones that occurred once",
        metavar="N,N,...",
    )
    bits: int = option(32, "bits of each probability and back-off weight: 32, or 8 for a file of half the size")
    counts: bool = option(False, "keep the counts besides the probabilities")
    memory: int = option(1024, "MiB of memory to sort in; more than that goes through files", low=16, high=1 << 20)

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        if self.bits not in (8, 32):
            raise FieldError("bits", f"={self.bits}: give 8 or 32")
        self.thresholds()

    def thresholds(self) -> list[int]:
        """Return a threshold for each length: n-grams that did not occur more often are left out.

        Raises UsageError if ``prune`` is malformed.
        """
        parts = [part.strip() for part in self.prune.split(",")] if self.prune else ["0"]
        if not all(part.isascii() and part.isdigit() for part in parts):
            raise FieldError("prune", f"={self.prune}: give whole numbers joined by commas, as in 0,0,1")
        found = [int(part) for part in parts]
        if found[0] or sorted(found) != found or len(found) > self.order:
            raise FieldError(
                "prune",
                f"={self.prune}: begin with 0, as no single token is left out, never fall, and give at most "
                f"{self.order} numbers, one for each length",
            )
        return found + found[-1:] * (self.order - len(found))


@dataclass(frozen=True, slots=True)
class Built:
    """A model that was built.

    ``ngrams``: the number of n-grams of each length. ``guessed``: lengths that use KenLM's fallback for discounts.
    """

    header: Header
    ngrams: tuple[int, ...]
    guessed: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The token ids of a model of tokens, 0 to ``size`` - 1; ``name`` and ``fingerprint`` identify the tokenizer."""

    size: int
    name: str = ""
    fingerprint: str = ""


Progress = Callable[[str, int], object]
"""Called with the phase, ``reading`` or ``counting``, and the number of tokens just done."""


def _silent(what: str, done: int) -> None:
    """Show no progress."""


def build(
    output: Path,
    documents: Iterable[Document],
    options: NgramOptions,
    *,
    tokenizer: Tokenizer | None = None,
    vocabulary: Vocabulary | None = None,
    progress: Progress = _silent,
) -> Built:
    """Build a model of tokens, or of words if there is no tokenizer, and write it. A name such as ``x.arpa`` asks for
    ARPA.

    In a model of tokens, each document is a text; in a model of words, each non-empty line is one. A ``tokenizer``
    needs its ``vocabulary``. Temporary files in the folder of ``output`` take about 50 bytes a token. Raises
    ParlayError if the documents have no token, and if the files can't be written.
    """
    with _scratch(output) as scratch:
        if tokenizer is None:
            words = _read_words(documents, scratch, options.memory * MEBIBYTE, progress)
            return _finish(output, scratch, Vocabulary(len(words)), options, words=words, progress=progress)
        assert vocabulary is not None, "whose ids they are is known with the tokenizer"
        _read_tokens(documents, tokenizer, scratch, progress)
        return _finish(output, scratch, vocabulary, options, progress=progress)


def build_from_ids(
    output: str | Path, texts: Iterable[Sequence[int]], vocabulary: Vocabulary, options: NgramOptions
) -> Built:
    """Build a model from texts given as token ids, as `build` does. Raises ValueError for ids outside the
    vocabulary."""
    output = Path(output)
    with _scratch(output) as scratch:
        for text in texts:
            ids = np.asarray(text, np.int64)
            if len(ids) and not 0 <= ids.min() <= ids.max() < vocabulary.size:
                raise ValueError(f"a text has ids outside the vocabulary of {vocabulary.size}")
            if len(ids):
                scratch.append("ids", np.concatenate([[BEGIN], ids + FIRST, [END]]).astype(np.uint32))
        return _finish(output, scratch, vocabulary, options)


def _finish(
    output: Path,
    scratch: Scratch,
    vocabulary: Vocabulary,
    options: NgramOptions,
    *,
    words: Sequence[str] | None = None,
    progress: Progress = _silent,
) -> Built:
    """Count, estimate, prune and write the model, all in files of the scratch folder."""
    ids = scratch.read("ids", np.uint32)
    if not len(ids):
        raise UsageError("the corpus holds no text: name files with some words in them")
    size, memory = FIRST + vocabulary.size, options.memory * MEBIBYTE
    counted = counting.count(
        ids, size, options.order, scratch, memory=memory, counted=lambda done: progress("counting", done)
    )
    texts = int(counted.counts[0][BEGIN])
    tokens = len(ids) - 2 * texts
    del ids
    scratch.remove("ids")
    thresholds = options.thresholds()
    if options.smoothing == KNESER_NEY:
        model = estimating.kneser_ney(counted, thresholds, scratch)
    else:
        model = estimating.stupid_backoff(counted, scratch)
    if any(thresholds):
        model = estimating.prune(model, thresholds, scratch)
    header = Header(
        options.order,
        vocabulary.size,
        options.smoothing,
        words is not None,
        vocabulary.name,
        vocabulary.fingerprint,
        tokens,
        texts,
        options.prune,
        options.bits,
    )
    counts = options.counts or options.smoothing == STUPID_BACKOFF
    _write(output, scratch.folder, header, model, words=words or (), counts=counts)
    return Built(header, tuple(model.trie.count(n) for n in range(1, options.order + 1)), model.guessed)


def convert(
    source: Path, output: Path, bits: int = 32, *, vocabulary: Vocabulary | None = None, memory: int = 1 << 30
) -> Built:
    """Convert an ARPA file to a model file, using at most ``memory`` bytes. With a ``vocabulary``, the words are its
    ids."""
    model, words = arpa.read(source, vocabulary.size if vocabulary else 0, memory)
    whose = vocabulary or Vocabulary(len(words))
    orders = range(1, model.trie.order + 1)
    header = Header(
        len(orders), whose.size, model_file.ARPA, vocabulary is None, whose.name, whose.fingerprint, bits=bits
    )
    with _scratch(output) as scratch:
        _write(output, scratch.folder, header, model, words=words)
    return Built(header, tuple(map(model.trie.count, orders)), ())


@contextmanager
def _scratch(output: Path) -> Iterator[Scratch]:
    """Make a temporary folder for columns, next to the output. It is removed in any case."""
    with ExitStack() as stack:
        try:
            name = stack.enter_context(tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent))
        except OSError as error:
            raise ParlayError(f"can't write {output}: {error.strerror}") from None
        scratch = Scratch(Path(name))
        stack.callback(scratch.close)
        try:
            yield scratch
        except OSError as error:
            reason = error.strerror or f"the disk took a part alone ({error})"  # numpy's OSError has no strerror
            raise ParlayError(f"can't write beside {output}: {reason}") from error


def _write(
    output: Path, folder: Path, header: Header, model: Estimated, *, words: Sequence[str] = (), counts: bool = False
) -> None:
    if arpa.is_arpa(output):
        model_file.write(folder / "model", header, model, words=words)
        arpa.write(output, NgramModel.open(folder / "model"))
    else:
        model_file.write(output, header, model, words=words, counts=counts)


def _read_words(documents: Iterable[Document], scratch: Scratch, memory: int, progress: Progress) -> tuple[str, ...]:
    """Write the ids of all texts, and return the words in the order of their ids.

    Raises UsageError for words that do not fit into ``memory`` bytes.
    """
    ids: defaultdict[str, int] = defaultdict(numbers(FIRST).__next__)
    ids.update(dict.fromkeys(arpa.SPECIAL, UNKNOWN))
    known = len(ids)
    for document in documents:
        for piece in document:
            found: list[int] = []
            for line in piece.split("\n"):
                if words := line.split():
                    found.append(BEGIN)
                    found += map(ids.__getitem__, words)
                    found.append(END)
            new = list(islice(reversed(ids), len(ids) - known))
            known, memory = len(ids), memory - sum(map(len, new)) - arpa.WORD_BYTES * len(new)
            if max(map(len, new), default=0) > arpa.LONGEST_WORD:
                raise UsageError(f"a word of more than {arpa.LONGEST_WORD:,} letters: give text, or count tokens")
            if memory < 0:
                raise UsageError(f"{known:,} different words need more than --memory: allow more, or count tokens")
            scratch.append("ids", np.array(found, np.uint32))
            progress("reading", len(found))
    return tuple(word for word in ids if word not in arpa.SPECIAL)


def _read_tokens(documents: Iterable[Document], tokenizer: Tokenizer, scratch: Scratch, progress: Progress) -> None:
    """Write the ids of all texts."""
    inside, size = False, 0
    waiting: list[str | None] = []  # None: the end of a document

    def encode() -> None:
        nonlocal inside, size
        found = iter(encode_all(tokenizer, [part for part in waiting if part is not None], special=False))
        for part in waiting:
            tokens = np.array(next(found), np.uint32) + FIRST if part is not None else np.array([END] * inside)
            if part is None:
                inside = False
            elif len(tokens) and not inside:
                inside, tokens = True, np.append(BEGIN, tokens)
            scratch.append("ids", tokens.astype(np.uint32))
            progress("reading", len(tokens))
        waiting.clear()
        size = 0

    for document in documents:
        for piece in document:
            for part in cut(piece):
                waiting.append(part)
                size += len(part)
            if size >= _BATCH:
                encode()
        waiting.append(None)
    encode()
