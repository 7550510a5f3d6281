"""Strategies that learn from the texts of many requests, or from a corpus."""

from __future__ import annotations

from parlay.drafters.entries import Entry, Parameter, budget
from parlay.types import Exactness

_STORE = {
    "store": Parameter(str, "", "file in which past outputs outlive the process; empty: none"),
    "max_tokens": Parameter(int, 250_000, "past outputs to keep, in tokens; the oldest go first", low=1, high=1e9),
    "save_every": Parameter(int, 8, "requests after which the file is written", low=1, high=1e6),
}
_TREE_OR = ("tree", "path")

ENTRIES = (
    Entry(
        name="trie-lookahead",
        family="store",
        exactness=Exactness.BITS,
        training="none",
        needs="nothing; past requests help",
        summary="The branches that most often followed the last tokens, in this request and in past outputs.",
        when="a service whose answers repeat each other",
        reference="Zhao et al. 2023 (Lookahead), arXiv:2312.12728",
        parameters={
            "branch_length": Parameter(int, 12, "most tokens in a branch", low=1, high=64),
            "max_query": Parameter(int, 2, "most tokens looked up; fewer if they fill too little", low=1, high=16),
            "output_weight": Parameter(float, 1e-4, "weight of past outputs against the request", low=0, high=1),
            "shape": Parameter(str, "tree", "all branches, or one", choices=_TREE_OR),
            **_STORE,
            **budget(63),
        },
        factory="parlay.drafters.stores.trie_lookahead:TrieLookahead",
        toys=("max_tokens=300",),
    ),
    Entry(
        name="suffix-decoding",
        family="store",
        exactness=Exactness.BITS,
        training="none",
        needs="nothing; past requests help",
        summary="The likeliest continuations of what matches here or in past outputs; long matches get more of them.",
        when="agents: the same tools and phrases again and again, over many requests",
        reference="Oliaro et al. 2024 (SuffixDecoding), arXiv:2411.04975",
        parameters={
            "depth": Parameter(int, 64, "most tokens of match and draft together", low=2, high=256),
            "factor": Parameter(float, 1.0, "nodes per matching token", low=0, high=64),
            "offset": Parameter(float, 0.0, "nodes on top of that", low=-64, high=1024),
            "min_prob": Parameter(float, 0.1, "least probability of a drafted path", low=0, high=1),
            "shape": Parameter(str, "tree", "several continuations, or the likeliest", choices=_TREE_OR),
            **_STORE,
            **budget(32),
        },
        factory="parlay.drafters.stores.suffix_decoding:SuffixDecoding",
        toys=("max_tokens=300,offset=2",),
    ),
    Entry(
        name="suffix-automaton",
        family="store",
        exactness=Exactness.BITS,
        training="none",
        needs="nothing; past requests help",
        summary="Copies from the longest match in this request, or in past outputs if that is longer by a margin.",
        when="as suffix-decoding, with one long chain, or another drafter where matches are short",
        reference="Hu et al. 2024 (SAM decoding), arXiv:2411.10666",
        parameters={
            "min_match": Parameter(int, 5, "shorter matches leave the draft to the fallback", low=1, high=64),
            "bias": Parameter(int, 5, "tokens by which a match in past outputs must be longer", low=0, high=64),
            "fallback": Parameter(tuple, (), "drafter for where matches are short; empty: none", strategies=True),
            **_STORE,
            **budget(40),
        },
        factory="parlay.drafters.stores.suffix_automaton:SuffixAutomaton",
        toys=("max_tokens=300,bias=0,fallback=token-recycling",),
    ),
    Entry(
        name="token-recycling",
        family="store",
        exactness=Exactness.BITS,
        training="none",
        needs="nothing; past requests help",
        summary="The tokens that the target nearly chose after a token, tried when the token comes again.",
        when="no text to copy from, and no draft model at hand",
        reference="Luo et al. 2024 (Token Recycling), arXiv:2408.08696",
        parameters={
            "tenants": Parameter(
                int, 16, "tenants remembered, 32 bytes per token of the vocabulary each", low=1, high=4096
            ),
            "store": Parameter(str, "", "file in which the candidates outlive the process; empty: none"),
            "save_every": _STORE["save_every"],
            **budget(80),
        },
        factory="parlay.drafters.stores.token_recycling:TokenRecycling",
    ),
)
