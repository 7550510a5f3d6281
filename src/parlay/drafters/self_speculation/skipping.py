"""Drafting with the target itself: choosing the sub-layers to leave out, and writing a chain with the others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from parlay.drafters.draft_models.guesses import Guess, paired, probabilities
from parlay.drafters.resources import Resources
from parlay.options import UsageError
from parlay.sampling.sampler import ranked
from parlay.types import Draft, DraftForm, Layers, RunnerSpec, SequenceView, Skip, Sublayer, trees


def skippable(source: str, resources: Resources) -> RunnerSpec:
    """The target's spec. Raises UsageError if strategy ``source`` can't leave out any of its layers."""
    target = resources.target
    if target is None:
        raise UsageError(f"strategy {source} drafts with layers of its target, and there is no target to ask for them")
    if not target.layer_skip:
        raise UsageError(
            f"strategy {source} drafts with some of its target's layers, but the runner of {target.name} can't skip "
            "any: choose another strategy"
        )
    return target


def inner(target: RunnerSpec) -> tuple[Sublayer, ...]:
    """The sub-layers of all layers except the first and the last, which models need."""
    return tuple(sublayer for sublayer in target.sublayers if 0 < sublayer[1] < target.num_layers - 1)


def middle(target: RunnerSpec, ratio: float) -> Skip:
    """A share of the inner sub-layers, those nearest to the middle of the model; in a layer, attention before MLP.

    A rule of thumb without a search: the middle layers change their input least, and for 13 B parameters the search of
    Draft & Verify left out 24 attentions and 10 MLPs.
    """
    centre = (target.num_layers - 1) / 2
    nearest = sorted(inner(target), key=lambda sublayer: (abs(sublayer[1] - centre), sublayer[0], -sublayer[1]))
    return frozenset(nearest[: round(ratio * len(nearest))])


def named(source: str, target: RunnerSpec, attention: Iterable[str], mlp: Iterable[str]) -> Skip:
    """The sub-layers of the listed layers. Raises UsageError for a layer that does not exist."""
    wanted: set[Sublayer] = set()
    for half, layers in (("attention", attention), ("mlp", mlp)):
        known = {str(layer): sublayer for sublayer in target.sublayers for layer in sublayer[1:] if sublayer[0] == half}
        for layer in layers:
            if layer not in known:
                raise UsageError(
                    f"strategy {source}: {half}={layer} is not a layer of {target.name}: they are 0 to "
                    f"{target.num_layers - 1}"
                )
            wanted.add(known[layer])
    return frozenset(wanted)


def layers_of(view: SequenceView) -> Layers:
    assert view.layers is not None, "the drafter's needs name the layers"
    return view.layers


@dataclass(slots=True)
class ChainDraft:
    """An unfinished chain. ``levels``: the guesses of each step, best first; the first one is the chain's token."""

    view: SequenceView
    budget: int
    threshold: float
    """A step whose largest probability is below this is the last one."""
    tokens: list[int] = field(default_factory=list)
    levels: list[list[Guess]] = field(default_factory=list)

    def take(self, guesses: list[Guess], confidence: float) -> bool:
        """Add a step. Returns whether the chain goes on. A row that the sampler can't use ends it."""
        if not guesses:
            return False
        self.levels.append(guesses)
        self.tokens.append(guesses[0][0])
        ended = self.tokens[-1] in self.view.request.stop_ids
        return confidence >= self.threshold and len(self.tokens) < self.budget and not ended

    def chain(self, source: str) -> Draft:
        return trees.chain(self.tokens, source, [level[0][1] for level in self.levels])


def write_ahead(plans: Sequence[ChainDraft], form: DraftForm, width: int = 1) -> None:
    """Write all chains together, token by token, with each request's own sampler and noise."""
    plans = [plan for plan in plans if plan.budget > 0]
    while plans:
        views, paths = [plan.view for plan in plans], [plan.tokens for plan in plans]
        logits_RV = layers_of(views[0]).forward(views, paths, form)
        probs_RV = probabilities(logits_RV, views)
        found = paired(ranked(logits_RV, views, paths, width), probs_RV)
        tops = probs_RV.amax(-1).tolist()
        plans = [plan for plan, guesses, top in zip(plans, found, tops, strict=True) if plan.take(guesses, top)]
