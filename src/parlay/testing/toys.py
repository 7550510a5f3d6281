"""Toy runners, which implement the full runner protocol. Their logits are a known function of the whole text."""

from __future__ import annotations

import zlib
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from parlay.testing.reference import LogitsOf
from parlay.types import (
    HIDDEN_STEP,
    NO_SKIP,
    CanvasSpec,
    Exactness,
    Finish,
    OutOfRoom,
    Output,
    RunnerSpec,
    Segment,
    Skip,
    shared_length,
    trees,
)


class RandomLogits:
    """Random logits that depend mostly on the last two ids, so that texts repeat themselves, and a little on the whole
    text, so that only the true text gives the true logits. Two instances that differ in ``drift`` agree often, not
    always."""

    def __init__(self, vocab_size: int, seed: int = 0, *, scale: float = 2.0, drift: float = 0.5) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.vocab_size = vocab_size
        self._seed = seed
        self._pairs_VVV = scale * torch.randn(vocab_size, vocab_size, vocab_size, generator=generator)
        self._drift_PV = drift * torch.randn(1024, vocab_size, generator=generator)

    def __call__(self, ids: Sequence[int]) -> Tensor:
        before = ids[-2] if len(ids) > 1 else 0
        return self._pairs_VVV[before, ids[-1]] + self._drift_PV[text_hash(ids, self._seed) % 1024]


def text_hash(ids: Sequence[int], seed: int = 0) -> int:
    """Return a number in [0, 2**32) that depends on every id of the text. It is the same on every machine and
    Python."""
    return zlib.crc32(array("q", ids).tobytes(), seed)


def without(token: int, logits_of: LogitsOf) -> LogitsOf:
    """Return the same logits, except that the token is never written."""

    def logits(ids: Sequence[int]) -> Tensor:
        logits_V = logits_of(ids).clone()
        logits_V[token] = -torch.inf
        return logits_V

    return logits


def with_mask(logits_of: LogitsOf, mask_id: int) -> LogitsOf:
    """Add a mask token to ``logits_of``, whose vocabulary has ``mask_id`` tokens. The mask is never written; in a text
    it counts as token 0."""

    def logits(ids: Sequence[int]) -> Tensor:
        return torch.cat([logits_of([token % mask_id for token in ids]), torch.tensor([-torch.inf])])

    return logits


def nan_after(logits_of: LogitsOf, length: int) -> LogitsOf:
    """Return the same logits, but NaN after exactly ``length`` ids."""

    def logits(ids: Sequence[int]) -> Tensor:
        result = logits_of(ids)
        return torch.full_like(result, torch.nan) if len(ids) == length else result

    return logits


@dataclass(slots=True)
class _State:
    """The state of a toy's sequence: its cached ids, the cache cell of each, and the last forward's segment and skipped
    layers."""

    salt: str
    tokens: list[int] = field(default_factory=list)
    cells: list[int] = field(default_factory=list)
    reserved: int = 0
    fed: Segment | None = None
    skipped: Skip = NO_SKIP
    in_flight: bool = False


class ToyRunner:
    """Implements `Runner` over a `LogitsOf`, strictly: misuse of the protocol is an AssertionError.

    ``tree``: the kind of drafts that it takes. ``capacity``: tokens of all sequences together; forks share their
    prefix. With ``cut`` above 1 it resembles a recurrent model with snapshots: after a rejection, it can only go back
    to a cached length that is a multiple of ``cut``. Later sequences with the same salt reuse a released text. Hidden
    states are a hash of the row's text, without its position. Each skipped sub-layer adds noise to the logits, which
    depends on the text alone; a full forward never reuses rows that skipped one. ``in_flight``: how many forwards may
    be under way at once. Calls for their sequences are refused until their outputs have been taken.
    """

    def __init__(
        self,
        logits_of: LogitsOf,
        vocab_size: int,
        *,
        tree: Literal["tree", "chain", "none"] = "tree",
        capacity: int = 65_536,
        max_context: int = 4096,
        cut: int = 1,
        canvas: CanvasSpec | None = None,
        in_flight: int = 1,
    ) -> None:
        self.spec = RunnerSpec(
            name="toy",
            vocab_size=vocab_size,
            max_context=max_context,
            tree=tree,
            exactness=Exactness.BITS,
            hidden_size=4,
            num_layers=4,
            device="cpu",
            dtype="float32",
            kernels="none: the logits are looked up",
            layer_skip=True,
            features=True,
            kv_heads=1,
            head_dim=4,
            together=canvas is not None,
            hides=canvas is None or canvas.text == "causal",
            canvas=canvas,
            in_flight=in_flight,
        )
        self.logits_of = logits_of
        self.forwards = 0
        self._capacity = capacity
        self._cut = cut
        self._states: dict[int, _State] = {}
        self._retired: dict[str, list[int]] = {}
        self._next_cell = 0
        self._holders: Counter[int] = Counter()
        self._unfilled = 0  # tokens reserved beyond those cached

    def embed(self, ids: Sequence[int]) -> Tensor:
        return torch.tensor([tap_row(0, [token]) for token in ids], dtype=torch.float32)

    def open(self, sequence: int, tokens: Sequence[int], salt: str = "") -> int:
        assert sequence not in self._states, f"sequence {sequence} is open already"
        reusable = min(shared_length(self._retired.get(salt, []), tokens), len(tokens) - 1, self.free_tokens())
        state = self._states[sequence] = _State(salt)
        state.reserved = reusable - reusable % self._cut
        self._unfilled += state.reserved
        self._cache(state, tokens[: state.reserved])
        return state.reserved

    def reserve(self, sequence: int, tokens: int) -> bool:
        if tokens > min(self._capacity, self.spec.max_context):
            raise OutOfRoom(f"the toy's cache can never hold {tokens} tokens (capacity {self._capacity})")
        state = self._landed(sequence)
        wanted = max(tokens, len(state.tokens))
        if wanted - state.reserved > self.free_tokens():
            return False
        self._unfilled += wanted - state.reserved
        state.reserved = wanted
        return True

    def forward(self, segments: Sequence[Segment], taps: Sequence[int] = (), skip: Skip = NO_SKIP) -> Output:
        self.forwards += not skip
        assert skip <= set(self.spec.sublayers), f"no such sub-layers: {skip}"
        assert len({segment.sequence for segment in segments}) == len(segments), "a sequence appears twice"
        logits: list[Tensor] = []
        starts = [0]
        texts: list[list[int]] = []
        for segment in segments:
            rows = self._texts(segment, skip)
            logits += [self._degraded(text, skip, segment) for text in rows[segment.logits_from - segment.base :]]
            starts.append(len(logits))
            texts += rows
        logits_RV = torch.stack(logits) if logits else torch.empty(0, self.spec.vocab_size)
        return Output(
            logits_RV,
            tuple(starts),
            {layer: torch.tensor([tap_row(layer, text) for text in texts], dtype=torch.float64) for layer in taps},
        )

    def begin(self, segments: Sequence[Segment], taps: Sequence[int] = (), skip: Skip = NO_SKIP) -> Finish:
        out, flying = self.forward(segments, taps, skip), [self._states[segment.sequence] for segment in segments]
        self._set_in_flight(flying, to=True)

        def finish() -> Output:
            self._set_in_flight(flying, to=False)
            return out

        return finish

    def _set_in_flight(self, flying: Sequence[_State], *, to: bool) -> None:
        for state in flying:
            state.in_flight = to

    def _landed(self, sequence: int) -> _State:
        """Return the state of a sequence that is in no unfinished forward."""
        state = self._states[sequence]
        assert not state.in_flight, f"sequence {sequence} is in a forward that is under way"
        return state

    def _degraded(self, text: Sequence[int], skip: Skip, segment: Segment) -> Tensor:
        logits_V = self.logits_of(text)
        seeds = [2 * layer + (half == "mlp") for half, layer in sorted(skip)]
        seeds += [100 + segment.bits] * (segment.bits > 0) + [200 + segment.hidden[1]] * (segment.hidden[1] > 0)
        for seed in seeds:
            noise = torch.Generator().manual_seed(text_hash(text, seed))
            logits_V = logits_V + 0.3 * torch.randn(self.spec.vocab_size, generator=noise)
        return logits_V

    def _texts(self, segment: Segment, skip: Skip) -> list[list[int]]:
        """Return the text that ends with each row that runs. Raises AssertionError for misuse of the protocol."""
        state = self._landed(segment.sequence)
        tree, base = segment.tree, segment.base
        ids = segment.pending + tree.tokens
        assert segment.pending, "a segment needs at least one pending token"
        assert segment.features is None or len(segment.features.rows_KH) <= segment.rows, "features of rows not run"
        apart = segment.together or segment.places
        assert not apart or self.spec.together, "this runner's rows can't see each other, or move"
        assert base < segment.end, "a segment needs at least one row that runs"
        assert base <= segment.logits_from <= segment.end, f"logits_from {segment.logits_from} of {segment.end} rows"
        assert all(0 <= token < self.spec.vocab_size for token in ids), f"ids outside the vocabulary: {ids}"
        assert len(state.tokens) + segment.end <= state.reserved, f"{segment.end} rows were not reserved"
        assert not tree.tokens or self.spec.tree != "none", "this runner takes no drafts"
        assert self.spec.tree == "tree" or trees.is_chain(tree), "this runner takes chains only"
        assert base <= 0 or _serves(state, segment, skip), f"the last forward left no {base} rows of this segment"
        assert base + len(state.tokens) >= 0, f"{-base} of {len(state.tokens)} cached tokens can't run again"
        hidden = all(place % HIDDEN_STEP == 0 for place in segment.hidden)
        assert hidden, f"{segment.hidden} are no multiples of {HIDDEN_STEP}"
        assert segment.hidden[1] <= len(state.tokens), f"{segment.hidden} are not all cached"
        state.fed, state.skipped = segment, skip
        return row_texts(state.tokens, segment)

    def keep(self, sequence: int, path: Sequence[int]) -> int:
        state = self._landed(sequence)
        assert state.fed is not None, "keep without a forward"
        assert not state.skipped, "rows of a forward that skipped sub-layers can't be kept"
        assert not state.fed.approximate, "rows of a forward in another form can't be kept"
        tree = state.fed.tree
        assert not path or tuple(path) == trees.path_to(tree, path[-1]), f"{tuple(path)} is not a path from the root"
        self._cache(state, [*state.fed.pending, *(tree.tokens[node] for node in path)])
        rejected = len(path) < len(tree)
        state.fed = None
        return self.truncate(sequence, len(state.tokens)) if rejected else len(state.tokens)

    def truncate(self, sequence: int, length: int) -> int:
        state = self._landed(sequence)
        length = min(length, len(state.tokens))
        length -= length % self._cut
        self._unfilled += len(state.tokens) - length
        self._let_go(state.cells[length:])
        del state.tokens[length:], state.cells[length:]
        state.fed = None
        return length

    def fork(self, sequence: int, copy: int) -> None:
        assert copy not in self._states, f"sequence {copy} is open already"
        state = self._states[sequence]
        self._states[copy] = _State(state.salt, list(state.tokens), list(state.cells), len(state.tokens))
        self._holders.update(state.cells)

    def release(self, sequence: int) -> None:
        state = self._states.pop(sequence, None)
        if state is not None:
            self._retired[state.salt] = state.tokens
            self._unfilled -= state.reserved - len(state.tokens)
            self._let_go(state.cells)

    def free_tokens(self) -> int:
        return self._capacity - len(self._holders) - self._unfilled

    def capacity(self) -> int:
        return self._capacity

    def check(self) -> None:
        assert self.free_tokens() >= 0, "more tokens are reserved than the cache holds"
        unfilled = sum(state.reserved - len(state.tokens) for state in self._states.values())
        assert self._unfilled == unfilled, f"{self._unfilled} tokens counted as reserved, {unfilled} are"
        assert self._holders.keys() == {cell for state in self._states.values() for cell in state.cells}, "a cell leaks"
        for sequence, state in self._states.items():
            assert len(state.tokens) == len(state.cells) <= state.reserved, f"sequence {sequence} outgrew its reserve"
            assert len(state.tokens) <= self.spec.max_context, f"sequence {sequence} outgrew the context"

    def _cache(self, state: _State, tokens: Sequence[int]) -> None:
        state.tokens += tokens
        self._unfilled -= len(tokens)
        cells = range(self._next_cell, self._next_cell + len(tokens))
        state.cells += cells
        self._holders.update(cells)
        self._next_cell += len(tokens)

    def _let_go(self, cells: Sequence[int]) -> None:
        self._holders.subtract(cells)
        for cell in cells:
            if self._holders[cell] == 0:
                del self._holders[cell]


def row_texts(cached: Sequence[int], segment: Segment) -> list[list[int]]:
    """Return the text that ends with each row that runs, of a segment fed after ``cached``: pending rows, then nodes.

    If rows see each other, the text of each is the text before them, the ids of all of them, and then their ids up to
    the row itself. If a row has a position of its own, the positions on its path come first.
    """
    tree, base = segment.tree, segment.base
    text = [*cached, *segment.pending]
    texts = [text[:end] for end in range(len(cached) + min(base, 0) + 1, len(text) + 1)]
    paths = (trees.path_to(tree, node) for node in range(len(tree)))
    texts += [[*text, *(tree.tokens[above] for above in path)] for path in paths]
    first_node = len(texts) - len(tree)
    for chain in trees.last_chains(tree, segment.together):
        last = texts[first_node + chain.stop - 1]
        for row in range(first_node + chain.start, first_node + chain.stop):
            texts[row] = last + texts[row][len(last) - len(chain) :]
    for node in range(len(tree) - len(segment.places), len(tree)):
        path = trees.path_to(tree, node)
        texts[first_node + node] = [*(segment.places[each - len(tree)] for each in path), *texts[first_node + node]]
    return texts[max(base, 0) :]


def _serves(state: _State, segment: Segment, skip: Skip) -> bool:
    """Whether the last forward computed the rows before the segment's base."""
    last = state.fed
    if last is None or state.skipped != skip or ((skip or last.approximate) and last.base < 0):
        return False
    return segment.follows(last)


def tap_row(layer: int, text: Sequence[int]) -> list[float]:
    """Return the toy's hidden state that enters ``layer`` at the last id of ``text``."""
    number = text_hash(text)
    return [float(layer), float(text[-1]), float(number >> 16), float(number & 0xFFFF)]
