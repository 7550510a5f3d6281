"""Drafters whose guesses are the target's own: the forward that verifies a draft also guesses the next one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from parlay.drafters.draft_models.static_trees import Acceptance, FilledTree, best_tree
from parlay.drafters.per_sequence import History
from parlay.types import NO_DRAFT, Draft, Features, Needs, Observation, SequenceView, Tree

_READ = 0.1  # share of steps: a probe that is read less often is not worth its row


class GuessingAhead(ABC):
    """The forward that verifies a draft also guesses the next one.

    Chains of probes hang below the root and below drafted nodes. The probes below the last accepted node predict what
    follows the token that is sampled there: the ranked tokens of probe m are the guesses m + 1 levels below the new
    root. They make the tree that is best for ``acceptance``.
    """

    def __init__(self, source: str, needs: Needs) -> None:
        self._source = source
        self.needs = needs
        self._guessed: dict[int, tuple[History, list[Sequence[int]]]] = {}

    @property
    @abstractmethod
    def acceptance(self) -> Acceptance:
        """How often guesses are right, by level and rank."""

    @abstractmethod
    def _see(self, observation: Observation) -> None:
        """Learn from a step how good the guesses were."""

    @abstractmethod
    def _hang(self, draft: Draft) -> Draft:
        """Add probes to the draft."""

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        return [
            self._hang(self._draft(view, budget)) if budget > 0 else NO_DRAFT
            for view, budget in zip(views, budgets, strict=True)
        ]

    def observe(self, observations: Sequence[Observation]) -> None:
        for observation in observations:
            self._see(observation)
            tokens, sequence = observation.view.tokens, observation.view.sequence
            history, _ = self._guessed.get(sequence, (History(), []))
            history.cut(history.agree(tokens))
            history.tokens += tokens[len(history.tokens) :]
            self._guessed[sequence] = history, self._guesses(observation)

    def release(self, sequence: int) -> None:
        self._guessed.pop(sequence, None)

    def _guesses(self, observation: Observation) -> list[Sequence[int]]:
        """The ranked tokens of each level below the new root."""
        return read_probes(observation, self._source)

    def _draft(self, view: SequenceView, budget: int) -> Draft:
        """Draft from the guesses of the last step's probes, if that was the text's latest step."""
        history, guesses = self._guessed.get(view.sequence, (History(), []))
        if len(history.tokens) != len(view.tokens) or history.agree(view.tokens) < len(view.tokens):
            return NO_DRAFT
        acceptance = self.acceptance
        filled = FilledTree(best_tree(acceptance, budget, len(guesses)))
        for level, (tokens, chances) in enumerate(zip(guesses, acceptance, strict=False)):
            for node in filled.inner(level):
                filled.fill(node, list(zip(tokens, chances, strict=False)))
        return filled.draft(self._source)


def with_probes(
    draft: Draft, counts: Sequence[int], source: str, inputs: Features | None = None, *, token: int = 0
) -> Draft:
    """Add a chain of ``counts[0]`` probes below the root, and of ``counts[i + 1]`` below node i.

    Probe m of each chain reads the m-th of ``inputs``. Without inputs, probes read ``token``, and those of a chain see
    each other.
    """
    tokens, parents = list(draft.tree.tokens), list(draft.tree.parents)
    which: list[int] = []
    for anchor, count in zip(range(-1, len(draft)), counts, strict=True):
        for place in range(count):
            parents.append(len(parents) - 1 if place else anchor)
            tokens.append(token)
            which.append(place)
    return Draft(
        Tree(tuple(tokens), tuple(parents)),
        sources=(source,) * len(tokens),
        scores=(*draft.scores, *(0.0,) * len(which)),
        probes=len(which),
        inputs=inputs.of(which) if inputs else None,
        together=0 if inputs else len(which),
    )


def probe_counts(draft: Draft, reach: Sequence[float], most: int) -> list[int]:
    """How many probes hang below the root and below each node, ``most`` in all.

    ``reach``: by probe, the probability that all guesses down to its own are right; it never rises.
    """
    ends = walk_ends(draft)
    worth = [(-end * far, place, at) for at, end in enumerate(ends) for place, far in enumerate(reach)]
    counts = [0] * len(ends)
    for _, _, at in sorted(worth)[:most]:
        counts[at] += 1
    return counts


def group_counts(draft: Draft, groups: int, length: int) -> list[int]:
    """``length`` probes below each of ``groups`` nodes (or the root) at which the accepted path is likeliest to end."""
    ends = walk_ends(draft)
    chosen = set(_likeliest(ends, groups))
    return [length if at in chosen else 0 for at in range(len(ends))]


def likely_counts(draft: Draft, groups: int, reach: Sequence[float], least: int) -> list[int]:
    """Counts of probes below the root and each node; at most ``groups`` nodes, the likeliest ends, have any.

    A node has as many probes as are read in one step out of ten, at least ``least`` if it has any; the likeliest node
    always has some. ``reach``: by probe, the probability that all guesses down to its own are right; it never rises.
    """
    ends = walk_ends(draft)
    counts = [0] * len(ends)
    for place, at in enumerate(_likeliest(ends, groups)):
        read = sum([ends[at] * far >= _READ for far in reach])
        counts[at] = max(read, min(least, len(reach))) if read or not place else 0
    return counts


def _likeliest(ends: Sequence[float], groups: int) -> list[int]:
    """The ``groups`` likeliest ends of the accepted path, in order; 0 is the root, i + 1 is node i."""
    return sorted(range(len(ends)), key=lambda at: -ends[at])[:groups]


def walk_ends(draft: Draft) -> list[float]:
    """The probability that the accepted path ends at the root, then at each node."""
    path_probs = [1.0]
    ends = [1.0]
    for parent, score in zip(draft.tree.parents, draft.scores, strict=True):
        path_probs.append(path_probs[parent + 1] * score)
        ends.append(path_probs[-1])
        ends[parent + 1] -= path_probs[-1]
    return ends


def read_probes(observation: Observation, source: str) -> list[Sequence[int]]:
    """The ranked tokens of the probes below the last accepted node, from the first probe on."""
    draft, verdict = observation.draft, observation.verdict
    found: list[Sequence[int]] = []
    node = verdict.path[-1] if verdict.path else -1
    probes = range(len(draft) - draft.probes, len(draft))
    below = {draft.tree.parents[probe]: probe for probe in probes if draft.sources[probe] == source}
    while node in below and observation.top_k:
        node = below[node]
        found.append(observation.top_k[node + 1])
    return found
