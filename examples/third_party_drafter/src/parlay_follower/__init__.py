"""A whole drafter: after each token, the one that most often followed it in this text."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from parlay import trees
from parlay.drafters.resources import Resources
from parlay.options import Options, option
from parlay.types import Draft, Needs, Observation, SequenceView


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowerOptions(Options):
    """The parameters of the strategy, as in ``follower:least=1``."""

    least: int = option(2, "how often a follower must have been seen", low=1)


class Follower:
    """Guesses the most frequent follower of each token, as long as it was seen ``least`` times."""

    needs = Needs(outcomes=False)  # the committed tokens say it all

    def __init__(self, resources: Resources, options: FollowerOptions) -> None:
        self._least = options.least

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        return [self._draft(view.tokens, budget) for view, budget in zip(views, budgets, strict=True)]

    def _draft(self, tokens: Sequence[int], budget: int) -> Draft:
        followers: dict[int, Counter[int]] = defaultdict(Counter)
        for token, follower in pairwise(tokens):
            followers[token][follower] += 1
        path = [tokens[-1]]
        while len(path) <= budget and followers[path[-1]]:
            follower, count = followers[path[-1]].most_common(1)[0]
            if count < self._least:
                break
            path.append(follower)
        return trees.chain(path[1:], "follower")

    def observe(self, observations: Sequence[Observation]) -> None: ...

    def release(self, sequence: int) -> None: ...
