"""Strategies in which drafters stand inside drafters."""

from __future__ import annotations

from parlay.drafters.entries import Entry, Parameter, budget
from parlay.types import Exactness

ENTRIES: tuple[Entry, ...] = (
    Entry(
        name="cascade",
        family="cascade",
        exactness=Exactness.BITS,
        training="that of its levels",
        needs="what its levels need",
        summary="A cheap drafter writes for a small model, that one for a larger one, the last for the target.",
        when="the draft model is itself slow enough to be worth speeding up",
        reference="Spector and Re 2023 (staged speculative decoding), arXiv:2308.04623; "
        "Chen et al. 2023 (CS Drafting, vertical), arXiv:2312.11462",
        parameters={
            "levels": Parameter(
                tuple,
                ("prompt-lookup", "draft-model(k=16)"),
                "drafters from the cheapest to the dearest, joined by +; models from the second on",
                strategies=True,
            ),
            "enough": Parameter(int, 0, "tokens after which the last level stops; 0: its k", low=0, high=1024),
            **budget(16),
        },
        factory="parlay.drafters.combined.cascade:Cascade",
        toys=(
            "levels=prompt-lookup(k=3)+draft-model(min_p=0)+draft-model(k=16,min_p=0,model=other,shape=tree,width=2)",
        ),
    ),
    Entry(
        name="horizontal",
        family="cascade",
        exactness=Exactness.BITS,
        training="that of its levels",
        needs="what its levels need",
        summary="The dearest drafter writes the first tokens of a draft, cheaper ones go on from there.",
        when="early tokens deserve a model, later ones only a guess",
        reference="Chen et al. 2023 (CS Drafting, horizontal), arXiv:2312.11462",
        parameters={
            "levels": Parameter(
                tuple,
                ("draft-model(k=5)", "prompt-lookup(k=10)"),
                "drafters from the dearest to the cheapest, joined by +; each drafts up to its own k",
                strategies=True,
            ),
            **budget(15),
        },
        factory="parlay.drafters.combined.horizontal:Horizontal",
        toys=("levels=draft-model(k=3,min_p=0,shape=tree,width=2)+prompt-lookup",),
    ),
    Entry(
        name="cs-drafting",
        family="cascade",
        exactness=Exactness.BITS,
        training="that of its drafters",
        needs="what its drafters need",
        summary="Vertical and horizontal cascades of several drafters, laid out by one matrix of draft lengths.",
        when="several drafters of different price, laid out by hand",
        reference="Chen et al. 2023 (CS Drafting), arXiv:2312.11462",
        parameters={
            "drafters": Parameter(
                tuple,
                ("draft-model", "prompt-lookup"),
                "from the dearest to the cheapest, joined by +",
                strategies=True,
            ),
            "matrix": Parameter(
                tuple, ("5/10", "0/10"), "tokens each drafter (column) writes, row by row, joined by +"
            ),
            **budget(32),
        },
        factory="parlay.drafters.combined.cs_drafting:cs_drafting",
        toys=("drafters=draft-model(min_p=0)+draft-model(model=other,min_p=0)+prompt-lookup,matrix=2/4/3+0/1/3+0/0/3",),
    ),
)
