"""Texts that another program decodes, as drafters see them: tokens, and how many nodes of each draft were right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parlay.options import UsageError
from parlay.types import NO_DRAFT, Draft, NoiseKey, Observation, Request, SamplingParams, Strategy, Tree, Verdict, trees
from parlay.types.base import Exactness

NO_NOISE = NoiseKey(0)


@dataclass(slots=True, eq=False)
class TokenText:
    """A text that is decoded elsewhere: a `SequenceView` without layers. ``draft``: what was last proposed for it."""

    sequence: int
    request: Request
    tokens: list[int]
    prompt_length: int
    draft: Draft = NO_DRAFT
    layers: None = None

    def commit(self, tokens: Sequence[int]) -> Observation:
        """Append the tokens that a step committed, and report which nodes of the last draft were right.

        These are fewer than the tokens, because the last token is always the target's own.
        """
        draft, path = self.draft, _path(self.draft.tree, tokens[:-1])
        self.tokens.extend(tokens)
        self.draft = NO_DRAFT
        return Observation(self, draft, Verdict(path, tuple(tokens[: len(path) + 1])))


def open_text(
    number: int,
    tokens: Sequence[int],
    params: SamplingParams,
    *,
    prompt_length: int | None = None,
    key: NoiseKey = NO_NOISE,
    salt: str = "",
    store: bool = True,
) -> TokenText:
    """Begin a text. By default all its tokens are the prompt. ``key``, ``salt`` and ``store``: see `Request`."""
    prompt_length = len(tokens) if prompt_length is None else prompt_length
    prompt = tuple(tokens[:prompt_length])
    request = Request(id=str(number), prompt=prompt, params=params, key=key, salt=salt, store=store)
    return TokenText(number, request, list(tokens), prompt_length)


def check_tokens_suffice(strategy: Strategy, who: str) -> None:
    """Raises UsageError for a strategy that needs more from the target than its committed tokens.

    ``who`` names the program that has the target, and begins the message.
    """
    if strategy.selector is not None or strategy.exactness not in (Exactness.BITS, Exactness.SEED):
        raise UsageError(f"strategy {strategy.name}: {who} verifies by its own rule; remove rule=, or choose another")
    needs = [drafter.needs for drafter in strategy.drafters]
    if any(each.layers or each.taps or each.top_k for each in needs):
        raise UsageError(
            f"strategy {strategy.name}: {who} shows committed tokens only, and this one reads the target's layers or "
            "scores; choose one that copies, a store or a datastore"
        )


def _path(tree: Tree, tokens: Sequence[int]) -> tuple[int, ...]:
    """The nodes that the tokens follow from the root, as far as the tree has them."""
    if trees.is_chain(tree):
        depth, most = 0, min(len(tree), len(tokens))
        while depth < most and tree.tokens[depth] == tokens[depth]:
            depth += 1
        return tuple(range(depth))
    families, path = trees.children(tree), list[int]()
    for token in tokens:
        node = next((child for child in families[path[-1] if path else -1] if tree.tokens[child] == token), None)
        if node is None:
            break
        path.append(node)
    return tuple(path)
