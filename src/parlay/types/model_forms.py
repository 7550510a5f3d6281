"""Special forms of a model: drafting for itself, filling canvases, and reading with an encoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

Sublayer = tuple[Literal["attention", "mlp"], int]
"""One half of a layer, and the layer's number from 0."""

Skip = frozenset[Sublayer]

NO_SKIP: Skip = frozenset()

HIDDEN_STEP = 256
"""Cached tokens are hidden from drafts in multiples of this number: the keys of one block of attention."""

PAGE_TOKENS = 16
"""Tokens in a page of the cache. Hidden tokens are shown to drafts in whole pages."""


class DraftForm(NamedTuple):
    """How a target runs more cheaply than when it verifies, to draft for itself.

    It leaves out the sub-layers of ``skip``. With a ``window``, rows attend to the first ``sinks`` and the last
    ``window`` cached tokens, both rounded up to multiples of `HIDDEN_STEP`, and to all rows of the draft. Of the tokens
    between, each head of each layer also attends to ``keys``, in whole pages: those that got most of its attention when
    pages were last chosen, at most ``refresh`` tokens ago. With ``bits``, weights are rounded to that many bits.
    """

    skip: Skip = NO_SKIP
    window: int = 0
    sinks: int = 0
    bits: int = 0
    keys: int = 0
    refresh: int = 0

    def hidden(self, cached: int) -> tuple[int, int]:
        """The span [first, end) of ``cached`` tokens that rows attend to only where pages of it are chosen.

        Empty if all of them could be chosen.
        """
        first = -(-self.sinks // HIDDEN_STEP) * HIDDEN_STEP
        last = (cached - self.window) // HIDDEN_STEP * HIDDEN_STEP
        return (first, last) if self.window and last - first > self.keys else (0, 0)


WHOLE_FORM = DraftForm()


@dataclass(frozen=True, slots=True, eq=False)
class ChosenPages:
    """Pages of a text's ``hidden`` span that rows attend to after all: ``pages_LKC`` int32, contiguous.

    C page numbers for each of K key heads in each of L layers; a page has `PAGE_TOKENS` tokens. Layers with sliding
    windows ignore them. Raises ValueError for pages outside the span.
    """

    pages_LKC: Tensor
    hidden: tuple[int, int]

    def __post_init__(self) -> None:
        first, end = (place // PAGE_TOKENS for place in self.hidden)
        if not self.pages_LKC.numel() or int(self.pages_LKC.min()) < first or int(self.pages_LKC.max()) >= end:
            raise ValueError(f"pages can be chosen of hidden tokens only, which are {first} to {end - 1} here")


class Ends(NamedTuple):
    r"""How a model tells the length of an answer, if one canvas is the whole answer to a source and a separator.

    - length: the separator's row predicts how many tokens the answer has, as one of the number tokens.
    - fertilities: a canvas reads the source first. Its rows predict how often the answer's places read each token.
    - frames: the canvas has ``scale`` places per source token. Equal neighbouring tokens count once, and then
      ``blank_id`` is dropped (CTC).
    - graph: there are ``scale`` places per source token, too, and a path from the first to the last is the answer
      (DA-Transformer). Rows predict the next place of the path: how far it is, as a number token, or by the attention
      of ``heads`` heads.

    The ``numbers`` number tokens stand for 0, 1, ... and have ids from ``first_number`` on. ``end_id`` joins the text
    after the answer. With ``copies``, open places read the source, spread evenly, instead of the mask. With ``drafts``,
    the model has learned to fill the next places of an answer that has begun.
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
        """Whether the model first guesses the answer's length, so that each place is one token of the answer."""
        return self.kind in ("length", "fertilities")


def link_size(numbers: int, heads: int) -> int:
    """Size of each head's query, and of its key, if a vertex has ``numbers`` numbers in all: an even number, or 0."""
    return (numbers // heads - 1) // 4 * 2 if heads else 0


class CanvasSpec(NamedTuple):
    """How a model fills places in any order. ``mask_id`` is the token that it reads at an open place.

    A canvas has ``block`` places; 0: as many as the answer may have. With ``shift``, the row before a place predicts
    its token, as in models adapted from autoregressive ones; otherwise the place's own row does.

    ``text`` says what rows of the text attend to. causal: the rows before them. block: all rows of their block too;
    blocks begin at multiples of ``block``, and a canvas ends where its block does. full: all rows, including the
    canvas. With ``whole``, places stay on the canvas until all are decided, because rows of the text attend to less
    than places do. With ``ends``, one canvas is the whole answer, and the model writes no other text.

    With ``ordered``, no row attends to later rows, not even on the canvas: rows of decided places come first, then
    those of open places, each at the position of its own place. When first places join the text, as many new ones are
    added at the canvas's end.

    With ``noise`` there is no mask, and ``mask_id`` is -1. Open places read random tokens below ``noise``, new ones in
    each forward, and a row also reads what the last forward predicted for its place (`Segment.guesses`).
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
    """How an encoder-decoder reads a prompt: the tokens before the first ``start`` are the source.

    ``start`` is the decoder's start token. A source has at most ``max_source`` tokens. The decoder has at most
    ``max_target`` tokens, counted from the start token.
    """

    start: int
    max_source: int
    max_target: int
