"""The target drafts for itself in a cheaper form: with weights of fewer bits, or with some of its cached keys."""

from __future__ import annotations

from collections.abc import Sequence

from parlay.drafters.options import SELF_DRAFT as SOURCE
from parlay.drafters.options import SelfDraftOptions
from parlay.drafters.per_sequence import FromText
from parlay.drafters.resources import Resources
from parlay.drafters.self_speculation.skipping import ChainDraft, write_ahead
from parlay.models.gguf.blocks import ROUNDED
from parlay.options import UsageError, refuse_unread
from parlay.types import NO_DRAFT, Draft, DraftForm, Needs, SequenceView


class SelfDraft(FromText):
    """Quantised and sparse self-speculation (Sadhukhan et al. 2024, MagicDec, arXiv:2408.11049).

    Drafts run with the target's weights rounded to ``bits``, which are kept in addition to its own. They attend to the
    first ``sinks`` and the last ``window`` cached tokens, and to ``keys`` of those between, chosen for each head. There
    is one cache: drafts read the keys and values that the target computed in full, and the verifying forward overwrites
    theirs. A chain ends after a token whose probability is below ``min_p``. Without ``bits``, a text that fits into the
    window is not drafted for, because a draft would cost as much as the text.
    """

    needs = Needs(layers=True, outcomes=False)

    def __init__(self, resources: Resources, options: SelfDraftOptions) -> None:
        target = resources.target
        if target is None or not target.hides:
            name = target.name if target else "no target"
            raise UsageError(
                f"strategy {SOURCE}: {name} can't run in a cheaper form: Parlay's own decoder in one process can, "
                "without --tensor-parallel and its like"
            )
        if not target.cheaper:
            raise UsageError(
                f"strategy {SOURCE}: {target.name} runs on torch's operators, which take as long in a cheaper form: "
                "Parlay's compiled decoder, for CPUs, is faster then"
            )
        if not options.bits and not options.window:
            raise UsageError(f"strategy {SOURCE}: bits=0,window=0 is the target itself: set one of them")
        if not options.window:
            refuse_unread(f"strategy {SOURCE}", options, ("sinks",), "with window=0, where drafts see all: remove it")
        if options.keys and not options.window:
            raise UsageError(f"strategy {SOURCE}: keys={options.keys},window=0: without a window drafts see all keys")
        if not options.keys and options.refresh != SelfDraftOptions().refresh:
            raise UsageError(
                f"strategy {SOURCE}: refresh={options.refresh} is how often keys are chosen: set keys, too"
            )
        if options.bits:
            _round(resources, options.bits)
        self.form = DraftForm(
            window=options.window,
            sinks=options.sinks,
            bits=options.bits,
            keys=options.keys,
            refresh=options.refresh if options.keys else 0,
        )
        self._min_p = options.min_p

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        plans = [
            ChainDraft(view, budget if self.is_cheaper(view) else 0, self._min_p)
            for view, budget in zip(views, budgets, strict=True)
        ]
        write_ahead(plans, self.form)
        return [plan.chain(SOURCE) if plan.tokens else NO_DRAFT for plan in plans]

    def is_cheaper(self, view: SequenceView) -> bool:
        """Whether drafting costs less than decoding, for this text."""
        return self.form.bits > 0 or self.form.hidden(len(view.tokens) - 1) != (0, 0)


def _round(resources: Resources, bits: int) -> None:
    if bits not in ROUNDED:
        raise UsageError(f"strategy {SOURCE}: bits={bits}: choose {' or '.join(map(str, ROUNDED))}, or 0 for none")
    if resources.round_weights is None:
        raise UsageError(
            f"strategy {SOURCE}: bits={bits} needs a target that is loaded from a file; set window instead"
        )
    try:
        resources.round_weights(bits)
    except ValueError as error:
        raise UsageError(f"strategy {SOURCE}: bits={bits}: {error}; set window instead") from None
