"""Options of all drafters, in a module that loads no torch."""

from __future__ import annotations

from dataclasses import dataclass

from parlay.options import Options, option

DRAFT_MODEL = "draft-model"
MERGED_DRAFTS = "merged-drafts"
SEQUOIA = "sequoia"

MIN_P, MIN_P_HELP = 0.1, "stop where the chance of the drafted path falls below this"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions(Options):
    """Options of strategies that draft with a model: its name."""

    model: str = option("", "draft model, by name or directory; empty: the one that goes with the target", opens=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftModelOptions(ModelOptions):
    """Options of `DraftModel`: how the model drafts."""

    shape: str = option(
        "auto", "shape of the drafts; auto: what suits the rule", choices=("auto", "chain", "tree", "beam")
    )
    width: int = option(3, "nodes per forward and children of each; drawn: chains, children, beam", low=1, high=64)
    branching: tuple[str, ...] = option((), "drawn trees: children per node by depth, such as 3+2+1; empty: width")
    min_p: float = option(0.2, MIN_P_HELP, low=0, high=1)
    tokens: int = option(28672, "frequent tokens to choose among, with the text's own; 0: the whole vocabulary", low=0)


PARALLEL_DRAFT = "parallel-draft"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelDraftOptions(ModelOptions):
    """Options of `ParallelDraft`: the model that drafts while the target verifies, and the length of drafts."""

    url: str = option("", "URL of a `parlay serve --drafter-only` that drafts, in place of a model here", opens=True)
    form: str = option(
        "auto",
        "pearl: so many tokens during each forward, and the next step waits for them; amusd: on and on, until the "
        "forward ends; auto: as pearl, but before forwards where that is quicker by measurement",
        choices=("auto", "pearl", "amusd"),
    )
    ahead: int = option(0, "tokens drafted during a forward; 0: as many as fit into one", low=0, high=64)
    min_p: float = option(0.2, "before a forward, " + MIN_P_HELP, low=0, high=1)
    threads: int = option(1, "threads that draft; the target has the others", low=1, high=256)
    tokens: int = option(28672, "frequent tokens to choose among, with the text's own; 0: the whole vocabulary", low=0)
    deadline_ms: float = option(1000.0, "milliseconds that a drafter at a url may take", low=0.1, high=60_000)


BIG_LITTLE = "big-little"


@dataclass(frozen=True, slots=True, kw_only=True)
class BigLittleOptions(ModelOptions):
    """Options of big-little decoding: when the small model hands over to the target."""

    fallback: float = option(0.6, "stop before a token of which the small model is less sure than this", low=0, high=1)
    by_kind: tuple[str, ...] = option(
        (),
        "another fallback for kinds of requests, as maths/0.5+code/0.8; `parlay calibrate --fit` finds them",
        high=1,
        kinds=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedDraftsOptions(Options):
    """Options of merged drafts: the draft models, and where their chains end."""

    models: tuple[str, ...] = option((), "draft models, by name or directory, joined by +", opens=True)
    min_p: float = option(MIN_P, MIN_P_HELP, low=0, high=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequoiaOptions(ModelOptions):
    """Options of Sequoia: the numbers from which the best tree is computed."""

    width: int = option(5, "ranks of guesses that are told apart, and most children of a node", low=1, high=64)
    levels: int = option(8, "most levels of a tree", low=1, high=64)
    level_cost: float = option(0.1, "what drafting a level costs, in forwards of the target", low=0, high=10)


SPEC_REASON = "spec-reason"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecReasonOptions(ModelOptions):
    """Options of SpecReason: the model that writes reasoning steps, and where a step ends."""

    until: str = option("sentence", "what a step is", choices=("sentence", "line"))


SUPERPOSED_DRAFT = "superposed-draft"


@dataclass(frozen=True, slots=True, kw_only=True)
class SuperposedDraftOptions(ModelOptions):
    """Options of superposed drafts: drafts per row, how they are mixed, and the n-grams that join them."""

    drafts: int = option(3, "drafts that a row stands for", low=1, high=16)
    min_p: float = option(MIN_P, MIN_P_HELP, low=0, high=1)
    temperature: float = option(
        0.06, "how evenly they are mixed, by their chances; near 0: the best alone", low=0.001, high=10
    )
    ngrams: str = option(
        "", "n-gram model that says which token goes on with which draft; `parlay ngram build` makes one", opens=True
    )
    alpha: float = option(0.54, "weight of the n-gram model beside the draft model", low=0, high=1)


CANVAS_DRAFT = "canvas-draft"


@dataclass(frozen=True, slots=True, kw_only=True)
class CanvasDraftOptions(Options):
    """Options of canvas drafts: how a canvas is filled, and how its guesses become a tree."""

    model: str = option("", "diffusion model that drafts, by name or directory", opens=True)
    steps: int = option(
        1, "forwards of a canvas; each fixes the places that are surest, for the next to see", low=1, high=64
    )
    width: int = option(3, "best tokens of each place that may become nodes", low=1, high=64)
    min_p: float = option(0.05, MIN_P_HELP, low=0, high=1)


CASCADE = "cascade"
HORIZONTAL = "horizontal"
CS_DRAFTING = "cs-drafting"


@dataclass(frozen=True, slots=True, kw_only=True)
class CascadeOptions(Options):
    """Options of a cascade: its levels, and when the last one stops."""

    levels: tuple[str, ...] = option(
        ("prompt-lookup", "draft-model(k=16)"),
        "drafters from the cheapest to the most expensive, joined by +; models from the second on",
        strategies=True,
    )
    enough: int = option(0, "tokens after which the last level stops; 0: its k", low=0, high=1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class HorizontalOptions(Options):
    """Options of horizontal cascades: the drafters, in the order in which they write parts of a draft."""

    levels: tuple[str, ...] = option(
        ("draft-model(k=5)", "prompt-lookup(k=10)"),
        "drafters from the most expensive to the cheapest, joined by +; each drafts up to its own k",
        strategies=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CsDraftingOptions(Options):
    """Options of CS drafting: the drafters, and how many tokens each of them writes for each other one."""

    drafters: tuple[str, ...] = option(
        ("draft-model", "prompt-lookup"), "from the most expensive to the cheapest, joined by +", strategies=True
    )
    matrix: tuple[str, ...] = option(("5/10", "0/10"), "tokens each drafter (column) writes, row by row, joined by +")


JACOBI = "jacobi"
LOOKAHEAD = "lookahead"


@dataclass(frozen=True, slots=True, kw_only=True)
class JacobiOptions(Options):
    """Options of Jacobi decoding: how far it guesses, and its first guesses."""

    variant: str = option(
        "parallel",
        "how far is guessed: as the budget allows, to the end of a block, or in blocks until bound",
        choices=("parallel", "block", "hybrid"),
    )
    block: int = option(8, "block, hybrid: tokens that are solved together", low=2, high=1024)
    bound: int = option(128, "hybrid: output tokens after which decoding is plain", low=1)
    guess: str = option("pad", "first guess of a token", choices=("pad", "last", "prompt"))
    recycle: int = option(
        0, "n-grams of earlier guesses verified beside the block, and kept per first token", low=0, high=128
    )
    ngram: int = option(5, "recycle: tokens of an n-gram", low=2, high=32)


@dataclass(frozen=True, slots=True, kw_only=True)
class LookaheadOptions(Options):
    """Options of lookahead decoding: sizes of its window and its pool of n-grams."""

    window: int = option(5, "columns of the window (W); 0: n-grams of the text alone", low=0, high=128)
    ngram: int = option(4, "tokens of an n-gram (N); the window has one row less", low=2, high=32)
    guesses: int = option(5, "n-grams verified at once, and kept per first token (G)", low=0, high=128)
    copy: bool = option(True, "take n-grams from prompt and output, too")


UNIVERSAL_DRAFT = "universal-draft"
INTERSECTION_DRAFT = "intersection-draft"


@dataclass(frozen=True, slots=True, kw_only=True)
class IntersectionDraftOptions(ModelOptions):
    """Options of token-level intersection: the draft model, and where its chains end."""

    min_p: float = option(MIN_P, MIN_P_HELP, low=0, high=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class UniversalDraftOptions(IntersectionDraftOptions):
    """Options of universal drafts: the draft model, where chains end, and how much text is tokenised again."""

    window: int = option(10, "last tokens of the text that are tokenised again with the draft", low=1, high=256)


LAYER_SKIP = "layer-skip"
SWIFT = "swift"
EARLY_EXIT = "early-exit"

RATIO = 0.45
"""The share of attention and MLP halves of inner layers that is left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSkipOptions(Options):
    """Options of layer skipping: the layers that are left out, how they are searched for, and where a draft ends."""

    attention: tuple[str, ...] = option((), "layers whose attention is left out, from 0, joined by +")
    mlp: tuple[str, ...] = option((), "layers whose MLP is left out, from 0, joined by +")
    ratio: float = option(
        RATIO, "if none are named: share of the inner attention and MLP blocks to skip", low=0, high=1
    )
    search: int = option(0, "most sets of layers to try while decoding, one per step", low=0, high=100_000)
    window: int = option(32, "search: tokens of output on which a set is tried", low=1, high=4096)
    threshold: float = option(0.8, "greedy: first value of the probability below which a draft ends", low=0, high=1)
    threshold_sampled: float = option(0.5, "the same for sampled requests", low=0, high=1)
    acceptance: float = option(0.9, "acceptance that the threshold moves towards", low=0, high=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SwiftOptions(Options):
    """Options of SWIFT: how the set of skipped layers is searched for, and where a draft ends."""

    ratio: float = option(RATIO, "share of the inner attention and MLP blocks to skip", low=0, high=1)
    window: int = option(32, "tokens of output on which a set of layers is tried", low=1, high=4096)
    every: int = option(25, "one in so many sets is chosen by the estimator, the others at random", low=1, high=100_000)
    enough: float = option(0.95, "the search ends at this share of equal tokens", low=0, high=1)
    patience: int = option(300, "the search ends after so many sets without a better one", low=1)
    probes: int = option(1000, "most sets that are tried; 0: none", low=0, high=100_000)
    threshold: float = option(0.8, "probability below which a draft ends", low=0, high=1)
    width: int = option(10, "best tokens at each step that become nodes", low=1, high=64)


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyExitOptions(Options):
    """Options of early exit: the layer after which drafting leaves the target, and where a draft ends."""

    exit: int = option(0, "layers that run while drafting; 0: a quarter of them", low=0, high=1024)
    threshold: float = option(0.0, "probability below which a draft ends", low=0, high=1)


SELF_DRAFT = "self-draft"


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfDraftOptions(Options):
    """Options of self drafts: the target's weights and cached keys that drafts use, and where a draft ends."""

    bits: int = option(
        0, "weights are rounded to so many bits, 4 or 8, when the strategy is opened; 0: as they are", opens=True
    )
    window: int = option(512, "last cached tokens that drafts see; 0: all", low=0)
    sinks: int = option(4, "first cached tokens that drafts see besides", low=0)
    keys: int = option(0, "tokens between these that each head sees besides: those it attended to most; 0: none", low=0)
    refresh: int = option(64, "new tokens after which these are chosen again; 0: only when the window moves", low=0)
    min_p: float = option(MIN_P, MIN_P_HELP, low=0, high=1)


SET_BLOCK, ADAPTER = "set-block", "adapter"
"""The strategy's name, and the name of its option for an adapter of mask rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetBlockOptions(Options):
    """Options of set-block drafts: the adapter of mask rows, masks per node, and nodes with masks."""

    adapter: str = option(
        "",
        "folder of an adapter that mask rows alone run with (UNO); empty: the owner's, or the model's own weights",
        opens=True,
    )
    masks: int = option(
        0,
        "mask rows below each node; 0: as many as are likely to be read, at most the model's block and 16",
        low=0,
        high=64,
    )
    groups: int = option(2, "nodes, the root among them, below which masks stand: the likeliest", low=1, high=64)
    width: int = option(3, "best tokens of each place that may become nodes", low=1, high=64)


EAGLE, EAGLE2, EAGLE3, MTP = "eagle", "eagle2", "eagle3", "mtp"
BLOCK_DRAFTER, BLOCKWISE, KANGAROO = "block-drafter", "blockwise", "kangaroo"
DYNAMO, PASS, PPD = "dynamo", "pass", "ppd"
BITA, STREAMING = "bita", "speculative-streaming"
MEDUSA, HYDRA, MLP_SPECULATOR, REDRAFTER = "medusa", "hydra", "mlp-speculator", "redrafter"

HEADS_OF_OTHERS = {EAGLE2: EAGLE}
"""Strategies that draft with another strategy's heads, and that strategy."""

ON_PROBES = frozenset({BITA, PPD, SET_BLOCK, STREAMING})
"""Strategies whose guesses are all made at probes, which a drafter inside another one can't have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadOptions(Options):
    """Options of strategies that draft with a head, or with several: their files."""

    head: str = option(
        "",
        "folder or Hub repository of the head, or its name or domain in parlay drafters; empty: the target's",
        opens=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicTreeOptions(HeadOptions):
    """Options of heads with dynamic trees: how large trees grow before they are cut to the budget."""

    width: int = option(4, "nodes per forward of the head, and children of each", low=1, high=64)
    depth: int = option(4, "most levels of a tree", low=1, high=32)
    min_p: float = option(0.02, "grow no path whose chance falls below this", low=0, high=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamOptions(HeadOptions):
    """Options of beam search: number of beams, and its depth."""

    width: int = option(10, "beams", low=1, high=64)
    depth: int = option(4, "tokens of a beam", low=1, high=32)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockOptions(HeadOptions):
    """Options of heads that guess a block at once: how the guesses become a tree."""

    width: int = option(4, "nodes of a level that get children, and children of each", low=1, high=64)
    min_p: float = option(0.02, "grow no path whose chance falls below this", low=0, high=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockwiseOptions(BlockOptions):
    """Options of blockwise drafts: what rescores the heads' guesses, and its weight."""

    rescore: str = option(
        "neural",
        "what reorders the heads' guesses: a small language model, n-grams, or nothing",
        choices=("neural", "ngram", "none"),
    )
    weight: float = option(0.3, "what the rescoring counts, beside the head", low=0, high=1)
    lattice: int = option(16, "best guesses of each head that are rescored", low=1, high=256)


@dataclass(frozen=True, slots=True, kw_only=True)
class KangarooOptions(HeadOptions):
    """Options of Kangaroo: where a draft ends."""

    threshold: float = option(0.6, "probability below which a draft ends", low=0, high=1)
    length: int = option(6, "most tokens of a draft", low=1, high=64)


@dataclass(frozen=True, slots=True, kw_only=True)
class PpdOptions(HeadOptions):
    """Options of parallel prompt decoding: number of probe rows beside a draft."""

    probes: int = option(12, "probes of one step, below all nodes together", low=1, high=256)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOptions(HeadOptions):
    """Options of heads with groups of probes: number of nodes that have probes below them."""

    groups: int = option(
        8, "nodes, the root among them, below which stand all trained inputs: the likeliest", low=1, high=64
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamoOptions(BlockOptions):
    """Options of DynaMo: the pairs of tokens that are used."""

    lattice: int = option(16, "best guesses of each head that are joined", low=1, high=64)
    eps: float = option(0.1, "rule=unverified: least probability of a token, its square of a pair", low=0, high=1)
    otsu: bool = option(True, "rule=unverified: also leave out pairs below the gap that Otsu's method finds")
