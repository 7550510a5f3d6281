"""Drafters whose guesses are the target's own, made by probes that read trained inputs instead of future tokens."""

from __future__ import annotations

import operator
from abc import abstractmethod
from collections.abc import Sequence
from itertools import accumulate

from torch import Tensor

from parlay.drafters.draft_models.guesses import probabilities
from parlay.drafters.draft_models.static_trees import Acceptance
from parlay.drafters.heads.guessing_ahead import GuessingAhead, group_counts, probe_counts, with_probes
from parlay.drafters.heads.watch import AcceptanceWatch
from parlay.drafters.options import BITA, PASS, PPD, STREAMING, GroupOptions, HeadOptions, PpdOptions
from parlay.drafters.per_sequence import FromText
from parlay.drafters.resources import Resources
from parlay.drafters.self_speculation.skipping import layers_of
from parlay.heads.artefact import HeadArtefact
from parlay.heads.opening import opened
from parlay.options import UsageError
from parlay.sampling.sampler import ranked
from parlay.types import NO_DRAFT, WHOLE_FORM, Draft, Features, Join, Needs, Observation, Prefix, SequenceView, trees

_ANOTHER = "choose a head that was trained for this model"
_TOKEN = 0
"""A probe's token in the tree. The target reads the probe's input instead."""


class _TrainedProbes(GuessingAhead):
    """The base of drafters with trained probes. The head says how often guesses at each level and rank were right."""

    def __init__(self, source: str, artefact: HeadArtefact) -> None:
        self._inputs_MH: Tensor = artefact.tensors["inputs_MH"].float()
        self._acceptance: list[list[float]] = artefact.settings["acceptance"]
        self._watch = AcceptanceWatch(source, artefact)
        super().__init__(source, Needs(top_k=len(self._acceptance[0]), expected=artefact.expected))

    @property
    def acceptance(self) -> Acceptance:
        return self._acceptance

    def _see(self, observation: Observation) -> None:
        self._watch.see(observation)

    def _hang(self, draft: Draft) -> Draft:
        return with_probes(draft, self._counts(draft), self._source, self._inputs())

    @abstractmethod
    def _counts(self, draft: Draft) -> Sequence[int]:
        """How many probes hang below the root and below each node."""

    def _inputs(self) -> Features:
        """The inputs of the probes of a chain."""
        return Features(self._inputs_MH)


class Ppd(_TrainedProbes):
    """PPD (Chen et al. 2024, arXiv:2405.18628): probes read trained inputs instead of tokens.

    ``probes`` probes are placed where they are likeliest to be read: by the probability that the accepted path ends at
    their node, times the probability that all guesses before theirs are right. So likely nodes get longer chains. In
    the paper the shapes are chosen beforehand.
    """

    def __init__(self, resources: Resources, options: PpdOptions) -> None:
        super().__init__(PPD, _probes_for(PPD, resources, options.head))
        self._most = options.probes
        self._reach = list(accumulate((min(1.0, sum(ranks)) for ranks in self._acceptance), operator.mul))

    def _counts(self, draft: Draft) -> Sequence[int]:
        return probe_counts(draft, self._reach, self._most)


class _Grouped(_TrainedProbes):
    """A chain of all probes below each of the ``groups`` nodes at which the accepted path is likeliest to end."""

    def __init__(self, source: str, artefact: HeadArtefact, groups: int) -> None:
        super().__init__(source, artefact)
        self._groups = groups

    def _counts(self, draft: Draft) -> Sequence[int]:
        return group_counts(draft, self._groups, len(self._inputs_MH))


class Bita(_Grouped):
    """BiTA (Lin et al. 2024, arXiv:2401.12522): the probes also attend to a trained prefix, which no other row does."""

    def __init__(self, resources: Resources, options: GroupOptions) -> None:
        artefact = _probes_for(BITA, resources, options.head)
        super().__init__(BITA, artefact, options.groups)
        self._prefix = Prefix(artefact.tensors["prefix"].float())
        target = resources.target
        if target is None or not target.takes(self._prefix):
            raise UsageError(f"strategy {BITA}: the head was trained for a model of another shape: {_ANOTHER}")

    def _inputs(self) -> Features:
        return Features(self._inputs_MH, prefix=self._prefix)


class SpeculativeStreaming(_Grouped):
    """Speculative Streaming (Bhendawade et al. 2024, arXiv:2402.11131), on an unchanged target.

    Streams begin at a layer, from their node's state there, and attend to the text's keys and to earlier streams' keys.
    The layers before do not run for them. The paper also prunes the tree between two layers of a forward; here a tree
    has all its nodes before the forward begins, and the budget cuts it.
    """

    def __init__(self, resources: Resources, options: GroupOptions) -> None:
        artefact = _probes_for(STREAMING, resources, options.head)
        super().__init__(STREAMING, artefact, options.groups)
        down_RH, up_RH = (artefact.tensors[name].float().contiguous() for name in ("down_RH", "up_RH"))
        layer, target = int(artefact.settings["join"]), resources.target
        if target is None or not 0 <= layer < target.num_layers:
            raise UsageError(
                f"strategy {STREAMING}: the head begins at layer {layer}, which the target does not have: {_ANOTHER}"
            )
        self._join = Join(layer, down_RH, up_RH)

    def _inputs(self) -> Features:
        return Features(self._inputs_MH, join=self._join)


class Pass(FromText):
    """PaSS (Monea et al. 2023, arXiv:2311.13581): one forward of the whole target drafts, the next one verifies.

    The first forward reads the root and then the probes. The second one always confirms the token after the root, so
    each pair of forwards gives at least two tokens.
    """

    needs = Needs(layers=True)

    def __init__(self, resources: Resources, options: HeadOptions) -> None:
        self._inputs_MH: Tensor = _probes_for(PASS, resources, options.head).tensors["inputs_MH"].float()

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        drafts = [NO_DRAFT] * len(views)
        by_count: dict[int, list[int]] = {}
        for place, budget in enumerate(budgets):
            if budget > 0:
                by_count.setdefault(min(budget - 1, len(self._inputs_MH)), []).append(place)
        for count, places in by_count.items():
            for place, draft in zip(places, self._drafts([views[place] for place in places], count), strict=True):
                drafts[place] = draft
        return drafts

    def _drafts(self, views: Sequence[SequenceView], count: int) -> list[Draft]:
        """Chains of ``count`` + 1 tokens, drafted in one forward."""
        paths = [[_TOKEN] * count for _ in views]
        logits_RV = layers_of(views[0]).forward(views, paths, WHOLE_FORM, count + 1, self._inputs_MH[:count])
        logits_BCV = logits_RV.view(len(views), count + 1, -1)
        chains: list[list[int]] = [[] for _ in views]
        scores: list[list[float]] = [[] for _ in views]
        for place in range(count + 1):
            probs_BV = probabilities(logits_BCV[:, place], views)
            for at, best in enumerate(ranked(logits_BCV[:, place], views, chains, 1)):
                if best and len(chains[at]) == place:
                    chains[at] = [*chains[at], best[0]]
                    scores[at].append(1.0 if place == 0 else float(probs_BV[at, best[0]]))
        return [trees.chain(chain, PASS, own) for chain, own in zip(chains, scores, strict=True)]


def _probes_for(source: str, resources: Resources, name: str) -> HeadArtefact:
    """The head's tensors. Raises UsageError if the target can't read them."""
    target = resources.target
    if target is None or not target.features:
        called = "there is no target" if target is None else f"the runner of {target.name} reads tokens alone"
        raise UsageError(
            f"strategy {source} gives its target inputs in place of tokens, but {called}: choose another strategy"
        )
    return opened(source, resources.find_head, name).artefact
