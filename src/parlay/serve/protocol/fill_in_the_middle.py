"""Fill-in-the-middle: prompts from a prefix and a suffix, for models trained on them.

A prompt is the prefix, the suffix, and the part of the middle that is written already. The model continues that part,
so the text before the cursor may be cut anywhere: what follows the cut counts as written. If the cut stays in place
while somebody types, all of the prompt before its end stays the same and is found in the prefix cache. But a word that
ends behind the cut reads as complete, so half a word is seldom completed: see `Gap.without_word`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from parlay.llm.vocabulary import Vocabulary
from parlay.serve.errors import TOO_LONG, ApiError
from parlay.serve.hosted import Served
from parlay.serve.settings import InfillOrder, Settings
from parlay.text.prompts import TokensPrompt
from parlay.text.tokenize import Encoder, PromptTooLong, opening
from parlay.types import Tokenizer


class _Marks(NamedTuple):
    """A family's special tokens: before the prefix, the suffix and the middle; and those of repositories, if it has
    them."""

    prefix: str
    suffix: str
    middle: str
    repository: str = ""
    file: str = ""


_FAMILIES = (
    _Marks("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>"),  # Qwen
    _Marks("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<repo_name>", "<file_sep>"),  # StarCoder
    _Marks("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    _Marks("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    _Marks("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
)
_WORD = re.compile(r"\w{1,64}[ \t]?")
"""A word and the space before it, matched backwards: a search for a word at the end of a text takes quadratic time."""
_REPOSITORY, _FILE = "repository\n", "file\n"
"""Names for the model, as clients send none; they are constant, so that prompts share a prefix."""


@dataclass(frozen=True, slots=True)
class Gap:
    """A place to fill in a file; ``written`` is the text between the prefix and the cursor. ``others`` are names and
    texts of other files.

    At most ``suffix_tokens`` of the suffix are used; None: all.
    """

    prefix: str
    suffix: str
    written: str = ""
    others: Sequence[tuple[str, str]] = ()
    suffix_tokens: int | None = None

    def cut(self, order: InfillOrder, suffix_tokens: int | None = None) -> Gap:
        """The same gap with the text before the cursor cut as ``order`` says, and a limit on the suffix."""
        text = self.prefix + self.written
        at = {"psm": len(text), "line": text.rfind("\n") + 1, "spm": 0}[order]
        return replace(self, prefix=text[:at], written=text[at:], suffix_tokens=suffix_tokens)

    def without_word(self) -> tuple[Gap, str]:
        """Remove the word that is being written, with the space before it; returns the gap and that word.

        Half a word has other tokens than the whole word, so the answer is made to begin with it instead (token
        healing).
        """
        found = _WORD.match(self.written[::-1])
        at = len(self.written) - (found.end() if found else 0)
        return replace(self, written=self.written[:at]), self.written[at:]


class GapFields(NamedTuple):
    """A request's names for the parts of a gap."""

    prefix: str = "prompt"
    suffix: str = "suffix"
    written: str = "prompt"
    others: str = "input_extra"


OPENAI = GapFields()


def infill_prompt(vocabulary: Vocabulary, most: int, gap: Gap, fields: GapFields = OPENAI) -> list[int]:
    """Token ids of a prompt for the gap.

    Raises ApiError for a model without such tokens, and for more than ``most`` tokens.
    """
    tokenizer, encoder = vocabulary.tokenizer, vocabulary.encoder
    marks = _marks(tokenizer) if tokenizer is not None else None
    if tokenizer is None or encoder is None or marks is None:
        message = (
            f"{fields.suffix} is not supported by this model, whose tokenizer has no fill-in-the-middle tokens: "
            "remove it"
        )
        raise ApiError(400, message, fields.suffix, "unsupported_field")
    encode = _Encode(encoder, most)
    return [
        *opening(tokenizer),
        *(_others(gap, marks, encode, fields.others) if gap.others else ()),
        marks["prefix"],
        *encode(fields.prefix, gap.prefix),
        marks["suffix"],
        *encode(fields.suffix, gap.suffix)[: gap.suffix_tokens],
        marks["middle"],
        *encode(fields.written, gap.written),
    ]


def gap_prompt(served: Served, settings: Settings, prefix: str, suffix: str) -> TokensPrompt:
    """The prompt for the gap between two texts, cut as the server's settings say; raises as `infill_prompt`."""
    gap = Gap(prefix, suffix).cut(settings.infill_order, settings.infill_suffix)
    return TokensPrompt(prompt_token_ids=infill_prompt(served.vocabulary, served.max_model_len, gap))


def _others(gap: Gap, marks: dict[str, int], encode: _Encode, field: str) -> list[int]:
    """Token ids of the other files; models that know repositories get the files' names."""
    if marks.keys() < {*_Marks._fields}:
        return [token for name, text in gap.others for token in encode(field, f"{name}\n{text}\n")]
    ids = [marks["repository"], *encode(field, _REPOSITORY)]
    for name, text in gap.others:
        ids += [marks["file"], *encode(field, f"{name}\n{text}")]
    return [*ids, marks["file"], *encode(field, _FILE)]


def _marks(tokenizer: Tokenizer) -> dict[str, int] | None:
    """The special tokens' ids of the first family that the tokenizer has. The vocabulary is not listed, as that takes
    long."""
    known = tokenizer.backend_tokenizer.token_to_id if tokenizer.is_fast else tokenizer.get_vocab().get
    for family in _FAMILIES:
        ids = {name: known(token) for name, token in family._asdict().items() if token}
        found = {name: token for name, token in ids.items() if token is not None}
        if found.keys() >= {"prefix", "suffix", "middle"}:
            return found
    return None


@dataclass(frozen=True, slots=True)
class _Encode:
    encoder: Encoder
    most: int

    def __call__(self, field: str, text: str) -> tuple[int, ...]:
        """Tokenize a field's text. Raises ApiError if it is too long."""
        try:
            return self.encoder.encode(text, self.most, special=False) if text else ()
        except PromptTooLong as error:
            raise ApiError(400, str(error), field, TOO_LONG) from None
