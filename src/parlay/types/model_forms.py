"""Forms of a model beside the usual one: how it drafts for itself, fills canvases, or reads with an encoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

Sublayer = tuple[Literal["attention", "mlp"], int]
"""Half of a layer, and the layer's number from 0."""

Skip = frozenset[Sublayer]

NO_SKIP: Skip = frozenset()

HIDDEN_STEP = 256
"""Cached tokens are hidden from drafts by so many at a time: keys of one block of attention."""

PAGE_TOKENS = 16
"""Of hidden tokens so many neighbours are seen or not: a page of the cache."""


class DraftForm(NamedTuple):
    """How a target runs more cheaply than it verifies, to draft for itself.

    It leaves out the sub-layers of ``skip``. With a ``window``, rows see of the cached tokens the first ``sinks`` and
    the last ``window``, both rounded up to multiples of `HIDDEN_STEP`, and all rows of the draft. Of those between,
    each head of each layer sees ``keys`` as well, in whole pages: those to which its queries paid most attention when
    that was looked at last, ``refresh`` tokens ago at most. With ``bits``, its weights are rounded to so many.
    """

    skip: Skip = NO_SKIP
    window: int = 0
    sinks: int = 0
    bits: int = 0
    keys: int = 0
    refresh: int = 0

    def hidden(self, cached: int) -> tuple[int, int]:
        """Which of so many cached tokens no row sees, chosen ones apart: from the first number to before the second.

        None are hidden where all of them could be chosen.
        """
        first = -(-self.sinks // HIDDEN_STEP) * HIDDEN_STEP
        last = (cached - self.window) // HIDDEN_STEP * HIDDEN_STEP
        return (first, last) if self.window and last - first > self.keys else (0, 0)


WHOLE_FORM = DraftForm()


@dataclass(frozen=True, slots=True, eq=False)
class ChosenPages:
    """Pages of the ``hidden`` span of a text that rows see all the same: ``pages_LKC`` int32, contiguous.

    C of them for each of K key heads in each of L layers, by their numbers in the text; each has `PAGE_TOKENS` tokens.
    Layers that see the last keys alone take none. Raises ValueError for pages outside the span.
    """

    pages_LKC: Tensor
    hidden: tuple[int, int]

    def __post_init__(self) -> None:
        first, end = (place // PAGE_TOKENS for place in self.hidden)
        if not self.pages_LKC.numel() or int(self.pages_LKC.min()) < first or int(self.pages_LKC.max()) >= end:
            raise ValueError(f"pages can be chosen of hidden tokens only, which are {first} to {end - 1} here")


class Ends(NamedTuple):
    """How long an answer is, where one canvas is the whole of it, after a prompt of a source and a separator.

    - length: the row of the separator tells how many tokens the answer has, by the tokens of numbers.
    - fertilities: the rows of a canvas that reads the source tell so how often the answer's places read each token.
    - frames: there are ``scale`` places for each token of the source. Of their tokens equal neighbours are one, and
      then ``blank_id`` is left out (CTC).
    - graph: there are so many places, of which a path from the first to the last is the answer (DA-Transformer). Rows
      tell the next place by the tokens of numbers: how far it is, or by attention of so many ``heads``.

    Tokens of the ``numbers`` from 0 on begin at ``first_number``. ``end_id`` joins the text after the answer. With
    ``copies``, open places read the source, spread evenly, in place of the mask. With ``drafts`` the model has learned
    to fill the next places of an answer that has begun.
    """

    kind: Literal["length", "fertilities", "frames", "graph"]
    end_id: int
    first_number: int
    numbers: int
    scale: int = 1
    blank_id: int = 0
    copies: bool = False
    drafts: bool = False
    heads: int = 0

    @property
    def guesses(self) -> bool:
        """Whether the model guesses how long an answer is, and its places are the answer's."""
        return self.kind in ("length", "fertilities")


def link_size(numbers: int, heads: int) -> int:
    """Numbers of each head's query, and of its key, where a vertex has so many in all: an even count, or 0."""
    return (numbers // heads - 1) // 4 * 2 if heads else 0


class CanvasSpec(NamedTuple):
    """How a model fills places in any order: ``mask_id`` is what it reads in an open one.

    A canvas has ``block`` places; 0: as many as the answer may have. With ``shift`` the row before a place predicts its
    token, as in models adapted from ones that write token by token; otherwise the place's own row does.

    ``text`` says what rows of the text see: causal, those before them; block, those of their whole block as well, which
    begins at a multiple of ``block``, and a canvas ends where its block does; full, all rows, the canvas included. With
    ``whole``, places stay on the canvas until all of it are decided, because the text would see less than they do. With
    ``ends`` one canvas is the answer, and the model writes no other text.

    With ``ordered`` no row sees those after it, on the canvas either: rows of decided places come first, then those of
    open ones, each at the position of its own place. When the first places join the text, as many join the canvas at
    its end.

    With ``noise`` there is no mask, and ``mask_id`` is -1: open places read random ones of so many tokens, other ones
    in each forward, and a row also reads what the forward before said of its place (`Segment.guesses`).
    """

    mask_id: int
    block: int = 0
    shift: bool = False
    text: Literal["causal", "block", "full"] = "causal"
    whole: bool = False
    ends: Ends | None = None
    ordered: bool = False
    noise: int = 0


class EncoderSpec(NamedTuple):
    """How an encoder-decoder reads a prompt: tokens before the first ``start`` are the source.

    ``start`` is the decoder's start token. A source has at most ``max_source`` tokens. From the start token on there
    are at most ``max_target``, which count for themselves.
    """

    start: int
    max_source: int
    max_target: int
