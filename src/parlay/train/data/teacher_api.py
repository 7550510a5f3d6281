"""Answers that an OpenAI-compatible server writes to given prompts, stored in the same shards as a local target's."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import NamedTuple
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from parlay.text.tokenize import encode
from parlay.train.data.prompts import ChatFrame
from parlay.train.data.user_texts import TrainingText, save_shard, shard_path
from parlay.types import ParlayError, Tokenizer

KEY = "OPENAI_API_KEY"
"""The environment variable with the API key, if the server needs one."""
SHARD = 32
"""Conversations in a shard: fewer than a local target's, because a server may fail at any time."""
_AT_ONCE = 8
_SECONDS = 600
_SCHEMES = ("http://", "https://")


class Answer(NamedTuple):
    """A text, and whether the model ended it; an answer that was cut off at the token limit has no end token."""

    text: str
    ended: bool


@dataclass(frozen=True, slots=True)
class TeacherApi:
    """A model on a server. ``url`` is the address without ``/chat/completions``; most end in ``/v1``."""

    url: str
    model: str
    answer_tokens: int
    temperature: float = 0.8

    def answer(self, prompt: str) -> Answer:
        """Return the server's answer to one prompt. Raises ParlayError if it fails or returns no chat completion."""
        asked = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": self.answer_tokens,
            "temperature": self.temperature,
        }
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(KEY):
            headers["Authorization"] = f"Bearer {key}"
        address = f"{self.url.rstrip('/')}/chat/completions"
        try:
            with urlopen(Request(address, json.dumps(asked).encode(), headers), timeout=_SECONDS) as reply:
                choice = json.load(reply)["choices"][0]
                text, reason = choice["message"]["content"], choice.get("finish_reason")
        except HTTPError as error:
            raise ParlayError(f"{address} answers {error.code}: {error.read(300).decode(errors='replace')}") from error
        except (URLError, OSError, HTTPException) as error:
            raise ParlayError(
                f"{address} can't be reached ({error}); what it wrote is kept: run again later"
            ) from error
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ParlayError(f"{address} answers with something else than a chat completion") from error
        return Answer(text if isinstance(text, str) else "", ended=reason != "length")


def ask(
    folder: Path,
    prompts: Sequence[str],
    teacher: TeacherApi,
    tokenizer: Tokenizer,
    done: Callable[[int], None] = lambda _: None,
) -> None:
    """Write the missing shards of answers to ``folder``; ``done`` is called with the number of each.

    Empty answers are left out. Raises ParlayError if the server fails; finished shards stay, so the next call continues
    after them.
    """
    if not teacher.url.startswith(_SCHEMES):
        raise ParlayError(f"url={teacher.url}: expected an address such as http://127.0.0.1:8000/v1", "url")
    frame = ChatFrame.of(tokenizer)
    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for number, begin in enumerate(range(0, len(prompts), SHARD)):
            path = shard_path(folder, number)
            if path.exists():
                continue
            asked = prompts[begin : begin + SHARD]
            answers = list(pool.map(teacher.answer, asked))
            pairs = [pair for pair in zip(asked, answers, strict=True) if pair[1].text]
            save_shard(path, [_text(frame, tokenizer, *pair) for pair in pairs])
            done(number)


def _text(frame: ChatFrame, tokenizer: Tokenizer, prompt: str, answer: Answer) -> TrainingText:
    before = frame.around(encode(tokenizer, prompt, special=False))
    end = [tokenizer.eos_token_id] if answer.ended and tokenizer.eos_token_id is not None else []
    return TrainingText((*before, *encode(tokenizer, answer.text, special=False), *end), len(before))
