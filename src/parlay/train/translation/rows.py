"""Packs texts into the rows of a training batch; each text has a canvas whose places attend to each other."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen3ForCausalLM

IGNORED = -100


class Laid(NamedTuple):
    """A pair laid out for a model: a text, then a canvas. ``labels`` belong to the last rows of both together.

    The first ``deep`` rows of the text run through all layers; in a shallow model, the others run through fewer. A pair
    may have a second canvas, ``aside``, between text and canvas. Both canvases attend to the text, and not to each
    other. With ``begins``, the canvas is divided into as many equal blocks, which do not attend to each other. Block i
    follows only the first ``begins[i]`` rows of the text.
    """

    text: Sequence[int]
    canvas: Sequence[int]
    labels: Sequence[int]
    deep: int
    aside: Sequence[int] = ()
    begins: Sequence[int] = ()

    @property
    def before(self) -> int:
        """Number of rows before the canvas."""
        return len(self.text) + len(self.aside)

    @property
    def size(self) -> int:
        return self.before + len(self.canvas)


class Packing:
    """Packs texts one after another into at most ``count`` rows of ``length`` places."""

    def __init__(self, length: int, count: int) -> None:
        self.length, self._count = length, count
        self.used = list[int]()

    def place(self, size: int) -> int | None:
        """Reserve room for a text; return its first place, counted over all rows, or None if no row has room."""
        for row, used in enumerate(self.used):
            if used + size <= self.length:
                self.used[row] += size
                return row * self.length + used
        if len(self.used) == self._count or size > self.length:
            return None
        self.used.append(size)
        return (len(self.used) - 1) * self.length


@dataclass(frozen=True, slots=True)
class Rows:
    """R rows of N places that hold texts with their canvases.

    Of text b, ``first_B`` is the first place, counted over all rows, ``texts_B`` the number of rows before its canvas,
    and ``canvases_B`` the number of places on it. Each place has a token ``ids_RN``, its position in the text
    ``places_RN``, its text ``owners_RN`` (-1: none), its canvas ``canvas_RN`` (0: the text itself), the number of text
    rows that it attends to ``sees_RN``, and whether it runs through all layers ``deep_RN``. An ``aside`` counts as
    before the canvas.
    """

    ids_RN: Tensor
    places_RN: Tensor
    owners_RN: Tensor
    canvas_RN: Tensor
    sees_RN: Tensor
    deep_RN: Tensor
    first_B: Tensor
    texts_B: Tensor
    canvases_B: Tensor

    @staticmethod
    def of(laid: Sequence[Laid], length: int = 0, count: int = 0) -> Rows:
        """Pack texts into ``count`` rows of ``length`` places; by default each text has its own row.

        Raises ValueError if they don't fit.
        """
        sizes = [each.size for each in laid]
        packing = Packing(length or max(sizes), count or len(laid))
        firsts = [packing.place(size) if length else number * max(sizes) for number, size in enumerate(sizes)]
        flat = torch.zeros(6, (count or len(laid)) * packing.length, dtype=torch.long)
        flat[2] = -1
        for owner, (each, first) in enumerate(zip(laid, firsts, strict=True)):
            if first is None:
                raise ValueError(f"{len(laid)} texts don't fit into {count} rows of {length} places")
            flat[:, first : first + each.size] = _places(each, owner)
        ids, places, owners, canvases, sees, deep = flat.view(6, -1, packing.length)
        counts = [[each.before for each in laid], [len(each.canvas) for each in laid]]
        numbers = (torch.tensor(each) for each in (firsts, *counts))
        return Rows(ids, places, owners, canvases, sees, deep == 1, *numbers)

    @property
    def canvas_BC(self) -> Tensor:
        """The canvases' places, counted over all rows; a shorter canvas repeats its last place."""
        place = torch.arange(int(self.canvases_B.max()))
        return (self.first_B + self.texts_B)[:, None] + place.clamp(max=self.canvases_B[:, None] - 1)

    @property
    def inside_BC(self) -> Tensor:
        """Whether the canvas has such a place, bool."""
        return torch.arange(int(self.canvases_B.max())) < self.canvases_B[:, None]

    def visible(self) -> Tensor:
        """Return the attention mask ``[R, 1, N, N]``: text rows attend causally, canvas places to their text and whole
        canvas."""
        seen_R1N, sees_RN1 = self.canvas_RN[:, None, :], self.canvas_RN[:, :, None]
        before_RNN = (self.places_RN[:, None, :] < self.sees_RN[:, :, None]) & (seen_R1N == 0)
        own_RNN = self.owners_RN[:, :, None] == self.owners_RN[:, None, :]
        return (own_RNN & (before_RNN | ((seen_R1N == sees_RN1) & (sees_RN1 > 0))))[:, None]

    def filled(self, shown_M: Tensor, tokens_M: Tensor) -> Rows:
        """Return the rows with these places, counted over all rows, set to these tokens."""
        ids_RN = self.ids_RN.flatten().scatter(0, shown_M, tokens_M).view_as(self.ids_RN)
        return replace(self, ids_RN=ids_RN)

    def labels(self, laid: Sequence[Laid]) -> tuple[Tensor, Tensor]:
        """Return the places ``[M]`` that have a label, counted over all rows, and their labels."""
        ends = (self.first_B + self.texts_B + self.canvases_B).tolist()
        numbers = itertools.chain.from_iterable(
            range(end - len(each.labels), end) for end, each in zip(ends, laid, strict=True)
        )
        labels_M = torch.tensor([label for each in laid for label in each.labels])
        wanted_M = labels_M != IGNORED
        return torch.tensor(list(numbers))[wanted_M], labels_M[wanted_M]


def _places(laid: Laid, owner: int) -> Tensor:
    """Compute the fields of `Rows` for the places of one text with its canvases, ``[6, size]``."""
    text, aside, blocks = len(laid.text), len(laid.aside), len(laid.begins) or 1
    begins = torch.tensor(laid.begins or [text]).repeat_interleave(len(laid.canvas) // blocks)
    within = torch.arange(len(laid.canvas) // blocks).repeat(blocks)
    numbers = torch.arange(1, 1 + blocks).repeat_interleave(len(laid.canvas) // blocks)
    own = torch.arange(text + aside)
    found = torch.full((6, laid.size), owner)
    found[0] = torch.tensor([*laid.text, *laid.aside, *laid.canvas])
    found[1] = torch.cat((own, begins + within))
    found[3] = torch.cat((torch.zeros_like(own).masked_fill_(own >= text, 1 + blocks), numbers))
    found[4] = torch.cat(((own + 1).clamp(max=text), begins))
    found[5] = torch.arange(laid.size) < laid.deep
    return found


class Network:
    """A model in training, and the way its rows run through it; layers are compiled if asked and a C++ compiler is
    there.

    Rows that are not deep run only through the last ``shallow`` layers; 0: all rows through all layers.
    """

    def __init__(self, model: Qwen3ForCausalLM, shallow: int = 0, *, compiled: bool = False) -> None:
        self.model = model
        model.set_attn_implementation("eager")  # which is quicker than torch's own where rows are short
        self._joins = model.config.num_hidden_layers - shallow if shallow else 0
        there = compiled and any(shutil.which(name) for name in ("g++", "c++", "clang++"))
        self._through = torch.compile(through, dynamic=False) if there else through

    def hidden(self, rows: Rows) -> Tensor:
        """Return the final hidden states ``[R * N, H]`` of all places."""
        decoder = self.model.model
        embedded_RNH = hidden_RNH = decoder.embed_tokens(rows.ids_RN)
        seen_R1NN = torch.zeros(()).masked_fill(~rows.visible(), torch.finfo(torch.bfloat16).min)
        turns = decoder.rotary_emb(hidden_RNH, rows.places_RN)
        for number, layer in enumerate(decoder.layers):
            if self._joins and number == self._joins:
                hidden_RNH = torch.where(rows.deep_RN[:, :, None], hidden_RNH, embedded_RNH)
            hidden_RNH = self._through(layer, hidden_RNH, seen_R1NN, turns)
        final_RNH: Tensor = decoder.norm(hidden_RNH)
        return final_RNH.flatten(0, 1)

    def logits(self, states_MH: Tensor) -> Tensor:
        """Return the logits in float32."""
        logits: Tensor = self.model.lm_head(states_MH)
        return logits.float()


def through(layer: nn.Module, hidden_RNH: Tensor, seen_R1NN: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """Run one layer. It is compiled only once, as layers differ only in their weights."""
    left_RNH: Tensor = layer(hidden_RNH, attention_mask=seen_R1NN, position_embeddings=turns)
    return left_RNH


def padded(rows: Sequence[Sequence[int]], value: int = IGNORED) -> Tensor:
    """Pad rows of ids to one tensor ``[B, T]``."""
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=value)
