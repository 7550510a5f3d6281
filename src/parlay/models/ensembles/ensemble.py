"""Several models that write one text: their logits are combined at each place."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import accumulate

import torch
from torch import Tensor

from parlay.models.ensembles.combining import Deferral, choice_of, choose, combine, rule_of
from parlay.models.ensembles.parts import Part
from parlay.models.fetch.origin import public_name
from parlay.options import Ensemble
from parlay.types import (
    NO_SKIP,
    Exactness,
    FieldError,
    OutOfRoom,
    Output,
    ParlayError,
    Runner,
    RunnerLost,
    RunnerSpec,
    Segment,
    Skip,
)

_TREES = ("tree", "chain", "none")
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Sequence:
    """A sequence: the tokens cached by all members, its `Part` in each member by number, and the last segment."""

    tokens: list[int]
    parts: dict[int, Part]
    last: Segment | None = None
    lost: tuple[str, ...] = field(default=())
    """Names of members that failed for it or were late, and were dropped."""

    def settle(self) -> int:
        """Cut ``tokens`` to those that all members have cached; returns their number."""
        del self.tokens[min(len(part.tokens) for part in self.parts.values()) :]
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class _Rows:
    """One member's output, and its logits of each segment."""

    out: Output
    logits: list[Tensor]

    def states(self, layer: int, segments: Sequence[Segment]) -> list[Tensor]:
        """The tapped states of the rows that have logits; exactly the segments must have run."""
        ends = accumulate(segment.rows for segment in segments)
        tap_NH = self.out.taps[layer]
        return [tap_NH[end - len(rows) : end] for end, rows in zip(ends, self.logits, strict=True)]


class EnsembleRunner(Runner):
    """Combines its members' logits by the ensemble's rule; see `parlay.types.Runner`.

    Each member has its own cache and reads every token; tokens that it finds cached do not run again. Members may
    differ in size and family, but an id must stand for the same token in all of them; the vocabulary is the ids that
    all have. Taps and layer-skipping drafts come from the first member. With ``one_budget`` the caches share their
    memory, so free room is counted for all members together. ``deferral`` is the head of rule defer, and ``clock`` is
    used for deadlines.
    """

    def __init__(
        self,
        members: Sequence[Runner],
        ensemble: Ensemble,
        *,
        one_budget: bool = True,
        deferral: Deferral | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Raises UsageError for members that don't fit together."""
        self._deadline, self._clock = ensemble.deadline, clock
        self._members, self._drops, self._one_budget = tuple(members), ensemble.drop_failed, one_budget
        made = _spec_of([member.spec for member in members], ensemble.describe(members[0].spec.name))
        self._spec = replace(made, drops=ensemble.drop_failed or ensemble.deadline is not None)
        self._names = _names([member.spec for member in members])
        self._chooses, self._reads = ensemble.chooses, (self._spec.num_layers,) if deferral is not None else ()
        self._rule = lru_cache(partial(rule_of, ensemble))
        self._choice = lru_cache(partial(choice_of, ensemble, deferral))
        self._open: dict[int, _Sequence] = {}

    @property
    def spec(self) -> RunnerSpec:
        return self._spec

    def open(self, sequence: int, tokens: Sequence[int], salt: str = "") -> int:
        if sequence in self._open:
            raise ValueError(f"sequence {sequence} is open already: release it first")
        parts = {number: Part(member, sequence) for number, member in enumerate(self._members)}
        opened = self._open[sequence] = _Sequence(list(tokens), parts)
        for part in parts.values():
            part.open(tokens, salt)
        return opened.settle()

    def reserve(self, sequence: int, tokens: int) -> bool:
        if tokens > self.capacity():
            raise OutOfRoom(
                f"a text of {tokens} tokens does not fit the caches of all models of the ensemble, which hold "
                f"{self.capacity()}: allow more memory"
            )
        return all(part.reserve(tokens) for part in self._get(sequence).parts.values())

    def forward(self, segments: Sequence[Segment], taps: Sequence[int] = (), skip: Skip = NO_SKIP) -> Output:
        """Run the rows in every member, one after another; with ``skip`` only in the first, whose logits are then
        returned.

        Raises ParlayError if a member's logits are NaN, and what a member raises. If the ensemble drops failed members,
        a sequence that runs alone and without a tree goes on without the failed member instead. All sequences of a
        forward go on without a member that misses the deadline, unless a prompt is being read.
        """
        if any(segment.features is not None or segment.together or segment.places for segment in segments):
            raise ValueError(f"{self._spec.name}: an ensemble takes no features, and no rows of canvases")
        first = self._run(0, segments, taps if skip else sorted({*taps, *self._reads}), skip)
        rows = {0: first}
        for number in range(1, 1 if skip else len(self._members)):
            began = self._clock()
            try:
                rows[number] = self._run(number, segments)
            except RunnerLost:
                raise
            except Exception as error:
                if not self._drops or len(segments) > 1 or segments[0].tree.tokens:
                    raise
                self._drop(number, segments[0].sequence, f"failed: {error}")
            else:
                self._drop_late(number, segments, self._clock() - began)
        for segment in segments:
            self._get(segment.sequence).last = segment
        starts = tuple(accumulate((segment.end - segment.logits_from for segment in segments), initial=0))
        logits_RV, writers = (torch.cat(first.logits), ()) if skip else self._combined(segments, rows)
        lost = {segment.sequence: self._open[segment.sequence].lost for segment in segments}
        lost = {name: members for name, members in lost.items() if members}
        tapped = {layer: first.out.taps[layer] for layer in taps}
        return Output(logits_RV, starts, tapped, first.out.tap_seconds if taps else 0.0, lost, writers)

    def keep(self, sequence: int, path: Sequence[int]) -> int:
        opened = self._get(sequence)
        segment, opened.last = opened.last, None
        assert segment is not None, "keep without a forward"
        opened.tokens += [*segment.pending, *(segment.tree.tokens[node] for node in path)]
        for part in opened.parts.values():
            part.keep(path, segment.tree)
        return opened.settle()

    def truncate(self, sequence: int, length: int) -> int:
        opened = self._get(sequence)
        opened.last = None
        for part in opened.parts.values():
            part.truncate(length)
        return opened.settle()

    def fork(self, sequence: int, copy: int) -> None:
        opened = self._get(sequence)
        parts = {number: part.fork(copy) for number, part in opened.parts.items()}
        self._open[copy] = _Sequence(list(opened.tokens), parts, lost=opened.lost)
        self._open[copy].settle()

    def release(self, sequence: int) -> None:
        self._open.pop(sequence, None)
        for member in self._members:
            member.release(sequence)

    def free_tokens(self) -> int:
        return self._together(member.free_tokens() for member in self._members)

    def capacity(self) -> int:
        return self._together(member.capacity() for member in self._members)

    def check(self) -> None:
        for member in self._members:
            member.check()
        for name, opened in self._open.items():
            for part in opened.parts.values():
                agreed = part.tokens[: len(opened.tokens)] == opened.tokens[: len(part.tokens)]
                assert agreed, f"sequence {name}: a member has cached another text"

    def _get(self, sequence: int) -> _Sequence:
        try:
            return self._open[sequence]
        except KeyError:
            raise ValueError(f"sequence {sequence} is not open") from None

    def _together(self, tokens: Iterable[int]) -> int:
        """How many tokens fit if all members cache them, from how many would fit in each alone."""
        counts = list(tokens)
        if not self._one_budget or min(counts) <= 0:
            return max(0, min(counts))
        return int(1 / sum(1 / count for count in counts))

    def _run(self, number: int, segments: Sequence[Segment], taps: Sequence[int] = (), skip: Skip = NO_SKIP) -> _Rows:
        """Run one member's forward. With taps exactly the segments' rows run, as taps have a row for each of them."""
        fed: list[Segment] = []
        places: list[int | None] = []
        for segment in segments:
            opened = self._get(segment.sequence)
            own = None
            if (part := opened.parts.get(number)) is not None:
                if taps or skip:
                    part.align(opened.tokens, segment)
                own = part.feed(opened.tokens, segment, segment.end - segment.logits_from)
            places.append(None if own is None else len(fed))
            fed += [] if own is None else [own]
        nothing_0V = torch.empty(0, self._spec.vocab_size, device=self._spec.device)
        out = self._members[number].forward(fed, taps, skip) if fed else Output(nothing_0V, (0,))
        logits_RV = out.logits_RV[:, : self._spec.vocab_size]
        if bool(torch.isnan(logits_RV).any()):
            name = self._members[number].spec.name
            raise ParlayError(f"logits of {name} are NaN for this text: its weights or dtype are broken, remove it")
        starts = out.starts
        return _Rows(out, [nothing_0V if at is None else logits_RV[starts[at] : starts[at + 1]] for at in places])

    def _drop_late(self, number: int, segments: Sequence[Segment], seconds: float) -> None:
        """Drop a member whose forward took too long, except for sequences below 0, which are measurements."""
        if self._deadline is None or seconds <= self._deadline:
            return
        if any(len(each.pending) > 1 or each.sequence < 0 for each in segments):
            return
        for segment in segments:
            if number in self._get(segment.sequence).parts:
                self._drop(number, segment.sequence, f"took {seconds:.3g} s, and the deadline is {self._deadline:g} s")

    def _drop(self, number: int, sequence: int, reason: str) -> None:
        """Drop a member from one sequence."""
        name, opened = self._names[number], self._get(sequence)
        _log.warning("a request goes on without the model %s of the ensemble, which %s", name, reason)
        del opened.parts[number]
        opened.lost += (name,)
        self._members[number].release(sequence)

    def _combined(self, segments: Sequence[Segment], rows: dict[int, _Rows]) -> tuple[Tensor, tuple[str, ...]]:
        """Combine the logits of all segments, each from the members that it still has; the second result names who
        decided each row."""
        made: list[Tensor] = []
        writers: list[str] = []
        states = [rows[0].states(layer, segments) for layer in self._reads]
        for place, segment in enumerate(segments):
            members = tuple(self._get(segment.sequence).parts)
            logits = [rows[member].logits[place] for member in members]
            if self._chooses:
                read_RH = states[0][place] if states else None
                chosen_RV, chosen = choose(self._choice(members), logits, read_RH)
                made.append(chosen_RV)
                writers += [self._names[members[model]] for model in chosen]
            else:
                made.append(combine(self._rule(members), logits) if len(logits) > 1 else logits[0])
        return torch.cat(made), tuple(writers)


def _names(specs: Sequence[RunnerSpec]) -> tuple[str, ...]:
    """The members' names without local folders; equal names get their place in parentheses."""
    names = [public_name(spec.name) for spec in specs]
    return tuple(f"{name} ({place})" if names.count(name) > 1 else name for place, name in enumerate(names, 1))


def _spec_of(specs: Sequence[RunnerSpec], summary: str) -> RunnerSpec:
    """The spec of the ensemble: what all members can do. Raises UsageError if a member can't take part."""
    first = specs[0]
    for spec in specs:
        if spec.fills_only or spec.encoder is not None:
            kind = "an encoder-decoder" if spec.encoder is not None else "a diffusion model"
            raise FieldError("ensemble", f": {spec.name} is {kind}, and members write token by token: remove it")
    return replace(
        first,
        vocab_size=min(spec.vocab_size for spec in specs),
        max_context=min(spec.max_context for spec in specs),
        tree=max((spec.tree for spec in specs), key=_TREES.index),
        exactness=Exactness.weakest(*(spec.exactness for spec in specs)),
        kernels=f"{summary}; {first.kernels}",
        features=False,
        together=False,
        hides=False,
        likeliest=False,
        canvas=None,
        kv_heads=0,
        head_dim=0,
        in_flight=1,
    )
