"""A runner over llama.cpp; its exactness level is ``seed``, as its rows depend on the batch shape.

llama.cpp masks a row by the sequences of its cells. A Parlay sequence has one of these. While a tree is verified, each
path to a leaf has one, too, to which all cells of the path belong (as in llama.cpp's own example of tree speculation).
`keep` moves the accepted path's cells to the sequence, and frees the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from parlay.models.llama_cpp.context import BatchRow, Context, Decoded
from parlay.models.reserving import ReservingRunner, TakenForGood, refuse
from parlay.types import NO_SKIP, Exactness, OutOfRoom, Output, Runner, RunnerSpec, Segment, Skip, trees

_ROOT = -1


@dataclass(slots=True)
class _Step:
    """The rows of the last forward.

    ``homes`` maps each node to a llama.cpp sequence that has its path; the root's is the sequence's own. ``tips`` maps
    each such llama.cpp sequence to the node at its end.
    """

    segment: Segment
    homes: dict[int, int]
    tips: dict[int, int]


@dataclass(slots=True)
class _Sequence:
    number: int
    """The number of its own llama.cpp sequence."""
    cached: int = 0
    reserved: int = 0
    step: _Step | None = None

    def position(self, segment: Segment, depth: int = 0) -> int:
        """The position of a node at this depth; depth 0 is the root."""
        return self.cached + len(segment.pending) - 1 + depth


class LlamaCppRunner(TakenForGood, ReservingRunner[_Sequence], Runner):
    """A runner over a llama.cpp context; sequences share prefixes only by `fork`."""

    def __init__(self, context: Context, *, name: str, longest: int | None = None, capacity: int | None = None) -> None:
        """Texts have at most ``longest`` tokens; at most ``capacity`` tokens (None: all cells) can be reserved."""
        facts = context.facts
        cells = min(facts.cells, capacity or facts.cells)
        super().__init__(cells, facts.max_context)
        self._context, self._windows = context, facts.windows
        self._free = list(reversed(range(facts.sequences)))
        self.nbytes = facts.cells * facts.cell_bytes
        self._spec = RunnerSpec(
            name=name,
            vocab_size=facts.vocab_size,
            max_context=min(facts.max_context, cells, longest or facts.max_context),
            tree="tree",
            exactness=Exactness.SEED,
            hidden_size=facts.hidden_size,
            num_layers=facts.num_layers,
            device="cpu",
            dtype="float32",
            kernels=facts.kernels,
            eos_ids=facts.eos_ids,
        )

    def open(self, sequence: int, tokens: Sequence[int], salt: str = "") -> int:
        """Begin a sequence; nothing is cached of it. Raises OutOfRoom if llama.cpp has no free sequence."""
        self._begin(sequence)
        return 0

    def forward(self, segments: Sequence[Segment], taps: Sequence[int] = (), skip: Skip = NO_SKIP) -> Output:
        """Run all segments in one batch; a tree with more leaves than llama.cpp has free sequences runs path by path.

        Raises ValueError for what this runner can't do: skip sub-layers, read features, run cached tokens again, or tap
        other hidden states than the LM head's inputs.
        """
        untapped = [tap for tap in taps if tap != self._spec.num_layers]
        for segment in segments:
            step = self._sequences[segment.sequence].step
            refuse(
                self._spec.name,
                "llama.cpp",
                segment,
                skip,
                step.segment if step is not None else None,
                untapped=untapped,
            )
        parts: list[list[BatchRow] | Decoded] = []
        for segment in segments:
            rows = self._planned(segment)
            parts.append(self._by_paths(segment, bool(taps)) if rows is None else rows)
        batch = [row for part in parts if not isinstance(part, Decoded) for row in part]
        results = _divided(self._context.decode(batch, bool(taps)) if batch else None, parts)
        starts = tuple(accumulate((len(each.logits_WV) for each in results), initial=0))
        states = [each.states_NH for each in results if each.states_NH is not None]
        return Output(torch.cat([each.logits_WV for each in results]), starts, {tap: torch.cat(states) for tap in taps})

    def keep(self, sequence: int, path: Sequence[int]) -> int:
        """Cache the pending rows and the nodes of ``path``, as far as the last forward ran them."""
        state = self._sequences[sequence]
        step = state.step
        assert step is not None, f"sequence {sequence} has no forward to keep"
        kept = [node for node in path if node in step.homes]
        begin = state.cached + len(step.segment.pending)
        state.cached = begin + len(kept)
        home = step.homes[kept[-1]] if kept else state.number
        if home != state.number:
            self._context.remove(state.number, begin)
            self._context.copy(home, state.number, state.cached, begin)
        self._forget(state)
        return state.cached

    def truncate(self, sequence: int, length: int) -> int:
        """Forget tokens from ``length`` on, or all if llama.cpp dropped keys that the next row would need."""
        state = self._sequences[sequence]
        state.cached = min(state.cached, max(length, 0))
        self._forget(state)
        if self._windows and self._context.positions(state.number)[0] > 0:
            state.cached = 0
            self._forget(state)
        return state.cached

    def fork(self, sequence: int, copy: int) -> None:
        """Begin ``copy`` with the cells of ``sequence``. Raises OutOfRoom if llama.cpp has no free sequence."""
        state = self._sequences[sequence]
        twin = self._begin(copy)
        self._context.copy(state.number, twin.number, state.cached)
        twin.cached = state.cached

    def release(self, sequence: int) -> None:
        state = self._sequences.pop(sequence, None)
        if state is not None:
            state.cached = 0
            self._forget(state)
            self._free.append(state.number)

    def check(self) -> None:
        """Check that each sequence has exactly the cells of its tokens, and that each llama.cpp sequence has one
        owner."""
        assert self.free_tokens() >= 0, "more is reserved than the cache holds"
        numbers = list(self._free)
        for name, state in self._sequences.items():
            numbers += [state.number] if state.step is None else state.step.tips
            if state.step is None:
                cells = self._context.positions(state.number)[1] + 1
                assert cells == state.cached, f"sequence {name} has {cells} cells instead of {state.cached}"
        assert sorted(numbers) == list(range(self._context.facts.sequences)), "a sequence of llama.cpp has two owners"
        assert all(self._context.positions(number) == (-1, -1) for number in self._free), "an unused sequence has cells"

    # ----------------------------------------------------------------------------------------------------- sequences

    def _begin(self, sequence: int) -> _Sequence:
        assert sequence not in self._sequences, f"sequence {sequence} is open already"
        if not self._free:
            most = self._context.facts.sequences
            raise OutOfRoom(f"llama.cpp holds {most} sequences at a time: run fewer requests together")
        state = self._sequences[sequence] = _Sequence(self._free.pop())
        return state

    def _forget(self, state: _Sequence, pending: int = 0) -> None:
        """Remove the cells after the cached and ``pending`` tokens, and the last forward's tree."""
        step, state.step = state.step, None
        self._context.remove(state.number, state.cached + pending)
        self._give([each for each in step.tips if each != state.number] if step is not None else [])

    def _give(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._context.remove(number, 0)
        self._free += numbers

    # ------------------------------------------------------------------------------------------------------ forwards

    def _planned(self, segment: Segment) -> list[BatchRow] | None:
        """Lay out the rows of a batch; None if llama.cpp has too few free sequences for the leaves."""
        state, known = self._sequences[segment.sequence], max(0, segment.base - len(segment.pending))
        left = self._left(state, segment)
        if any(node not in left.homes for node in range(known)):
            return None
        step, owners = _Step(segment, dict(left.homes), dict(left.tips)), dict[int, list[int]]()
        state.step = step
        for path in trees.leaf_paths(segment.tree):
            if path[-1] < known:
                continue
            above = [node for node in path if node < known]
            number = left.homes[above[-1] if above else _ROOT]
            if step.tips[number] != (above[-1] if above else _ROOT):
                if not self._free:
                    return None
                number = self._copied(state, segment, number, len(above))
            step.tips[number] = path[-1]
            for node in path:
                owners.setdefault(node, []).append(number)
        step.homes.update({node: numbers[0] for node, numbers in owners.items()})
        spare = step.tips.keys() - step.homes.values()
        step.tips = {number: tip for number, tip in step.tips.items() if number not in spare}
        self._give(list(spare))
        return _rows(state, segment, owners)

    def _left(self, state: _Sequence, segment: Segment) -> _Step:
        """Keep the last forward's rows before ``segment.base``, and remove its other rows."""
        step, pending = state.step, len(segment.pending)
        known = segment.base - pending
        if step is None or known <= 0:
            self._forget(state, min(segment.base, pending))
            return _Step(segment, {_ROOT: state.number}, {state.number: _ROOT})
        tree, tips = step.segment.tree, dict[int, int]()
        for number, tip in step.tips.items():
            path = [node for node in trees.path_to(tree, tip) if node < known]
            tips[number] = path[-1] if path else _ROOT
            self._context.remove(number, state.position(segment, len(path)) + 1)
        homes = {node: home for node, home in step.homes.items() if node < known}
        step.homes, step.tips = homes, tips
        return step

    def _copied(self, state: _Sequence, segment: Segment, source: int, depth: int) -> int:
        """Copy the text, and the rows of the path to a node at this depth, to a free llama.cpp sequence."""
        number = self._free.pop()
        end = state.position(segment, depth) + 1 if depth else state.cached + min(segment.base, len(segment.pending))
        self._context.copy(source, number, end)
        return number

    def _by_paths(self, segment: Segment, states: bool) -> Decoded:
        """Run the paths to all leaves one after another in the sequence's own cells; those of the last path stay."""
        state = self._sequences[segment.sequence]
        self._forget(state)
        number, pending = state.number, len(segment.pending)
        rows = _rows(state, segment._replace(base=0), {node: [number] for node in range(len(segment.tree))})
        logits, hidden = dict[int, Tensor](), dict[int, Tensor]()
        last: tuple[int, ...] = ()
        for turn, path in enumerate(trees.leaf_paths(segment.tree)):
            shared = sum(1 for one, other in zip(path, last, strict=False) if one == other)
            run = [*(range(pending) if turn == 0 else ()), *(pending + node for node in path[shared:])]
            if turn:
                self._context.remove(number, state.position(segment, shared) + 1)
            out = self._context.decode([rows[row] for row in run], states)
            logits |= dict(zip([row for row in run if rows[row].wanted], out.logits_WV, strict=True))
            hidden |= dict(zip(run, out.states_NH, strict=True)) if out.states_NH is not None else {}
            last = path
        state.step = _Step(segment, dict.fromkeys((_ROOT, *last), number), {number: last[-1]})
        logits_WV = torch.stack([logits[row] for row in range(segment.logits_from, segment.end)])
        kept = torch.stack([hidden[row] for row in range(segment.base, segment.end)]) if states else None
        return Decoded(logits_WV, kept)


def _rows(state: _Sequence, segment: Segment, owners: Mapping[int, Sequence[int]]) -> list[BatchRow]:
    """The rows to run; pending ones belong to all paths, a node to the paths through it."""
    pending, depths = len(segment.pending), trees.depths(segment.tree)
    everyone = tuple(dict.fromkeys([state.number, *(number for numbers in owners.values() for number in numbers)]))
    rows = []
    for row in range(segment.base, segment.end):
        node, wanted = row - pending, row >= segment.logits_from
        if node < 0:
            rows.append(BatchRow(segment.pending[row], state.cached + row, everyone, wanted))
        else:
            place = state.position(segment, depths[node])
            rows.append(BatchRow(segment.tree.tokens[node], place, tuple(owners[node]), wanted))
    return rows


def _divided(out: Decoded | None, parts: Sequence[list[BatchRow] | Decoded]) -> list[Decoded]:
    """Each segment's output: its part of the batch's, or the one that it has already."""
    found, wanted, ran = list[Decoded](), 0, 0
    for part in parts:
        if isinstance(part, Decoded):
            found.append(part)
            continue
        assert out is not None, "rows without a forward"
        ends = wanted + sum(row.wanted for row in part), ran + len(part)
        states = None if out.states_NH is None else out.states_NH[ran : ends[1]]
        found.append(Decoded(out.logits_WV[wanted : ends[0]], states))
        wanted, ran = ends
    return found
