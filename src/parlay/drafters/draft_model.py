"""Speculative decoding with a draft model (Leviathan et al. 2023, Chen et al. 2023): a smaller model writes ahead."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from parlay import trees
from parlay.drafters.entries import Resources, UsageError
from parlay.drafters.followers import Follower, Followers
from parlay.drafters.guesses import Guess, best_guesses
from parlay.types import NO_DRAFT, Draft, Needs, Observation, Tree, View

SOURCE = "draft-model"
_TREE_PENDING = 8  # a tree's pending tokens run again at each depth, so most of a long run is fed beforehand


class DraftModel:
    """Speculative decoding (Leviathan et al. 2023, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318).

    A smaller model with the target's vocabulary continues each sequence with the request's own sampler and noise, so
    that it draws the target's token as often as the coupling allows. ``shape=chain`` drafts one continuation;
    ``tree`` expands the ``width`` likeliest nodes per forward by ``width`` children each, best path first. Paths
    whose probability falls below ``min_p`` are not followed (the confidence stop of assisted generation).
    Scores are the draft model's probabilities.
    """

    def __init__(
        self, resources: Resources, *, model: str = "", shape: str = "chain", width: int = 3, min_p: float = 0.1
    ) -> None:
        name = model or resources.default_draft
        if not name:
            raise UsageError(f"strategy {SOURCE}: no draft model goes with this target; name one by model=NAME_OR_PATH")
        self._runner = resources.open_runner(name)
        spec = self._runner.spec
        if spec.vocab_size != resources.vocab_size:
            raise UsageError(
                f"strategy {SOURCE}: {name} has a vocabulary of {spec.vocab_size} tokens and the target one of "
                f"{resources.vocab_size}; choose a draft model with the target's tokenizer"
            )
        if shape == "tree" and spec.tree != "tree":
            raise UsageError(f"strategy {SOURCE}: {name} can't verify trees; use shape=chain")
        self._followers = Followers(self._runner)
        self._as_tree = shape == "tree"
        self._width = width
        self._min_p = min_p

    @property
    def needs(self) -> Needs:
        return Needs()

    def propose(self, views: Sequence[View], budgets: Sequence[int]) -> list[Draft]:
        room = self._runner.spec.max_context
        limits = [min(budget, room - len(view.tokens)) for view, budget in zip(views, budgets, strict=True)]
        wanted = [place for place, limit in enumerate(limits) if limit > 0]
        followers = self._followers.catch_up(
            [views[place] for place in wanted],
            [limits[place] for place in wanted],
            *([_TREE_PENDING] if self._as_tree else []),
        )
        plans = {
            place: _Plan(views[place], follower, limits[place], self._min_p)
            for place, follower in zip(wanted, followers, strict=True)
            if follower is not None
        }
        if self._as_tree:
            self._grow_trees(list(plans.values()))
        else:
            self._write_chains(list(plans.values()))
        return [plans[place].draft() if place in plans else NO_DRAFT for place in range(len(views))]

    def observe(self, observations: Sequence[Observation]) -> None:
        """Learns nothing here: `propose` compares its cache with the committed tokens."""

    def release(self, sequence: int) -> None:
        self._followers.release(sequence)

    def _write_chains(self, plans: Sequence[_Plan]) -> None:
        """Token by token, all sequences at once. Drafted tokens join the draft model's cache as if committed."""
        while plans:
            out = self._runner.forward([plan.follower.segment() for plan in plans])
            paths = [plan.tokens for plan in plans]
            guesses = best_guesses(out.logits_RV, [plan.view for plan in plans], paths, 1)
            for plan, guess in zip(plans, guesses, strict=True):
                self._followers.keep(plan.follower)
                plan.offer(len(plan.tokens) - 1, guess)
                plan.follower.pending = tuple(plan.grow(1))
            plans = [plan for plan in plans if plan.follower.pending and len(plan.tokens) < plan.budget]

    def _grow_trees(self, plans: Sequence[_Plan]) -> None:
        """Level by level: the newest nodes of every tree run at once and offer their likeliest children."""
        while plans:
            out = self._runner.forward([plan.follower.segment(plan.tree, len(plan.newest)) for plan in plans])
            rows = [(plan, node) for plan in plans for node in plan.newest]
            views = [plan.view for plan, _ in rows]
            paths = [plan.path_tokens(node) for plan, node in rows]
            for (plan, node), guesses in zip(rows, best_guesses(out.logits_RV, views, paths, self._width), strict=True):
                plan.offer(node, guesses)
            plans = [plan for plan in plans if not self._finished(plan)]

    def _finished(self, plan: _Plan) -> bool:
        """Grow the plan; when no further forward can help it, its likeliest path stays in the draft model's cache."""
        ran = plan.tree
        left = plan.budget - len(ran)
        if left > self._width and plan.grow(self._width):
            return False
        self._followers.keep(plan.follower, plan.likeliest_path(), ran)
        plan.grow(left)
        return True


class _Plan:
    """A draft in the making: nodes so far, and candidates for more of them, the likeliest path first."""

    def __init__(self, view: View, follower: Follower, budget: int, min_p: float) -> None:
        self.view = view
        self.follower = follower
        self.budget = budget
        self.tokens: list[int] = []
        self.newest: list[int] = [-1]  # nodes that have not run yet; at first the root
        self._min_p = min_p
        self._parents: list[int] = []
        self._scores: list[float] = []
        self._reach: list[float] = []  # probability of the path to each node
        self._candidates: list[tuple[float, int, int, int, float]] = []  # -reach, order, parent, token, score
        self._offered = 0

    @property
    def tree(self) -> Tree:
        return Tree(tuple(self.tokens), tuple(self._parents))

    def offer(self, parent: int, guesses: Sequence[Guess]) -> None:
        """Candidates for children of ``parent``; those below ``min_p`` are dropped."""
        reach = self._reach[parent] if parent >= 0 else 1.0
        for token, probability in guesses:
            if reach * probability >= self._min_p:
                self._offered += 1
                heapq.heappush(self._candidates, (-reach * probability, self._offered, parent, token, probability))

    def grow(self, count: int) -> list[int]:
        """Turn up to ``count`` candidates into nodes; returns their tokens."""
        first = len(self.tokens)
        for _ in range(min(count, len(self._candidates))):
            reach, _, parent, token, score = heapq.heappop(self._candidates)
            self.tokens.append(token)
            self._parents.append(parent)
            self._scores.append(score)
            self._reach.append(-reach)
        self.newest = list(range(first, len(self.tokens)))
        return self.tokens[first:]

    def path_tokens(self, node: int) -> list[int]:
        return [self.tokens[place] for place in trees.path_to(self.tree, node)]

    def likeliest_path(self) -> tuple[int, ...]:
        """From the root to the leaf that comes of taking the likeliest child each time."""
        families = trees.children(self.tree)
        node, path = -1, []
        while families[node]:
            node = max(families[node], key=self._reach.__getitem__)
            path.append(node)
        return tuple(path)

    def draft(self) -> Draft:
        if not self.tokens:
            return NO_DRAFT
        return Draft(self.tree, sources=(SOURCE,) * len(self.tokens), scores=tuple(self._scores))
