"""Conversations that others wrote, for a drafter to learn from the target's distribution over them.

The target reads such a text several times as fast as it writes one of its own. Nothing is measured on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from parlay.encoding import encode
from parlay.train.data.prompts import ChatFrame
from parlay.train.data.texts import TrainingText, given_path, save_shard
from parlay.types import Tokenizer

_SHARD = 128


def save_given(
    folder: Path, conversations: Sequence[tuple[str, str]], tokenizer: Tokenizer, prompt_tokens: int, tokens: int
) -> None:
    """Shards of the conversations that are not there yet; prompts and answers are cut to so many tokens."""
    frame = ChatFrame.of(tokenizer)
    for number, start in enumerate(range(0, len(conversations), _SHARD)):
        path = given_path(folder, number)
        if not path.exists():
            texts = []
            for prompt, answer in conversations[start : start + _SHARD]:
                words = encode(tokenizer, prompt, special=False)[:prompt_tokens]
                ids = (*frame.around(words), *encode(tokenizer, answer, special=False)[:tokens])
                texts.append(TrainingText(ids, len(ids)))
            save_shard(path, texts)
