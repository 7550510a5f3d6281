"""Builds trees of proposed tokens, and reads depths, children, paths and visibility off their parents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import TypeVar

from parlay.types import NO_DRAFT, Draft, Tree

Value = TypeVar("Value")


def chain(tokens: Sequence[int], source: str, scores: Sequence[float] = ()) -> Draft:
    """A draft without branches: each token is the child of the one before it."""
    if not tokens:
        return NO_DRAFT
    return Draft(chain_tree(tokens), sources=(source,) * len(tokens), scores=tuple(scores))


def chain_tree(tokens: Sequence[int]) -> Tree:
    return Tree(tuple(tokens), _chain_parents(len(tokens)))


def is_chain(tree: Tree) -> bool:
    parents = tree.parents
    chained = _chain_parents(len(parents))
    return parents is chained or parents == chained


@lru_cache(maxsize=512)
def _chain_parents(count: int) -> tuple[int, ...]:
    """The parents of a chain. All chains of a length share one tuple, so most are recognised by identity."""
    return tuple(range(-1, count - 1))


def depths(tree: Tree) -> list[int]:
    """Distance of each node from the root; a child of the root has depth 1."""
    if is_chain(tree):
        return list(range(1, len(tree) + 1))
    result: list[int] = []
    for parent in tree.parents:
        result.append(result[parent] + 1 if parent >= 0 else 1)
    return result


def children(tree: Tree) -> list[list[int]]:
    """Children of each node in order; entry ``n`` (the last) holds those of the root, so -1 indexes it."""
    result: list[list[int]] = [[] for _ in range(len(tree) + 1)]
    for node, parent in enumerate(tree.parents):
        result[parent].append(node)
    return result


def path_to(tree: Tree, node: int) -> tuple[int, ...]:
    """The nodes from below the root down to ``node``, itself included; empty for the root (-1)."""
    path: list[int] = []
    while node >= 0:
        path.append(node)
        node = tree.parents[node]
    return tuple(reversed(path))


def anchors(tree: Tree, count: int) -> list[int]:
    """For each of the last ``count`` nodes, its nearest ancestor that is not one of them; -1: the root."""
    first = len(tree) - count
    found: list[int] = []
    for parent in tree.parents[first:]:
        found.append(found[parent - first] if parent >= first else parent)
    return found


def last_chains(tree: Tree, count: int) -> list[range]:
    """Divide the last ``count`` nodes into chains: a node joins the chain of its parent if that is the node before."""
    first = len(tree) - count
    begins = [node for node in range(first, len(tree)) if node == first or tree.parents[node] != node - 1]
    return [range(*pair) for pair in pairwise([*begins, len(tree)])]


def along(values: tuple[Value, ...], path: Sequence[int]) -> tuple[Value, ...]:
    """The values at the nodes of a path.

    Paths rise, so a path that ends with node n - 1 has exactly the first n nodes.
    """
    if not path or path[-1] == len(path) - 1:
        return values[: len(path)]
    return tuple([values[node] for node in path])


def leaf_paths(tree: Tree) -> list[tuple[int, ...]]:
    """The path to each leaf, in the order of the leaves. Together they cover the tree."""
    inner = set(tree.parents)
    return [path_to(tree, node) for node in range(len(tree)) if node not in inner]


def visibility(tree: Tree) -> list[list[bool]]:
    """``[i][j]``: whether node i attends to node j, which is itself or an ancestor."""
    rows: list[list[bool]] = []
    for node, parent in enumerate(tree.parents):
        row = list(rows[parent]) if parent >= 0 else [False] * len(tree)
        row[node] = True
        rows.append(row)
    return rows


def subtree(draft: Draft, nodes: Sequence[int]) -> Draft:
    """The draft cut to ``nodes``, a rising list closed under parents. Probes that are not in the list are dropped."""
    if len(nodes) == len(draft):
        return draft
    if not nodes:
        return NO_DRAFT
    if nodes[-1] == len(nodes) - 1:
        return _beginning(draft, len(nodes))
    place = {node: index for index, node in enumerate(nodes)}
    place[-1] = -1
    tree = Tree(
        tuple(draft.tree.tokens[node] for node in nodes),
        tuple(place[draft.tree.parents[node]] for node in nodes),
    )
    first_probe = len(draft) - draft.probes
    probes = [node - first_probe for node in nodes if node >= first_probe] if draft.probes else []
    return replace(
        draft,
        tree=tree,
        sources=tuple(draft.sources[node] for node in nodes),
        scores=tuple(draft.scores[node] for node in nodes) if draft.scores else (),
        probs=None if draft.probs is None else draft.probs[list(nodes)],
        probes=len(probes),
        inputs=None if draft.inputs is None or not probes else draft.inputs.of(probes),
        together=sum(node >= len(draft) - draft.together for node in nodes) if draft.together else 0,
    )


def _beginning(draft: Draft, count: int) -> Draft:
    """The draft cut to its first ``count`` nodes."""
    tree = draft.tree
    parents = _chain_parents(count) if is_chain(tree) else tree.parents[:count]
    probes = max(0, count - (len(draft) - draft.probes))
    return Draft(
        tree=Tree(tree.tokens[:count], parents),
        kind=draft.kind,
        sources=draft.sources[:count],
        scores=draft.scores[:count],
        probs=None if draft.probs is None else draft.probs[:count],
        probes=probes,
        inputs=None if draft.inputs is None or not probes else draft.inputs.of(range(probes)),
        together=max(0, count - (len(draft) - draft.together)),
        mask_adapter=draft.mask_adapter,
    )


def first_path(tree: Tree) -> tuple[int, ...]:
    """The path from the root down by first children."""
    families = children(tree)
    path: list[int] = []
    while below := families[path[-1] if path else -1]:
        path.append(below[0])
    return tuple(path)


def best_chain(draft: Draft) -> Draft:
    """The path with the highest expected accepted length, for runners that can't branch; the deepest if without scores.

    For a drawn draft, the first path: a choice by what was drawn would change the distribution.
    """
    if is_chain(draft.tree):
        return draft
    if draft.kind != "point":
        return subtree(draft, first_path(without_probes(draft).tree))
    values: list[float] = []  # expected accepted nodes along the path to each node: sum of products of scores
    path_probs: list[float] = []
    for node, parent in enumerate(draft.tree.parents):
        path_probs.append((path_probs[parent] if parent >= 0 else 1.0) * (draft.scores[node] if draft.scores else 1.0))
        values.append((values[parent] if parent >= 0 else 0.0) + path_probs[node])
    real = len(draft) - draft.probes
    best = max(range(real), key=lambda node: (values[node], -node), default=-1)  # -1: nothing but probes
    return subtree(draft, path_to(draft.tree, best))


def prune(draft: Draft, nodes: Sequence[int]) -> Draft:
    """The draft cut to ``nodes``, a rising list closed under parents and without probes.

    A probe stays if all its ancestors stay.
    """
    if not draft.probes:
        return subtree(draft, nodes)
    kept = {-1, *nodes}
    probes: list[int] = []
    for probe in range(len(draft) - draft.probes, len(draft)):
        if draft.tree.parents[probe] in kept:
            kept.add(probe)
            probes.append(probe)
    return subtree(draft, [*nodes, *probes])


def first(draft: Draft, budget: int) -> Draft:
    """The draft cut to its first ``budget`` nodes, which are closed under parents because parents come first.

    Probes are not part of a budget: a probe stays if its ancestors do.
    """
    return draft if len(draft) - draft.probes <= budget else prune(draft, range(budget))


def ended(draft: Draft, stops: Set[int]) -> Draft:
    """The draft without the descendants of nodes whose token is in ``stops``, probes included. A stop ends the text."""
    tokens, real = draft.tree.tokens, len(draft) - draft.probes
    if stops.isdisjoint(tokens[:real]):
        return draft
    kept: list[int] = []
    over: set[int] = set()
    for node, parent in enumerate(draft.tree.parents):
        if parent not in over:
            kept.append(node)
        if parent in over or (node < real and tokens[node] in stops):
            over.add(node)
    return subtree(draft, kept)


def lengthened(chain: Draft, tokens: Sequence[int], source: str) -> Draft:
    """A chain with more tokens after its last node, each with score 1. Its probabilities are dropped.

    Probes keep their parents.
    """
    end, count = len(chain) - chain.probes, len(tokens)
    old = chain.tree
    hung = (parent if parent < end else parent + count for parent in old.parents[end:])
    tree = Tree(
        (*old.tokens[:end], *tokens, *old.tokens[end:]),
        (*old.parents[:end], *range(end - 1, end - 1 + count), *hung),
    )
    sources = (*chain.sources[:end], *(source,) * count, *chain.sources[end:])
    scored = len(chain.scores) == len(chain)
    scores = (*chain.scores[:end], *(1.0,) * count, *chain.scores[end:]) if scored else ()
    return replace(chain, tree=tree, sources=sources, scores=scores, probs=None)


def without_probes(draft: Draft) -> Draft:
    return subtree(draft, range(len(draft) - draft.probes))


def with_offers(proposed: Mapping[Value, Draft], offers: Mapping[Value, Draft | None]) -> dict[Value, Draft]:
    """Return each text's draft after one more drafter was asked: its offer, unless that is empty and an earlier
    drafter has offered one. None: the drafter failed."""
    taken = {
        text: draft for text, draft in offers.items() if draft is not None and (len(draft) or text not in proposed)
    }
    return {**proposed, **taken}


def credited(draft: Draft, other: Draft) -> Draft:
    """The draft, with nodes that ``other`` has too credited to their sources there."""
    found = {-1: -1}
    theirs = {key: node for node, key in enumerate(zip(other.tree.parents, other.tree.tokens, strict=True))}
    sources = list(draft.sources)
    for node, (parent, token) in enumerate(zip(draft.tree.parents, draft.tree.tokens, strict=True)):
        same = theirs.get((found[parent], token)) if parent in found else None
        if same is not None:
            found[node], sources[node] = same, other.sources[same]
    return replace(draft, sources=tuple(sources))


def merge(drafts: Sequence[Draft]) -> Draft:
    """One tree of several point drafts: equal siblings become one node, credited to the first that proposed it.

    Raises ValueError for drafts of other kinds: merging draws would change the distribution they were drawn by.
    """
    drafts = [draft for draft in drafts if len(draft)]
    if any(draft.kind != "point" or draft.probes for draft in drafts):
        raise ValueError("only drafts of fixed guesses without probes can be merged into one tree")
    if len(drafts) <= 1:
        return drafts[0] if drafts else NO_DRAFT
    tokens: list[int] = []
    parents: list[int] = []
    sources: list[str] = []
    scores: list[float] = []
    found: dict[tuple[int, int], int] = {}
    for draft in drafts:
        place = {-1: -1}
        for node, token in enumerate(draft.tree.tokens):
            key = (place[draft.tree.parents[node]], token)
            if key not in found:
                found[key] = len(tokens)
                tokens.append(token)
                parents.append(key[0])
                sources.append(draft.sources[node])
                scores.append(draft.scores[node] if draft.scores else 0.5)
            place[node] = found[key]
    return Draft(Tree(tuple(tokens), tuple(parents)), sources=tuple(sources), scores=tuple(scores))
