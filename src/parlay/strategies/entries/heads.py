"""Strategies that draft with a head trained on the target's hidden states."""

from __future__ import annotations

from parlay.drafters.heads.options import EAGLE3, HYDRA, MEDUSA, Eagle3Options, HydraOptions, MedusaOptions
from parlay.strategies.entry import StrategyEntry

ENTRIES = (
    StrategyEntry(
        name=EAGLE3,
        family="heads",
        training="a head on the target (parlay train eagle3)",
        needs="a head trained for this target",
        summary="A one-layer head over features of several target layers drafts a tree that grows where it is surest.",
        when="a head for the target exists: any text, above all new text that copies nothing",
        reference="Li et al. 2025, arXiv:2503.01840; trees: Li et al. 2024, arXiv:2406.16858",
        options=Eagle3Options,
        k=16,
        factory="parlay.drafters.heads.eagle3:Eagle3",
        toys=("min_p=0", "min_p=0,width=2,depth=6"),
    ),
    StrategyEntry(
        name=MEDUSA,
        family="heads",
        training="heads on the target (parlay train medusa)",
        needs="heads trained for this target",
        summary="Several small heads guess a token each from the target's last state; a static tree combines them.",
        when="heads for the target exist, and the target is so large that drafting must cost nearly nothing",
        reference="Cai et al. 2024, arXiv:2401.10774",
        options=MedusaOptions,
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
        options=HydraOptions,
        k=16,
        factory="parlay.drafters.heads.hydra:Hydra",
    ),
)
