"""Options of all drafters, in a module that loads no torch."""

from __future__ import annotations

from dataclasses import dataclass

from parlay.options import Options, option

DRAFT_MODEL, MERGED_DRAFTS, SEQUOIA = "draft-model", "merged-drafts", "sequoia"

MIN_P, MIN_P_HELP = 0.1, "stop where the probability of the drafted path falls below this"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions(Options):
    """Options of strategies that draft with a model: its name."""

    model: str = option("", "draft model, by name or directory; empty: the one that goes with the target", opens=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftModelOptions(ModelOptions):
    """Options of `DraftModel`: how the model drafts."""

    shape: str = option(
        "auto", "shape of drafts; auto: what suits the accept rule", choices=("auto", "chain", "tree", "beam")
    )
    width: int = option(3, "nodes per forward, children of each; if drawn: chains, children, beams", low=1, high=64)
    branching: tuple[str, ...] = option((), "drawn trees: children per node, by depth, as in 3+2+1; empty: `width`")
    min_p: float = option(0.2, MIN_P_HELP, low=0, high=1)
    tokens: int = option(28672, "frequent tokens to draft with, besides the text's own; 0: the whole vocabulary", low=0)


PARALLEL_DRAFT = "parallel-draft"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelDraftOptions(ModelOptions):
    """Options of `ParallelDraft`: the model that drafts while the target verifies, and the length of drafts."""

    url: str = option("", "URL of a `parlay serve --drafter-only` that drafts instead of a model here", opens=True)
    form: str = option(
        "auto",
        "pearl: draft `ahead` tokens during each forward, and let the next step wait for them; amusd: draft until the "
        "forward ends; auto: as pearl, or before forwards if that is measured to be quicker",
        choices=("auto", "pearl", "amusd"),
    )
    ahead: int = option(0, "tokens to draft during a forward; 0: as many as there is time for", low=0, high=64)
    min_p: float = option(0.2, "before a forward, " + MIN_P_HELP, low=0, high=1)
    threads: int = option(1, "threads that draft; the target uses the others", low=1, high=256)
    tokens: int = option(28672, "frequent tokens to draft with, besides the text's own; 0: the whole vocabulary", low=0)
    deadline_ms: float = option(1000.0, "milliseconds that the drafter at `url` may take", low=0.1, high=60_000)


BIG_LITTLE = "big-little"


@dataclass(frozen=True, slots=True, kw_only=True)
class BigLittleOptions(ModelOptions):
    """Options of big-little decoding: when the small model hands over to the target."""

    fallback: float = option(0.6, "stop before a token that the small model finds less likely than this", low=0, high=1)
    by_kind: tuple[str, ...] = option(
        (),
        "`fallback` by kind of request, as in maths/0.5+code/0.8; `parlay calibrate --fit` finds them",
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

    width: int = option(5, "children of a node at most; acceptance is measured for each rank", low=1, high=64)
    levels: int = option(8, "maximum levels of a tree", low=1, high=64)
    level_cost: float = option(0.1, "cost of drafting a level, in forwards of the target", low=0, high=10)


SPEC_REASON = "spec-reason"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecReasonOptions(ModelOptions):
    """Options of SpecReason: the model that writes reasoning steps, and where a step ends."""

    until: str = option("sentence", "where a step ends: at a sentence or a line", choices=("sentence", "line"))


SUPERPOSED_DRAFT = "superposed-draft"


@dataclass(frozen=True, slots=True, kw_only=True)
class SuperposedDraftOptions(ModelOptions):
    """Options of superposed drafts: drafts per row, how they are mixed, and the n-grams that join them."""

    drafts: int = option(3, "drafts that one row writes", low=1, high=16)
    min_p: float = option(MIN_P, MIN_P_HELP, low=0, high=1)
    temperature: float = option(
        0.06, "how evenly the drafts are mixed; near 0: only the likeliest counts", low=0.001, high=10
    )
    ngrams: str = option(
        "", "n-gram model that tells which token continues which draft, made by `parlay ngram build`", opens=True
    )
    alpha: float = option(0.54, "weight of the n-gram model; the draft model has the rest", low=0, high=1)


CANVAS_DRAFT = "canvas-draft"


@dataclass(frozen=True, slots=True, kw_only=True)
class CanvasDraftOptions(Options):
    """Options of canvas drafts: how a canvas is filled, and how its guesses become a tree."""

    model: str = option("", "diffusion model that drafts, by name or directory", opens=True)
    steps: int = option(1, "forwards of a canvas; each fills the places that it is surest of", low=1, high=64)
    width: int = option(3, "likeliest tokens of each place that may become nodes", low=1, high=64)
    min_p: float = option(0.05, MIN_P_HELP, low=0, high=1)


CASCADE = "cascade"
HORIZONTAL = "horizontal"
CS_DRAFTING = "cs-drafting"


@dataclass(frozen=True, slots=True, kw_only=True)
class CascadeOptions(Options):
    """Options of a cascade: its levels, and when the last one stops."""

    levels: tuple[str, ...] = option(
        ("prompt-lookup", "draft-model(k=16)"),
        "drafters from the cheapest to the most expensive, joined by +; all but the first are models",
        strategies=True,
    )
    enough: int = option(0, "tokens after which the last level stops; 0: its `k`", low=0, high=1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class HorizontalOptions(Options):
    """Options of horizontal cascades: the drafters, in the order in which they write parts of a draft."""

    levels: tuple[str, ...] = option(
        ("draft-model(k=5)", "prompt-lookup(k=10)"),
        "drafters from the most expensive to the cheapest, joined by +; each drafts up to its own `k`",
        strategies=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CsDraftingOptions(Options):
    """Options of CS drafting: the drafters, and how many tokens each of them writes for each other one."""

    drafters: tuple[str, ...] = option(
        ("draft-model", "prompt-lookup"), "drafters, the most expensive first, joined by +", strategies=True
    )
    matrix: tuple[str, ...] = option(("5/10", "0/10"), "tokens that each drafter (column) writes, by row, joined by +")


JACOBI = "jacobi"
LOOKAHEAD = "lookahead"


@dataclass(frozen=True, slots=True, kw_only=True)
class JacobiOptions(Options):
    """Options of Jacobi decoding: how far it guesses, and its first guesses."""

    variant: str = option(
        "parallel",
        "parallel: guess as many tokens as the budget allows; block: up to a block's end; hybrid: blocks up to `bound`",
        choices=("parallel", "block", "hybrid"),
    )
    block: int = option(8, "block, hybrid: tokens of a block", low=2, high=1024)
    bound: int = option(128, "hybrid: output tokens after which decoding is plain", low=1)
    guess: str = option("pad", "what stands in for a token before it is guessed", choices=("pad", "last", "prompt"))
    recycle: int = option(
        0, "n-grams of earlier guesses to verify with the block, and to keep for each first token", low=0, high=128
    )
    ngram: int = option(5, "tokens of a recycled n-gram", low=2, high=32)


@dataclass(frozen=True, slots=True, kw_only=True)
class LookaheadOptions(Options):
    """Options of lookahead decoding: sizes of its window and its pool of n-grams."""

    window: int = option(5, "columns of the window (W); 0: take n-grams from the text only", low=0, high=128)
    ngram: int = option(4, "tokens of an n-gram (N); the window has N - 1 rows", low=2, high=32)
    guesses: int = option(5, "n-grams to verify at once, and to keep for each first token (G)", low=0, high=128)
    copy: bool = option(True, "also take n-grams from the prompt and the output")


UNIVERSAL_DRAFT = "universal-draft"
INTERSECTION_DRAFT = "intersection-draft"


@dataclass(frozen=True, slots=True, kw_only=True)
class IntersectionDraftOptions(ModelOptions):
    """Options of token-level intersection: the draft model, and where its chains end."""

    min_p: float = option(MIN_P, MIN_P_HELP, low=0, high=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class UniversalDraftOptions(IntersectionDraftOptions):
    """Options of universal drafts: the draft model, where chains end, and how much text is tokenised again."""

    window: int = option(10, "last tokens of the text to tokenize again with the draft", low=1, high=256)


LAYER_SKIP = "layer-skip"
SWIFT = "swift"
EARLY_EXIT = "early-exit"

RATIO = 0.45
"""The share of attention and MLP halves of inner layers that is left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSkipOptions(Options):
    """Options of layer skipping: the layers that are left out, how they are searched for, and where a draft ends."""

    attention: tuple[str, ...] = option((), "layers whose attention is skipped, counted from 0, joined by +")
    mlp: tuple[str, ...] = option((), "layers whose MLP is skipped, counted from 0, joined by +")
    ratio: float = option(
        RATIO, "share of the inner attention and MLP blocks to skip, if none are named", low=0, high=1
    )
    search: int = option(0, "maximum sets of layers to try while decoding, one per step", low=0, high=100_000)
    window: int = option(32, "tokens of output on which the search tries a set", low=1, high=4096)
    threshold: float = option(0.8, "greedy requests: initial probability below which a draft ends", low=0, high=1)
    threshold_sampled: float = option(0.5, "the same for sampled requests", low=0, high=1)
    acceptance: float = option(0.9, "share of accepted tokens at which the threshold aims", low=0, high=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SwiftOptions(Options):
    """Options of SWIFT: how the set of skipped layers is searched for, and where a draft ends."""

    ratio: float = option(RATIO, "share of the inner attention and MLP blocks to skip", low=0, high=1)
    window: int = option(32, "tokens of output on which a set of layers is tried", low=1, high=4096)
    every: int = option(25, "choose every so-many-th set by the estimator, the others at random", low=1, high=100_000)
    enough: float = option(0.95, "end the search at this share of equal tokens", low=0, high=1)
    patience: int = option(300, "end the search after so many sets without a better one", low=1)
    probes: int = option(1000, "maximum sets to try; 0: none", low=0, high=100_000)
    threshold: float = option(0.8, "probability below which a draft ends", low=0, high=1)
    width: int = option(10, "likeliest tokens of each drafting step that become nodes", low=1, high=64)


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyExitOptions(Options):
    """Options of early exit: the layer after which drafting leaves the target, and where a draft ends."""

    exit: int = option(0, "layers that run to draft; 0: a quarter of all", low=0, high=1024)
    threshold: float = option(0.0, "probability below which a draft ends", low=0, high=1)


SELF_DRAFT = "self-draft"


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfDraftOptions(Options):
    """Options of self drafts: the target's weights and cached keys that drafts use, and where a draft ends."""

    bits: int = option(0, "draft with weights that are rounded to 4 or 8 bits; 0: as they are", opens=True)
    window: int = option(512, "number of last cached tokens that drafts see; 0: all", low=0)
    sinks: int = option(4, "number of first cached tokens that drafts also see", low=0)
    keys: int = option(0, "tokens between them that each head also sees, those it attended to most; 0: none", low=0)
    refresh: int = option(64, "choose those again after so many new tokens; 0: only when the window moves", low=0)
    min_p: float = option(MIN_P, MIN_P_HELP, low=0, high=1)


SET_BLOCK, ADAPTER = "set-block", "adapter"
"""The strategy's name, and the name of its option for an adapter of mask rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetBlockOptions(Options):
    """Options of set-block drafts: the adapter of mask rows, masks per node, and nodes with masks."""

    adapter: str = option(
        "",
        "folder of an adapter that only mask rows use (UNO); empty: the one of the request's owner, if any",
        opens=True,
    )
    masks: int = option(
        0,
        "mask rows below each node; 0: as many as are likely to be used, at most 16 and the model's block size",
        low=0,
        high=64,
    )
    groups: int = option(2, "how many nodes get mask rows: the likeliest, and the root", low=1, high=64)
    width: int = option(3, "likeliest tokens of each place that may become nodes", low=1, high=64)


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
        "folder or Hub repository of the head, or its name or domain in parlay drafters; empty: found by the target",
        opens=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicTreeOptions(HeadOptions):
    """Options of heads with dynamic trees: how large trees grow before they are cut to the budget."""

    width: int = option(4, "nodes per forward of the head, and children of each", low=1, high=64)
    depth: int = option(6, "maximum levels of a tree", low=1, high=32)
    min_p: float = option(0.02, "do not grow paths of lower probability", low=0, high=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Options(DynamicTreeOptions):
    """Options of EAGLE-3: its trees, and whether they also repeat the text."""

    copies: bool = option(True, "favour tokens that followed the same tokens earlier in the text; the paper does not")


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamOptions(HeadOptions):
    """Options of beam search: number of beams, and its depth."""

    width: int = option(10, "beams", low=1, high=64)
    depth: int = option(4, "tokens of a beam", low=1, high=32)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockOptions(HeadOptions):
    """Options of heads that guess a block at once: how the guesses become a tree."""

    width: int = option(4, "nodes of a level that get children, and children of each", low=1, high=64)
    min_p: float = option(0.02, "do not grow paths of lower probability", low=0, high=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockwiseOptions(BlockOptions):
    """Options of blockwise drafts: what rescores the heads' guesses, and its weight."""

    rescore: str = option(
        "neural",
        "what reorders the heads' guesses: a small neural language model, n-grams, or nothing",
        choices=("neural", "ngram", "none"),
    )
    weight: float = option(0.3, "weight of what reorders them; the heads have the rest", low=0, high=1)
    lattice: int = option(16, "likeliest guesses of each head that are reordered", low=1, high=256)


@dataclass(frozen=True, slots=True, kw_only=True)
class KangarooOptions(HeadOptions):
    """Options of Kangaroo: where a draft ends."""

    threshold: float = option(0.6, "probability below which a draft ends", low=0, high=1)
    length: int = option(6, "maximum tokens of a draft", low=1, high=64)


@dataclass(frozen=True, slots=True, kw_only=True)
class PpdOptions(HeadOptions):
    """Options of parallel prompt decoding: number of probe rows beside a draft."""

    probes: int = option(12, "probes of one step, over all nodes", low=1, high=256)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOptions(HeadOptions):
    """Options of heads with groups of probes: number of nodes that have probes below them."""

    groups: int = option(8, "how many nodes get the trained inputs: the likeliest, and the root", low=1, high=64)


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamoOptions(BlockOptions):
    """Options of DynaMo: the pairs of tokens that are used."""

    lattice: int = option(16, "likeliest guesses of each head that are combined", low=1, high=64)
    eps: float = option(
        0.1, "rule=unverified: minimum probability of a token; a pair of tokens needs its square", low=0, high=1
    )
    otsu: bool = option(True, "rule=unverified: also remove pairs below the threshold that Otsu's method finds")
