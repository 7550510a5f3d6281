"""The protocol of a tokenizer. The names are those of transformers, whose tokenizers can be given as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import tokenizers


class Tokenizer(Protocol):
    """From text to ids and back, with the names of special tokens and the model's chat templates."""

    @property
    def is_fast(self) -> bool:
        """Whether there is a ``backend_tokenizer``, which tells offsets and decodes token by token."""
        ...

    @property
    def backend_tokenizer(self) -> tokenizers.Tokenizer: ...

    @property
    def chat_template(self) -> str | dict[str, str] | None:
        """The one template, or by name where there are more."""
        ...

    @property
    def special_tokens_map(self) -> Mapping[str, str]:
        """Tokens by what they are for: ``bos_token``, ``eos_token`` and so on."""
        ...

    @property
    def all_special_tokens(self) -> Sequence[str]: ...

    @property
    def added_tokens_decoder(self) -> Mapping[int, tokenizers.AddedToken]:
        """Tokens that are found in a text before anything else is done to it, by id."""
        ...

    @property
    def bos_token_id(self) -> int | None: ...

    @property
    def eos_token_id(self) -> int | None: ...

    @property
    def pad_token_id(self) -> int | None: ...

    def __len__(self) -> int:
        """How many tokens there are, added ones included."""
        ...

    def get_vocab(self) -> Mapping[str, int]: ...

    def convert_ids_to_tokens(self, ids: int) -> str | None:
        """How the vocabulary writes the token with this id; None for one that it lacks."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """``add_special_tokens``: with those that stand around every text."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str: ...
