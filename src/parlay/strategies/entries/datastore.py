"""Strategies that retrieve from a corpus."""

from __future__ import annotations

from parlay.drafters.stores import datastore
from parlay.strategies.entry import StrategyEntry

ENTRIES = (
    StrategyEntry(
        name=datastore.SOURCE,
        family="retrieval",
        training="none",
        needs="a datastore file, made by `parlay datastore build`",
        summary="Drafts what followed the latest tokens in a corpus, the most frequent continuations as one tree.",
        when="answers resemble a corpus that is known beforehand",
        reference="He et al. 2023 (REST), arXiv:2311.08252",
        options=datastore.RetrievalOptions,
        k=64,
        factory="parlay.drafters.stores.datastore:Retrieval",
        toys=("file=toy",),
    ),
)
