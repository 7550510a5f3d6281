"""A diffusion model drafts for an autoregressive target: it fills a canvas, and the target verifies it."""

from __future__ import annotations

from collections.abc import Sequence

from parlay.drafters.draft_models.draft_sequences import DraftJob, DraftSequences
from parlay.drafters.draft_models.guesses import Guess, best_guesses, falling, likely_chain
from parlay.drafters.draft_models.opening import open_draft
from parlay.drafters.draft_models.static_trees import FilledTree, best_tree
from parlay.drafters.options import CANVAS_DRAFT as SOURCE
from parlay.drafters.options import CanvasDraftOptions
from parlay.drafters.per_sequence import FromText
from parlay.drafters.resources import Resources
from parlay.options import UsageError
from parlay.sampling.sampler import take_rows
from parlay.types import NO_DRAFT, CanvasSpec, Draft, Segment, SequenceView, trees


class CanvasDraft(FromText):
    """Speculative diffusion decoding (Christopher et al. 2025, arXiv:2408.05636): one forward guesses a whole block.

    The paper drafts the likeliest token at each place. Here each place offers its ``width`` best tokens, ranked by the
    request's own sampler, and the draft is the tree of the likeliest paths through them, as if places were independent.
    Paths less likely than ``min_p`` are left out. With several ``steps``, the surest places are fixed first, and the
    others are guessed again. Scores are the model's probabilities. With translation models, this is generalised
    aggressive decoding (Xia et al. 2022, arXiv:2203.16487).
    """

    def __init__(self, resources: Resources, options: CanvasDraftOptions) -> None:
        if not options.model:
            raise UsageError(f"strategy {SOURCE}: name a diffusion model, as in {SOURCE}:model=FOLDER")
        self._runner = open_draft(SOURCE, resources, options.model, canvases=True)
        canvas = self._runner.spec.canvas
        if canvas is None or not self._runner.spec.together:
            raise UsageError(
                f"strategy {SOURCE}: the runner of {options.model} can't fill canvases: choose a model that "
                "Parlay's own decoder runs"
            )
        if canvas.ordered:
            raise UsageError(f"strategy {SOURCE}: {options.model} writes token by token too: choose draft-model for it")
        if canvas.noise:
            raise UsageError(
                f"strategy {SOURCE}: canvases of {options.model} begin as noise: choose a model with a mask"
            )
        if canvas.ends is not None and not canvas.ends.drafts:
            raise UsageError(
                f"strategy {SOURCE}: {options.model} fills whole answers; choose a model that fills blocks, as one "
                "of parlay train cmlm"
            )
        self._canvas: CanvasSpec = canvas
        ends = canvas.ends
        numbers = () if ends is None else range(ends.first_number, ends.first_number + ends.numbers)
        self._barred = (canvas.mask_id, *numbers)
        self._options = options
        self._sequences = DraftSequences(self._runner)

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        jobs = self._sequences.jobs(views, budgets)
        plans = {place: _Plan(job, self._places(job)) for place, job in jobs.items()}
        for step in range(self._options.steps):
            if active := [plan for plan in plans.values() if plan.open]:
                self._guess(active, self._options.steps - step)
        return [self._draft(plans[place]) if place in plans else NO_DRAFT for place in range(len(views))]

    def release(self, sequence: int) -> None:
        self._sequences.release(sequence)

    def _places(self, job: DraftJob) -> int:
        """The number of places: at most the budget, and the canvas ends where the model's block does."""
        size, length = self._canvas.block, len(job.view.tokens)
        if not size:
            return job.budget
        return min(job.budget, size - length % size if self._canvas.text == "block" else size)

    def _guess(self, plans: Sequence[_Plan], steps_left: int) -> None:
        """Guess all open places in one forward, and fix the surest share of them; after the last step, all."""
        out = self._runner.forward([plan.segment(self._canvas) for plan in plans])
        for plan, start in zip(plans, out.starts, strict=False):
            if steps_left > 1:
                self._sequences.run_again(plan.job)
            else:
                self._sequences.keep(plan.job.sequence)
            logits_RV, wanted = out.logits_RV, [start + place for place in plan.open]
            if len(wanted) <= wanted[-1] - wanted[0]:
                logits_RV, wanted = take_rows(logits_RV, wanted), list(range(len(wanted)))
            views, paths = [plan.job.view] * len(wanted), plan.paths(self._canvas.mask_id)
            width, barred = self._options.width, self._barred
            plan.take(best_guesses(logits_RV, views, paths, width, wanted=wanted, barred=barred), steps_left)

    def _draft(self, plan: _Plan) -> Draft:
        """The tree of the likeliest paths; a chain if each place has one token."""
        if self._options.width == 1:
            chain = [guesses[0] for guesses in plan.guesses[: plan.job.budget]]
            return likely_chain(chain, self._options.min_p, SOURCE)
        chances = [falling([chance for _, chance in guesses]) for guesses in plan.guesses]
        shape = best_tree(chances, plan.job.budget, len(chances))
        likely = sum(path >= self._options.min_p for path in shape.path_probs)
        filled = FilledTree(best_tree(chances, likely, len(chances)))
        for level, guesses in enumerate(plan.guesses):
            for node in filled.inner(level):
                filled.fill(node, guesses)
        return filled.draft(SOURCE)


class _Plan:
    """An unfinished canvas: the guesses at each place, and which places are still open."""

    def __init__(self, job: DraftJob, places: int) -> None:
        self.job = job
        self.guesses: list[list[Guess]] = [[] for _ in range(places)]
        self.open = list(range(places))

    def tokens(self, mask_id: int) -> list[int]:
        """The ids that the rows of the places read."""
        if len(self.open) == len(self.guesses):
            return [mask_id] * len(self.open)
        return [mask_id if place in self.open else guesses[0][0] for place, guesses in enumerate(self.guesses)]

    def paths(self, mask_id: int) -> list[list[int]]:
        """For each open place, the tokens before it on the canvas."""
        tokens = self.tokens(mask_id)
        return [tokens[:place] for place in self.open]

    def segment(self, canvas: CanvasSpec) -> Segment:
        """The pending tokens and the canvas, with logits of the rows that predict its places.

        If each row predicts the next place, the last place's row predicts nothing. A causal model does not run it;
        others do, because they have learned to fill whole canvases.
        """
        tokens = self.tokens(canvas.mask_id)
        if not canvas.shift:
            return self.job.sequence.segment(trees.chain_tree(tokens), len(tokens), together=len(tokens))
        seen = tokens[:-1] if canvas.text == "causal" else tokens
        return self.job.sequence.segment(trees.chain_tree(seen), len(seen) + 1, together=len(seen))

    def take(self, found: Sequence[list[Guess]], steps_left: int) -> None:
        """Store the guesses at open places. The canvas ends at a place where nothing can be drawn."""
        for place, guesses in zip(self.open, found, strict=True):
            self.guesses[place] = guesses
        if not all(self.guesses):
            del self.guesses[self.guesses.index([]) :]
        if steps_left == 1:
            self.open = []
            return
        self.open = [place for place in self.open if place < len(self.guesses)]
        surest = sorted(self.open, key=lambda place: -self.guesses[place][0][1])
        fixed = surest[: -(-len(surest) // steps_left)]
        self.open = [place for place in self.open if place not in fixed]
