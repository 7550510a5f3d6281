"""Chains and trees of a draft model's best guesses, grown by the compiled decoder in one call."""

from __future__ import annotations

from collections.abc import Sequence

from parlay.drafters.draft_models.draft_sequences import DraftJob, DraftSequences
from parlay.drafters.draft_models.opening import DraftWriter
from parlay.models.forward import GrownTree, Growth, TreeRequest
from parlay.models.native import NativeRunner
from parlay.sampling import noise
from parlay.sampling.processors import edits
from parlay.types import NO_DRAFT, Draft, SequenceView, Tree


class GrownDrafts:
    """Grows all drafts of a step in one call, with the noise that draft model and target share.

    ``width`` 1 makes chains. Requests whose logits are edited go to ``slow``.
    """

    def __init__(
        self, runner: NativeRunner, sequences: DraftSequences, source: str, growth: Growth, slow: DraftWriter
    ) -> None:
        self._runner, self._sequences, self._source = runner, sequences, source
        self._growth, self._slow = growth, slow
        runner.prepare(growth)

    def write(self, jobs: Sequence[DraftJob]) -> list[Draft]:
        """Grow drafts. The likeliest path of each joins the draft model's cache as if committed."""
        plain = [job for job in jobs if is_plain(job.view)]
        edited = [job for job in jobs if not is_plain(job.view)]
        drafts = dict(zip(map(id, edited), self._slow.write(edited) if edited else (), strict=True))
        drafts |= zip(map(id, plain), self._grow(plain) if plain else (), strict=True)
        return [drafts[id(job)] for job in jobs]

    def _grow(self, jobs: Sequence[DraftJob]) -> list[Draft]:
        growth = self._growth._replace(levels=max([job.budget for job in jobs]))
        grown = self._runner.grow([job.sequence.segment() for job in jobs], growth, [tree_request(job) for job in jobs])
        for job, tree in zip(jobs, grown, strict=True):
            self._sequences.keep(job.sequence, tree.likeliest_rows, tree.rows)
        return [self._draft(tree) for tree in grown]

    def _draft(self, grown: GrownTree) -> Draft:
        if not grown.tokens:
            return NO_DRAFT
        return Draft(
            Tree(grown.tokens, grown.parents), sources=(self._source,) * len(grown.tokens), scores=grown.chances
        )


def is_plain(view: SequenceView) -> bool:
    """Whether the compiled decoder can draft for the request, because nothing edits its logits."""
    return not edits(view, ()) and view.request.params.typical_p == 1


def tree_request(job: DraftJob) -> TreeRequest:
    """The arguments of a job's draft for the compiled decoder."""
    view, params, sequence = job.view, job.view.request.params, job.sequence
    unread, salt = view.tokens[sequence.listed :], view.request.salt
    sequence.listed = len(view.tokens)
    if params.greedy:
        return TreeRequest(job.budget, unread=unread, salt=salt, ends=view.request.stop_ids)
    place = len(view.tokens)
    streams = [noise.stream(view.request.key, place + level) for level in range(job.budget)]
    cuts = params.temperature, streams, params.top_k, params.top_p, params.min_p
    return TreeRequest(job.budget, *cuts, unread, salt, view.request.stop_ids)
