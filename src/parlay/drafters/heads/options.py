"""Options of drafters with trained heads. They stand apart so that reading them loads no torch."""

from __future__ import annotations

from dataclasses import dataclass

from parlay.options import Options, option

EAGLE, EAGLE2, EAGLE3, MTP = "eagle", "eagle2", "eagle3", "mtp"
BLOCK_DRAFTER, BLOCKWISE, KANGAROO = "block-drafter", "blockwise", "kangaroo"
DYNAMO, PASS, PPD = "dynamo", "pass", "ppd"
BITA, STREAMING = "bita", "speculative-streaming"
MEDUSA, HYDRA, MLP_SPECULATOR, REDRAFTER = "medusa", "hydra", "mlp-speculator", "redrafter"

HEADS_OF_OTHERS = {EAGLE2: EAGLE}
"""Strategies that draft with another one's heads, and whose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadOptions(Options):
    """Which head drafts, or which heads."""

    head: str = option(
        "",
        "folder or Hub repository of the head, or its name or domain in parlay drafters; empty: the target's",
        opens=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicTreeOptions(HeadOptions):
    """How large trees grow before they are cut to the budget."""

    width: int = option(4, "nodes per forward of the head, and children of each", low=1, high=64)
    depth: int = option(4, "most levels of a tree", low=1, high=32)
    min_p: float = option(0.02, "grow no path whose chance falls below this", low=0, high=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamOptions(HeadOptions):
    """How many beams are searched, and how far."""

    width: int = option(10, "beams", low=1, high=64)
    depth: int = option(4, "tokens of a beam", low=1, high=32)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockOptions(HeadOptions):
    """How the guesses of a block become a tree."""

    width: int = option(4, "nodes of a level that get children, and children of each", low=1, high=64)
    min_p: float = option(0.02, "grow no path whose chance falls below this", low=0, high=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockwiseOptions(BlockOptions):
    """By what the guesses of the heads are rescored, and how much that counts."""

    rescore: str = option(
        "neural",
        "what reorders the heads' guesses: a small language model, n-grams, or nothing",
        choices=("neural", "ngram", "none"),
    )
    weight: float = option(0.3, "what the rescoring counts, beside the head", low=0, high=1)
    lattice: int = option(16, "best guesses of each head that are rescored", low=1, high=256)


@dataclass(frozen=True, slots=True, kw_only=True)
class KangarooOptions(HeadOptions):
    """Where a draft ends."""

    threshold: float = option(0.6, "probability below which a draft ends", low=0, high=1)
    length: int = option(6, "most tokens of a draft", low=1, high=64)


@dataclass(frozen=True, slots=True, kw_only=True)
class PpdOptions(HeadOptions):
    """How many probes the target reads beside a draft."""

    probes: int = option(12, "probes of one step, below all nodes together", low=1, high=256)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOptions(HeadOptions):
    """How many nodes have probes below them."""

    groups: int = option(
        8, "nodes, the root among them, below which stand all trained inputs: the likeliest", low=1, high=64
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamoOptions(BlockOptions):
    """Which pairs of tokens count."""

    lattice: int = option(16, "best guesses of each head that are joined", low=1, high=64)
    eps: float = option(0.1, "rule=unverified: least probability of a token, its square of a pair", low=0, high=1)
    otsu: bool = option(True, "rule=unverified: also leave out pairs below the gap that Otsu's method finds")
