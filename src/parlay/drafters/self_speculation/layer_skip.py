"""Draft & Verify (Zhang et al. 2023): the target drafts for itself with some of its sub-layers left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parlay.drafters.options import LAYER_SKIP as SOURCE
from parlay.drafters.options import RATIO, LayerSkipOptions
from parlay.drafters.resources import Resources
from parlay.drafters.self_speculation.layer_search import Halt, OnlineSearch, ParzenSearch, speedup
from parlay.drafters.self_speculation.skipping import ChainDraft, middle, named, skippable, write_ahead
from parlay.options import UsageError
from parlay.types import Draft, DraftForm, Needs, Observation, SequenceView, Skip

_MATCH_DECAY = 0.5  # decay of the match rate, per step; the paper's beta 1
_STEP = 0.01  # step of the threshold
_THRESHOLD_DECAY = 0.9  # decay of the threshold, per step; the paper's beta 2


class LayerSkip:
    """Draft & Verify (Zhang et al. 2023, arXiv:2309.08168): self-speculation without training.

    It leaves out the attentions of the layers in ``attention`` and the MLPs of the layers in ``mlp``. If none are
    named, it leaves out the share ``ratio`` of the inner sub-layers, from the middle of the model (0: none). ``search``
    is how many other sets it tries while it generates, one per step, each on the last ``window`` tokens of an output;
    it keeps the set with the highest expected speed. The paper searches 1,000 sets beforehand, on calibration texts, by
    measured time.

    A chain ends after the token at which the largest probability is below a threshold. The threshold starts at
    ``threshold`` for greedy requests and ``threshold_sampled`` for others. Each sequence adjusts it so that the share
    ``acceptance`` of its drafted tokens is accepted. Scores are the probabilities.
    """

    needs = Needs(layers=True)

    def __init__(self, resources: Resources, options: LayerSkipOptions) -> None:
        target = skippable(SOURCE, resources)
        given = named(SOURCE, target, options.attention, options.mlp)
        if given and options.ratio != RATIO:
            raise UsageError(f"strategy {SOURCE}: name the layers to skip or their ratio, not both")

        def worth(agreed: float, skip: Skip) -> float:
            return speedup(agreed, skip, target.num_layers)

        self._search = OnlineSearch(
            given or middle(target, options.ratio),
            ParzenSearch(target.sublayers),
            Halt(probes=options.search, patience=options.search),
            every=1,
            window=options.window,
            worth=worth,
        )
        self._thresholds = (options.threshold, options.threshold_sampled)
        self._acceptance = options.acceptance
        self._stops: dict[int, _Stop] = {}

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        self._search.step(views)
        stops = [self._stop(view) for view in views]
        plans = [
            ChainDraft(view, budget, stop.threshold) for view, budget, stop in zip(views, budgets, stops, strict=True)
        ]
        write_ahead(plans, DraftForm(self._search.best))
        for stop, plan in zip(stops, plans, strict=True):
            stop.full = len(plan.tokens) == plan.budget
        return [plan.chain(SOURCE) for plan in plans]

    def observe(self, observations: Sequence[Observation]) -> None:
        """Adjust each sequence's threshold by the nodes that this drafter proposed."""
        for observation in observations:
            own = {node for node, source in enumerate(observation.draft.sources) if source == SOURCE}
            if own:
                accepted = len(own.intersection(observation.verdict.path))
                self._stop(observation.view).learn(accepted / len(own), self._acceptance)

    def release(self, sequence: int) -> None:
        self._stops.pop(sequence, None)

    def _stop(self, view: SequenceView) -> _Stop:
        if view.sequence not in self._stops:
            threshold = self._thresholds[0 if view.request.params.greedy else 1]
            self._stops[view.sequence] = _Stop(threshold, self._acceptance)
        return self._stops[view.sequence]


@dataclass(slots=True)
class _Stop:
    """The state that ends one sequence's chains. ``full``: the last chain ended because of its length."""

    threshold: float
    matched: float
    full: bool = False

    def learn(self, rate: float, wanted: float) -> None:
        """Raise the threshold if too little is accepted; lower it otherwise, unless the budget ends chains anyway."""
        self.matched = _MATCH_DECAY * self.matched + (1 - _MATCH_DECAY) * rate
        move = _STEP if self.matched < wanted else 0.0 if self.full else -_STEP
        moved = _THRESHOLD_DECAY * self.threshold + (1 - _THRESHOLD_DECAY) * (self.threshold + move)
        self.threshold = min(max(moved, 0.0), 1.0)
