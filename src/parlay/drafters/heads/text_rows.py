"""A head's rows of the committed text: the target's features, the head's cache, and which rows run next.

The row of token p reads the features of token p and the embedding of token p + 1. So all rows before the root's can run
once the features of all tokens before the root are known. Tokens that the target had cached and the head had not, and
tokens committed while the drafter was not used, have features of zero, so that their rows know the tokens alone: the
target would have to compute their features again. Without rows of these tokens no later row would be at the place of
its token, and the next turn of a conversation would find none of them in the head's cache.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from parlay.drafters.per_sequence import History
from parlay.drafters.state_room import StateBytes, StateRoom
from parlay.types import Features, Observation, OutOfRoom, Runner, Segment, SequenceView

_CHUNK = 512  # the most rows of one sequence in one forward
_FEW = 16  # at most this many rows run together with the last one, which is faster than a forward of their own


@dataclass(slots=True)
class Ahead:
    """Features of consecutive tokens from place ``start`` on, in pieces ``[K, F]``."""

    start: int
    tokens: list[int]
    features: list[Tensor]

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(slots=True)
class HeadSequence:
    """One sequence: its first ``ran`` rows are in the head's cache, and ``waiting`` has the features of later rows.

    ``text``: the tokens that these rows and features belong to. The root's row is never kept in the cache: the next
    proposal runs it again, whether or not a token was committed in between.
    """

    name: int
    text: History = field(default_factory=History)
    ran: int = 0
    waiting: list[Tensor] = field(default_factory=list)
    """Features in pieces ``[K, F]``."""
    ahead: Ahead | None = None
    """Features that were observed although those of some tokens before them are missing."""
    shown: int = 0
    """How many tokens, from the first, were `WaitingRows.unread` before."""

    @property
    def known(self) -> int:
        """How many tokens, from the first, have features."""
        return self.ran + self.rows_waiting

    @property
    def rows_waiting(self) -> int:
        return sum(map(len, self.waiting))

    def features(self, rows: int) -> Tensor:
        """The features of the next ``rows`` rows, as one tensor ``[K, F]``."""
        pieces, left = [], rows
        for piece in self.waiting:
            pieces.append(piece[:left])
            left -= len(pieces[-1])
            if not left:
                break
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def wait_only(self, first: int, end: int) -> None:
        """Keep only the features of these waiting rows. Copy a piece of which few are left, to free the rest."""
        kept, at = [], 0
        for piece in self.waiting:
            own = piece[max(first - at, 0) : max(end - at, 0)]
            at += len(piece)
            if len(own):
                few = 2 * own.nbytes < own.untyped_storage().nbytes()
                kept.append(own.clone() if few else own)
        self.waiting = kept

    @property
    def nbytes(self) -> int:
        """Bytes of the features."""
        features = [*self.waiting, *(self.ahead.features if self.ahead else ())]
        return sum([each.untyped_storage().nbytes() for each in features])


class HeadSequences:
    """One drafter's sequences. ``taps``: the target's layers whose states make the features, in order.

    Features wait as long as memory allows. If there is too little, the sequence drops all but its last few.
    """

    def __init__(self, runner: Runner, taps: Sequence[int], room: StateRoom) -> None:
        self._runner, self._taps = runner, tuple(taps)
        self._states: dict[int, HeadSequence] = {}  # by the target's sequence, least recently used first
        self._bytes = StateBytes(room, self._states, lambda state: runner.release(state.name))
        self._unseen_1F: Tensor | None = None  # zeros, for a token without features; made when some are seen

    def take(self, view: SequenceView, start: int, taps: Mapping[int, Tensor]) -> None:
        """Take in the features of the tokens from ``start`` on. Features after a gap wait until it is filled."""
        state, end = self.aligned(view), start + len(taps[self._taps[0]])
        if state.known >= end or not self._make_room(state, view, taps):
            return
        known = state.known
        if start <= known < end:
            features_KF = torch.cat([taps[layer] for layer in self._taps], -1)
            state.waiting.append(features_KF[known - start :] if known > start else features_KF)
            state.text.tokens += view.tokens[len(state.text.tokens) : end]
            self._join(state, view)
        elif start > known:
            tokens, features = list(view.tokens[start:end]), torch.cat([taps[layer] for layer in self._taps], -1)
            if state.ahead is None or state.ahead.end != start:
                state.ahead = Ahead(start, [], [])
            state.ahead.tokens += tokens
            state.ahead.features.append(features)
        self._bytes.set(view.sequence, state.nbytes)

    def _make_room(self, state: HeadSequence, view: SequenceView, taps: Mapping[int, Tensor]) -> bool:
        """Make room for the features of a step, if need be by dropping waiting ones. False if there is none."""
        rows = len(taps[self._taps[0]])
        size = sum([taps[layer].nbytes for layer in self._taps])
        if self._unseen_1F is None:
            self._unseen_1F = torch.cat([taps[layer].new_zeros(1, taps[layer].shape[1]) for layer in self._taps], -1)
        if self._bytes.room.make(size):
            return True
        state.ahead = None
        self._forget(state, state.ran)
        self._bytes.set(view.sequence, 0)
        return rows <= _FEW or self._bytes.room.make(size)

    def _join(self, state: HeadSequence, view: SequenceView) -> None:
        """Append the features seen ahead, if they now follow the known ones. If they no longer fit, drop them."""
        ahead, known = state.ahead, state.known
        if ahead is None or known < ahead.start:
            return
        state.ahead = None
        if known == ahead.start and list(view.tokens[ahead.start : ahead.end]) == ahead.tokens:
            state.waiting += ahead.features
            state.text.tokens += view.tokens[len(state.text.tokens) : ahead.end]

    def lacking(self, view: SequenceView) -> tuple[int, int]:
        """The span of missing features: it ends where features were seen ahead, or at the root."""
        state = self.aligned(view)
        ahead = state.ahead
        whole = ahead is not None and list(view.tokens[ahead.start : ahead.end]) == ahead.tokens
        return state.known, ahead.start if ahead is not None and whole else len(view.tokens) - 1

    def aligned(self, view: SequenceView) -> HeadSequence:
        """The state of the view's sequence, cut back to what is still valid, and marked as recently used."""
        state = self._states.pop(view.sequence, None) or self._open(view)
        self._states[view.sequence] = state
        agreed = min(state.text.agree(view.tokens), len(view.tokens) - 1)
        if agreed < len(state.text.tokens):
            sound = max(agreed - 1, 0)  # the row of token p reads token p + 1
            if state.ran > sound:
                self._forget(state, sound)
            elif state.waiting:
                state.wait_only(0, agreed - state.ran)
            state.text.cut(agreed)
        return state

    def fill(self, view: SequenceView) -> None:
        """Give tokens features of zero: those before seen ones, and those of the answer, except the latest."""
        while self.lacks(view) and self._fill_next(view):
            pass

    def _fill_next(self, view: SequenceView) -> bool:
        """Fill the first span of missing features. False if there is none."""
        state, unseen_1F = self.aligned(view), self._unseen_1F
        known, (_, seen) = state.known, self.lacking(view)
        end = min(seen, len(view.tokens) - 2)
        if unseen_1F is None or known >= end or (seen == len(view.tokens) - 1 and known < view.prompt_length):
            return False
        state.waiting.append(unseen_1F.expand(end - known, -1))
        state.text.tokens += view.tokens[len(state.text.tokens) : end]
        self._join(state, view)
        return True

    def lacks(self, view: SequenceView) -> bool:
        """Whether features of tokens before the root are missing."""
        return self.aligned(view).known < len(view.tokens) - 1

    def has_room(self, view: SequenceView) -> bool:
        """Whether there is memory for the missing features."""
        start, end = self.lacking(view)
        row_bytes = 0 if self._unseen_1F is None else self._unseen_1F.nbytes
        return end - start <= _FEW or (end - start) * row_bytes <= self._bytes.room.left

    def reserve(self, view: SequenceView, tokens: int, busy: set[int]) -> bool:
        """Reserve cache for ``tokens`` tokens, if need be by evicting idle sequences (not ``busy``), oldest use first.

        False if there is too little, or if the target took the memory of rows that ran, so that features are missing.
        """
        state = self.aligned(view)
        try:
            while not self._runner.reserve(state.name, tokens):
                idle = next((sequence for sequence in self._states if sequence not in busy), None)
                if idle is None:
                    return False
                self.release(idle)
        except OutOfRoom:
            return False
        if self._runner.truncate(state.name, state.ran) < state.ran:
            self._forget(state, state.ran)
        return not self.lacks(view)

    def keep(self, view: SequenceView, rows: int) -> None:
        """Keep the ``rows`` rows that the last forward ran in the cache, except the root's."""
        state = self._states[view.sequence]
        most = min(state.ran + rows, len(view.tokens) - 2)
        left = self._runner.truncate(state.name, min(self._runner.keep(state.name, ()), most))
        if left >= state.ran:
            state.wait_only(left - state.ran, state.rows_waiting)
        else:
            state.waiting = []
        state.ran = left
        state.text.cut(max(state.known, _standing_on(left)))
        self._bytes.set(view.sequence, state.nbytes)

    def release(self, sequence: int) -> None:
        """Forget the sequence. Unknown names are ignored."""
        state = self._states.pop(sequence, None)
        self._bytes.release(sequence)
        if state is not None:
            self._runner.release(state.name)

    def _open(self, view: SequenceView) -> HeadSequence:
        """Open a sequence, perhaps with cached rows of an earlier one.

        Rows do not read the first token, so the salt has it.
        """
        tokens = view.tokens
        state = HeadSequence(uuid.uuid4().int >> 66)
        state.ran = self._runner.open(state.name, tokens[1:], f"{view.request.salt}/{tokens[0]}")
        state.text.tokens += tokens[: state.ran + 1] if state.ran else []
        return state

    def _forget(self, state: HeadSequence, rows: int) -> None:
        """Keep at most ``rows`` rows. The features of the others are then missing."""
        state.ran = self._runner.truncate(state.name, rows)
        state.waiting = []
        state.text.cut(_standing_on(state.ran))


def _standing_on(rows: int) -> int:
    """How many tokens, from the first, the first ``rows`` rows depend on."""
    return rows + 1 if rows else 0


Inputs = Callable[[Tensor, Sequence[int]], Tensor]
"""Makes what rows read, ``[K, H]``, from the target's features ``[K, F]`` and the token after each."""


@dataclass(frozen=True, slots=True)
class WaitingRows:
    """One sequence's rows that must run first, the root's last: their tokens, and the target's features.

    ``unread`` are the tokens of the text that earlier calls did not have, for LM heads that list the newest ones.
    """

    view: SequenceView
    name: int
    pending: tuple[int, ...]
    features_KF: Tensor
    make_inputs: Inputs
    unread: Sequence[int]

    def inputs(self) -> Tensor:
        """The inputs of the rows, ``[K, H]``."""
        return self.make_inputs(self.features_KF, self.pending)


class TextRows:
    """Runs a head's rows of committed texts. ``taps``: the target's layers whose states make the features."""

    def __init__(self, runner: Runner, taps: Sequence[int], inputs: Inputs, room: StateRoom) -> None:
        self.runner = runner
        self._taps, self._inputs = tuple(taps), inputs
        self._sequences = HeadSequences(runner, taps, room)

    def take(self, observation: Observation) -> None:
        """Take in the features of an observed step."""
        if observation.taps:
            self._sequences.take(observation.view, observation.start, observation.taps)

    def release(self, sequence: int) -> None:
        """Forget the sequence. Unknown names are ignored."""
        self._sequences.release(sequence)

    def waiting(self, views: Sequence[SequenceView], rows: Sequence[int | None]) -> dict[int, WaitingRows]:
        """The sequences that can run now, by index. All their rows have run except the last chunk.

        ``rows``: how many rows each needs besides those of its text; None leaves the sequence out.
        """
        room = {
            place: len(view.tokens) + more
            for place, (view, more) in enumerate(zip(views, rows, strict=True))
            if more is not None
            and len(view.tokens) > view.prompt_length  # otherwise this step will show the prompt's features
        }
        busy = {views[place].sequence for place in room}
        self._catch_up([views[place] for place in room])
        ready = [place for place in room if self._sequences.reserve(views[place], room[place], busy)]
        return {place: self._waiting(views[place]) for place in ready}

    def keep(self, waiting: WaitingRows) -> None:
        """Keep the rows that have run, except the root's, which the next proposal runs again."""
        self._sequences.keep(waiting.view, len(waiting.pending))

    def _catch_up(self, views: Sequence[SequenceView]) -> None:
        """Fill in features that were not seen, and let the target compute the last ones if they are missing.

        A prefix hit and a pause leave such tokens. Without their features a head is right a little less often, but
        computing them would make all requests wait.
        """
        for view in views:
            self._sequences.fill(view)
        while lacking := [view for view in views if self._sequences.lacks(view) and self._sequences.has_room(view)]:
            views = self._closed(lacking)

    def _closed(self, lacking: Sequence[SequenceView]) -> list[SequenceView]:
        """Fill the first missing span of each view. Returns the views that may miss more."""
        layers = lacking[0].layers
        assert layers is not None, "the needs name taps"
        spans = [self._sequences.lacking(view) for view in lacking]
        for view, (start, _), taps in zip(lacking, spans, layers.states(lacking, spans, self._taps), strict=True):
            if taps:
                self._sequences.take(view, start, taps)
        return [
            view for view, (_, end) in zip(lacking, spans, strict=True) if self._sequences.aligned(view).known >= end
        ]

    def _waiting(self, view: SequenceView) -> WaitingRows:
        state = self._sequences.aligned(view)
        while (waiting := state.rows_waiting) > _FEW:
            # The outputs of these rows are not read, so the last layer computes only their keys and values.
            rows = min(waiting - 1, _CHUNK)
            tokens = tuple(view.tokens[state.ran + 1 : state.ran + 1 + rows])
            inputs = Features(self._inputs(state.features(rows), tokens))
            self.runner.forward([Segment(state.name, tokens, logits_from=len(tokens), features=inputs)])
            self._sequences.keep(view, len(tokens))
        pending = tuple(view.tokens[state.ran + 1 : state.ran + 1 + waiting])
        unread = view.tokens[state.shown :]
        state.shown = len(view.tokens)
        return WaitingRows(view, state.name, pending, state.features(waiting), self._inputs, unread)
