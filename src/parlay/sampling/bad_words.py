"""Words that an output must not hold, as a processor of logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from parlay.types import Tokenizer


class BadWords:
    """Masks the last token of each word where the output ends with the tokens before it.

    A word is its tokens, with and without a space before it; a text that spells it in other tokens is not seen, as in
    vLLM. ``prompt_length`` tokens come before the output.
    """

    def __init__(self, words: Sequence[str], tokenizer: Tokenizer, prompt_length: int) -> None:
        spelled = [space + word.strip() for word in words for space in ("", " ")]
        encoded = [tuple(tokenizer.encode(text, add_special_tokens=False)) for text in spelled]
        self._sequences = [ids for ids in dict.fromkeys(encoded) if ids]
        self._prompt_length = prompt_length

    def __call__(self, ids: list[int], logits_V: Tensor) -> Tensor:
        output = ids[self._prompt_length :]
        masked = [
            last
            for *before, last in self._sequences
            if not before or output[max(0, len(output) - len(before)) :] == before
        ]
        if masked:
            logits_V[torch.tensor(masked, device=logits_V.device)] = -torch.inf
        return logits_V
