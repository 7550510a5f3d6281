"""Strategies that learn from the texts of many requests, or from a corpus."""

from __future__ import annotations

from parlay.drafters.stores import suffix_automaton, suffix_decoding, token_recycling, trie_lookahead
from parlay.strategies.entry import StrategyEntry

ENTRIES = (
    StrategyEntry(
        name=trie_lookahead.SOURCE,
        family="store",
        replayable=True,
        training="none",
        needs="nothing; past requests help",
        summary="Drafts the branches that most often followed the last tokens, in this request and in past outputs.",
        when="a service whose answers repeat each other",
        reference="Zhao et al. 2023 (Lookahead), arXiv:2312.12728",
        options=trie_lookahead.TrieLookaheadOptions,
        k=63,
        factory="parlay.drafters.stores.trie_lookahead:TrieLookahead",
        toys=("max_tokens=300",),
    ),
    StrategyEntry(
        name=suffix_decoding.SOURCE,
        family="store",
        replayable=True,
        arm=1,
        training="none",
        needs="nothing; past requests help",
        summary="Drafts the likeliest continuations of matches in request and past outputs, more after longer matches.",
        when="agents: the same tools and phrases again and again, over many requests",
        reference="Oliaro et al. 2024 (SuffixDecoding), arXiv:2411.04975",
        options=suffix_decoding.SuffixDecodingOptions,
        k=32,
        factory="parlay.drafters.stores.suffix_decoding:SuffixDecoding",
        toys=("max_tokens=300,offset=2",),
        vllm=("suffix",),
    ),
    StrategyEntry(
        name=suffix_automaton.SOURCE,
        family="store",
        replayable=True,
        training="none",
        needs="nothing; past requests help",
        summary="Copies from the longest match in this request, or in past outputs if that is longer by a margin.",
        when="as suffix-decoding, with one long chain, or another drafter where matches are short",
        reference="Hu et al. 2024 (SAM decoding), arXiv:2411.10666",
        options=suffix_automaton.SuffixAutomatonOptions,
        k=40,
        factory="parlay.drafters.stores.suffix_automaton:SuffixAutomaton",
        toys=("max_tokens=300,bias=0,fallback=token-recycling",),
    ),
    StrategyEntry(
        name=token_recycling.SOURCE,
        family="store",
        training="none",
        needs="nothing; past requests help",
        summary="Drafts the tokens that the target ranked highest after the same token before.",
        when="no text to copy from, and no draft model at hand",
        reference="Luo et al. 2024 (Token Recycling), arXiv:2408.08696",
        options=token_recycling.TokenRecyclingOptions,
        k=80,
        factory="parlay.drafters.stores.token_recycling:TokenRecycling",
    ),
)
