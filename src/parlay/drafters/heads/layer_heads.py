"""The base of drafters whose head is a decoder layer with its own cache, which runs a tree level by level."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from parlay.drafters.draft_models.guesses import Guess
from parlay.drafters.heads.level_trees import Guessing, LevelTree
from parlay.drafters.heads.text_rows import Inputs, ReadText, TextRows, WaitingRows
from parlay.drafters.heads.watch import Watched
from parlay.drafters.state_room import StateRoom
from parlay.heads.artefact import HeadArtefact
from parlay.types import NO_DRAFT, NO_TREE, Draft, Features, Needs, Runner, Segment, SequenceView

_LAST = 1  # the tap behind the head's one layer


@dataclass(frozen=True, slots=True)
class TreeLimits:
    """How large trees grow: the most levels, and the most children of a node.

    ``rows``: the most rows of a tree that the head runs; None if all of them are in the draft.
    """

    levels: int
    children: int
    rows: int | None = None


@dataclass(slots=True)
class TreeJob:
    """One sequence to draft for: the rows that must run first, then its tree, and finally the draft."""

    text: WaitingRows
    budget: int
    tree: LevelTree
    inputs_KH: Tensor | None = None
    """Inputs of the latest level's rows; first those of its text. None: no level has run."""
    draft: Draft = NO_DRAFT

    def segment(self) -> Segment:
        """The rows to run next."""
        if self.inputs_KH is None:
            self.inputs_KH = self.text.inputs()
        rows, count = (self.tree.rows(), len(self.tree.newest)) if self.tree.ran else (NO_TREE, 1)
        end = len(self.text.pending) + len(rows)
        base = end - count if rows.tokens else 0
        return Segment(self.text.name, self.text.pending, rows, end - count, base, Features(self.inputs_KH))


class LayerHeadDrafter(Watched, ABC):
    """The head continues from the target's features of the committed text, then from its own hidden states.

    Each level of the trees is one forward of the head for all sequences. Rows of drafted tokens are dropped from its
    cache: once committed, they run again on the target's own features. If a request samples, candidates are ranked with
    its noise. Scores are the head's probabilities.

    ``from_target`` makes the inputs of rows. It is not a method, so that no reference cycle keeps an unloaded model's
    memory.
    """

    def __init__(
        self,
        source: str,
        runner: Runner,
        artefact: HeadArtefact,
        guessing: Guessing,
        limits: TreeLimits,
        *,
        from_target: Inputs,
        room: StateRoom,
        read: ReadText | None = None,
    ) -> None:
        """``read``: see `TextRows`."""
        taps: list[int] = artefact.settings["taps"]
        self._source, self._runner, self._guessing, self._limits = source, runner, guessing, limits
        self.needs = Needs(taps=tuple(taps), expected=artefact.expected)
        self._from_target, self._rows = from_target, TextRows(runner, taps, from_target, room, read)
        super().__init__(source, artefact, self._rows)

    @abstractmethod
    def _from_itself(self, hidden_KH: Tensor, tokens: Sequence[int]) -> Tensor:
        """Inputs ``[K, H]`` for rows of drafted ``tokens``, from the head's output at their parents' rows."""

    @abstractmethod
    def _tree(self, budget: int) -> LevelTree:
        """A new tree for a draft of at most ``budget`` nodes."""

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        jobs = self._jobs(views, budgets)
        if jobs:
            self._grow(list(jobs.values()))
            for job in jobs.values():
                self._rows.keep(job.text)
        return [jobs[place].draft if place in jobs else NO_DRAFT for place in range(len(views))]

    def _jobs(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> dict[int, TreeJob]:
        """The sequences that can be drafted for now, by index."""
        most, rows = self._runner.spec.max_context, self._limits.rows
        limits = [min(budget, most - len(view.tokens)) for view, budget in zip(views, budgets, strict=True)]
        room = [
            (budget if rows is None else rows) if limit > 0 else None
            for budget, limit in zip(budgets, limits, strict=True)
        ]
        return {
            place: TreeJob(text, limits[place], self._tree(limits[place]))
            for place, text in self._rows.waiting(views, room).items()
        }

    def _grow(self, jobs: list[TreeJob]) -> None:
        """Grow all trees, level by level, and make the drafts."""
        active = jobs
        for level in range(self._limits.levels):
            out = self._runner.forward([job.segment() for job in active], (_LAST,))
            hidden_NH, guesses, row, first = out.taps[_LAST], self._guesses(active, out.logits_RV), 0, 0
            growing = []
            for job in active:
                count, ran = len(job.tree.newest), job.segment().rows
                before = job.tree.newest
                job.tree.offer(guesses[row : row + count])
                row, first = row + count, first + ran
                if level + 1 < self._limits.levels and job.tree.expand(job.text.view.request.stop_ids):
                    above_KH = hidden_NH[first - count : first][job.tree.rows_above(before)]
                    job.inputs_KH = self._from_itself(above_KH, [job.tree.token(node) for node in job.tree.newest])
                    growing.append(job)
            active = growing
            if not active:
                break
        for job in jobs:
            job.draft = job.tree.draft(job.budget, self._source)

    def _guesses(self, jobs: Sequence[TreeJob], logits_RD: Tensor) -> list[list[Guess]]:
        """The best children of each row that has just run."""
        rows = [(job, node) for job in jobs for node in job.tree.newest]
        paths = [job.tree.path_tokens(node) for job, node in rows]
        return self._guessing.best(logits_RD, [job.text.view for job, _ in rows], paths, self._limits.children)
