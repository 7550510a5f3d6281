"""LayerSkip's self-speculation (Elhoushi et al. 2024): the target exits at an early layer to draft."""

from __future__ import annotations

from collections.abc import Sequence

from parlay.drafters.options import EARLY_EXIT as SOURCE
from parlay.drafters.options import EarlyExitOptions
from parlay.drafters.per_sequence import FromText
from parlay.drafters.resources import Resources
from parlay.drafters.self_speculation.skipping import ChainDraft, skippable, write_ahead
from parlay.options import UsageError
from parlay.types import Draft, DraftForm, Needs, SequenceView

_QUARTER = 4


class EarlyExit(FromText):
    """Early exit (Elhoushi et al. 2024, LayerSkip, arXiv:2404.16710): the last norm and LM head read an early layer.

    The layers from ``exit`` on are left out while drafting (0: all but the first quarter). This works for targets that
    were trained to predict from early layers: `parlay train early-exit` trains one. A chain ends after a token whose
    probability is below ``threshold``; the paper's chains have a fixed length. Verification runs all layers again; the
    paper's continues from the states of the first layers, which this engine does not keep.
    """

    needs = Needs(layers=True, outcomes=False)

    def __init__(self, resources: Resources, options: EarlyExitOptions) -> None:
        target = skippable(SOURCE, resources)
        leave = options.exit or max(1, target.num_layers // _QUARTER)
        if leave >= target.num_layers:
            raise UsageError(
                f"strategy {SOURCE}: exit={leave} leaves no layer out: {target.name} has {target.num_layers}, so give "
                f"{target.num_layers - 1} at most"
            )
        self._form = DraftForm(frozenset(half for half in target.sublayers if half[1] >= leave))
        self._threshold = options.threshold

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        plans = [ChainDraft(view, budget, self._threshold) for view, budget in zip(views, budgets, strict=True)]
        write_ahead(plans, self._form)
        return [plan.chain(SOURCE) for plan in plans]
