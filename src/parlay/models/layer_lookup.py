"""First layers that are looked up, as their output depends on a row's last tokens only (after Wang et al. 2022).

SkipBERT looks up the output of an encoder's first layers for short n-grams; here these layers see earlier tokens only.
A row's n-gram is made of the last tokens of its path. An unknown n-gram runs by itself, as a text from position 0 on.
So its state is the same bit for bit in every text, whether it was cached or not.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from parlay.cache import CacheShape, Rows
from parlay.cache.pages import Page, PageTable, zeros
from parlay.models.config import DecoderConfig
from parlay.models.forward import Forward, ForwardBatch
from parlay.models.lookup import last_tokens
from parlay.models.state_table import Gram, StateTable
from parlay.models.weights.shapes import BadCheckpoint
from parlay.types import Exactness, Skip

MOST_STATES = 65_536
"""Default of the most n-grams whose states are cached."""
_TOGETHER = 64
"""N-grams that run in one forward."""
_FIRST_ROOM = 256


@dataclass(frozen=True, slots=True)
class LookupPlan:
    """The most cached states, and a table of precomputed ones."""

    most: int = MOST_STATES
    table: StateTable | None = None


USUAL_LOOKUP = LookupPlan()


@dataclass(slots=True)
class LookupCounts:
    """Counts of the rows so far and of cache hits; of misses, how many states came from the table or were computed."""

    rows: int = 0
    hits: int = 0
    mapped: int = 0
    computed: int = 0


class RecentStates:
    """The states of at most ``most`` n-grams; the least recently used one is replaced."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._slots: OrderedDict[Gram, int] = OrderedDict()
        self._states_SH = torch.empty(0, 0)

    def __len__(self) -> int:
        return len(self._slots)

    def find(self, gram: Gram) -> int | None:
        """The index of an n-gram's state, which now counts as used; it is valid until states are added."""
        slot = self._slots.get(gram)
        if slot is not None:
            self._slots.move_to_end(gram)
        return slot

    def read(self, slots: Sequence[int]) -> Tensor:
        """Copy the states ``[N, H]`` at these indices."""
        return self._states_SH[slots]

    def add(self, grams: Sequence[Gram], states_UH: Tensor) -> None:
        """Cache the states of n-grams that are not cached yet; if they are too many, the last ones."""
        grams, states_UH = grams[-self._most :], states_UH[-self._most :]
        slots = [self._take(gram) for gram in grams]
        if len(self._slots) > len(self._states_SH):
            size = min(self._most, max(2 * len(self._states_SH), len(self._slots), _FIRST_ROOM))
            grown_SH = states_UH.new_empty(size, states_UH.shape[1])
            if len(self._states_SH):
                grown_SH[: len(self._states_SH)] = self._states_SH
            self._states_SH = grown_SH
        self._states_SH[slots] = states_UH

    def clear(self) -> None:
        """Drop all states."""
        self._slots.clear()

    def _take(self, gram: Gram) -> int:
        full = len(self._slots) == self._most
        slot = self._slots.popitem(last=False)[1] if full else len(self._slots)
        self._slots[gram] = slot
        return slot


class LayerLookup:
    """Replaces rows' embeddings by the output of the first layers, so that only the other layers run."""

    def __init__(self, forward: Forward, config: DecoderConfig, device: torch.device, plan: LookupPlan) -> None:
        """Raises BadCheckpoint if the table's states differ from those computed here."""
        assert config.ngram_layers is not None, "only such models have a lookup"
        layers, self.tokens = config.ngram_layers
        self._forward, self._layers, self._table = forward, layers, plan.table
        self._first, self._others = _halves(range(layers)), _halves(range(layers, config.num_layers))
        whole, recent = forward.kernels.cache_shapes(config, device)
        self._whole = _page_each(whole, _TOGETHER)
        self._recent_pages = None if recent is None else _page_each(recent.shape, _TOGETHER)
        self.kept, self.counts = RecentStates(plan.most), LookupCounts()
        if plan.table is not None and forward.kernels.exactness is Exactness.BITS:
            self._compare(plan.table)

    def prepare(self, work: ForwardBatch, tokens: Sequence[Sequence[int]]) -> ForwardBatch:
        """Make the work's rows start after the first layers; ``tokens`` are those of
        `parlay.models.lookup.path_tokens`."""
        last = last_tokens(work.places, tokens, self.tokens)
        grams = [tuple(token for token in reversed(own) if token >= 0) for own in last]
        return work._replace(inputs=self.states(grams).float(), skip=work.skip | self._first)

    def states(self, grams: Sequence[Gram]) -> Tensor:
        """The first layers' output ``[N, H]`` for each n-gram; missing ones are computed and cached."""
        slots = [self.kept.find(gram) for gram in grams]
        hits = [slot for slot in slots if slot is not None]
        self.counts.rows += len(grams)
        self.counts.hits += len(hits)
        if len(hits) == len(grams):
            return self.kept.read(hits)
        lacking = list(dict.fromkeys(gram for gram, slot in zip(grams, slots, strict=True) if slot is None))
        made_UH = self._made(lacking)
        known_NH = torch.cat((self.kept.read(hits), made_UH)) if hits else made_UH
        self.kept.add(lacking, made_UH)
        place, hit = {gram: len(hits) + number for number, gram in enumerate(lacking)}, iter(range(len(hits)))
        return known_NH[[place[gram] if slot is None else next(hit) for gram, slot in zip(grams, slots, strict=True)]]

    def compute(self, grams: Sequence[Gram]) -> Tensor:
        """Run the first layers on n-grams of 1 to ``tokens`` tokens; returns their states ``[U, H]``."""
        parts = [self._run(grams[begin : begin + _TOGETHER]) for begin in range(0, len(grams), _TOGETHER)]
        return torch.cat(parts)

    def _made(self, grams: Sequence[Gram]) -> Tensor:
        """Take states from the table, or compute them."""
        found = [-1] * len(grams) if self._table is None else self._table.find(grams)
        lacking = [gram for gram, number in zip(grams, found, strict=True) if number < 0]
        mapped = [number for number in found if number >= 0]
        self.counts.computed += len(lacking)
        self.counts.mapped += len(mapped)
        if self._table is None or not mapped:
            return self.compute(lacking)
        mapped_MH = self._table.read(mapped)
        if not lacking:
            return mapped_MH
        computed_CH = self.compute(lacking)
        made_UH = computed_CH.new_empty(len(grams), computed_CH.shape[1])
        is_mapped_U = torch.tensor(found) >= 0
        made_UH[is_mapped_U], made_UH[~is_mapped_U] = mapped_MH, computed_CH
        return made_UH

    def _run(self, grams: Sequence[Gram]) -> Tensor:
        recent = [None] * len(grams) if self._recent_pages is None else self._recent_pages[: len(grams)]
        tables = zip(grams, self._whole[: len(grams)], recent, strict=True)
        places = [Rows(table, 0, len(gram), recent=own) for gram, table, own in tables]
        ids = [token for gram in grams for token in gram]
        out = self._forward.run(ForwardBatch(ids, places, [], (self._layers,), self._others))
        ends = [end - 1 for end in accumulate(map(len, grams))]
        return out.taps[self._layers][ends].cpu()

    def _compare(self, table: StateTable) -> None:
        """Compare some of the table's states with computed ones, as other kernels, or an adapter in the weights, change
        bits."""
        grams, states_KH = table.sample()
        if not self.compute(grams).equal(states_KH):
            raise BadCheckpoint(
                f"{table.path} has states that this processor or build does not compute: make it here, with "
                "parlay train ngram-states, or delete it"
            )


def _halves(layers: range) -> Skip:
    return frozenset((half, layer) for layer in layers for half in ("attention", "mlp"))


def _page_each(shape: CacheShape, count: int) -> list[PageTable]:
    """Page tables of ``count`` texts that each fit one page."""
    memory = zeros((*shape.size[:3], count, *shape.size[3:]), shape.dtype, shape.device)
    tables = [PageTable() for _ in range(count)]
    for number, table in enumerate(tables):
        table.append(Page(memory, number, shape.lanes))
    return tables
