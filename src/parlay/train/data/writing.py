"""Texts that a target writes for its drafters: its answers to given prompts, and to prompts that it makes up.

A drafter must predict what the target writes, so it is trained on the target's own texts. If no prompts are given, the
target also writes prompts: given the tokens that its chat template puts before a user's words, it continues as a user
would (Magpie, Xu et al. 2024).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parlay.llm.llm import LLM
from parlay.text.prompts import TokensPrompt
from parlay.text.tokenize import encode, encode_all
from parlay.train.data.collecting import write_featured
from parlay.train.data.features import FeatureStore
from parlay.train.data.prompts import ChatFrame
from parlay.train.data.user_texts import TrainingText, save_shard, shard_path
from parlay.types import ParlayError, SamplingParams, Tokenizer

_SHARD = 128
"""Conversations in a shard, so few that a killed run loses at most some minutes of work."""


@dataclass(frozen=True, slots=True)
class WritingPlan:
    """Which texts to write. Shard ``i`` depends only on the plan, the target and ``i``.

    ``own_share`` of the prompts are the target's own. ``greedy_share`` of the answers are greedy, the others sampled at
    ``temperature``. ``prompt_tokens``, ``own_prompt_tokens`` and ``answer_tokens`` are the longest lengths.
    """

    prompts: Sequence[str] = ()
    own_share: float = 0.5
    greedy_share: float = 0.7
    temperature: float = 0.8
    prompt_tokens: int = 384
    own_prompt_tokens: int = 96
    answer_tokens: int = 192
    seed: int = 0


def short_prompts(prompts: Sequence[str], tokenizer: Tokenizer, most: int) -> list[str]:
    """Return the prompts of at most ``most`` tokens, and print how many are left out.

    Raises ParlayError if all are longer.
    """
    short = [
        text
        for text, ids in zip(prompts, encode_all(tokenizer, prompts, special=False), strict=True)
        if len(ids) <= most
    ]
    if prompts and not short:
        raise ParlayError(f"all {len(prompts)} prompts have more than {most} tokens: shorten some, or give others")
    if len(short) < len(prompts):
        print(
            f"{len(prompts) - len(short)} of {len(prompts)} prompts have more than {most} tokens: left out", flush=True
        )
    return short


class Writer:
    """Writes shards of texts with a target, and gives a ``store`` the states that the target computes for them."""

    def __init__(self, llm: LLM, plan: WritingPlan, store: FeatureStore) -> None:
        self._llm = llm
        self._plan = plan
        self._store = store
        self._frame = ChatFrame.of_prompts(llm.tokenizer) if plan.own_share < 1 else ChatFrame.of(llm.tokenizer)
        self._tokenizer: Any = llm.tokenizer

    def write(self, folder: Path, count: int, done: Callable[[int], None] = lambda _: None) -> None:
        """Write the missing ones of the first ``count`` shards; ``done`` is called with the number of each."""
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(count):
            path = shard_path(folder, number)
            if not path.exists():
                prompts, params = self._asked(number)
                save_shard(path, self._answered(path, prompts, params))
                done(number)

    def _asked(self, number: int) -> tuple[list[tuple[int, ...]], list[SamplingParams]]:
        """Return the prompts of shard ``number`` and how to answer them.

        Raises ParlayError if there are no given prompts and the target ends none of its own.
        """
        rng = random.Random(self._plan.seed * 1_000_003 + number)
        given = self._given(number)
        prompts = [*given, *self._own(_SHARD - len(given), rng)] if self._plan.own_share else given
        if not prompts:
            raise ParlayError(
                f"the target ended none of its own prompts within {self._plan.own_prompt_tokens} tokens: give some by "
                "--prompts, or texts by --texts and --shards 0"
            )
        return prompts, [self._answer_params(rng) for _ in prompts]

    def _answered(
        self, path: Path, prompts: Sequence[tuple[int, ...]], params: Sequence[SamplingParams]
    ) -> list[TrainingText]:
        """Write the conversations of the shard ``path``, and save their states."""
        featured = write_featured(self._llm, self._store.layers, prompts, params)
        self._store.save(path, featured)
        return [TrainingText(tuple(each.ids_T.tolist()), each.answer) for each in featured]

    def _given(self, number: int) -> list[tuple[int, ...]]:
        """Return this shard's given prompts: all shards go through them in one random order, repeatedly."""
        plan = self._plan
        if not plan.prompts:
            return []
        count = round(_SHARD * (1 - plan.own_share))
        order = random.Random(plan.seed).sample(range(len(plan.prompts)), len(plan.prompts))
        chosen = [plan.prompts[order[(number * count + i) % len(order)]] for i in range(count)]
        ids = [tuple(encode(self._tokenizer, text, special=False)) for text in chosen]
        return [self._frame.around(words) for words in ids]

    def _own(self, count: int, rng: random.Random) -> list[tuple[int, ...]]:
        """Let the target write ``count`` prompts, and return those that it ended within the limit."""
        params = [
            SamplingParams(temperature=1.0, top_p=0.98, max_tokens=self._plan.own_prompt_tokens, seed=_seed(rng))
            for _ in range(count)
        ]
        openings = [TokensPrompt(prompt_token_ids=list(self._frame.before)) for _ in range(count)]
        outputs = self._llm.generate(openings, params, strategy="none")
        ended = [out.outputs[0].token_ids for out in outputs if out.outputs[0].finish_reason == "stop"]
        return [self._frame.around(words[:-1]) for words in ended if len(words) > 1]

    def _answer_params(self, rng: random.Random) -> SamplingParams:
        temperature = 0.0 if rng.random() < self._plan.greedy_share else self._plan.temperature
        return SamplingParams(temperature=temperature, max_tokens=self._plan.answer_tokens, seed=_seed(rng))


def _seed(rng: random.Random) -> int:
    return rng.getrandbits(31)
