"""Turns recorded texts into token ids with the tokenizer of the model that wrote them.

The ids may differ slightly from what the model wrote: it may have divided some words into other tokens, and the token
that ended its answer is not recorded.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from parlay.bench.replay.answers import RecordedAnswer
from parlay.models.fetch.resolving import resolve
from parlay.models.loading import load_tokenizer
from parlay.text.chat_template import render
from parlay.types import ParlayError, Tokenizer

if TYPE_CHECKING:
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

MISTRAL = "mistral-common"
MISTRAL_VERSIONS = ("v1", "v2", "v3", "v7", "tekken")

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Recorded:
    """One recorded answer, its prompt and its references, as token ids."""

    prompt: Ids
    output: Ids
    references: tuple[Ids, ...] = ()


class RecordedTokens(Protocol):
    """The tokenizer of a replay. ``base`` is the model's tokenizer, which drafters that compare texts need."""

    @property
    def name(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def base(self) -> Tokenizer | None: ...

    def asked(self, prompt: str) -> Ids:
        """Return the ids of a prompt as the model reads it: in its chat template, if there is one."""
        ...

    def encode(self, text: str) -> Ids:
        """Return the ids of the text without special tokens."""
        ...


def open_tokens(name: str) -> RecordedTokens:
    """Load a tokenizer by ``mistral-common:VERSION``, or the name of a built-in model, a local folder, or a Hub id.

    Raises ParlayError or ValueError if it can't be loaded.
    """
    kind, colon, version = name.partition(":")
    return _Mistral(version) if kind == MISTRAL and colon else _HuggingFace(name)


def recorded(answer: RecordedAnswer, tokens: RecordedTokens) -> Recorded:
    """Return a recorded answer as token ids."""
    references = tuple(tokens.encode(text) for text in answer.references)
    return Recorded(tokens.asked(answer.prompt), tokens.encode(answer.output), references)


class _HuggingFace:
    """The tokenizer of a model in Hugging Face's format."""

    def __init__(self, name: str) -> None:
        self.base: Tokenizer = load_tokenizer(resolve(name))
        self.name = Path(name).name
        self.vocab_size = len(self.base)

    def asked(self, prompt: str) -> Ids:
        if not self.base.chat_template:
            return tuple(self.base.encode(prompt))
        turn = [{"role": "user", "content": prompt}]
        return self.encode(render(self.base, turn))

    def encode(self, text: str) -> Ids:
        return tuple(self.base.encode(text, add_special_tokens=False))


class _Mistral:
    """A tokenizer of the package mistral-common."""

    base = None

    def __init__(self, version: str) -> None:
        self.name = f"{MISTRAL}:{version}"
        self._tokenizer = _open_mistral(version)
        self._plain = self._tokenizer.instruct_tokenizer.tokenizer
        self.vocab_size: int = self._plain.n_words

    def asked(self, prompt: str) -> Ids:
        from mistral_common.protocol.instruct.messages import UserMessage
        from mistral_common.protocol.instruct.request import ChatCompletionRequest

        request = ChatCompletionRequest(messages=[UserMessage(content=prompt)])
        return tuple(self._tokenizer.encode_chat_completion(request).tokens)

    def encode(self, text: str) -> Ids:
        return tuple(self._plain.encode(text, bos=False, eos=False))


def _open_mistral(version: str) -> MistralTokenizer:
    if version not in MISTRAL_VERSIONS:
        raise ValueError(f"{MISTRAL} has no tokenizer {version!r}: choose one of {', '.join(MISTRAL_VERSIONS)}")
    try:
        from mistral_common.tokens.tokenizers.mistral import MistralTokenizer  # here, because it is an extra

        return MistralTokenizer.v3(is_tekken=True) if version == "tekken" else _by_version(version)
    except ImportError as error:
        raise ParlayError(f"{MISTRAL}:{version} needs {error.name}: pip install 'parlay[replay]'") from None


def _by_version(version: str) -> MistralTokenizer:
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    makers = {
        "v1": MistralTokenizer.v1,
        "v2": MistralTokenizer.v2,
        "v3": MistralTokenizer.v3,
        "v7": MistralTokenizer.v7,
    }
    return makers[version]()
