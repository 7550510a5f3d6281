"""Drafters whose guesses are the target's own, after trained inputs in the place of tokens to come."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import accumulate

from torch import Tensor

from parlay.drafters.draft_models.guesses import probabilities
from parlay.drafters.draft_models.static_trees import FilledTree, best_tree
from parlay.drafters.heads.watch import AcceptanceWatch
from parlay.drafters.history import History
from parlay.drafters.options import BITA, PASS, PPD, STREAMING, GroupOptions, HeadOptions, PpdOptions
from parlay.drafters.resources import Resources
from parlay.drafters.self_speculation.skipping import layers_of
from parlay.heads.artefact import HeadArtefact
from parlay.heads.opening import opened
from parlay.options import UsageError
from parlay.sampling.sampler import ranked
from parlay.types import (
    NO_DRAFT,
    NO_SKIP,
    Draft,
    Features,
    Join,
    Needs,
    Observation,
    Prefix,
    SequenceView,
    Tree,
    trees,
)

_TOKEN = 0
"""What stands in a probe's place in the tree; the target reads the probe's input instead."""


class _GuessingAhead(ABC):
    """The forward that verifies a draft also guesses the next one.

    Chains of probes hang below the root and below drafted nodes. Of the node at which the walk ends, the probes say
    what comes after the token that is sampled there: the ranked tokens of probe m are the guesses m + 1 levels below
    the new root. They make the tree that was best for held-out texts.
    """

    def __init__(self, source: str, held: HeadArtefact) -> None:
        self._source = source
        self._inputs_MH: Tensor = held.tensors["inputs_MH"].float()
        self._acceptance: list[list[float]] = held.settings["acceptance"]
        self._watch = AcceptanceWatch(source, held)
        self.needs = Needs(top_k=len(self._acceptance[0]), expected=held.expected)
        self._held: dict[int, tuple[History, list[Sequence[int]]]] = {}

    @abstractmethod
    def _counts(self, draft: Draft) -> Sequence[int]:
        """How many probes hang below the root, and below each node."""

    def _inputs(self) -> Features:
        """Inputs of the probes of a chain."""
        return Features(self._inputs_MH)

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        return [
            self._with_probes(self._draft(view, budget)) if budget > 0 else NO_DRAFT
            for view, budget in zip(views, budgets, strict=True)
        ]

    def observe(self, observations: Sequence[Observation]) -> None:
        for observation in observations:
            self._watch.see(observation)
            history = History()
            history.tokens += observation.view.tokens
            self._held[observation.view.sequence] = history, _read(observation, self._source)

    def release(self, sequence: int) -> None:
        self._held.pop(sequence, None)

    def _draft(self, view: SequenceView, budget: int) -> Draft:
        """Draft from the guesses of the last step's probes, if that step was the text's last."""
        history, guesses = self._held.get(view.sequence, (History(), []))
        if len(history.tokens) != len(view.tokens) or history.agree(view.tokens) < len(view.tokens):
            return NO_DRAFT
        filled = FilledTree(best_tree(self._acceptance, budget, len(guesses)))
        for level, (tokens, chances) in enumerate(zip(guesses, self._acceptance, strict=False)):
            for node in filled.inner(level):
                filled.fill(node, list(zip(tokens, chances, strict=False)))
        return filled.draft(self._source)

    def _with_probes(self, draft: Draft) -> Draft:
        tree, first = draft.tree, len(draft)
        tokens, parents = list(tree.tokens), list(tree.parents)
        which: list[int] = []
        for anchor, count in zip(range(-1, first), self._counts(draft), strict=True):
            for place in range(count):
                parents.append(len(parents) - 1 if place else anchor)
                tokens.append(_TOKEN)
                which.append(place)
        return Draft(
            Tree(tuple(tokens), tuple(parents)),
            sources=(self._source,) * len(tokens),
            scores=(*draft.scores, *(0.0,) * len(which)),
            probes=len(which),
            inputs=self._inputs().of(which),
        )


class Ppd(_GuessingAhead):
    """PPD (Chen et al. 2024, arXiv:2405.18628): probes are inputs in place of tokens.

    As many as ``probes`` stand where they are likeliest to be read: the chance that the walk ends at their node, times
    the chance that all guesses before theirs are right. So likely nodes get longer chains, as in the paper, which
    chooses the shapes beforehand.
    """

    def __init__(self, resources: Resources, options: PpdOptions) -> None:
        super().__init__(PPD, _probes_for(PPD, resources, options.head))
        self._most = options.probes
        self._reach = list(accumulate((min(1.0, sum(ranks)) for ranks in self._acceptance), operator.mul))

    def _counts(self, draft: Draft) -> Sequence[int]:
        return probe_counts(draft, self._reach, self._most)


class _Grouped(_GuessingAhead):
    """All probes hang below each of the ``groups`` nodes at which the walk is likeliest to end."""

    def __init__(self, source: str, held: HeadArtefact, groups: int) -> None:
        super().__init__(source, held)
        self._groups = groups

    def _counts(self, draft: Draft) -> Sequence[int]:
        ends = _ends(draft)
        chosen = set(sorted(range(len(ends)), key=lambda at: -ends[at])[: self._groups])
        return [len(self._inputs_MH) if at in chosen else 0 for at in range(len(ends))]


class Bita(_Grouped):
    """BiTA (Lin et al. 2024, arXiv:2401.12522): the probes also see a trained prefix, which no other row does."""

    def __init__(self, resources: Resources, options: GroupOptions) -> None:
        held = _probes_for(BITA, resources, options.head)
        super().__init__(BITA, held, options.groups)
        self._prefix = Prefix(held.tensors["prefix"].float())
        target = resources.target
        if target is None or not target.takes(self._prefix):
            raise UsageError(f"strategy {BITA}: the trained prefix has the shape of another model's keys and values")

    def _inputs(self) -> Features:
        return Features(self._inputs_MH, prefix=self._prefix)


class SpeculativeStreaming(_Grouped):
    """Speculative Streaming (Bhendawade et al. 2024, arXiv:2402.11131), on a target that stays as it is.

    Streams begin at a layer from their node's state there, and see the text's own keys and those of the streams before
    them. The layers before run no row of theirs. The paper also takes nodes out of the tree between two layers of a
    forward; here a tree has all its nodes before the forward begins, and the budget cuts it.
    """

    def __init__(self, resources: Resources, options: GroupOptions) -> None:
        held = _probes_for(STREAMING, resources, options.head)
        super().__init__(STREAMING, held, options.groups)
        down_RH, up_RH = (held.tensors[name].float().contiguous() for name in ("down_RH", "up_RH"))
        layer, target = int(held.settings["join"]), resources.target
        if target is None or not 0 <= layer < target.num_layers:
            raise UsageError(f"strategy {STREAMING}: the target has no layer {layer}, at which these streams begin")
        self._join = Join(layer, down_RH, up_RH)

    def _inputs(self) -> Features:
        return Features(self._inputs_MH, join=self._join)


def probe_counts(draft: Draft, reach: Sequence[float], most: int) -> list[int]:
    """How many probes hang below the root and below each node, ``most`` in all.

    ``reach`` is how likely all guesses down to each probe's are right; it never rises.
    """
    ends = _ends(draft)
    worth = [(-end * far, place, at) for at, end in enumerate(ends) for place, far in enumerate(reach)]
    counts = [0] * len(ends)
    for _, _, at in sorted(worth)[:most]:
        counts[at] += 1
    return counts


def _ends(draft: Draft) -> list[float]:
    """The chance that the walk ends at the root, then at each node."""
    path_probs = [1.0]
    ends = [1.0]
    for parent, score in zip(draft.tree.parents, draft.scores, strict=True):
        path_probs.append(path_probs[parent + 1] * score)
        ends.append(path_probs[-1])
        ends[parent + 1] -= path_probs[-1]
    return ends


def _read(observation: Observation, source: str) -> list[Sequence[int]]:
    """The ranked tokens of the probes below the node at which the walk ended, from the first probe on."""
    draft, verdict = observation.draft, observation.verdict
    found: list[Sequence[int]] = []
    node = verdict.path[-1] if verdict.path else -1
    probes = range(len(draft) - draft.probes, len(draft))
    below = {draft.tree.parents[probe]: probe for probe in probes if draft.sources[probe] == source}
    while node in below and observation.top_k:
        node = below[node]
        found.append(observation.top_k[node + 1])
    return found


class Pass:
    """PaSS (Monea et al. 2023, arXiv:2311.13581): one forward of the whole target drafts, the next one verifies.

    The first reads the root and then the probes. After the root follows a token that the second will confirm, so each
    pair of forwards gives two tokens at least.
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

    def observe(self, observations: Sequence[Observation]) -> None:
        """The text says it all."""

    def release(self, sequence: int) -> None:
        """Nothing is held."""

    def _drafts(self, views: Sequence[SequenceView], count: int) -> list[Draft]:
        """Chains of ``count`` + 1 tokens, from one forward."""
        paths = [[_TOKEN] * count for _ in views]
        logits_RV = layers_of(views[0]).forward(views, paths, NO_SKIP, count + 1, self._inputs_MH[:count])
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
    """Raises UsageError where the target can't read them."""
    target = resources.target
    if target is None or not target.features:
        called = "there is no target" if target is None else f"the runner of {target.name} reads tokens alone"
        raise UsageError(f"strategy {source} gives its target inputs in place of tokens, but {called}")
    return opened(source, resources.find_head, name).artefact
