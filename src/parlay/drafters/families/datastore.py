"""Strategies that retrieve from a corpus."""

from __future__ import annotations

from parlay.drafters.entries import Entry, Parameter, budget
from parlay.types import Exactness

ENTRIES = (
    Entry(
        name="datastore",
        family="retrieval",
        exactness=Exactness.BITS,
        training="none",
        needs="a datastore file, made by `parlay datastore build`",
        summary="What followed the latest tokens in a corpus, the most frequent continuations as one tree.",
        when="answers resemble a corpus that is known beforehand",
        reference="He et al. 2023 (REST), arXiv:2311.08252",
        parameters={
            "file": Parameter(str, "", "the datastore; `parlay datastore build` makes one"),
            "max_match": Parameter(int, 16, "most tokens of the sequence that are looked for", low=1, high=256),
            "min_match": Parameter(int, 2, "fewest tokens that must match", low=1, high=256),
            "branch": Parameter(int, 10, "tokens that are taken after a match: most depth of a draft", low=1, high=256),
            "matches": Parameter(int, 5000, "most matches that are counted", low=1, high=100_000),
            **budget(64),
        },
        factory="parlay.drafters.stores.datastore:Retrieval",
        toys=("file=toy",),
    ),
)
