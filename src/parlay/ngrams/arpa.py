"""Reads and writes ARPA files, the text format for back-off models of KenLM, SRILM and others. Reading checks them.

In the ARPA file of a model of tokens, words are the tokens' ids.
"""

from __future__ import annotations

import gzip
import math
import re
import zlib
from array import array
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from parlay.ngrams.counting import LONGEST
from parlay.ngrams.estimating import Estimated, Numbers
from parlay.ngrams.model import NgramModel
from parlay.ngrams.model_file import MOST, NEVER
from parlay.ngrams.trie import BEGIN, END, FIRST, PAD, UNKNOWN, Integers, Trie, blocks
from parlay.system.user_cache import saved_whole
from parlay.types import ParlayError

SPECIAL = {"<unk>": UNKNOWN, "<s>": BEGIN, "</s>": END}

_UNKNOWN_WORDS = -100.0
"""log10 of the probability of unknown words in files without <unk>, as in KenLM."""

LONGEST_WORD = 1 << 12
"""The most bytes of a word."""

_COUNT = re.compile(r"ngram\s+(\d{1,9})\s*=\s*(\d{1,18})", re.ASCII)
_LONGEST_LINE = 1 << 17
_MOST_SPARE = 1000  # lines before \data\, or empty lines in a row
WORD_BYTES = 200  # memory for each word, besides its letters


class BadArpa(ParlayError):
    """An ARPA file that contradicts itself; the message names the line."""


def is_arpa(path: Path) -> bool:
    return path.suffix == ".arpa" or path.name.endswith(".arpa.gz")


# ------------------------------------------------------------------------------------------------------------- reading


def read(path: Path, vocab_size: int = 0, memory: int = 1 << 30) -> tuple[Estimated, tuple[str, ...]]:
    """Read a model and its words, using at most ``memory`` bytes.

    With a ``vocab_size``, the words are token ids below it. Raises BadArpa if the counts do not match the n-grams or
    need too much memory, if a context has no back-off weight, if an n-gram has an unknown word or its first words are
    no n-gram of the file, if a number can't be the logarithm of a probability, if a line is too long, if the text is
    not UTF-8, and if the end is missing.
    """
    with ExitStack() as stack:
        try:
            file = stack.enter_context((gzip.open if path.suffix == ".gz" else open)(path, "rb"))
            return _Reader(path, iter(lambda: file.readline(_LONGEST_LINE), b""), vocab_size, memory).model()
        except (OSError, EOFError, zlib.error) as error:  # including those of gzip
            raise BadArpa(f"can't read {path}: {error}") from None


class _Reader:
    def __init__(self, path: Path, lines: Iterator[bytes], vocab_size: int, memory: int) -> None:
        self._path, self._lines, self._vocab_size = path, enumerate(lines, 1), vocab_size
        self._memory, self._letters = memory, memory
        self._line = 0
        self._ids: dict[str, int] = dict(SPECIAL)

    def model(self) -> tuple[Estimated, tuple[str, ...]]:
        counts = self._counts()
        self._refuse_too_many(counts)
        trie, prob, weight, lines = self._unigrams(counts[0], len(counts) == 1)
        probs, weights = [prob], [weight]
        for n, expected in enumerate(counts[1:], 2):
            ids, prob, weight, found = self._section(n, expected, n == len(counts))
            parents = self._parents(trie, ids[:, :-1], found)
            order = np.lexsort((ids[:, -1], parents))
            parents, last, found = parents[order], ids[order, -1], found[order]
            self._refuse_duplicates(parents, last, found)
            starts = np.searchsorted(parents, np.arange(trie.count(n - 1) + 1))
            self._refuse_without_weight(starts, weights[-1], lines)
            trie = Trie(trie.size, (*trie.tokens, last.astype(np.uint32)), (*trie.starts, starts))
            probs.append(prob[order])
            weights.append(weight[order])
            lines = found
        self._expect("\\end\\")
        words = () if self._vocab_size else tuple(word for word in self._ids if word not in SPECIAL)
        return Estimated(trie, (), tuple(map(_linear, probs)), tuple(map(_linear, weights[:-1]))), words

    def _unigrams(self, expected: int, last: bool) -> tuple[Trie, Numbers, Numbers, Integers]:
        """Read the 1-grams. Ids that are missing from the file get the probability of <unk>."""
        ids, found_probs, found_weights, found_lines = self._section(1, expected, last)
        size = FIRST + (self._vocab_size or len(self._ids) - len(SPECIAL))
        if size == FIRST:
            raise self._bad("the model has no words")
        prob, weight, lines = np.full(size, np.nan), np.full(size, np.nan), np.zeros(size, np.int64)
        places = ids[:, 0]
        prob[places], weight[places], lines[places] = found_probs, found_weights, found_lines
        prob[[PAD, BEGIN]] = NEVER
        prob[UNKNOWN] = _UNKNOWN_WORDS if np.isnan(prob[UNKNOWN]) else prob[UNKNOWN]
        prob[np.isnan(prob)] = prob[UNKNOWN]
        return Trie(size, (np.empty(0, np.uint32),), ()), prob, weight, lines

    def _counts(self) -> list[int]:
        """Read the counts in the head of the file: the number of n-grams of each length."""
        while self._next() != "\\data\\":
            if self._line > _MOST_SPARE:
                raise self._bad("no line \\data\\ until here: this is not an ARPA file")
        found: list[int] = []
        while (line := self._next()) and len(found) <= LONGEST:
            claim = _COUNT.fullmatch(line)
            if claim is None or int(claim[1]) != len(found) + 1:
                raise self._bad(f"{line[:40]!r} where 'ngram {len(found) + 1}=COUNT' or an empty line is due")
            found.append(int(claim[2]))
        if not 0 < len(found) <= LONGEST:
            raise self._bad(f"n-grams of {len(found)} lengths: Parlay reads 1 to {LONGEST}")
        return found

    def _refuse_too_many(self, counts: list[int]) -> None:
        """Raise BadArpa if the counts in the head need too much memory. `_section` later refuses rows beyond these
        counts."""
        kept = 60 * sum(counts) + WORD_BYTES * counts[0]
        while_read = max(count * (16 * n + 60) for n, count in enumerate(counts, 1))
        if (needed := kept + while_read) > self._memory:
            allowed = f"{self._memory >> 20:,}: allow more by --memory"
            raise self._bad(f"{sum(counts):,} n-grams need about {needed >> 20:,} MiB and may take {allowed}")

    def _section(self, n: int, expected: int, last: bool) -> tuple[Integers, Numbers, Numbers, Integers]:
        """Return ids ``[rows, n]``, log-probabilities, back-offs (NaN where none is given) and line numbers."""
        self._expect(f"\\{n}-grams:")
        ids, probs, weights, lines = array("q"), array("f"), array("f"), array("q")
        while line := self._next():
            if len(probs) == expected:
                raise self._bad(f"more {n}-grams than the {expected} that the head says: the file was changed")
            # Words may contain Unicode spaces.
            parts = line.split() if line.isascii() else [part.decode() for part in line.encode().split()]
            if len(parts) not in ((n + 1,) if last else (n + 1, n + 2)):
                wanted = f"a number, {n} words{'' if last else ' and a number'}"
                raise self._bad(f"{len(parts)} fields where a {n}-gram has {wanted}")
            probs.append(self._number(parts[0], "a log-probability", 0.0))
            weights.append(self._number(parts[-1], "a back-off weight", MOST) if len(parts) == n + 2 else math.nan)
            ids.extend([self._id(word, n) for word in parts[1 : n + 1]])
            lines.append(self._line)
        if len(probs) != expected:
            raise self._bad(
                f"{len(probs)} {n}-grams are there, and the head says {expected}: the file is cut or changed"
            )
        numbers = np.array(probs, np.float32), np.array(weights, np.float32)
        return np.array(ids, np.int64).reshape(-1, n), *numbers, np.array(lines, np.int64)

    def _number(self, text: str, what: str, most: float) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if math.isnan(value):
            raise self._bad(f"{text[:40]!r} is not {what}")
        if value > most:
            raise self._bad(f"{what} of {text[:40]} is above {most:g}")
        return max(value, NEVER)

    def _id(self, word: str, n: int) -> int:
        found = self._ids.get(word)
        if n > 1 and found is None:
            raise self._bad(f"{word[:40]!r} is not among the 1-grams")
        if found is not None and (n > 1 or word in SPECIAL):
            return found
        if found is not None:
            raise self._bad(f"{word[:40]!r} is there a second time")
        self._letters -= len(word)
        if len(word) > LONGEST_WORD:
            raise self._bad(f"a word of {len(word):,} letters: words may have {LONGEST_WORD:,}")
        if self._letters < 0:
            raise self._bad(f"the words need more than {self._memory >> 20:,} MiB: allow more by --memory")
        if not self._vocab_size:
            found = FIRST + len(self._ids) - len(SPECIAL)
        elif word.isascii() and word.isdigit() and int(word) < self._vocab_size:
            found = FIRST + int(word)
        else:
            raise self._bad(f"{word[:40]!r} is not an id of the tokenizer, which are 0 to {self._vocab_size - 1}")
        self._ids[word] = found
        return found

    def _parents(self, trie: Trie, ids: Integers, lines: Integers) -> Integers:
        """Return the trie places of the n-grams' contexts, which are all their words but the last."""
        places = ids[:, 0]
        for n in range(2, ids.shape[1] + 1):
            places = trie.continued(n, places, ids[:, n - 1])
        lost = np.flatnonzero(places < 0)
        if len(lost):
            raise self._bad(f"the first {ids.shape[1]} words are no {ids.shape[1]}-gram of the file", lines[lost[0]])
        return places

    def _refuse_duplicates(self, parents: Integers, last: Integers, lines: Integers) -> None:
        twice = np.flatnonzero((parents[1:] == parents[:-1]) & (last[1:] == last[:-1]))
        if len(twice):
            raise self._bad("the n-gram is there a second time", max(lines[twice[0] : twice[0] + 2]))

    def _refuse_without_weight(self, starts: Integers, weights: Numbers, lines: Integers) -> None:
        lacking = np.flatnonzero((np.diff(starts) > 0) & np.isnan(weights))
        if len(lacking):
            raise self._bad("longer n-grams begin so, and it has no back-off weight", lines[lacking[0]])

    def _next(self) -> str:
        """Return the next line, stripped."""
        self._line, line = next(self._lines, (self._line + 1, b""))
        if not line:
            raise self._bad("the file ends here, and \\end\\ is missing: it was cut short")
        if len(line) == _LONGEST_LINE:
            raise self._bad(f"a line of {_LONGEST_LINE:,} bytes or more: this is not an ARPA file")
        try:
            return str(line.decode()).strip(" \t\r\n")
        except UnicodeDecodeError:
            raise self._bad("not UTF-8: convert it first, say with iconv") from None

    def _expect(self, wanted: str) -> None:
        first = self._line
        while not (line := self._next()):
            if self._line - first > _MOST_SPARE:
                raise self._bad(f"{_MOST_SPARE:,} empty lines where {wanted} is due")
        if line != wanted:
            raise self._bad(f"{line[:40]!r} where {wanted} is due")

    def _bad(self, what: str, line: int | None = None) -> BadArpa:
        return BadArpa(f"{self._path}, line {self._line if line is None else int(line)}: {what}")


def _linear(logs: Numbers) -> Numbers:
    """Convert logarithms to probabilities or weights; a weight that is not given becomes 1."""
    linear: Numbers = 10 ** np.nan_to_num(logs.astype(np.float64))
    return linear


# ------------------------------------------------------------------------------------------------------------- writing


def write(path: Path, model: NgramModel) -> None:
    """Write a model as ARPA, to seven digits. Tokens that the corpus lacks are left out, because <unk> has their
    numbers."""
    words = ["<pad>", "<unk>", "<s>", "</s>", *(model.words or map(str, range(model.header.vocab_size)))]
    trie, order = model.trie, model.order
    unigrams = _unlike_unknown(model)
    counts = [len(unigrams), *(trie.count(n) for n in range(2, order + 1))]
    with saved_whole(path) as part, gzip.open(part, "wb") if path.suffix == ".gz" else part.open("wb") as file:
        claims = "".join(f"ngram {n}={count}\n" for n, count in enumerate(counts, 1))
        file.write(f"\\data\\\n{claims}".encode())
        for n in range(1, order + 1):
            file.write(f"\n\\{n}-grams:\n".encode())
            for rows in blocks(counts[n - 1]):
                places = unigrams[rows] if n == 1 else np.arange(rows.start, rows.stop)
                columns = [places] if n == 1 else trie.rows(n, rows.start, rows.stop)
                logs, backoffs = model.numbers(n, places)
                texts = zip(*([words[id] for id in column.tolist()] for column in columns), strict=True)
                for log, ids, backoff in zip(logs.tolist(), texts, backoffs.tolist(), strict=True):
                    end = "\n" if n == order else f"\t{backoff:.7g}\n"
                    file.write(f"{log:.7g}\t{' '.join(ids)}{end}".encode())
        file.write(b"\n\\end\\\n")


def _unlike_unknown(model: NgramModel) -> Integers:
    """Return the 1-grams whose numbers differ from those of <unk>."""
    logs, backoffs = model.numbers(1, np.arange(model.trie.size))
    alike = (logs == logs[UNKNOWN]) & (backoffs == 0) & (not model.header.words)
    alike[PAD], alike[UNKNOWN : END + 1] = True, False
    return np.flatnonzero(~alike)
