"""Superposed decoding: several drafts that grow by one row each level, and a draft model that drafts so.

One row reads the mean of the embeddings of the drafts' last tokens, weighted by the drafts' chances (Shen et al. 2024,
arXiv:2405.18400). So all drafts share the law that follows, and n-grams say which token goes on with which draft.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from parlay.drafters.counting.ngram_lm import open_ngrams
from parlay.drafters.draft_models.draft_sequences import DraftJob, DraftSequences
from parlay.drafters.draft_models.guesses import Guess, best_guesses, falling
from parlay.drafters.draft_models.opening import EmbeddingRunner, draft_name, open_draft
from parlay.drafters.options import SUPERPOSED_DRAFT as SOURCE
from parlay.drafters.options import SuperposedDraftOptions
from parlay.drafters.per_sequence import FromText
from parlay.drafters.resources import Resources
from parlay.ngrams.model import NgramModel
from parlay.options import UsageError, refuse_unread
from parlay.types import NO_DRAFT, Draft, Features, Segment, SequenceView, Tree, trees

_LN10 = math.log(10)
_LEAST = 1e-30  # a chance whose logarithm is still a number
TOP_K = 9
"""Tokens of each law that may go on with a draft, in the paper."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A draft so far. ``score`` is the sum of its tokens' scores; ``ended``: nothing may follow."""

    tokens: tuple[int, ...] = ()
    score: float = 0.0
    ended: bool = False


def grown(
    candidates: Sequence[Candidate],
    law: Sequence[tuple[int, float]],
    text: Sequence[int],
    alpha: float,
    ngrams: NgramModel | None = None,
) -> list[Candidate]:
    """All continuations of the drafts by a token, the best first.

    ``law`` has tokens with the logarithms of their chances, which hold after each of the drafts; ``text`` comes before
    these. With ``ngrams`` a token scores log p^(1 - alpha) q^alpha: p by the law, q by the n-grams.
    """
    found: list[Candidate] = []
    text = text[-ngrams.order :] if ngrams is not None else ()
    for each in candidates:
        scores = [log for _, log in law]
        if ngrams is not None:
            state = ngrams.state((*text, *each.tokens)[-ngrams.order :])
            scores = [(1 - alpha) * log + alpha * _LN10 * ngrams.log10(state, token) for token, log in law]
        found += [
            Candidate((*each.tokens, token), each.score + own) for (token, _), own in zip(law, scores, strict=True)
        ]
    return sorted(found, key=lambda each: -each.score)


def sharpened(guesses: Sequence[Guess], temperature: float) -> list[tuple[int, float]]:
    """Tokens with the logarithms of their chances at this temperature, as if there were no other tokens."""
    chances_K = torch.tensor([max(chance, _LEAST) for _, chance in guesses], dtype=torch.float64)
    logs: list[float] = torch.log_softmax(chances_K.log() / temperature, 0).tolist()
    return [(token, log) for (token, _), log in zip(guesses, logs, strict=True)]


def mean_of(rows_DH: Tensor, candidates: Sequence[Candidate]) -> Tensor:
    """The row ``[1, H]`` that stands for all drafts: the mean of their last tokens' rows, by their chances."""
    weights_D = torch.softmax(torch.tensor([each.score for each in candidates], dtype=torch.float64), 0)
    return (weights_D[:, None] * rows_DH.double().cpu()).sum(0, keepdim=True).to(rows_DH.dtype)


class SuperposedDraft(FromText):
    """Superposed decoding as a drafter (Shen et al. 2024, arXiv:2405.18400): ``drafts`` paths for one row each level.

    A smaller model reads, at each level, one row: the mean of the drafts' last tokens. Its law continues all of them;
    the best tokens are those of the request's own sampler. Every beginning that was among the best ``drafts`` is a node
    of the tree, the likeliest paths first. A path ends where its chance falls below ``min_p``, the tree where it has as
    many nodes as may be drafted. The mixed rows are never kept: the draft model caches the text alone. Scores are the
    model's probabilities. The target verifies the tree, so the text is its own.
    """

    def __init__(self, resources: Resources, options: SuperposedDraftOptions) -> None:
        if not options.ngrams:
            refuse_unread(f"strategy {SOURCE}", options, ("alpha",), "without ngrams=: name an n-gram model")
        name = draft_name(SOURCE, resources, options.model)
        runner = open_draft(SOURCE, resources, name)
        if not isinstance(runner, EmbeddingRunner) or not runner.spec.features:
            raise UsageError(
                f"strategy {SOURCE}: {name} can't read several tokens as one: choose a draft model that Parlay's own "
                "decoder runs"
            )
        self._ngrams = open_ngrams(f"strategy {SOURCE}", options.ngrams, resources) if options.ngrams else None
        self._runner, self._options = runner, options
        self._sequences = DraftSequences(runner)

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        jobs = self._sequences.jobs(views, budgets)
        plans = {place: _Paths(job, self._options, self._ngrams) for place, job in jobs.items()}
        active = list(plans.values())
        while active:
            out = self._runner.forward(self._segments(active))
            seen, paths = [plan.job.view for plan in active], [plan.best for plan in active]
            for plan, found in zip(active, best_guesses(out.logits_RV, seen, paths, TOP_K), strict=True):
                plan.take(found)
            active = [plan for plan in active if plan.goes_on]
        for plan in plans.values():
            self._sequences.keep(plan.job.sequence)
        return [plans[place].draft() if place in plans else NO_DRAFT for place in range(len(views))]

    def _segments(self, plans: Sequence[_Paths]) -> list[Segment]:
        """One row of each: at first the last token of its text, then the mean of its drafts."""
        if not plans[0].nodes:
            return [plan.job.sequence.level(plan.rows, 1) for plan in plans]
        rows_NH = self._runner.embed([each.tokens[-1] for plan in plans for each in plan.alive])
        segments, first = list[Segment](), 0
        for plan in plans:
            mean_1H = mean_of(rows_NH[first : first + len(plan.alive)], plan.alive)
            segments.append(plan.job.sequence.level(plan.rows, 1)._replace(features=Features(mean_1H)))
            first += len(plan.alive)
        return segments

    def release(self, sequence: int) -> None:
        self._sequences.release(sequence)


@dataclass(slots=True)
class _Paths:
    """The drafts of one sequence in the making."""

    job: DraftJob
    options: SuperposedDraftOptions
    ngrams: NgramModel | None
    alive: list[Candidate] = field(default_factory=lambda: [Candidate()])
    nodes: list[int] = field(default_factory=list)
    """Tokens by which the rows go that stand for all drafts: of the best of them."""
    chances: dict[tuple[int, ...], tuple[float, float]] = field(default_factory=lambda: {(): (1.0, 1.0)})
    """Of each beginning of a draft: of the whole path, and of its last token."""

    @property
    def rows(self) -> Tree:
        return trees.chain_tree(self.nodes)

    @property
    def best(self) -> tuple[int, ...]:
        return self.alive[0].tokens

    @property
    def goes_on(self) -> bool:
        """Whether there is something to go on with, and room in the tree for it."""
        return bool(self.alive) and len(self.chances) <= self.job.budget

    def take(self, found: Sequence[Guess]) -> None:
        """One more token for the drafts; where the sampler can make nothing of the row, they end."""
        ids = [token for token, _ in found]
        own = dict(zip(ids, falling([chance for _, chance in found]), strict=True))
        law = sharpened(list(own.items()), self.options.temperature) if own else []
        text = self.job.view.tokens[-self.ngrams.order :] if self.ngrams is not None else ()
        best = grown(self.alive, law, text, self.options.alpha, self.ngrams)[: self.options.drafts]
        self.alive = []
        for each in best:
            *above, token = each.tokens
            path = self.chances[tuple(above)][0] * own[token]
            if path >= self.options.min_p:
                self.chances[each.tokens] = (path, own[token])
                self.alive += [each] if token not in self.job.view.request.stop_ids else []
        if self.alive:
            self.nodes.append(self.alive[0].tokens[-1])

    def draft(self) -> Draft:
        """The likeliest paths, as many nodes as the budget has; none is less likely than what follows it."""
        paths = sorted((path for path in self.chances if path), key=lambda path: -self.chances[path][0])
        paths = paths[: self.job.budget]
        if not paths:
            return NO_DRAFT
        places = {path: place for place, path in enumerate(paths)} | {(): -1}
        tree = Tree(tuple(path[-1] for path in paths), tuple(places[path[:-1]] for path in paths))
        return Draft(tree, sources=(SOURCE,) * len(paths), scores=tuple(self.chances[path][1] for path in paths))
