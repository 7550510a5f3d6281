"""The protocol of a tokenizer. Names are those of transformers, whose tokenizers implement it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import tokenizers


class Tokenizer(Protocol):
    """Converts text to ids and back, and knows special tokens and the model's chat templates."""

    @property
    def is_fast(self) -> bool:
        """Whether it has a ``backend_tokenizer``, which reports offsets and decodes token by token."""
        ...

    @property
    def backend_tokenizer(self) -> tokenizers.Tokenizer: ...

    @property
    def chat_template(self) -> str | dict[str, str] | None:
        """The chat template, or several by name."""
        ...

    @property
    def special_tokens_map(self) -> Mapping[str, str]:
        """Special tokens by purpose: ``bos_token``, ``eos_token`` and so on."""
        ...

    @property
    def all_special_tokens(self) -> Sequence[str]: ...

    @property
    def added_tokens_decoder(self) -> Mapping[int, tokenizers.AddedToken]:
        """Added tokens by id; they are found in a text before it is split otherwise."""
        ...

    @property
    def bos_token_id(self) -> int | None: ...

    @property
    def eos_token_id(self) -> int | None: ...

    @property
    def pad_token_id(self) -> int | None: ...

    def __len__(self) -> int:
        """How many tokens there are, including added ones."""
        ...

    def get_vocab(self) -> Mapping[str, int]: ...

    def convert_ids_to_tokens(self, ids: int) -> str | None:
        """The vocabulary's spelling of the token with this id; None if there is no such token."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text. ``add_special_tokens``: with the special tokens that surround every text."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str: ...
