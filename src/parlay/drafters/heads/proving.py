"""Checks at first use that a head and its target compute the same here as where the head was trained.

A head that fails does not change the text, but costs time. So a warning names it, and it drafts all the same.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parlay.drafters.heads.modules import check_tensors
from parlay.heads.artefact import BadHead
from parlay.heads.opening import FindHead, OpenHead
from parlay.heads.proof import GUESSES, LENGTH, Proof, agreement
from parlay.types import WHOLE_FORM, Drafter, DraftForm, NoiseKey, Request, SamplingParams, SequenceView
from parlay.types.requests import FixedText

LEAST_AGREEMENT = 0.7
"""Required agreement of the target's states. Files of one model in four and in sixteen bits agree better."""
LEAST_RIGHT = 0.75
"""Required share of equal guesses. Kernels of another precision change one now and then."""

_log = logging.getLogger(__name__)


class ProvedHeads:
    """Finds heads as ``find`` does, refuses those with wrong tensors, and checks the proofs of the others."""

    def __init__(self, find: FindHead) -> None:
        self._find = find
        self._found: list[OpenHead] = []

    def __call__(self, method: str, name: str) -> OpenHead | None:
        """See `FindHead`. Raises BadHead for tensors that are missing, left over, or of another shape."""
        head = self._find(method, name)
        if head is not None:
            try:
                check_tensors(head.artefact)
            except BadHead as error:
                raise BadHead(f"{name}: {error}" if name else str(error)) from None
            self._found.append(head)
        return head

    def prove(self, strategy: str, drafter: Drafter) -> None:
        """Log a warning for each proof of the heads found so far that ``drafter`` fails.

        A head that other drafters opened before was checked in those.
        """
        for head in self._found:
            proof, own = head.artefact.proof, type(drafter).__name__
            if proof is None or own in head.proved_in or not _is_of(proof, head, drafter):
                continue
            head.proved_in.add(own)
            memory = head.memory
            if memory is not None and memory.has(own):
                continue
            holds = [_prove_target(strategy, proof, head), _prove_guesses(strategy, proof, drafter)]
            if memory is not None and all(holds):
                memory.add(own)


def _is_of(proof: Proof, head: OpenHead, drafter: Drafter) -> bool:
    """Whether the proof has the states that the drafter reads: a folder may have a proof for something else."""
    size = len(proof.layers) * head.artefact.layer.hidden_size
    return proof.states_TF.shape[1] == size and {*drafter.needs.taps} <= {*proof.layers}


def prove(drafter: Drafter, ids: Sequence[int], states: Mapping[int, Tensor]) -> Proof:
    """Make a proof for the head of ``drafter``, which was just trained.

    ``states`` ``[T, H]``: the target's states of this text, by layer.
    """
    layers = tuple(drafter.needs.taps) or (max(states),)
    count = min(LENGTH, len(ids))
    states_TF = torch.cat([states[layer][:count] for layer in layers], -1).to(torch.bfloat16)
    unsaid = Proof(torch.tensor(ids[:count]), layers, states_TF, torch.zeros(max(min(GUESSES, count - 2), 0)).long())
    own = drafter.needs.layers or not drafter.needs.taps  # such a drafter runs the target itself
    guesses = [] if own else first_guesses(drafter, unsaid)
    return Proof(unsaid.ids_T, layers, states_TF, torch.tensor(guesses, dtype=torch.int64))


def first_guesses(drafter: Drafter, proof: Proof) -> list[int]:
    """The first token drafted after each of the proof's prefixes, from the proof's states; -1 if none."""
    ids = proof.ids_T.tolist()
    lent = _StoredStates(proof)
    ends = range(len(ids) - len(proof.guesses_P), len(ids))
    greedy = SamplingParams(temperature=0)
    request = Request(id="proof", prompt=(ids[0],), params=greedy, key=NoiseKey(0), salt="proof")
    views = [FixedText(-1 - place, request, ids[:end], 1, lent) for place, end in enumerate(ends)]
    try:
        drafts = drafter.propose(views, [1] * len(views))
    finally:
        for view in views:
            drafter.release(view.sequence)
    return [draft.tree.tokens[0] if len(draft) else -1 for draft in drafts]


def _prove_target(strategy: str, proof: Proof, head: OpenHead) -> bool:
    """Whether the target is the one that the head was trained on. Logs a warning if it is not."""
    states_TF = head.states(proof.ids_T.tolist(), proof.layers) if head.states else None
    if states_TF is None:
        return False
    reached = agreement(proof, states_TF)
    if not reached >= LEAST_AGREEMENT:
        _log.warning(
            "strategy %s: this target's hidden states agree to %.2f with those that the head was trained on, and %.2f "
            "is asked. Most likely this is another fine-tune of the same base model, or its file is damaged. The "
            "output is not affected, but most drafts will be wrong: choose a head that was trained for this model",
            strategy,
            reached,
            LEAST_AGREEMENT,
        )
    return reached >= LEAST_AGREEMENT


def _prove_guesses(strategy: str, proof: Proof, drafter: Drafter) -> bool:
    """Whether the head guesses as it did where it was trained. Logs a warning if it does not."""
    if not len(proof.guesses_P):
        return True
    pairs = zip(first_guesses(drafter, proof), proof.guesses_P.tolist(), strict=True)
    judged = [here == there for here, there in pairs if here >= 0]  # -1: its cache had no room
    right = sum(judged) >= LEAST_RIGHT * len(judged)
    if not right:
        _log.warning(
            "strategy %s: the head guesses %d of %d tokens as it did where it was trained. Most likely its weights or "
            "settings were changed, or the kernels of this machine compute it wrongly. The output is not affected, "
            "but most drafts will be wrong: get the head again, or train one here",
            strategy,
            sum(judged),
            len(judged),
        )
    return right and bool(judged)


@dataclass(frozen=True, slots=True)
class _StoredStates:
    """`Layers` that have the states of one text and can't run."""

    proof: Proof

    def forward(
        self,
        views: Sequence[SequenceView],
        paths: Sequence[Sequence[int]],
        form: DraftForm = WHOLE_FORM,
        rows: int = 1,
        inputs_KH: Tensor | None = None,
    ) -> Tensor:
        raise NotImplementedError("heads that run the target's layers have no guesses in their proof")

    def early(self, views: Sequence[SequenceView], paths: Sequence[Sequence[int]], layer: int, rows: int = 1) -> Tensor:
        raise NotImplementedError("heads that run the target's layers have no guesses in their proof")

    def states(
        self, views: Sequence[SequenceView], spans: Sequence[tuple[int, int]], taps: Sequence[int]
    ) -> list[Mapping[int, Tensor]]:
        """See `Layers`."""
        return [
            {layer: self.proof.state_of(layer)[start : min(end, len(view.tokens) - 1)] for layer in taps}
            for view, (start, end) in zip(views, spans, strict=True)
        ]
