"""Turns users' prompts, documents and predictions into texts and token ids, for each prompt.

A prompt is a text, token ids, or a dict with either, as in vLLM. Documents and predictions of the output are not part
of the prompt: drafters may copy from them, but the output does not depend on them.
"""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any, NotRequired, SupportsIndex, TypedDict, TypeVar, cast

from parlay.text.chat_template import Messages
from parlay.text.reasoning import Thoughts
from parlay.text.tokenize import check_unicode, encode
from parlay.types import FieldError, Tokenizer, UsageError

if TYPE_CHECKING:
    from typing_extensions import TypeIs


class TokensPrompt(TypedDict):
    """A prompt given as token ids. ``thoughts``: whether the answer has reasoning, to which no structure applies.

    ``begins``: the answer is a text of its own, as in a chat, not a continuation of the prompt. ``cache_salt``: only
    prompts with the same one share cached prefixes and what drafters learn.
    """

    prompt_token_ids: Sequence[int]
    thoughts: NotRequired[Thoughts]
    begins: NotRequired[bool]
    cache_salt: NotRequired[str]


class TextPrompt(TypedDict):
    """A prompt given as a text in a dict. ``cache_salt``: as in `TokensPrompt`."""

    prompt: str
    cache_salt: NotRequired[str]


Prompt = str | TextPrompt | TokensPrompt | Sequence[int]
"""One prompt. A list of numbers is one prompt, given as token ids."""

Prompts = Prompt | Sequence[Prompt]

Document = str | Sequence[int]
"""A text, or token ids."""

Documents = Sequence[Document] | Sequence[Sequence[Document]]
"""One list for all prompts, or a list for each."""

Predictions = Document | Sequence[Document | None]
"""One prediction for all prompts, or one for each."""

Ids = tuple[int, ...]

_PREDICTION = "prediction"
_FIELDS = ("prompt", "prompt_token_ids", "thoughts", "begins", "cache_salt")
T = TypeVar("T")


def is_prompt(asked: Prompts | Messages) -> TypeIs[Prompt]:
    """Whether the value is one prompt, and neither several prompts nor a conversation."""
    if isinstance(asked, str | Mapping) or not isinstance(asked, Sized):
        return True
    return len(asked) > 0 and isinstance(asked[0], SupportsIndex)


def listed(prompts: Prompts) -> list[Prompt]:
    """Return a list of prompts; one prompt becomes a list of one."""
    return [prompts] if is_prompt(prompts) else list(prompts)


def conversations(messages: Messages | Sequence[Messages]) -> Sequence[Messages]:
    """Return a list of conversations; one conversation becomes a list of one. Raises ValueError for a single
    message."""
    if isinstance(messages, Mapping):
        raise ValueError("a conversation is a list of messages: put a single message in brackets")
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        raise ValueError("a conversation is a list of messages, each {'role': ..., 'content': ...}")
    one = bool(messages) and isinstance(messages[0], Mapping)
    return cast(Sequence[Messages], [messages] if one else messages)


def one_each(value: T | Sequence[T] | None, default: T, count: int, name: str) -> list[T]:
    """Return one value per prompt. Raises ValueError if a list's length is not the number of prompts."""
    if value is None:
        return [default] * count
    if isinstance(value, str) or not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise FieldError(name, f"has length {len(value)} for {count} prompts: give one for all or one for each")
    return list(value)


def text_or_ids(prompt: Prompt) -> tuple[str | tuple[int, ...], Thoughts]:
    """Return a prompt's text or ids, and whether its answer has reasoning.

    Raises ValueError for a value that is not a prompt.
    """
    if isinstance(prompt, str):
        return prompt, "none"
    if not isinstance(prompt, Mapping):
        return _ids(prompt), "none"
    fields: Mapping[str, Any] = prompt
    others = [name for name in fields if name not in _FIELDS]
    if others:
        raise ValueError(f"a prompt has no field {others[0]} here: give prompt or prompt_token_ids, and cache_salt")
    if fields.get("prompt_token_ids") is not None:
        return _ids(fields["prompt_token_ids"]), fields.get("thoughts", "none")
    if not isinstance(fields.get("prompt"), str):
        raise ValueError("a prompt that is a dict must have prompt, a text, or prompt_token_ids, a list")
    return fields["prompt"], "none"


def begins_anew(prompt: Prompt) -> bool:
    """Whether the answer is a text of its own, not a continuation of the prompt."""
    return isinstance(prompt, Mapping) and prompt.get("begins") is True


def salt_of(prompt: Prompt) -> str:
    """Return the prompt's ``cache_salt``; empty without one. Raises ValueError for a value that is no text, or
    empty."""
    salt = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
    if salt is None:
        return ""
    if not isinstance(salt, str) or not salt:
        raise ValueError(f"cache_salt must be a text that is not empty, got {reprlib.repr(salt)}")
    return salt


def _ids(tokens: Iterable[SupportsIndex]) -> tuple[int, ...]:
    try:
        if isinstance(tokens, bytes | bytearray):
            raise TypeError
        return tuple([operator.index(token) for token in tokens])
    except TypeError:
        fields = reprlib.repr(tokens)
        raise ValueError(f"a prompt must be a text, a list of token ids or a dict, got {fields}") from None


def check_known(ids: Ids, vocab_size: int) -> None:
    """Raises ValueError for a prompt with an id outside a vocabulary of this size."""
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        raise UsageError(f"the prompt has a token id that is not from 0 to {vocab_size - 1}", "prompt")


def references(
    documents: Documents | None, prompts: int, tokenizer: Tokenizer | None, vocab_size: int
) -> list[tuple[Ids, ...]]:
    """Return, for each prompt, the ids of its documents, without special tokens; empty documents are left out.

    Equal texts are tokenised once. Raises ValueError for a document that is neither text nor ids of the vocabulary, and
    if the number of lists is not the number of prompts.
    """
    known: dict[str, Ids] = {}

    def ids_of(document: Document) -> Ids:
        if not isinstance(document, str):
            return _checked(document, vocab_size, "documents")
        if document not in known:
            known[document] = _encode(document, tokenizer, "documents")
        return known[document]

    lists = per_prompt(documents, prompts)
    if all(each is lists[0] for each in lists):  # all prompts then share one tuple of documents
        return [tuple(filter(None, map(ids_of, each))) for each in lists[:1]] * prompts
    return [tuple(filter(None, map(ids_of, each))) for each in lists]


def predictions(given: Predictions | None, prompts: int, tokenizer: Tokenizer | None, vocab_size: int) -> list[Ids]:
    """Return, for each prompt, the ids of its prediction, without special tokens; empty if it has no prediction.

    A list of numbers is one prediction, given as token ids. Any other list has one entry per prompt: a text, a list of
    token ids, or None. Raises ValueError as `references` does.
    """
    if given is None or _is_one(given):
        each: list[Document | None] = [given] * prompts  # type: ignore[list-item]
    else:
        each = list(given)  # type: ignore[arg-type]
    if len(each) != prompts:
        raise FieldError(
            "prediction", f"has length {len(each)} for {prompts} prompts: give one for all or one for each"
        )
    if all(one is each[0] for one in each):
        return [prediction_ids(one, tokenizer, vocab_size) for one in each[:1]] * prompts
    return [prediction_ids(one, tokenizer, vocab_size) for one in each]


def prediction_ids(given: Document | None, tokenizer: Tokenizer | None, vocab_size: int) -> Ids:
    """Return the ids of one prediction; empty for None. Raises ValueError for a value that is neither text nor ids."""
    if isinstance(given, str):
        return _encode(given, tokenizer, _PREDICTION)
    return () if given is None else _checked(given, vocab_size, _PREDICTION)


def _is_one(given: object) -> bool:
    """Whether the value is a single prediction, or invalid."""
    if isinstance(given, str | bytes) or not isinstance(given, Sequence) or not given:
        return True
    return not any(one is None or isinstance(one, Sequence) for one in given)


def per_prompt(documents: Documents | None, prompts: int) -> list[Sequence[Document]]:
    """Return the documents of each prompt. A list that contains a text or a list of ids is one list for all prompts."""
    if documents is None:
        return [()] * prompts
    if isinstance(documents, str | bytes) or not isinstance(documents, Sequence):
        raise FieldError("documents", "must be a list: put a single document in brackets")
    if not documents or any(map(_is_document, documents)):
        return [documents] * prompts  # type: ignore[list-item]
    if len(documents) != prompts:
        raise FieldError(
            "documents", f"has length {len(documents)} for {prompts} prompts: give one list for all or one for each"
        )
    return list(documents)  # type: ignore[arg-type]


def _is_document(value: object) -> bool:
    """Whether the value counts as a document. An empty list does not: it may belong to a prompt without documents."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        return True  # values that are neither text nor list are refused later
    return len(value) > 0 and not isinstance(value[0], str | Sequence)


def _checked(ids: object, vocab_size: int, field: str) -> Ids:
    name = field.removesuffix("s")
    if isinstance(ids, bytes) or not isinstance(ids, Sequence):
        raise UsageError(f"a {name} must be text or a list of token ids, not {type(ids).__name__}", field)
    try:
        result = tuple(map(operator.index, ids))
    except TypeError:
        raise UsageError(f"a {name} must be text or a list of token ids: one holds something else", field) from None
    if result and not 0 <= min(result) <= max(result) < vocab_size:
        raise UsageError(f"a {name} has a token id that is not from 0 to {vocab_size - 1}", field)
    return result


def _encode(text: str, tokenizer: Tokenizer | None, field: str) -> Ids:
    name = field.removesuffix("s")
    if tokenizer is None:
        raise UsageError(f"this model came without a tokenizer: give a {name} as token ids", field)
    check_unicode(text, f"a {name} is")
    return tuple(encode(tokenizer, text, special=False))
