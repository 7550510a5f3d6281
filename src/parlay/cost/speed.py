"""Predicts how fast each strategy would be on a machine, by published formulas and the roofline's times.

Tokens per step: let a be the probability that a drafted token is right if the token before it was. A chain of k nodes
gives E = (1 - a^(k+1)) / (1 - a) tokens on average (Leviathan et al. 2023). A tree gives 1 plus the sum, over its
nodes, of the probability that the path down to the node is accepted (Chen et al. 2024, Sequoia).

Seconds per step: the target's forward that verifies all nodes, the draft model's forwards (one for each level of the
draft, or one for all levels), and the engine's overheads.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from parlay.cost.roofline import ForwardShape, Machine, ModelShape
from parlay.types import FieldError


@dataclass(frozen=True, slots=True)
class TreeShape:
    """The best tree of ``nodes`` nodes. A step with it commits ``tokens`` tokens on average; ``depth`` is in levels."""

    nodes: int
    tokens: float
    depth: int
    leaves: int


def best_tree(ranks: Sequence[float], nodes: int) -> TreeShape:
    """Return the tree whose ``nodes`` nodes have the highest probabilities of being accepted.

    ``ranks[j]`` is the probability that a node's j-th best child is right if the node is. One rank makes a chain.
    Raises ValueError unless ``ranks`` are at least 0 and their sum is at most 1.
    """
    if not ranks or min(ranks) < 0 or sum(ranks) > 1 + 1e-9:
        raise FieldError("acceptance", f"{'+'.join(map(str, ranks))} must be chances, together at most 1")
    tokens, depth, leaves = 1.0, 0, 0
    parents: set[int] = set()
    chosen = itertools.islice(_by_reach(ranks), nodes)
    for number, (reach, level, parent) in enumerate(chosen):
        tokens += reach
        depth = max(depth, level)
        leaves += 1 if parent in parents or number == 0 else 0
        parents.add(parent)
    return TreeShape(nodes, tokens, depth, max(1, leaves))


def children(ranks: Sequence[float], nodes: int) -> list[list[int]]:
    """Return the nodes of `best_tree`, the root first: for each the places of its children by rank, and 0 for none.

    Each list has an entry for every rank and a 0 after these. ``ranks`` must be as `best_tree` takes them.
    """
    tree = [[0] * (len(ranks) + 1) for _ in range(nodes + 1)]
    for place, (_, _, parent) in enumerate(itertools.islice(_by_reach(ranks), nodes), start=1):
        siblings = tree[parent + 1]
        siblings[siblings.index(0)] = place  # a node's children are found in the order of their ranks
    return tree


def _by_reach(ranks: Sequence[float]) -> Iterator[tuple[float, int, int]]:
    """Yield the nodes that a tree could have, likeliest first.

    Each is the probability that it is accepted, its level from 1, and the number of its parent (-1 for the root). A
    node's next sibling is no likelier than the node, nor is its best child, so both wait in the heap until the node has
    been yielded.
    """
    order = itertools.count()
    waiting = [
        (-ranks[0], next(order), 1, 0, -1, 1.0)
    ]  # equally likely nodes come in the order in which they were found
    for number in itertools.count():
        reach, _, level, rank, parent, above = heapq.heappop(waiting)
        yield -reach, level, parent
        heapq.heappush(waiting, (reach * ranks[0], next(order), level + 1, 0, number, -reach))
        if rank + 1 < len(ranks):
            heapq.heappush(waiting, (-above * ranks[rank + 1], next(order), level, rank + 1, parent, above))


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftPlan:
    """A strategy as its speed is predicted: drafts of at most ``nodes`` nodes with the probabilities ``ranks``.

    ``ranks`` are as in `best_tree`. ``drafter`` is the draft model; None means that drafting takes no time. It runs one
    forward for each level or, with ``at_once``, a single forward of one row for all levels. ``probes`` are extra rows
    in the forward that verifies a draft; they guess the next draft. With ``beside`` the drafter has a machine of its
    own, like the target's, and drafts chains during the target's forwards, as PEARL does. With ``adapts`` the policy
    drafts as many nodes as are fastest, possibly none. Otherwise it always drafts ``nodes``.
    """

    name: str
    nodes: int = 0
    ranks: tuple[float, ...] = (0.0,)
    drafter: ModelShape | None = None
    adapts: bool = True
    at_once: bool = False
    probes: int = 0
    beside: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """The predicted speed of a plan. Seconds are per step; ``tokens_per_second`` adds up all sequences."""

    name: str
    nodes: int
    tokens_per_step: float
    draft_seconds: float
    verify_seconds: float
    step_seconds: float
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class Setting:
    """The load to predict for: ``batch`` sequences of ``context`` tokens each, of one model on one machine."""

    machine: Machine
    shape: ModelShape
    batch: int
    context: int


def predict(setting: Setting, plan: DraftPlan) -> Speed:
    """Predict the plan's speed. With ``adapts`` the plan drafts the fastest number of nodes, otherwise ``nodes``."""
    sizes = [0, *_sizes(plan.nodes)] if plan.adapts else [plan.nodes]
    return max((speed_of(setting, plan, best_tree(plan.ranks, size)) for size in sizes), key=_rate)


def choose(speeds: Sequence[Speed]) -> Speed:
    """Return the fastest of the speeds; if several are equally fast, the first of them."""
    return max(speeds, key=_rate)


def crossover(setting: Setting, plan: DraftPlan, most: int = 256) -> int | None:
    """Return the smallest batch, up to ``most``, at which drafts of ``plan.nodes`` nodes do not beat plain decoding.

    ``setting.batch`` is ignored. Returns None if drafts win at every batch.
    """
    whole, plain = best_tree(plan.ranks, plan.nodes), best_tree(plan.ranks, 0)
    for batch in range(1, most + 1):
        here = Setting(setting.machine, setting.shape, batch, setting.context)
        if _rate(speed_of(here, plan, whole)) <= _rate(speed_of(here, plan, plain)):
            return batch
    return None


def _rate(speed: Speed) -> float:
    return speed.tokens_per_second


def speed_of(setting: Setting, plan: DraftPlan, tree: TreeShape) -> Speed:
    """Predict the speed of a plan if each of its drafts has the shape ``tree``."""
    rows = 1 + tree.nodes + (plan.probes if tree.nodes else 0)
    work = ForwardShape(batch=setting.batch, rows=rows, context=setting.context, leaves=tree.leaves)
    verify = setting.machine.forward(setting.shape, work)
    draft, tokens = 0.0, tree.tokens
    if plan.drafter is not None and tree.nodes:
        levels = 1 if plan.at_once else tree.depth
        width = 1 if plan.at_once else max(1, round(tree.nodes / tree.depth))
        level = ForwardShape(batch=setting.batch, rows=width, context=setting.context, leaves=width)
        seconds = setting.machine.forward(plan.drafter, level) + setting.machine.engine.of_level(setting.batch)
        draft = levels * seconds
        if plan.beside:
            tokens = tokens_beside(plan.ranks[0], tree.nodes)
            draft = max(0.0, draft + seconds - verify)  # the part that the target's forward does not hide
    step = draft + verify + setting.machine.engine.of_step(setting.batch, tree.nodes)
    return Speed(
        name=plan.name,
        nodes=tree.nodes,
        tokens_per_step=tokens,
        draft_seconds=draft,
        verify_seconds=verify,
        step_seconds=step,
        tokens_per_second=setting.batch * tokens / step,
    )


def tokens_beside(chance: float, nodes: int) -> float:
    """Return mean tokens per step if drafts are made during the target's forwards (PEARL, arXiv:2408.11850).

    A draft has ``nodes`` tokens; ``chance`` is the probability a that each is right if the token before it was. The
    next draft is ready if the drafter guessed the whole draft and the token after it, which has the probability
    a^(nodes + 1). After any other step the next forward runs without a draft. After that forward a draft is ready if
    its first token was right, which has the probability a. So drafts are ready in the share a / (1 - a^(nodes + 1) + a)
    of the steps.
    """
    whole = chance ** (nodes + 1)
    with_draft = chance / (1 - whole + chance) if chance < 1 else 1.0
    return 1 + with_draft * sum(chance**depth for depth in range(1, nodes + 1))


def _sizes(most: int) -> list[int]:
    """Return every count up to 16, then powers of two, up to and including ``most``."""
    return sorted({size for size in (*range(1, 17), *(1 << power for power in range(5, 11))) if size < most} | {most})
