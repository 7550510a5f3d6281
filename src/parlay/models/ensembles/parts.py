"""Follows a composite runner's segments in one of its models: what it has cached of a sequence, and what it must
run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from parlay.types import OutOfRoom, Runner, Segment, Tree

_CHUNK = 512
"""Most tokens that a model catches up in one forward."""


@dataclass(slots=True)
class Part:
    """A sequence in one model's runner. ``tokens`` are those that it has cached; the composite may have more or fewer.

    Its text is ``head``, then the composite's text from token ``cut`` on. By default both texts are the same.
    """

    runner: Runner
    name: int
    head: tuple[int, ...] = ()
    cut: int = 0
    tokens: list[int] = field(default_factory=list)
    reserved: int = 0
    fed: tuple[int, ...] = ()
    """The pending tokens of its last forward; empty if nothing ran."""
    caught_up: int = 0
    """How many rows ran before that forward to catch up."""

    def open(self, text: Sequence[int], salt: str) -> None:
        """Begin the sequence with what is cached of its text."""
        self.tokens = list(text[: self.runner.open(self.name, text, salt)])

    def place(self, length: int) -> int:
        """The length of its text when the composite's has ``length`` tokens."""
        return len(self.head) + max(0, length - self.cut)

    def reserve(self, tokens: int) -> bool:
        """Reserve room for its text when the composite's has ``tokens`` tokens. Raises OutOfRoom."""
        self.reserved = self.place(tokens)
        return self.runner.reserve(self.name, self.reserved)

    def lacks(self, length: int) -> int:
        """How many tokens of its text are not cached when the composite's has ``length`` tokens."""
        return self.place(length) - len(self.tokens)

    def feed(self, cached: Sequence[int], segment: Segment, rows: int, ahead: int = 1) -> Segment | None:
        """Make the segment that runs here what the composite's segment runs after its ``cached`` tokens.

        Its last ``rows`` rows get logits. Tokens cached only here do not run again; tokens missing only here run as
        well, but in a segment without logits no more rows than the composite's segment has, or ``ahead``. Returns None
        if there is nothing to run.
        """
        pending, tree = segment.pending, segment.tree
        self.fed, self.caught_up = pending, 0
        if not self.head and not self.cut and len(self.tokens) == len(cached):
            return segment._replace(sequence=self.name)
        end = self.place(len(cached) + len(pending))
        self._agree(self.place(len(cached)), end, cached, pending)
        if rows or tree.tokens:
            self._cut_back(min(end - 1, end + len(tree) - rows))
            own = self._catch_up(self._after(len(self.tokens), cached, pending), segment)
        else:
            own = self._after(len(self.tokens), cached, pending)[: max(ahead, len(pending))]
        self.fed = own
        if not own:
            return None
        return segment._replace(sequence=self.name, pending=own, logits_from=len(own) + len(tree) - rows, base=0)

    def keep(self, path: Sequence[int], tree: Tree) -> None:
        """Keep the rows fed last, and the nodes of ``path``."""
        if self.fed:
            self.tokens += [*self.fed, *(tree.tokens[node] for node in path)]
            del self.tokens[self.runner.keep(self.name, path) :]
        self.fed = ()

    def truncate(self, length: int) -> None:
        """Forget what is cached from ``length`` on."""
        del self.tokens[self.runner.truncate(self.name, length) :]
        self.fed = ()

    def fork(self, copy: int) -> Part:
        """Make a copy of the sequence, under the name ``copy``."""
        self.runner.fork(self.name, copy)
        forked = replace(self, name=copy, tokens=list(self.tokens), fed=())
        forked.truncate(len(self.tokens))  # returns how many tokens the copy has: fewer while a forward is under way
        return forked

    def align(self, cached: Sequence[int], segment: Segment) -> None:
        """Cache exactly the tokens that the composite has cached, so that the same rows run in both."""
        self._cut_back(len(cached))
        if len(self.tokens) < len(cached):
            self._run(tuple(cached[len(self.tokens) :]), segment)

    def _after(self, start: int, cached: Sequence[int], pending: Sequence[int]) -> tuple[int, ...]:
        """The text from ``start`` on."""
        first = self.cut + max(0, start - len(self.head))
        return (*self.head[start:], *cached[first:], *pending[max(0, first - len(cached)) :])

    def _agree(self, known: int, end: int, cached: Sequence[int], pending: Sequence[int]) -> None:
        """Forget cached tokens after the first ``known`` ones from where they differ from the text, up to ``end``."""
        own, text = self.tokens[known:end], self._after(known, cached, pending)
        wrong = next((place for place, (a, b) in enumerate(zip(own, text, strict=False)) if a != b), None)
        if wrong is not None:
            self._cut_back(known + wrong)

    def _cut_back(self, length: int) -> None:
        """Truncate to ``length`` if more is cached, and reserve the room again that truncating gave up."""
        if len(self.tokens) > length:
            self.truncate(length)
            self._take_room()

    def _take_room(self) -> None:
        if not self.runner.reserve(self.name, self.reserved):
            raise OutOfRoom(f"{self.runner.spec.name} has no room for {self.reserved} tokens: allow more memory")

    def _catch_up(self, own: tuple[int, ...], segment: Segment) -> tuple[int, ...]:
        """Run all missing tokens but the last chunk, which is returned."""
        while len(own) > _CHUNK:
            before = len(self.tokens)
            self._run(own[:_CHUNK], segment)
            own = own[len(self.tokens) - before :]
        return own

    def _run(self, tokens: tuple[int, ...], segment: Segment) -> None:
        """Cache tokens of its text without logits."""
        self.runner.forward([Segment(self.name, tokens, logits_from=len(tokens), adapter=segment.adapter)])
        self.caught_up += len(tokens)
        self.tokens += tokens
        del self.tokens[self.runner.keep(self.name, ()) :]
