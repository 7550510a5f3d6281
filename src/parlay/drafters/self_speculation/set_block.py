"""TiDAR: a model with a mask token drafts for itself, on mask rows of the forward that verifies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from operator import mul
from pathlib import Path

from parlay.drafters.draft_models.static_trees import Acceptance, RankRecord
from parlay.drafters.heads.guessing_ahead import GuessingAhead, group_counts, likely_counts, with_probes
from parlay.drafters.options import SET_BLOCK as SOURCE
from parlay.drafters.options import SetBlockOptions
from parlay.drafters.per_sequence import History
from parlay.drafters.resources import Resources
from parlay.models.lora import mask_of
from parlay.options import UsageError, user_path
from parlay.types import Adapter, CanvasSpec, Draft, Needs, Observation, RunnerSpec

USUAL, MOST = 6, 16
"""Mask rows below the likeliest node, if the options give no number and the model's block is as long: the number at
first, and the most when guesses are mostly right."""


class SetBlock(GuessingAhead):
    """TiDAR (Liu et al. 2025, arXiv:2511.08923) on models of set block decoding (Gat et al. 2025, arXiv:2509.04185).

    Below the ``groups`` nodes at which the accepted path is likeliest to end, there are ``masks`` rows each. They read
    the mask token and see each other; without a number, there are as many as are likely to be read. Their predictions
    of later tokens are the next draft, which the model's own causal rows then verify. In TiDAR, every node of a chain
    has mask rows, and each guess is one token; here only likely ends have them, and the guesses make a tree for the
    acceptance measured in this process. Scores are that acceptance. If a mask's row predicts its own place, sampled
    drafts are right less often, because rows are ranked with the noise of the place after theirs.

    With an ``adapter``, any causal target can draft in this way: only mask rows run with it, as in UNO (K2's unified
    drafter) and in gated LoRA (Samragh et al. 2025, arXiv:2507.11851). Everything that is verified and kept is the
    target's own.
    """

    def __init__(self, resources: Resources, options: SetBlockOptions) -> None:
        self._adapter: Adapter | None = None
        if folder := options.adapter or resources.mask_adapter:
            canvas, self._adapter = _adapted(resources, user_path(folder))
        else:
            canvas = _own_canvas(resources.target)
        called = resources.target.name if resources.target else ""
        self._mask, self._skipped, self._ordered = canvas.mask_id, 0 if canvas.shift else 1, canvas.ordered
        self._masks, self._most = options.masks, options.masks or min(MOST, canvas.block or USUAL)
        if self._most <= self._skipped:
            raise UsageError(f"strategy {SOURCE}: masks={options.masks} guesses nothing with {called}; give 2 or more")
        self._groups = options.groups
        self._record = RankRecord(self._most - self._skipped, options.width)
        super().__init__(SOURCE, Needs(top_k=options.width + 1))

    @property
    def acceptance(self) -> Acceptance:
        return self._record.acceptance

    def _hang(self, draft: Draft) -> Draft:
        if self._masks or not self._record.is_known:
            counts = group_counts(draft, self._groups, self._masks or min(USUAL, self._most))
        else:
            rights = [min(1.0, sum(ranks)) for ranks in self.acceptance]
            reach = [1.0] * self._skipped + list(accumulate(rights, mul))
            counts = likely_counts(draft, self._groups, reach, USUAL)
        hung = with_probes(draft, counts, SOURCE, token=self._mask)
        return replace(hung, mask_adapter=self._adapter, together=0 if self._ordered else hung.together)

    def _see(self, observation: Observation) -> None:
        """Compare the last guesses with the committed tokens, up to the first wrong guess."""
        history, guesses = self._guessed.get(observation.view.sequence, (History(), []))
        tokens = observation.view.tokens
        if not guesses or history.agree(tokens) < len(history.tokens):
            return
        for level, (token, ranked) in enumerate(zip(tokens[len(history.tokens) :], guesses, strict=False)):
            self._record.learn(level, ranked.index(token) if token in ranked else None)

    def _guesses(self, observation: Observation) -> list[Sequence[int]]:
        """The ranked tokens of each level.

        If a mask's row predicts its own place, the first mask guesses the new root.
        """
        found = super()._guesses(observation)[self._skipped :]
        return [[token for token in ranked if token != self._mask][: self.needs.top_k - 1] for ranked in found]


def _own_canvas(target: RunnerSpec | None) -> CanvasSpec:
    """The target's own canvas. Raises UsageError for a target that fills none, or that only fills canvases."""
    if target is None or target.canvas is None or target.fills_only or not target.together:
        lacks = "only fills places" if target is not None and target.fills_only else "fills none"
        called = "there is no target" if target is None else f"{target.name} {lacks}"
        raise UsageError(
            f"strategy {SOURCE} needs a target that writes token by token and fills masked places: {called}; "
            "parlay train set-block makes one of a causal model, or an adapter for it (adapter=FOLDER)"
        )
    return target.canvas


def _adapted(resources: Resources, folder: Path) -> tuple[CanvasSpec, Adapter]:
    """The canvas and the adapter of a folder. Raises UsageError, or BadAdapter for its files."""
    target = resources.target
    if target is None or target.fills_only or resources.read_adapter is None:
        raise UsageError(
            f"strategy {SOURCE}: adapter={folder} needs a target that writes token by token in Parlay's decoder"
        )
    canvas = mask_of(folder, target.vocab_size)
    return canvas, resources.read_adapter(folder, SOURCE)
