"""A model as one level of a cascade: it verifies what the level below proposes and returns its own draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from parlay.drafters.combined.extended_view import ExtendedView, ExtendedViews
from parlay.drafters.combined.level_rows import LevelRows
from parlay.drafters.draft_models.guesses import Guess, paired, probabilities
from parlay.sampling.rules import SharedNoise
from parlay.sampling.sampler import ranked, take_rows
from parlay.types import NO_DRAFT, Draft, Drafter, Observation, SequenceView, Tree, Verdict, trees


@dataclass(frozen=True, slots=True)
class LevelSettings:
    """How a level writes. ``source``: the source of the tokens it adds. ``min_p``: less likely paths end.

    Each verified row gives ``width`` guesses: the token drawn there, then the best others. With ``enough`` above 0, the
    level stops after the forward that brings it to that many tokens.
    """

    source: str
    width: int = 1
    min_p: float = 0.0
    enough: int = 0


class ModelLevel:
    """Drafts the same tokens as its model would alone, in fewer forwards. ``rows`` runs the forwards.

    It uses the target's accept rule: each token is what the request's sampler draws from this model's logits with the
    request's noise. So its draft is a fixed guess (kind ``point``), whatever the level below proposed.
    """

    def __init__(self, rows: LevelRows, below: Drafter, settings: LevelSettings) -> None:
        self._rows = rows
        self._below = below
        self.needs = replace(below.needs, layers=True) if rows.layers else below.needs
        self._settings = settings
        self._rule = SharedNoise()
        self._views = ExtendedViews()

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        texts = {
            place: _WrittenText(self._views.of(views[place]), budget, self._settings)
            for place, budget in self._rows.begin(views, budgets).items()
        }
        unfinished = list(texts.values())
        while unfinished:
            self._advance(unfinished)
            unfinished = [text for text in unfinished if not text.finished]
        return [texts[place].draft() if place in texts else NO_DRAFT for place in range(len(views))]

    def observe(self, observations: Sequence[Observation]) -> None:
        self._below.observe(observations)

    def release(self, sequence: int) -> None:
        self._rows.release(sequence)
        self._views.release(sequence)
        self._below.release(sequence)

    def _advance(self, texts: Sequence[_WrittenText]) -> None:
        """Run one forward of the model over all texts and over the level below's proposals for them."""
        drafts = self._below.propose([text.view for text in texts], [text.left - 1 for text in texts])
        if self._rows.chains:
            drafts = [trees.best_chain(draft) for draft in drafts]
        logits_RV, roots = self._rows.run([text.view for text in texts], drafts)
        verdicts = self._rule.accept([text.view for text in texts], drafts, logits_RV, roots)
        walks = [verdict if isinstance(verdict, Verdict) else _NOWHERE for verdict in verdicts]
        guesses = self._guesses(texts, walks, logits_RV, roots)
        for text, draft, walk, rows_of_text in zip(texts, drafts, walks, guesses, strict=True):
            path = text.write(draft, walk, rows_of_text)
            self._rows.keep(text.view, path, draft.tree)

    def _guesses(
        self, texts: Sequence[_WrittenText], walks: Sequence[Verdict], logits_RV: Tensor, roots: Sequence[int]
    ) -> list[list[list[Guess]]]:
        """For each text and row on its accepted path: the drawn token, then the best others, with probabilities."""
        views = [text.view for text, walk in zip(texts, walks, strict=True) for _ in walk.sampled]
        if not views:
            return [[] for _ in texts]
        walked = [root + 1 + node for root, walk in zip(roots, walks, strict=True) for node in _visited(walk)]
        visited_RV = take_rows(logits_RV, walked)
        best: Sequence[Sequence[int]] = [(token,) for walk in walks for token in walk.sampled]
        if self._settings.width > 1:
            paths = [walk.sampled[:depth] for walk in walks for depth in range(len(walk.sampled))]
            best = ranked(visited_RV, views, paths, self._settings.width)
        guesses = iter(paired(best, probabilities(visited_RV, views)))
        return [[next(guesses) for _ in walk.sampled] for walk in walks]


class _WrittenText:
    """A level's text after one sequence: a chain, and other guesses at each of its places."""

    def __init__(self, view: ExtendedView, limit: int, settings: LevelSettings) -> None:
        self.view = view
        self.left = limit  # how many more tokens the chain may get
        self.finished = False
        self._limit = limit
        self._settings = settings
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._scores: list[float] = []
        self._sources: list[str] = []
        self._path_probs: list[float] = []  # probability of the path to each node
        self._tip = -1  # the last node of the chain

    def write(self, draft: Draft, walk: Verdict, guesses: Sequence[Sequence[Guess]]) -> tuple[int, ...]:
        """Append the tokens accepted from the level below's draft. Returns the nodes that were kept."""
        nodes = zip(draft.tree.parents, draft.tree.tokens, draft.sources, strict=True)
        below = {(parent, token): source for parent, token, source in nodes}
        before = self.left
        goes_on = bool(guesses)
        for node, row in zip(_visited(walk), guesses, strict=True):
            sources = [below.get((node, token), self._settings.source) for token, _ in row]
            goes_on = goes_on and self._grow(row, sources)
        written = before - self.left
        enough = 0 < self._settings.enough <= self._limit - self.left
        self.finished = not goes_on or self.left == 0 or enough
        return walk.path[:written]

    def _grow(self, row: Sequence[Guess], sources: Sequence[str]) -> bool:
        """Add nodes for one row's guesses. Returns whether the chain grew by the first one, which was drawn."""
        tip = self._tip
        path_prob = self._path_probs[tip] if tip >= 0 else 1.0
        for place, ((token, probability), source) in enumerate(zip(row, sources, strict=True)):
            if path_prob * probability < self._settings.min_p:
                continue
            if place == 0:
                self._tip = len(self._tokens)
                self.left -= 1
                self.view.extend([token])
            self._tokens.append(token)
            self._parents.append(tip)
            self._scores.append(probability)
            self._sources.append(source)
            self._path_probs.append(path_prob * probability)
        return self._tip != tip

    def draft(self) -> Draft:
        """The likeliest nodes. None is likelier than its parent, which comes before it."""
        if not self._tokens:
            return NO_DRAFT
        tree = Tree(tuple(self._tokens), tuple(self._parents))
        whole = Draft(tree, sources=tuple(self._sources), scores=tuple(self._scores))
        ranks = sorted(range(len(whole)), key=lambda node: -self._path_probs[node])
        return trees.subtree(whole, sorted(ranks[: self._limit]))


_NOWHERE = Verdict((), ())


def _visited(walk: Verdict) -> list[int]:
    """The rows that tokens were drawn from: the root's and those of accepted nodes.

    Empty if the root's was unusable.
    """
    return [-1, *walk.path][: len(walk.sampled)]
