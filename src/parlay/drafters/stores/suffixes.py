"""Every substring of some texts and how often it occurs, for drafters that copy by statistics."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import islice

from parlay.drafters.per_sequence import History
from parlay.drafters.state_room import StateBytes, StateRoom
from parlay.drafters.step_budget import StepBudget
from parlay.types import SequenceView

_MANY = 24  # children of one state; after a common token there are thousands
_FIRST, _LAST = 192, 64  # of which so many are looked at
END = -1  # stands between texts: never in a query, never proposed

MOST_OF_REFERENCES = 65_536
"""Tokens of a request's references that each of its samples takes in: 10 MB, in 32 steps."""
_TOKEN_BYTES = 150  # of a live text: 141 in code, 156 in random ids


class Suffixes:
    """A suffix automaton (Blumer et al. 1985) of several texts, extended token by token, with counts.

    A *state* is a set of substrings that end at the same places; 0 is the empty one. Following a token leads to the
    state of the longer substring, `parent` to that of the longest proper suffix with other places too. So a state
    knows its number of occurrences, and the counts of its children over their sum are the conditional frequencies of
    the next token: the suffix tree of SuffixDecoding and the trie of lookahead, of any depth, in one structure.

    Substrings of more than ``depth`` tokens are followed, but not counted. A token costs 2 to 4 microseconds and, in
    ordinary text, 80 to 100 bytes (1.4 states of 24 bytes, and a dictionary for every state with more than one child).
    """

    __slots__ = (
        "_ends", "_frequent", "_last", "_lengths", "_more", "_parents", "_place", "_targets", "_tokens",
        "counts", "depth", "window", "window_length",
    )  # fmt: skip

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.counts = array("i", [0])
        self.window = 0  # state of the last ``window_length`` tokens of the text, ``depth`` of them at most
        self.window_length = 0
        self._lengths = array("i", [0])  # of the longest substring of each state
        self._parents = array("i", [-1])
        self._ends = array("i", [-1])  # where the state's substrings end first
        self._tokens = array("i", [END])  # the first child's token
        self._targets = array("i", [0])
        self._more: dict[int, dict[int, int]] = {}  # all further children
        self._frequent: dict[int, tuple[int, tuple[int, ...]]] = {}  # of states with many: their count then, tokens
        self._last = 0
        self._place = -1

    # ----------------------------------------------------------------------------------------------------- reading

    def follow(self, state: int, token: int) -> int:
        """The state of the substring with one more token, or -1. Its count may be 0 where texts were removed."""
        if self._tokens[state] == token:
            return self._targets[state]
        more = self._more.get(state)
        return more.get(token, -1) if more else -1

    def children(self, state: int) -> list[tuple[int, int, int]]:
        """Tokens that follow the state's substrings, each with its count and state, in the order first seen."""
        token, target, counts = self._tokens[state], self._targets[state], self.counts
        found = [(token, counts[target], target)] if token >= 0 and counts[target] else []
        more = self._more.get(state)
        if more:
            found += [(token, counts[target], target) for token, target in more.items() if counts[target]]
        return found

    def frequent(self, state: int) -> tuple[int, list[tuple[int, int, int]]]:
        """How often something followed the state's substrings, and the children, or the most frequent of very many.

        Of very many children only those seen first and last are searched: a token that is frequent was seen early or
        lately.
        """
        more = self._more.get(state)
        if more is None:  # nearly all states
            token, target = self._tokens[state], self._targets[state]
            count = self.counts[target] if token >= 0 else 0
            return count, [(token, count, target)] if count else []
        if len(more) < _MANY:
            children = self.children(state)
            return sum([count for _, count, _ in children]), children
        counts, total = self.counts, self.counts[state]  # ends of texts among them
        asked_at, tokens = self._frequent.get(state, (0, ()))
        if not 0.9 * total < asked_at < 1.1 * total:
            looked_at = {self._tokens[state], *islice(more, _FIRST), *islice(reversed(more), _LAST)}
            ranked = sorted([(-counts[self.follow(state, token)], token) for token in looked_at])
            tokens = tuple([token for _, token in ranked[: _MANY // 2]])
            self._frequent[state] = (total, tokens)
        targets = [self.follow(state, token) for token in tokens]
        pairs = zip(tokens, targets, strict=True)
        return total, [(token, counts[target], target) for token, target in pairs if counts[target]]

    def match(self, tokens: Sequence[int]) -> tuple[int, int]:
        """State and length of the longest end of ``tokens``, at most ``depth`` of them, that occurs in the texts."""
        state = length = 0
        counts, lengths, parents = self.counts, self._lengths, self._parents
        for token in tokens[-self.depth :]:
            target = self.follow(state, token)
            while (target < 0 or not counts[target]) and state:
                state = parents[state]
                length = lengths[state]
                target = self.follow(state, token)
            if target >= 0 and counts[target]:
                state, length = target, length + 1
        return state, length

    def ends(self, state: int, length: int) -> Iterator[tuple[int, int, int]]:
        """The state's substring of that length and all its ends: state by state, the shortest and the longest there.

        None is longer than ``depth - 1``, so that what follows it is counted.
        """
        while state > 0:
            above = self._parents[state]
            shortest = self._lengths[above] + 1
            if shortest < self.depth:
                yield state, shortest, min(length, self.depth - 1)
            state, length = above, shortest - 1

    def first_copy(self) -> tuple[int, int]:
        """Place after the first occurrence of the longest end of the text that occurs earlier, and its length.

        Places count all tokens appended and one `END` before each text. (-1, 0): there is none.
        """
        state, length = self.window, self.window_length
        while state > 0 and self._ends[state] == self._place:
            state = self._parents[state]
            length = self._lengths[state]
        return (self._ends[state] + 1, length) if state > 0 else (-1, 0)

    # ----------------------------------------------------------------------------------------------------- writing

    def begin(self) -> None:
        """A new text begins: no substring reaches across."""
        self._last = self.window = self.window_length = 0
        self._place += 1

    def append(self, token: int) -> None:
        self._place += 1
        self._last = self._extend(self._last, token)
        self._slide(token)
        state, counts, parents = self.window, self.counts, self._parents
        while state > 0:
            counts[state] += 1
            state = parents[state]

    def add(self, text: Sequence[int]) -> None:
        for _ in self.adding(text):
            pass

    def adding(self, text: Sequence[int]) -> Iterator[None]:
        """`add`, a token at a time."""
        self.begin()
        for token in text:
            self.append(token)
            yield

    def remove(self, text: Sequence[int]) -> None:
        """Uncount a text that was added whole. Its states stay."""
        for _ in self.removing(text):
            pass

    def removing(self, text: Sequence[int]) -> Iterator[None]:
        """`remove`, a token at a time."""
        self.begin()
        counts, parents = self.counts, self._parents
        for token in text:
            self._slide(token)
            state = self.window
            while state > 0:
                counts[state] -= 1
                state = parents[state]
            yield

    def _slide(self, token: int) -> None:
        """Move the window over a token that is in the automaton already."""
        state, length, lengths, parents = self.window, self.window_length, self._lengths, self._parents
        while length and lengths[parents[state]] >= length:  # it was split since
            state = parents[state]
        state = self.follow(state, token)
        length = min(length + 1, self.depth)
        while lengths[parents[state]] >= length:
            state = parents[state]
        self.window, self.window_length = state, length

    def _extend(self, last: int, token: int) -> int:
        """The state of the whole text so far, once ``token`` is appended."""
        lengths, parents = self._lengths, self._parents
        target = self.follow(last, token)
        if target >= 0:  # another text has it already
            return target if lengths[target] == lengths[last] + 1 else self._split(last, token, target)
        new = self._new(lengths[last] + 1, self._place)
        state = last
        while state >= 0 and target < 0:
            self._join(state, token, new)
            state = parents[state]
            if state >= 0:
                target = self.follow(state, token)
        if state < 0:
            parents[new] = 0
        elif lengths[target] == lengths[state] + 1:
            parents[new] = target
        else:
            parents[new] = self._split(state, token, target)
        return new

    def _split(self, state: int, token: int, target: int) -> int:
        """The shorter substrings of ``target``, which now end at more places, get a state of their own."""
        lengths, parents = self._lengths, self._parents
        clone = self._new(lengths[state] + 1, self._ends[target])
        self.counts[clone] = self.counts[target]
        self._tokens[clone] = self._tokens[target]
        self._targets[clone] = self._targets[target]
        if target in self._more:
            self._more[clone] = dict(self._more[target])
        parents[clone] = parents[target]
        parents[target] = clone
        while state >= 0 and self.follow(state, token) == target:
            if self._tokens[state] == token:
                self._targets[state] = clone
            else:
                self._more[state][token] = clone
            state = parents[state]
        return clone

    def _new(self, length: int, end: int) -> int:
        self.counts.append(0)
        self._lengths.append(length)
        self._parents.append(0)
        self._ends.append(end)
        self._tokens.append(END)
        self._targets.append(0)
        return len(self.counts) - 1

    def _join(self, state: int, token: int, target: int) -> None:
        if self._tokens[state] == END:
            self._tokens[state] = token
            self._targets[state] = target
        else:
            self._more.setdefault(state, {})[token] = target


class LiveText:
    """The suffixes of a sequence and of its references, updated with each committed token.

    ``text`` is all of it that is taken in so far, in the places of `Suffixes.first_copy`. If tokens were taken back, it
    is built again.
    """

    def __init__(self, depth: int, references: tuple[tuple[int, ...], ...]) -> None:
        self.references = references
        self._depth = depth
        self._history = History()
        self._reset()

    def _reset(self) -> None:
        self._history.cut(0)
        self.suffixes = Suffixes(self._depth)
        self.text = array("i")
        self._unread = self._parts()
        self._left = min(MOST_OF_REFERENCES, sum(map(len, self.references)))
        self._reading: Sequence[int] | None = None
        """The reference that is taken in now; None: the sequence itself."""
        self._place = 0
        self._next_part()

    def _parts(self) -> Iterator[Sequence[int]]:
        left = MOST_OF_REFERENCES
        for reference in self.references:
            yield reference[:left]
            left -= len(reference[:left])

    def _next_part(self) -> None:
        self._reading, self._place = next(self._unread, None), 0
        self.suffixes.begin()
        self.text.append(END)

    def follow(self, tokens: Sequence[int], step: StepBudget | None = None) -> Suffixes | None:
        """The suffixes of references and ``tokens``; None while this step has no room to take them all in."""
        history = self._history
        if history.agree(tokens) < len(history.tokens):
            self._reset()
        wanted = self._left + len(tokens) - len(history.tokens)
        most = wanted if step is None else step.take(wanted)
        while self._reading is not None:
            new = self._reading[self._place : self._place + most]
            self._take_in(new)
            most -= len(new)
            self._left -= len(new)
            if self._place < len(self._reading):
                break
            self._next_part()
        if self._reading is None:
            new = tokens[len(history.tokens) : len(history.tokens) + most]
            history.tokens.extend(new)
            self._take_in(new)
        return self.suffixes if len(history.tokens) == len(tokens) else None

    def _take_in(self, tokens: Sequence[int]) -> None:
        self.text.extend(tokens)
        for token in tokens:
            self.suffixes.append(token)
        self._place += len(tokens)


class LiveTexts:
    """The `LiveText` of each sequence, made when it is first asked for. Steps take in what `StepBudget` grants."""

    def __init__(self, depth: int, room: StateRoom) -> None:
        self._depth = depth
        self._texts: dict[int, LiveText] = {}
        self._bytes = StateBytes(room, self._texts)
        self._step = StepBudget(room, _TOKEN_BYTES)

    def begin(self, budgets: Sequence[int]) -> None:
        """A step begins, in which sequences with a budget draft."""
        self._step.begin(sum([budget > 0 for budget in budgets]))

    def of(self, view: SequenceView) -> LiveText | None:
        """The text of a sequence, with all of its tokens; None while it is being taken in."""
        references = view.request.references
        text = self._texts.get(view.sequence)
        if text is None or text.references is not references:
            text = self._texts[view.sequence] = LiveText(self._depth, references)
        whole = text.follow(view.tokens, self._step) is not None
        self._bytes.set(view.sequence, len(text.text) * _TOKEN_BYTES)
        return text if whole else None

    def release(self, sequence: int) -> None:
        self._texts.pop(sequence, None)
        self._bytes.release(sequence)


def chance(share: float, length: int) -> float:
    """Acceptance of a token that followed in ``share`` of the cases in which ``length`` tokens were as they are now.

    The frequency alone is 1 for what was seen once. How well a copy goes on depends on how long it has been right:
    length / (length + 2) is what prompt lookup's copies measure.
    """
    return share * length / (length + 2)
