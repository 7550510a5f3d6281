"""Encodes a runner's calls as integers. Rank 0 logs the calls of its runner, and the other ranks repeat them.

So all ranks hold the same sequences, prefixes and trees, in equally much memory. Rank 0 logs only completed calls, with
their results. A rank whose runner returns another result ends.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, MutableMapping, Sequence
from enum import IntEnum

from parlay.types import Adapter, Runner, RunnerLost, Segment, Skip, Tree


class Call(IntEnum):
    """A runner's calls that change its state. `REFUSED`: the previous forward raised ValueError, as it must on all
    ranks.

    `FORGET`: no row will use the adapter with this number any more.
    """

    OPEN = 1
    RESERVE = 2
    KEEP = 3
    TRUNCATE = 4
    FORK = 5
    RELEASE = 6
    FORWARD = 7
    REFUSED = 8
    FORGET = 9


_HALVES = ("attention", "mlp")


class CallLog:
    """Calls that have not been sent yet."""

    def __init__(self) -> None:
        self._numbers = array("q")

    def add(self, call: Call, *numbers: int) -> None:
        """Log a call with integer arguments."""
        self._numbers.extend((call, *numbers))

    def open(self, sequence: int, tokens: Sequence[int], salt: str, cached: int) -> None:
        """Log `Runner.open`, which found ``cached`` tokens in the cache."""
        self.add(Call.OPEN, sequence, cached)
        self._many(salt.encode("utf-8", "surrogatepass"))
        self._many(tokens)

    def keep(self, sequence: int, path: Sequence[int], cached: int) -> None:
        """Log `Runner.keep`, after which ``cached`` tokens are cached."""
        self.add(Call.KEEP, sequence, cached)
        self._many(path)

    def forward(
        self,
        segments: Sequence[Segment],
        taps: Sequence[int],
        skip: Skip,
        adapter_number: Callable[[Adapter | None], int],
    ) -> None:
        """Log `Runner.forward`; its segments must have no features. Raises what ``adapter_number`` raises, and then
        logs nothing.

        Adapters are identified by number, and 0 means none.
        """
        adapters = [(adapter_number(each.adapter), adapter_number(each.mask_adapter)) for each in segments]
        self.add(Call.FORWARD, len(segments))
        for segment, numbers in zip(segments, adapters, strict=True):
            self._numbers.extend(
                (segment.sequence, segment.logits_from, segment.base, segment.together, int(segment.stale), *numbers)
            )
            for each in (segment.pending, segment.tree.tokens, segment.tree.parents, segment.places):
                self._many(each)
        self._many(taps)
        self._many([2 * layer + _HALVES.index(half) for half, layer in sorted(skip)])

    def take(self) -> bytes:
        """Empty the log, and return its calls as bytes."""
        taken, self._numbers = self._numbers, array("q")
        return taken.tobytes()

    def _many(self, numbers: Sequence[int]) -> None:
        self._numbers.append(len(numbers))
        self._numbers.extend(numbers)


class _Numbers:
    """Reads integers from bytes. Raises RunnerLost for invalid content."""

    def __init__(self, content: bytes | bytearray) -> None:
        self._numbers = array("q")
        if len(content) % self._numbers.itemsize:
            raise RunnerLost("rank 0 sent calls that can't be read: are the versions the same?")
        self._numbers.frombytes(content)
        self._at = 0

    def __bool__(self) -> bool:
        return self._at < len(self._numbers)

    def some(self, count: int) -> Sequence[int]:
        end = self._at + count
        if not self._at <= end <= len(self._numbers):
            raise RunnerLost("rank 0 sent calls that can't be read: are the versions the same?")
        found, self._at = self._numbers[self._at : end], end
        return found

    def many(self) -> tuple[int, ...]:
        return tuple(self.some(self.one()))

    def one(self) -> int:
        return self.some(1)[0]


class Replay:
    """Repeats the calls of a log on ``runner``, which must return the same results as on rank 0.

    ``adapters``: the adapters that this rank has read, by rank 0's numbers.
    """

    def __init__(self, runner: Runner, adapters: MutableMapping[int, Adapter]) -> None:
        self._runner, self._adapters = runner, adapters
        self._refused = ""

    def run(self, content: bytes | bytearray) -> None:
        """Repeat all calls of a log. Raises RunnerLost if a result differs, or if the log is invalid."""
        numbers = _Numbers(content)
        while numbers:
            call = numbers.one()
            if (call == Call.REFUSED) != bool(self._refused):
                raise RunnerLost(f"the ranks differ: {self._refused or 'rank 0 alone refused a forward'}")
            self._refused = ""
            if call == Call.FORWARD:
                self._forward(numbers)
            elif call != Call.REFUSED:
                self._small(call, numbers)

    def _small(self, call: int, numbers: _Numbers) -> None:
        runner, sequence = self._runner, numbers.one()
        if call == Call.OPEN:
            self._open(sequence, numbers)
        elif call == Call.RESERVE:
            tokens = numbers.one()
            self._same("room", int(runner.reserve(sequence, tokens)), 1)
        elif call == Call.KEEP:
            cached, path = numbers.one(), numbers.many()
            self._same("cached tokens", runner.keep(sequence, path), cached)
        elif call == Call.TRUNCATE:
            length, cached = numbers.some(2)
            self._same("cached tokens", runner.truncate(sequence, length), cached)
        elif call == Call.FORK:
            runner.fork(sequence, numbers.one())
        elif call == Call.RELEASE:
            runner.release(sequence)
        elif call == Call.FORGET:
            self._adapters.pop(sequence, None)
        else:
            raise RunnerLost(
                f"rank 0 made a call of number {call}, which is not known here: are the versions the same?"
            )

    def _open(self, sequence: int, numbers: _Numbers) -> None:
        """Open a sequence. Rank 0 may have found fewer cached tokens, because it drops pages to make room for drafters.
        If so, the sequence is cut to that length here, too."""
        cached, salt, tokens = numbers.one(), bytes(numbers.many()).decode("utf-8", "surrogatepass"), numbers.many()
        found = self._runner.open(sequence, tokens, salt)
        if found > cached:
            found = self._runner.truncate(sequence, cached)
        self._same("cached tokens", found, cached)

    def _forward(self, numbers: _Numbers) -> None:
        segments: list[Segment] = []
        for _ in range(numbers.one()):
            sequence, logits_from, base, together, stale, *adapters = numbers.some(7)
            own, masks = map(self._adapter, adapters)
            pending, tree, places = numbers.many(), Tree(numbers.many(), numbers.many()), numbers.many()
            one = Segment(sequence, pending, tree, logits_from, base, None, together, bool(stale), own, masks)
            segments.append(one._replace(places=places))
        taps = numbers.many()
        skip: Skip = frozenset(("mlp" if half % 2 else "attention", half // 2) for half in numbers.many())
        try:
            self._runner.forward(segments, taps, skip)
        except ValueError as error:
            self._refused = f"this one refused a forward ({error})"

    def _adapter(self, number: int) -> Adapter | None:
        if number and number not in self._adapters:
            raise RunnerLost("the ranks differ: rank 0 names an adapter that was not read here")
        return self._adapters[number] if number else None

    def _same(self, what: str, found: int, wanted: int) -> None:
        if found != wanted:
            raise RunnerLost(f"the ranks differ: {found} {what} here, and {wanted} in rank 0")
