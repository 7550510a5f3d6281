"""Toy drafters that know what the target will write, and are always, never or sometimes right."""

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
"""The token that the target writes after the view's tokens and some more ids."""

Guess = Callable[[SequenceView, int], Draft]
"""Makes a draft for a view, of at most the given number of nodes."""


def answer_by(logits_of: LogitsOf) -> Answer:
    """Predict the target by running its logits through the engine's sampler."""

    def answer(view: SequenceView, path: Sequence[int]) -> int:
        token = sample(logits_of([*view.tokens, *path]).unsqueeze(0), [view], [path])[0]
        return token if isinstance(token, int) else 0  # after a fault the target writes nothing, so any guess is wrong

    return answer


def answer_from(text_of: Callable[[Request], Sequence[int]]) -> Answer:
    """Predict the target from its whole text for a request, prompt included. After the end of the text, the answer is
    0."""

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
    """Make a drafter that is always right: it drafts the target's next tokens as a chain."""
    return ToyDrafter(lambda view, budget: trees.chain(gold(answer, view, budget), "oracle"))


def sometimes(answer: Answer, vocab_size: int, pattern: Sequence[bool]) -> ToyDrafter:
    """Make a drafter of chains whose token at position p of the text is right if ``pattern[p % len(pattern)]`` is
    True."""

    def guess(view: SequenceView, budget: int) -> Draft:
        tokens = gold(answer, view, budget)
        start = len(view.tokens)
        right = [pattern[(start + offset) % len(pattern)] for offset in range(budget)]
        chosen = [token if good else (token + 1) % vocab_size for token, good in zip(tokens, right, strict=True)]
        return trees.chain(chosen, "sometimes")

    return ToyDrafter(guess)


def adversary(answer: Answer, vocab_size: int) -> ToyDrafter:
    """Make a drafter that is never right: no child of the root is the target's next token."""

    def guess(view: SequenceView, budget: int) -> Draft:
        wrong = [token for token in range(vocab_size) if token != answer(view, ())][: max(1, budget // 2)]
        below = range(min(budget - len(wrong), vocab_size))  # below a wrong node nothing can be right
        tree = Tree((*wrong, *below), (-1,) * len(wrong) + (0,) * len(below))
        return Draft(tree, sources=("adversary",) * len(tree))

    return ToyDrafter(guess)


def tree_oracle(answer: Answer, vocab_size: int, seed: int = 0) -> ToyDrafter:
    """Make a drafter of random trees, in which one path is right and all other nodes are wrong. Each position of the
    text has a tree of its own."""

    def guess(view: SequenceView, budget: int) -> Draft:
        return random_tree(answer, view, budget, vocab_size, random.Random(seed * 1_000_003 + len(view.tokens)))

    return ToyDrafter(guess)


def random_tree(answer: Answer, view: SequenceView, budget: int, vocab_size: int, chance: random.Random) -> Draft:
    """Return a random tree. The whole path to one leaf is what the target will write, and every other child of a node
    on that path is wrong."""
    shape = random_shape(budget, vocab_size - 1, chance)
    golden = chance.choice(trees.leaf_paths(shape))
    truth = dict(zip((-1, *golden), gold(answer, view, len(golden) + 1), strict=True))
    tokens = [0] * budget
    for siblings in filter(None, trees.children(shape)):
        true_token = truth.get(shape.parents[siblings[0]])  # None off the true path, where any token is wrong
        others = [token for token in range(vocab_size) if token != true_token]
        for node, decoy in zip(siblings, chance.sample(others, len(siblings)), strict=True):
            tokens[node] = truth[shape.parents[node]] if node in golden else decoy
    return Draft(replace(shape, tokens=tuple(tokens)), sources=("tree-oracle",) * budget)


def random_shape(nodes: int, most_children: int, chance: random.Random) -> Tree:
    """Return a random tree: each node's parent is a random earlier node or the root. All tokens are 0."""
    parents = [-1]
    while len(parents) < nodes:
        parent = chance.randrange(-1, len(parents))
        if parents.count(parent) < most_children:
            parents.append(parent)
    return Tree((0,) * nodes, tuple(parents))


def gold(answer: Answer, view: SequenceView, length: int) -> list[int]:
    """Return the next ``length`` tokens that the target will write."""
    tokens: list[int] = []
    for _ in range(length):
        tokens.append(answer(view, tokens))
    return tokens


class Raising:
    """Works like ``inner`` for the first ``at`` calls of `propose` or `observe`, as ``where`` says. The next call
    raises, and so do all later ones."""

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
    """Drafts nothing but a probe, which must never be accepted. The probe's token is the target's next one."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(self._probe)
        self._answer = answer

    def _probe(self, view: SequenceView, budget: int) -> Draft:
        return replace(trees.chain(gold(self._answer, view, 1), "prober"), probes=1)


class RejectedReader(ToyDrafter):
    """Asks for the target's two best tokens at every row, also of rejected nodes, and compares them with
    ``logits_of``."""

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
                continue  # a stop within the path has ended the sequence
            before = tokens[: -len(sampled)]
            texts = [before] + [
                [*before, *(tree.tokens[above] for above in trees.path_to(tree, node))] for node in range(len(tree))
            ]
            expected = tuple(self._two_best(observation.view.request, text) for text in texts)
            if observation.top_k != expected:
                self.wrong.append(f"choices {observation.top_k}, the target's are {expected}")
            self.rows += len(texts)

    def _two_best(self, request: Request, tokens: list[int]) -> tuple[int, ...]:
        """Return the slow sampler's choice, and its choice without that token."""
        text = ReferenceText(request, tokens, len(request.prompt))
        processed_V = process(self._logits_of(tokens), text, ()).clone()
        first = draw(processed_V, text)
        processed_V[first] = -torch.inf
        return first, draw(processed_V, text)
