"""Pairs of texts: read from a file, divided by source, tokenised, and drawn in batches."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import AddedToken, processors
from transformers import PreTrainedTokenizerFast

from parlay.train.lm_data import END_OF_TEXT, train_tokenizer
from parlay.train.translation.rows import Laid, Packing
from parlay.types import ParlayError

SEPARATOR, MASK, BLANK = "<|translate|>", "<|mask|>", "<|blank|>"
LENGTHS = 128
"""Numbers below this have a token: they stand for answers' lengths, fertilities, and distances between vertices."""
HELDOUT_ONE_IN = 100
_MISSES = 12
"""A batch is full when this many pairs in a row found no room."""
_SAMPLE = 400_000
"""Most texts that the tokenizer is trained on."""

Texts = tuple[str, str]


class Words(NamedTuple):
    """Ids of a translator's special tokens: end, separator, mask, blank (CTC), and the number 0."""

    end: int
    separator: int
    mask: int
    blank: int
    first_length: int


@dataclass(frozen=True, slots=True)
class Pair:
    """Ids of a source and its translation, without separator and end.

    ``fertilities``: how many tokens of the translation are aligned with each source token; empty if not computed.
    """

    source: tuple[int, ...]
    target: tuple[int, ...]
    fertilities: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        return len(self.source) + len(self.target) + 2


def read_pairs(file: Path) -> list[Texts]:
    """Read a file of pairs: on each line, a source, a tab and its translation. Columns after a second tab are ignored.

    Files ending in ``.zst`` are decompressed. Raises ValueError if there is no file, and for a line that is not a pair.
    """
    if not file.is_file():
        raise ValueError(f"no file {file}: name one with a source, a tab and its translation on each line")
    pairs = []
    for number, line in enumerate(_text(file).split("\n"), start=1):  # texts may have line ends of other kinds
        if not line.strip():
            continue
        parts = [part.strip() for part in line.split("\t")[:2]]
        if len(parts) < 2 or not all(parts):
            raise ValueError(f"{file}, line {number}: expected a source, a tab and its translation, got {line!r:.60}")
        pairs.append((parts[0], parts[1]))
    return pairs


def _text(file: Path) -> str:
    """Read a whole text file. Raises ValueError if it is not UTF-8, or compressed and damaged."""
    data = file.read_bytes()
    if file.suffix == ".zst":
        try:
            import zstandard  # optional: only .zst files need it
        except ModuleNotFoundError:
            raise ParlayError(f"{file} needs zstandard: pip install 'parlay[train]', or unpack it first") from None
        parts = []
        while data:  # a file may be several frames
            frame = zstandard.ZstdDecompressor().decompressobj()
            try:
                parts.append(frame.decompress(data))
            except zstandard.ZstdError as error:
                raise ValueError(f"{file} can't be unpacked ({error}): fetch it again") from None
            if not frame.eof:
                raise ValueError(f"{file} is cut short: fetch it again")
            data = frame.unused_data
        data = b"".join(parts)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{file}, line {line}: this is no text in UTF-8") from None


def divided(pairs: Sequence[Texts]) -> tuple[list[Texts], list[Texts]]:
    """Divide pairs into those to train on and those held out: one source in `HELDOUT_ONE_IN`, with all its
    translations.

    A source's hash decides, so no source is in both parts.
    """

    def held_out(source: str) -> bool:
        return int.from_bytes(hashlib.sha256(source.encode()).digest()[:8], "big") % HELDOUT_ONE_IN == 0

    return [pair for pair in pairs if not held_out(pair[0])], [pair for pair in pairs if held_out(pair[0])]


def make_tokenizer(pairs: Sequence[Texts], vocab_size: int, context: int) -> PreTrainedTokenizerFast:
    """Train one tokenizer for both languages. Encoding a source adds the separator after it."""
    every = max(1, 2 * len(pairs) // _SAMPLE)
    specials = [SEPARATOR, MASK, BLANK, *[_number(length) for length in range(LENGTHS)]]
    core = train_tokenizer([text for pair in pairs[::every] for text in pair], vocab_size - len(specials))
    core.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in specials])
    separator = (SEPARATOR, core.token_to_id(SEPARATOR))
    core.post_processor = processors.TemplateProcessing(single=f"$A {SEPARATOR}", special_tokens=[separator])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        mask_token=MASK,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )


def _number(length: int) -> str:
    return f"<|{length}|>"


def words_of(tokenizer: PreTrainedTokenizerFast) -> Words:
    """Return the ids of a translator's special tokens. Raises ValueError if the tokenizer lacks one."""
    known = tokenizer.get_vocab()
    names = (END_OF_TEXT, SEPARATOR, MASK, BLANK, _number(0))
    if absent := [name for name in (*names, _number(LENGTHS - 1)) if name not in known]:
        raise ValueError(f"the tokenizer has no {absent[0]}: take one that parlay train translator made")
    return Words(*[known[name] for name in names])


def tokenized(pairs: Sequence[Texts], tokenizer: PreTrainedTokenizerFast, longest: int) -> list[Pair]:
    """Encode pairs, leaving out those with an empty side or one of more than ``longest`` tokens."""
    core = tokenizer.backend_tokenizer
    sides = [core.encode_batch_fast([pair[side] for pair in pairs], add_special_tokens=False) for side in (0, 1)]
    each = [Pair(tuple(source.ids), tuple(target.ids)) for source, target in zip(*sides, strict=True)]
    return [pair for pair in each if 0 < len(pair.source) <= longest and 0 < len(pair.target) <= longest]


@dataclass(frozen=True, slots=True)
class PairBatches:
    """Draws batches of random pairs that fill ``rows`` rows of ``length`` places. A batch depends only on the random
    source."""

    pairs: Sequence[Pair]
    lay: Callable[[Pair, torch.Generator], Laid]
    rows: int
    length: int

    def draw(self, noise: torch.Generator) -> list[tuple[Pair, Laid]]:
        """Draw random pairs until the batch is full; see `filled`."""
        return self.filled((self.pairs[at] for at in self._endless(noise)), noise)

    def _endless(self, noise: torch.Generator) -> Iterator[int]:
        while True:
            yield from torch.randint(len(self.pairs), (256,), generator=noise).tolist()

    def filled(self, pairs: Iterable[Pair], noise: torch.Generator) -> list[tuple[Pair, Laid]]:
        """Take pairs until `_MISSES` in a row find no room."""
        packing, batch, misses = Packing(self.length, self.rows), list[tuple[Pair, Laid]](), 0
        for pair in pairs:
            laid = self.lay(pair, noise)
            if packing.place(laid.size) is None:
                misses += 1
                if misses == _MISSES:
                    break
            else:
                batch.append((pair, laid))
        return batch
