"""Strategies in which a smaller model writes ahead."""

from __future__ import annotations

from parlay.drafters import accept_rules
from parlay.drafters.entries import Entry, Parameter, budget
from parlay.types import Exactness

ENTRIES = (
    Entry(
        name="draft-model",
        family="model",
        exactness=Exactness.BITS,
        training="a small model",
        needs="a model with the target's vocabulary",
        summary="A smaller language model writes ahead, as a chain or as a tree of its best guesses.",
        when="a small model with the target's tokenizer exists: any text",
        reference="Leviathan et al. 2023, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318",
        parameters={
            "model": Parameter(str, "", "draft model, by name or directory; empty: the one that goes with the target"),
            "shape": Parameter(
                str, "auto", "shape of the drafts; auto: what suits the rule", choices=("auto", "chain", "tree", "beam")
            ),
            "width": Parameter(
                int, 3, "nodes per forward and children of each; drawn: chains, children, beam", low=1, high=64
            ),
            "branching": Parameter(tuple, (), "drawn trees: children per node by depth, such as 3+2+1; empty: width"),
            "min_p": Parameter(float, 0.1, "stop where the chance of the drafted path falls below this", low=0, high=1),
            **budget(8, (*accept_rules.GUESSED, *accept_rules.DRAWN)),
        },
        factory="parlay.drafters.draft_models.draft_model:DraftModel",
        model_level=True,
        toys=(
            "min_p=0",
            "min_p=0,shape=tree,width=2",
            "rule=rejection,min_p=0.05",
            "rule=block,min_p=0",
            "rule=k-seq,min_p=0,width=2",
            "rule=multi-candidate,min_p=0.05,width=2",
            "rule=without-replacement,min_p=0,shape=beam,width=2",
            "rule=typical,min_p=0",
            "rule=threshold,min_p=0",
        ),
    ),
    Entry(
        name="merged-drafts",
        family="model",
        exactness=Exactness.DISTRIBUTION,
        training="small models",
        needs="two or more models with the target's vocabulary",
        summary="Several smaller language models draw a chain each, and one tree of them all is verified.",
        when="several small models, each good at another kind of text; sampled requests",
        reference="Miao et al. 2024 (SpecInfer), arXiv:2305.09781",
        parameters={
            "models": Parameter(tuple, (), "draft models, by name or directory, joined by +"),
            "min_p": Parameter(float, 0.1, "stop where the chance of the drafted path falls below this", low=0, high=1),
            **budget(8, ("multi-candidate",)),
        },
        factory="parlay.drafters.draft_models.merged_drafts:MergedDrafts",
        toys=("models=parlay-mini+parlay-mini-draft,min_p=0",),
    ),
)
