"""Runs the forwards of one cascade level: a draft model with its own cache, or the target in a cheaper form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from parlay.drafters.combined.extended_view import ExtendedView
from parlay.drafters.draft_models.draft_sequences import DraftSequence, DraftSequences
from parlay.drafters.self_speculation.self_draft import SelfDraft
from parlay.drafters.self_speculation.skipping import layers_of
from parlay.types import Draft, Runner, SequenceView, Tree


class LevelRows(Protocol):
    """Runs the forwards of one level, whose texts grow at their ends while it drafts."""

    chains: bool
    """Whether the drafts it verifies must be chains."""
    layers: bool
    """Whether it runs the target's own layers."""

    def begin(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> dict[int, int]:
        """Start a round. Returns the budgets of the views that can be drafted for now, by index."""
        ...

    def run(self, views: Sequence[ExtendedView], drafts: Sequence[Draft]) -> tuple[Tensor, Sequence[int]]:
        """Logits ``[R, V]`` of each text's last row and of its draft's nodes, and the row number of each root."""
        ...

    def keep(self, view: ExtendedView, path: Sequence[int], tree: Tree) -> None:
        """Note that a text has grown: by the nodes of ``path`` in the tree that ran, perhaps by more tokens."""
        ...

    def release(self, sequence: int) -> None:
        """Forget a sequence."""
        ...


class ModelRows:
    """The level of a draft model."""

    layers = False

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.chains = runner.spec.tree == "chain"
        self._sequences = DraftSequences(runner)
        self._drafting: dict[int, DraftSequence] = {}

    def begin(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> dict[int, int]:
        """Start a round with the texts that the model has room for."""
        jobs = self._sequences.jobs(views, budgets)
        self._drafting = {job.view.sequence: job.sequence for job in jobs.values()}
        return {place: job.budget for place, job in jobs.items()}

    def run(self, views: Sequence[ExtendedView], drafts: Sequence[Draft]) -> tuple[Tensor, Sequence[int]]:
        """Run one forward over all tokens that are not cached, and over the drafts."""
        pairs = zip(views, drafts, strict=True)
        segments = [self._drafting[view.sequence].segment(one.tree, len(one) + 1) for view, one in pairs]
        out = self._runner.forward(segments)
        return out.logits_RV, out.starts[:-1]

    def keep(self, view: ExtendedView, path: Sequence[int], tree: Tree) -> None:
        """Keep the rows that agree with the text. The rest of the text is pending in the next forward."""
        opened = self._drafting[view.sequence]
        self._sequences.keep(opened, path, tree)
        opened.pending = tuple(view.tokens[len(opened.history.tokens) :])

    def release(self, sequence: int) -> None:
        """Free the sequence in the model's cache."""
        self._sequences.release(sequence)


class FormRows:
    """A level that runs the target in the cheaper form of a self-draft, over the target's own cache.

    So TriForce works (Sun et al. 2024, arXiv:2404.11912): a smaller drafter writes for the target with few keys, which
    writes for the target with all. Rows of the last forward are reused as far as the text is the same.
    """

    chains = layers = True

    def __init__(self, drafter: SelfDraft) -> None:
        self._drafter = drafter

    def begin(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> dict[int, int]:
        """Start a round with the texts for which this form is cheaper than the full target."""
        pairs = enumerate(zip(views, budgets, strict=True))
        return {at: budget for at, (view, budget) in pairs if budget > 0 and self._drafter.is_cheaper(view)}

    def run(self, views: Sequence[ExtendedView], drafts: Sequence[Draft]) -> tuple[Tensor, Sequence[int]]:
        """Run one forward for all drafts of the same length."""
        found: dict[int, Tensor] = {}
        for length in {len(draft) for draft in drafts}:
            places = [place for place, draft in enumerate(drafts) if len(draft) == length]
            paths = [drafts[place].tree.tokens for place in places]
            alike, rows = [views[place] for place in places], length + 1
            logits_RV = layers_of(alike[0]).forward(alike, paths, self._drafter.form, rows)
            found.update(zip(places, logits_RV.view(-1, rows, logits_RV.shape[1]), strict=True))
        parts = [found[place] for place in range(len(views))]
        roots = [sum(len(part) for part in parts[:place]) for place in range(len(parts))]
        return torch.cat(parts), roots

    def keep(self, view: ExtendedView, path: Sequence[int], tree: Tree) -> None:
        """Do nothing: the target's layers find out by themselves which rows can be reused."""

    def release(self, sequence: int) -> None:
        """Hold nothing."""
