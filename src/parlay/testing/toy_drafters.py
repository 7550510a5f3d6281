"""Toy drafters: they know what the target will say, and use it to be always, never, or sometimes right."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from parlay.drafters.per_sequence import FromText
from parlay.sampling.processors import process
from parlay.sampling.sampler import sample
from parlay.testing.reference import LogitsOf, ReferenceText, draw
from parlay.types import NO_DRAFT, Draft, Drafter, Needs, Observation, Request, SequenceView, Tree, trees

Answer = Callable[[SequenceView, Sequence[int]], int]
"""The token the target takes after the view's tokens and some more ids."""

Guess = Callable[[SequenceView, int], Draft]
"""A draft of at most so many nodes."""


def answer_by(logits_of: LogitsOf) -> Answer:
    """Know the target by running its logits through the one sampler."""

    def answer(view: SequenceView, path: Sequence[int]) -> int:
        token = sample(logits_of([*view.tokens, *path]).unsqueeze(0), [view], [path])[0]
        return token if isinstance(token, int) else 0  # a fault: the target says nothing, so any guess is wrong

    return answer


def answer_from(text_of: Callable[[Request], Sequence[int]]) -> Answer:
    """Know the target by its whole text for a request, prompt included; past its end nothing is right."""

    def answer(view: SequenceView, path: Sequence[int]) -> int:
        text, position = text_of(view.request), len(view.tokens) + len(path)
        return text[position] if position < len(text) else 0

    return answer


class ToyDrafter(FromText):
    """A drafter without state: each draft is a function of the view and the budget."""

    def __init__(self, guess: Guess) -> None:
        self._guess = guess

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        return [self._guess(view, budget) if budget else NO_DRAFT for view, budget in zip(views, budgets, strict=True)]


def oracle(answer: Answer) -> ToyDrafter:
    """Always right: a chain of what the target will say."""
    return ToyDrafter(lambda view, budget: trees.chain(gold(answer, view, budget), "oracle"))


def sometimes(answer: Answer, vocab_size: int, pattern: Sequence[bool]) -> ToyDrafter:
    """A chain whose token at absolute position p is right where ``pattern[p % len(pattern)]`` says so."""

    def guess(view: SequenceView, budget: int) -> Draft:
        tokens = gold(answer, view, budget)
        start = len(view.tokens)
        right = [pattern[(start + offset) % len(pattern)] for offset in range(budget)]
        chosen = [token if good else (token + 1) % vocab_size for token, good in zip(tokens, right, strict=True)]
        return trees.chain(chosen, "sometimes")

    return ToyDrafter(guess)


def adversary(answer: Answer, vocab_size: int) -> ToyDrafter:
    """Never right: every child of the root is a token that the target does not take."""

    def guess(view: SequenceView, budget: int) -> Draft:
        wrong = [token for token in range(vocab_size) if token != answer(view, ())][: max(1, budget // 2)]
        below = range(min(budget - len(wrong), vocab_size))  # below a wrong node nothing can be right
        tree = Tree((*wrong, *below), (-1,) * len(wrong) + (0,) * len(below))
        return Draft(tree, sources=("adversary",) * len(tree))

    return ToyDrafter(guess)


def tree_oracle(answer: Answer, vocab_size: int, seed: int = 0) -> ToyDrafter:
    """The true path among decoys, in trees of any shape: another random one, with another depth, at each position."""

    def guess(view: SequenceView, budget: int) -> Draft:
        return random_tree(answer, view, budget, vocab_size, random.Random(seed * 1_000_003 + len(view.tokens)))

    return ToyDrafter(guess)


def random_tree(answer: Answer, view: SequenceView, budget: int, vocab_size: int, chance: random.Random) -> Draft:
    """A random tree in which one leaf's whole path is what the target will say, and no other child of it is."""
    shape = random_shape(budget, vocab_size - 1, chance)
    golden = chance.choice(trees.leaf_paths(shape))
    truth = dict(zip((-1, *golden), gold(answer, view, len(golden) + 1), strict=True))
    tokens = [0] * budget
    for siblings in filter(None, trees.children(shape)):
        true_token = truth.get(shape.parents[siblings[0]])  # None beside the true path, where any token is wrong
        others = [token for token in range(vocab_size) if token != true_token]
        for node, decoy in zip(siblings, chance.sample(others, len(siblings)), strict=True):
            tokens[node] = truth[shape.parents[node]] if node in golden else decoy
    return Draft(replace(shape, tokens=tuple(tokens)), sources=("tree-oracle",) * budget)


def random_shape(nodes: int, most_children: int, chance: random.Random) -> Tree:
    """A tree in which each node has hung itself below any earlier one or the root; its tokens are all 0."""
    parents = [-1]
    while len(parents) < nodes:
        parent = chance.randrange(-1, len(parents))
        if parents.count(parent) < most_children:
            parents.append(parent)
    return Tree((0,) * nodes, tuple(parents))


def gold(answer: Answer, view: SequenceView, length: int) -> list[int]:
    """The next ``length`` tokens that the target will say."""
    tokens: list[int] = []
    for _ in range(length):
        tokens.append(answer(view, tokens))
    return tokens


class Raising:
    """Works like ``inner`` until its ``at``-th call of `propose` or `observe`, which raises; so do all later ones."""

    def __init__(self, inner: Drafter, at: int, where: str = "propose") -> None:
        self.needs = replace(inner.needs, outcomes=True)
        self._inner = inner
        self._left = {"propose": at if where == "propose" else -1, "observe": at if where == "observe" else -1}

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        self._count("propose")
        return self._inner.propose(views, budgets)

    def observe(self, observations: Sequence[Observation]) -> None:
        self._count("observe")
        self._inner.observe(observations)

    def release(self, sequence: int) -> None:
        self._inner.release(sequence)

    def _count(self, where: str) -> None:
        if self._left[where] == 0:
            raise RuntimeError(f"toy drafter raises in {where}, as it was told to")
        self._left[where] -= 1


class Prober(ToyDrafter):
    """Drafts nothing, but carries the very token the target will say as a probe, which must never be accepted."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(self._probe)
        self._answer = answer

    def _probe(self, view: SequenceView, budget: int) -> Draft:
        return replace(trees.chain(gold(self._answer, view, 1), "prober"), probes=1)


class RejectedReader(ToyDrafter):
    """Asks for the target's two best tokens at every row, rejected ones too, and holds them against ``logits_of``."""

    needs = Needs(top_k=2)

    def __init__(self, inner: ToyDrafter, logits_of: LogitsOf) -> None:
        super().__init__(inner._guess)
        self._logits_of = logits_of
        self.rows = 0
        self.wrong: list[str] = []

    def observe(self, observations: Sequence[Observation]) -> None:
        for observation in observations:
            tree = observation.draft.tree
            tokens, sampled = list(observation.view.tokens), list(observation.verdict.sampled)
            if tokens[-len(sampled) :] != sampled:
                continue  # a stop inside the path: the sequence is over
            before = tokens[: -len(sampled)]
            texts = [before] + [
                [*before, *(tree.tokens[above] for above in trees.path_to(tree, node))] for node in range(len(tree))
            ]
            expected = tuple(self._two_best(observation.view.request, text) for text in texts)
            if observation.top_k != expected:
                self.wrong.append(f"choices {observation.top_k}, the target's are {expected}")
            self.rows += len(texts)

    def _two_best(self, request: Request, tokens: list[int]) -> tuple[int, ...]:
        """By the slow sampler: its choice, and its choice without that one."""
        text = ReferenceText(request, tokens, len(request.prompt))
        processed_V = process(self._logits_of(tokens), text, ()).clone()
        first = draw(processed_V, text)
        processed_V[first] = -torch.inf
        return first, draw(processed_V, text)
