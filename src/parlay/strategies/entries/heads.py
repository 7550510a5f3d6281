"""Strategies that draft with a head trained on the target's hidden states."""

from __future__ import annotations

from parlay.drafters.heads.options import (
    EAGLE,
    EAGLE2,
    EAGLE3,
    HYDRA,
    MEDUSA,
    MTP,
    DynamicTreeOptions,
    HeadOptions,
)
from parlay.strategies.entry import StrategyEntry

_STATES = "parlay.drafters.heads.next_states:"
_TOYS = ("min_p=0", "min_p=0,width=2,depth=6")

ENTRIES = (
    StrategyEntry(
        name=EAGLE,
        family="heads",
        training="a head on the target (parlay train eagle)",
        needs="a head trained for this target",
        summary="A one-layer head guesses the target's next feature, and the target's LM head reads it; a static tree.",
        when="a head of this kind exists and eagle2's trees cost too much",
        reference="Li et al. 2024, arXiv:2401.15077",
        options=HeadOptions,
        k=16,
        factory=_STATES + "Eagle",
    ),
    StrategyEntry(
        name=EAGLE2,
        family="heads",
        training="a head on the target (parlay train eagle)",
        needs="eagle's head, trained for this target",
        summary="EAGLE's head, with a tree that grows where the head is surest.",
        when="a head of EAGLE exists for the target, and none of EAGLE-3",
        reference="Li et al. 2024, arXiv:2406.16858",
        options=DynamicTreeOptions,
        k=16,
        factory=_STATES + "Eagle2",
        toys=_TOYS,
    ),
    StrategyEntry(
        name=EAGLE3,
        family="heads",
        training="a head on the target (parlay train eagle3)",
        needs="a head trained for this target",
        summary="A one-layer head over features of several target layers drafts a tree that grows where it is surest.",
        when="a head for the target exists: any text, above all new text that copies nothing",
        reference="Li et al. 2025, arXiv:2503.01840; trees: Li et al. 2024, arXiv:2406.16858",
        options=DynamicTreeOptions,
        k=16,
        factory="parlay.drafters.heads.eagle3:Eagle3",
        toys=_TOYS,
    ),
    StrategyEntry(
        name=MTP,
        family="heads",
        training="a module on the target (parlay train mtp), or one that came with it",
        needs="a module trained for this target",
        summary="A decoder block trained to predict one token further drafts again and again on its own states.",
        when="the target was published with such a module",
        reference="DeepSeek-AI 2024, arXiv:2412.19437, section 2.2",
        options=DynamicTreeOptions,
        k=16,
        factory=_STATES + "Mtp",
        toys=_TOYS,
    ),
    StrategyEntry(
        name=MEDUSA,
        family="heads",
        training="heads on the target (parlay train medusa)",
        needs="heads trained for this target",
        summary="Several small heads guess a token each from the target's last state; a static tree combines them.",
        when="heads for the target exist, and the target is so large that drafting must cost nearly nothing",
        reference="Cai et al. 2024, arXiv:2401.10774",
        options=HeadOptions,
        k=16,
        factory="parlay.drafters.heads.medusa:Medusa",
    ),
    StrategyEntry(
        name=HYDRA,
        family="heads",
        training="heads on the target (parlay train hydra)",
        needs="heads trained for this target",
        summary="Small heads on the target's last state, each of which also reads the tokens drafted before its own.",
        when="as medusa, where drafting may cost a little more",
        reference="Ankner et al. 2024, arXiv:2402.05109",
        options=HeadOptions,
        k=16,
        factory="parlay.drafters.heads.hydra:Hydra",
    ),
)
