"""Superposed decoding: several drafts that grow by one row per level, and a drafter that drafts in this way.

The row is the mean of the embeddings of the drafts' last tokens, weighted by the drafts' probabilities (Shen et al.
2024, arXiv:2405.18400). So all drafts share one next-token distribution, and an n-gram model tells which token
continues which draft.
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
_LEAST = 1e-30  # lower limit of a probability, so that its logarithm is finite
TOP_K = 9
"""How many tokens of each distribution may continue a draft, as in the paper."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A draft so far. ``score``: the sum of its tokens' scores. ``ended``: nothing may follow."""

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
    """All continuations of the drafts by one token, the best first.

    ``law``: tokens with their log-probabilities, which are shared by all drafts. ``text``: the tokens before the
    drafts. With ``ngrams``, a token scores log(p^(1 - alpha) q^alpha): p by ``law``, q by the n-gram model.
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
    """Tokens with their log-probabilities at this temperature, as if there were no other tokens."""
    chances_K = torch.tensor([max(chance, _LEAST) for _, chance in guesses], dtype=torch.float64)
    logs: list[float] = torch.log_softmax(chances_K.log() / temperature, 0).tolist()
    return [(token, log) for (token, _), log in zip(guesses, logs, strict=True)]


def mean_of(rows_DH: Tensor, candidates: Sequence[Candidate]) -> Tensor:
    """The row ``[1, H]`` that stands for all drafts: the mean of ``rows_DH``, weighted by the drafts' probabilities."""
    weights_D = torch.softmax(torch.tensor([each.score for each in candidates], dtype=torch.float64), 0)
    return (weights_D[:, None] * rows_DH.double().cpu()).sum(0, keepdim=True).to(rows_DH.dtype)


class SuperposedDraft(FromText):
    """Superposed decoding as a drafter (Shen et al. 2024, arXiv:2405.18400): ``drafts`` paths for one row per level.

    At each level a smaller model reads one row: the mean of the drafts' last tokens. The distribution that follows
    continues all of them; the best tokens are those that the request's own sampler ranks highest. Every prefix that was
    among the best ``drafts`` is a node of the tree, the likeliest paths first. A path ends when its probability falls
    below ``min_p``, and the tree when it has as many nodes as the budget. The mixed rows are never kept: the draft
    model caches only the text. Scores are the model's probabilities. The target verifies the tree, so the text is its
    own.
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
        """One row per plan: first the last token of its text, later the mean of its drafts."""
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
    """The tokens of the mixed rows so far: those of the best draft."""
    chances: dict[tuple[int, ...], tuple[float, float]] = field(default_factory=lambda: {(): (1.0, 1.0)})
    """For each prefix of a draft: the probability of its path, and of its last token."""

    @property
    def rows(self) -> Tree:
        return trees.chain_tree(self.nodes)

    @property
    def best(self) -> tuple[int, ...]:
        return self.alive[0].tokens

    @property
    def goes_on(self) -> bool:
        """Whether there are drafts to continue, and room in the tree."""
        return bool(self.alive) and len(self.chances) <= self.job.budget

    def take(self, found: Sequence[Guess]) -> None:
        """Extend the drafts by one token. If the sampler can't use the row, they end."""
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
        """The likeliest paths, up to the budget. No node is less likely than its descendants."""
        paths = sorted((path for path in self.chances if path), key=lambda path: -self.chances[path][0])
        paths = paths[: self.job.budget]
        if not paths:
            return NO_DRAFT
        places = {path: place for place, path in enumerate(paths)} | {(): -1}
        tree = Tree(tuple(path[-1] for path in paths), tuple(places[path[:-1]] for path in paths))
        return Draft(tree, sources=(SOURCE,) * len(paths), scores=tuple(self.chances[path][1] for path in paths))
