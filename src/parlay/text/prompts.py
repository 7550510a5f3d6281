"""Prompts: a text, token ids, or a dict of either, as vLLM takes them."""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any, NotRequired, SupportsIndex, TypedDict, TypeVar, cast

from parlay.text.chat_template import Messages
from parlay.text.reasoning import Thoughts

if TYPE_CHECKING:
    from typing_extensions import TypeIs


class TokensPrompt(TypedDict):
    """A prompt given as token ids. ``thoughts``: whether the answer has reasoning, to which no form applies."""

    prompt_token_ids: Sequence[int]
    thoughts: NotRequired[Thoughts]


class TextPrompt(TypedDict):
    """A prompt given as a text in a dict."""

    prompt: str


Prompt = str | TextPrompt | TokensPrompt | Sequence[int]
"""One prompt. A list of numbers is one, too: token ids."""

Prompts = Prompt | Sequence[Prompt]
T = TypeVar("T")


def is_prompt(asked: Prompts | Messages) -> TypeIs[Prompt]:
    """Whether this is one prompt, and neither several prompts nor a conversation."""
    if isinstance(asked, str | Mapping) or not isinstance(asked, Sized):
        return True
    return len(asked) > 0 and isinstance(asked[0], SupportsIndex)


def listed(prompts: Prompts) -> list[Prompt]:
    """Each of them: one prompt is a list of one."""
    return [prompts] if is_prompt(prompts) else list(prompts)


def conversations(messages: Messages | Sequence[Messages]) -> Sequence[Messages]:
    """Each of them: one conversation is a list of one."""
    one = bool(messages) and isinstance(messages[0], Mapping)
    return cast(Sequence[Messages], [messages] if one else messages)


def one_each(value: T | Sequence[T] | None, default: T, count: int, name: str) -> list[T]:
    """One value per prompt. Raises ValueError when a list has another length than the prompts."""
    if value is None:
        return [default] * count
    if isinstance(value, str) or not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise ValueError(f"{name} has length {len(value)} for {count} prompts: give one for all or one for each")
    return list(value)


def text_or_ids(prompt: Prompt) -> tuple[str | tuple[int, ...], Thoughts]:
    """Split a prompt into what it says and whether its answer reasons. Raises ValueError for what is no prompt."""
    if isinstance(prompt, str):
        return prompt, "none"
    if not isinstance(prompt, Mapping):
        return _ids(prompt), "none"
    said: Mapping[str, Any] = prompt
    others = [name for name in said if name not in ("prompt", "prompt_token_ids", "thoughts")]
    if others:
        raise ValueError(f"{others[0]} can't be part of a prompt here: give prompt or prompt_token_ids alone")
    if said.get("prompt_token_ids") is not None:
        return _ids(said["prompt_token_ids"]), said.get("thoughts", "none")
    if not isinstance(said.get("prompt"), str):
        raise ValueError("a prompt that is a dict needs prompt, a text, or prompt_token_ids, a list")
    return said["prompt"], "none"


def _ids(tokens: Iterable[SupportsIndex]) -> tuple[int, ...]:
    try:
        return tuple([operator.index(token) for token in tokens])
    except TypeError:
        said = reprlib.repr(tokens)
        raise ValueError(f"a prompt is a text, a list of token ids or a dict of either, not {said}") from None
