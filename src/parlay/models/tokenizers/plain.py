"""A tokenizer that its tokenizer.json describes completely: the library that runs it, and its special tokens' names.

transformers offers the same with much more around it, and takes half a second to import.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from tokenizers import AddedToken, Tokenizer

_LONG = 4096
"""Characters or tokens above which the batch functions are used, as they let other threads run."""


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Raise ValueError instead of a Rust library's panic, which is not an `Exception`; a regex that never ends causes
    one."""
    try:
        yield
    except BaseException as error:
        raise_panic(error)
        raise


def raise_panic(error: BaseException) -> None:
    """Raise ValueError if the error is a Rust library's panic; do nothing for other errors."""
    if type(error).__module__ == "pyo3_runtime":
        reason = " ".join(str(error).split())
        raise ValueError(f"this model's tokenizer failed ({reason:.200}): change the text, or the tokenizer") from None


class PlainTokenizer:
    """Implements `parlay.types.Tokenizer` over ``backend``, whose truncation and padding are switched off.

    ``special`` are special tokens by purpose (``bos_token``, ...); those that are not special in the backend become so.
    ``digest`` is the hash of its file, if it was read from one.
    """

    is_fast = True
    digest = ""

    def __init__(
        self,
        backend: Tokenizer,
        special: Mapping[str, str],
        chat_template: str | dict[str, str] | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        known = {token.content for token in backend.get_added_tokens_decoder().values()}
        unknown = dict.fromkeys(token for token in special.values() if token not in known)
        backend.add_tokens([AddedToken(token, special=True) for token in unknown])
        self.backend_tokenizer = backend
        self.special_tokens_map = dict(special)
        self.chat_template = chat_template

    @property
    def all_special_tokens(self) -> list[str]:
        return list(dict.fromkeys(self.special_tokens_map.values()))

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        found: dict[int, AddedToken] = self.backend_tokenizer.get_added_tokens_decoder()
        return found

    @property
    def bos_token_id(self) -> int | None:
        return self._id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._id("eos_token")

    @property
    def pad_token_id(self) -> int | None:
        return self._id("pad_token")

    def _id(self, name: str) -> int | None:
        token = self.special_tokens_map.get(name)
        return None if token is None else self.backend_tokenizer.token_to_id(token)

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=True))

    def get_vocab(self) -> dict[str, int]:
        vocabulary: dict[str, int] = self.backend_tokenizer.get_vocab(with_added_tokens=True)
        return vocabulary

    def convert_ids_to_tokens(self, ids: int) -> str | None:
        token: str | None = self.backend_tokenizer.id_to_token(ids)
        return token

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        backend = self.backend_tokenizer
        with panics_as_errors():
            if len(text) > _LONG:
                return list(backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)
            return list(backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        if len(token_ids) > _LONG:
            (text,) = self.backend_tokenizer.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)
            return str(text)
        return str(self.backend_tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))
