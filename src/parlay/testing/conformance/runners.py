"""Tests runners: after any use of the cache, logits must equal those of a fresh prefill (U4); and a full cache must
refuse."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from parlay.testing.conformance.compare import Finding, Report, widest_gap
from parlay.testing.reference import LogitsOf
from parlay.testing.toy_drafters import random_shape
from parlay.testing.toys import row_texts
from parlay.types import OutOfRoom, Output, Runner, Segment, Tree, trees

CAPACITY = 2048
LONGEST = 48


def check_runner(
    open_runner: Callable[[int], Runner],
    logits_of: LogitsOf,
    *,
    noise_bound: float = 0.0,
    steps: int = 60,
    seed: int = 0,
) -> Report:
    """Test a runner. ``open_runner(capacity)`` makes a runner whose cache holds ``capacity`` tokens; ``logits_of``
    gives the expected logits ``[V]`` after a text, to within ``noise_bound``."""
    name = open_runner(CAPACITY).spec.name
    findings: list[Finding] = []
    for check in (random_walk, limits):
        began = time.perf_counter()
        try:
            detail = check(open_runner, Judge(logits_of, noise_bound), steps, seed)
        except Exception as error:
            findings.append(Finding(check.__name__, name, False, f"{type(error).__name__}: {error}"))
        else:
            findings.append(Finding(check.__name__, name, True, detail, time.perf_counter() - began))
    return Report(name, tuple(findings))


@dataclass(slots=True)
class Judge:
    """Compares rows of logits with recomputed ones. It counts the rows, and keeps the largest difference."""

    logits_of: LogitsOf
    noise_bound: float
    rows: int = 0
    widest: float = 0.0
    _known: dict[tuple[int, ...], Tensor] = field(default_factory=dict)

    def compare(self, text: Sequence[int], logits_V: Tensor, where: str) -> None:
        key = tuple(text)
        if key not in self._known:
            self._known[key] = self.logits_of(key)
        gap = widest_gap(logits_V.double(), self._known[key].double())
        self.rows += 1
        self.widest = max(self.widest, gap)
        assert gap <= self.noise_bound, f"{where}: logits after {len(key)} tokens are {gap:.3g} off"


def random_walk(open_runner: Callable[[int], Runner], judge: Judge, steps: int, seed: int) -> str:
    """Open, fork, cut back and release sequences at random. Each step feeds some of them a chunk or a tree, and keeps a
    path."""
    walk = _RandomWalk(open_runner(CAPACITY), judge, random.Random(seed))
    for _ in range(steps):
        walk.change()
        walk.step()
        walk.runner.check()
    return f"{judge.rows} rows, off by at most {judge.widest:.3g}"


class _RandomWalk:
    """The state of a random walk. Invariant: the runner holds ``texts[name][: cached[name]]`` of each sequence, and at
    least one token of it is pending."""

    def __init__(self, runner: Runner, judge: Judge, chance: random.Random) -> None:
        self.runner = runner
        self._judge = judge
        self._chance = chance
        self._texts: dict[int, list[int]] = {}
        self._cached: dict[int, int] = {}
        self._past: list[list[int]] = [[]]
        self._next = 0

    def change(self) -> None:
        """Open, fork, cut back or release one sequence. Sequences longer than `LONGEST` are always released."""
        for name in [name for name, text in self._texts.items() if len(text) > LONGEST]:
            self._release(name)
        chance = self._chance.random()
        if len(self._texts) < 2 or (chance < 0.3 and len(self._texts) < 5):
            self._open()
        elif chance < 0.45 and len(self._texts) < 5:
            self._fork(self._chance.choice(list(self._texts)))
        elif chance < 0.6:
            name = self._chance.choice(list(self._texts))
            length = self._chance.randrange(len(self._texts[name]))
            cached = self.runner.truncate(name, length)
            assert 0 <= cached <= min(length, self._cached[name]), f"truncate to {length} leaves {cached}"
            self._cached[name] = cached
        elif chance < 0.7:
            self._release(self._chance.choice(list(self._texts)))

    def step(self) -> None:
        """Feed some sequences in one forward, each with a segment of its own; compare every row, and keep random
        paths."""
        names = self._chance.sample(list(self._texts), self._chance.randint(1, len(self._texts)))
        segments = [self._segment(name) for name in names]
        if self.runner.spec.layer_skip and self._chance.random() < 0.3:
            self._run_without_layers(segments)
        if self._chance.random() < 0.3:
            segments = self._run_beginnings(segments)
        self._run(segments)
        for segment in segments:
            self._keep(segment)

    def _run(self, segments: Sequence[Segment]) -> None:
        """Run the segments in one forward, or in two concurrent forwards if the runner allows two."""
        parts = [segments]
        if self.runner.spec.in_flight > 1 and len(segments) > 1:
            parts = [segments[:1], segments[1:]]
        begun = [(part, self.runner.begin(part)) for part in parts]
        for part, finish in reversed(begun):
            self._compare(part, finish())

    def _compare(self, segments: Sequence[Segment], out: Output) -> None:
        for index, segment in enumerate(segments):
            rows = out.logits_RV[out.starts[index] : out.starts[index + 1]]
            cached = self._texts[segment.sequence][: self._cached[segment.sequence]]
            texts = row_texts(cached, segment)[segment.logits_from - segment.base :]
            assert len(rows) == len(texts), f"{len(rows)} rows of logits for {len(texts)} wanted"
            for text, row_V in zip(texts, rows, strict=True):
                where = f"{len(segment.pending)} pending, tree {segment.tree.parents}, base {segment.base}"
                self._judge.compare(text, row_V, where)

    def _run_without_layers(self, segments: Sequence[Segment]) -> None:
        """Run the segments, and some cached tokens again, with layers skipped. Later logits must not change."""
        sublayers = self.runner.spec.sublayers
        skip = frozenset(self._chance.sample(sublayers, self._chance.randint(1, len(sublayers))))
        bases = [-self._chance.randint(0, self._cached[segment.sequence]) for segment in segments]
        pairs = zip(segments, bases, strict=True)
        self.runner.forward(
            [segment._replace(base=base, logits_from=segment.end) for segment, base in pairs], skip=skip
        )

    def _run_beginnings(self, segments: Sequence[Segment]) -> list[Segment]:
        """Run the first nodes of some trees. Returns all segments, with what is left to run of each."""
        grown = [segment for segment in segments if segment.tree.tokens and self._chance.random() < 0.7]
        if not grown:
            return list(segments)
        left = {segment.sequence: segment for segment in segments}
        parts: list[Segment] = []
        for segment in grown:
            nodes = self._chance.randrange(len(segment.tree))
            parts.append(segment._replace(tree=Tree(segment.tree.tokens[:nodes], segment.tree.parents[:nodes])))
            base = self._chance.randint(0, parts[-1].end)
            left[segment.sequence] = segment._replace(base=base, logits_from=max(base, segment.logits_from))
        self._run(parts)
        return list(left.values())

    def _segment(self, name: int) -> Segment:
        text, cached = self._texts[name], self._cached[name]
        pending = tuple(text[cached:])
        tree = Tree()
        if len(pending) > 1 and self._chance.random() < 0.5:
            pending = pending[: self._chance.randint(1, len(pending) - 1)]  # a chunk of a prefill has no draft
        elif self.runner.spec.tree != "none":
            tree = self._tree()
        logits_from = self._chance.randint(0, len(pending))
        segment = Segment(name, pending, tree, logits_from)
        assert self.runner.reserve(name, cached + segment.end), "no room, although little is in use"
        return segment

    def _tree(self) -> Tree:
        vocab_size = self.runner.spec.vocab_size
        shape = random_shape(self._chance.randint(1, 7), vocab_size, self._chance)
        if self.runner.spec.tree == "chain":
            shape = trees.chain_tree(shape.tokens)
        tokens = list(shape.tokens)
        for siblings in trees.children(shape):
            for node, token in zip(siblings, self._chance.sample(range(vocab_size), len(siblings)), strict=True):
                tokens[node] = token
        return replace(shape, tokens=tuple(tokens))

    def _keep(self, segment: Segment) -> None:
        name, text = segment.sequence, self._texts[segment.sequence]
        path = trees.path_to(segment.tree, self._chance.randint(-1, len(segment.tree) - 1))
        fed = self._cached[name] + len(segment.pending)
        if fed == len(text):
            text += [segment.tree.tokens[node] for node in path]
            text.append(self._chance.randrange(self.runner.spec.vocab_size))
        cached = self.runner.keep(name, path)
        assert 0 <= cached <= fed + len(path), f"keep says {cached} cached, {fed + len(path)} were fed"
        self._cached[name] = cached

    def _open(self) -> None:
        past = self._chance.choice(self._past)
        fresh = [self._chance.randrange(self.runner.spec.vocab_size) for _ in range(self._chance.randint(1, 20))]
        text = past[: self._chance.randint(0, len(past))] + fresh
        cached = self.runner.open(self._next, text)
        assert 0 <= cached < len(text), f"open says {cached} of {len(text)} tokens are cached"
        self._texts[self._next], self._cached[self._next] = text, cached
        self._next += 1

    def _fork(self, name: int) -> None:
        self.runner.fork(name, self._next)
        self._texts[self._next] = list(self._texts[name])
        self._cached[self._next] = self._cached[name]
        self._next += 1

    def _release(self, name: int) -> None:
        self._past.append(self._texts.pop(name))
        del self._cached[name]
        self.runner.release(name)
        self.runner.release(name)  # unknown names are ignored


def limits(open_runner: Callable[[int], Runner], judge: Judge, steps: int, seed: int) -> str:
    """A full cache refuses tokens, and has room again after releases. Tokens that can never fit raise OutOfRoom.
    Prefixes are reused under their own salt only."""
    runner = open_runner(CAPACITY)
    chance = random.Random(seed)
    text = [chance.randrange(runner.spec.vocab_size) for _ in range(40)]
    names = range(2 * CAPACITY // len(text))
    granted = []
    for name in names:
        runner.open(name, text[: 1 + name], salt=f"own {name}")
        granted.append(runner.reserve(name, len(text)))
        runner.check()
    assert granted[0], "an empty cache refuses"
    assert not granted[-1], f"{len(names)} sequences of {len(text)} tokens fit into {CAPACITY}"
    for name in names:
        runner.release(name)
    runner.check()
    assert runner.free_tokens() >= CAPACITY - len(text), (
        f"room for {runner.free_tokens()} tokens after everything was released"
    )
    runner.open(-1, text)
    try:
        runner.reserve(-1, max(runner.capacity(), runner.spec.max_context) + CAPACITY)
    except OutOfRoom:
        pass
    else:
        raise AssertionError("more tokens than the cache can ever hold were not refused with OutOfRoom")
    runner.release(-1)
    return _salts(runner, text)


def _salts(runner: Runner, text: Sequence[int]) -> str:
    """Check that a released text is never found under another salt. It may be found under its own."""
    runner.open(0, text, salt="a")
    assert runner.reserve(0, len(text)), "no room for a single text"
    runner.forward([Segment(0, tuple(text), logits_from=len(text))])
    runner.keep(0, ())
    runner.release(0)
    found = runner.open(1, text, salt="a")
    assert runner.open(2, text, salt="b") == 0, "a prefix is found under another salt"
    runner.check()
    return f"{found} of {len(text)} tokens reused"
