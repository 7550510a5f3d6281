"""Counts all substrings of some texts, for drafters that copy by frequency."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TypeAlias

_MANY = 24  # most children of a state that are all examined; a common token has thousands
_FIRST, _LAST = 192, 64  # numbers of first and last children that are examined if there are more
END = -1  # separates texts; never in a query, never proposed


_Before: TypeAlias = tuple[int, int, int, int, tuple[int, int] | None]
"""An automaton before a token was appended: the number of states, the state of the whole text, that of the window and
its length, and from which state on transitions were moved to a new state, with the state they had led to."""


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
        "_before", "_ends", "_frequent", "_last", "_lengths", "_more", "_moved", "_parents", "_place", "_targets",
        "_tokens", "counts", "depth", "window", "window_length",
    )  # fmt: skip

    def __init__(self, depth: int, undone: int = 0) -> None:
        """``undone``: how many of the last appended tokens can be taken back."""
        self.depth = depth
        self._before: deque[_Before] = deque(maxlen=undone)
        self._moved: tuple[int, int] | None = None  # by the last appended token
        self.counts = array("i", [0])
        self.window = 0  # state of the text's last ``window_length`` tokens, at most ``depth``
        self.window_length = 0
        self._lengths = array("i", [0])  # length of each state's longest substring
        self._parents = array("i", [-1])
        self._ends = array("i", [-1])  # where the state's substrings end first
        self._tokens = array("i", [END])  # the first child's token
        self._targets = array("i", [0])
        self._more: dict[int, dict[int, int]] = {}  # all further children
        self._frequent: dict[
            int, tuple[int, tuple[int, ...]]
        ] = {}  # for states with many children: their count at that time, and tokens
        self._last = 0
        self._place = -1

    # ----------------------------------------------------------------------------------------------------- reading

    def follow(self, state: int, token: int) -> int:
        """The state of the substring with one more token, or -1. Its count may be 0 if texts were removed."""
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
        """How often any token followed the state's substrings, and the children: all, or the most frequent of many.

        If there are many children, only those seen first and last are examined: a frequent token was seen early or
        lately.
        """
        more = self._more.get(state)
        if more is None:  # true of nearly all states
            token, target = self._tokens[state], self._targets[state]
            count = self.counts[target] if token >= 0 else 0
            return count, [(token, count, target)] if count else []
        if len(more) < _MANY:
            children = self.children(state)
            return sum([count for _, count, _ in children]), children
        counts, total = self.counts, self.counts[state]  # includes ends of texts
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
        """State and length of the longest suffix of ``tokens``, of at most ``depth``, that occurs in the texts."""
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
        """The suffixes of the state's substring of this length: for each state, its shortest and longest one.

        None is longer than ``depth - 1``, so that what follows it is counted.
        """
        while state > 0:
            above = self._parents[state]
            shortest = self._lengths[above] + 1
            if shortest < self.depth:
                yield state, shortest, min(length, self.depth - 1)
            state, length = above, shortest - 1

    def first_copy(self) -> tuple[int, int]:
        """The place after the first occurrence of the text's longest suffix that occurs earlier, and its length.

        Places count all appended tokens and one `END` before each text. (-1, 0): there is none.
        """
        state, length = self.window, self.window_length
        while state > 0 and self._ends[state] == self._place:
            state = self._parents[state]
            length = self._lengths[state]
        return (self._ends[state] + 1, length) if state > 0 else (-1, 0)

    # ----------------------------------------------------------------------------------------------------- writing

    def begin(self) -> None:
        """Begin a new text; no substring spans two texts."""
        self._last = self.window = self.window_length = 0
        self._place += 1
        self._before.clear()

    def append(self, token: int) -> None:
        states, last, window, window_length = len(self.counts), self._last, self.window, self.window_length
        self._place += 1
        self._moved = None
        self._last = self._extend(last, token)
        self._slide(token)
        if self._before.maxlen:
            self._before.append((states, last, window, window_length, self._moved))
        state, counts, parents = self.window, self.counts, self._parents
        while state > 0:
            counts[state] += 1
            state = parents[state]

    def add(self, text: Sequence[int]) -> None:
        for _ in self.adding(text):
            pass

    def adding(self, text: Sequence[int]) -> Iterator[None]:
        """Like `add`, one token at a time."""
        self.begin()
        for token in text:
            self.append(token)
            yield

    def remove(self, text: Sequence[int]) -> None:
        """Uncount a text that was added whole. Its states stay."""
        for _ in self.removing(text):
            pass

    def removing(self, text: Sequence[int]) -> Iterator[None]:
        """Like `remove`, one token at a time."""
        self.begin()
        counts, parents = self.counts, self._parents
        for token in text:
            self._slide(token)
            state = self.window
            while state > 0:
                counts[state] -= 1
                state = parents[state]
            yield

    def take_back(self, tokens: Sequence[int]) -> bool:
        """Undo appending the text's last ``tokens``. False if these are more than can be undone."""
        if len(tokens) > len(self._before):
            return False
        for token in reversed(tokens):
            self._undo(token, self._before.pop())
        return True

    def _undo(self, token: int, before: _Before) -> None:
        state, counts, parents = self.window, self.counts, self._parents
        while state > 0:
            counts[state] -= 1
            state = parents[state]
        self._place -= 1
        states, last, self.window, self.window_length, moved = before
        self._last = last
        if moved is not None:
            state, target = moved
            clone = parents[target]
            parents[target] = parents[clone]
            self._move(state, token, clone, target)
        state = last
        while state >= 0 and self.follow(state, token) == states:
            self._part(state, token)
            state = parents[state]
        for gone in range(states, len(counts)):
            self._more.pop(gone, None)
            self._frequent.pop(gone, None)
        for column in (counts, self._lengths, parents, self._ends, self._tokens, self._targets):
            del column[states:]

    def _slide(self, token: int) -> None:
        """Move the window over a token that the automaton has already."""
        state, length, lengths, parents = self.window, self.window_length, self._lengths, self._parents
        while length and lengths[parents[state]] >= length:  # the state was split since
            state = parents[state]
        state = self.follow(state, token)
        length = min(length + 1, self.depth)
        while lengths[parents[state]] >= length:
            state = parents[state]
        self.window, self.window_length = state, length

    def _extend(self, last: int, token: int) -> int:
        """Append ``token``. Returns the state of the whole text."""
        lengths, parents = self._lengths, self._parents
        target = self.follow(last, token)
        if target >= 0:  # another text has this substring already
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
        """Give the shorter substrings of ``target``, which now end at more places, a state of their own."""
        lengths, parents = self._lengths, self._parents
        clone = self._new(lengths[state] + 1, self._ends[target])
        self.counts[clone] = self.counts[target]
        self._tokens[clone] = self._tokens[target]
        self._targets[clone] = self._targets[target]
        if target in self._more:
            self._more[clone] = dict(self._more[target])
        parents[clone] = parents[target]
        parents[target] = clone
        self._moved = state, target
        self._move(state, token, target, clone)
        return clone

    def _move(self, state: int, token: int, old: int, new: int) -> None:
        """From ``state`` upwards, let transitions by the token that led to ``old`` lead to ``new``."""
        while state >= 0 and self.follow(state, token) == old:
            if self._tokens[state] == token:
                self._targets[state] = new
            else:
                self._more[state][token] = new
            state = self._parents[state]

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

    def _part(self, state: int, token: int) -> None:
        """Undo `_join`."""
        self._frequent.pop(state, None)
        if self._tokens[state] == token:
            self._tokens[state], self._targets[state] = END, 0
            return
        del self._more[state][token]
        if not self._more[state]:
            del self._more[state]


def chance(share: float, length: int) -> float:
    """Probability that a token is accepted that followed in ``share`` of the cases after ``length`` equal tokens.

    The share alone is 1 for a token that followed once. How well a copy continues depends on how long it has been
    right: length / (length + 2) was measured on prompt lookup's copies.
    """
    return share * length / (length + 2)
