"""How often drafted tokens are right on a user's own prompts: measured by decoding them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from parlay.llm import LLM
from parlay.plan.strategies import Acceptance
from parlay.strategies.catalogue import find
from parlay.strategies.spelling import StrategySpec
from parlay.types import Metrics, SamplingParams

MOST = 16
"""Prompts that are decoded, the first ones of the file."""
_TOKENS = 128


def read_prompts(path: Path) -> list[str]:
    """The prompts of a file: a line each, or in a .jsonl file ``{"prompt": TEXT}`` a line.

    Raises ValueError for a file that can't be read or holds none.
    """
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        prompts = [json.loads(line)["prompt"] for line in lines] if path.suffix == ".jsonl" else lines
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--prompts {path} can't be read: {error}") from None
    if not prompts or not all(isinstance(prompt, str) and prompt for prompt in prompts):
        raise ValueError(f'--prompts {path}: give a prompt on each line, or {{"prompt": TEXT}} in a .jsonl file')
    return prompts[:MOST]


def measured(llm: LLM, strategies: Sequence[StrategySpec], prompts: Sequence[str]) -> Acceptance:
    """The chance that the next drafted token is right, by strategy. A step without a draft counts as a wrong one.

    The texts are greedy, and drafts as long as the strategy allows, so that the policy hides nothing.
    """
    rates: dict[str, tuple[float, ...]] = {}
    for spec in strategies:
        if find(spec.name).factory:
            rates[spec.name] = (_rate(_decode(llm, spec, prompts)),)
    return Acceptance(by_strategy=rates)


def _decode(llm: LLM, spec: StrategySpec, prompts: Sequence[str]) -> list[Metrics]:
    greedy = SamplingParams(temperature=0, max_tokens=_TOKENS)
    text = str(spec)
    strategy = text if "policy=" in text else f"{text}{',' if ':' in text else ':'}policy=fixed"
    if llm.tokenizer is not None and llm.tokenizer.chat_template:
        asked = [[{"role": "user", "content": prompt}] for prompt in prompts]
        outputs = llm.chat(asked, greedy, False, strategy=strategy)
    else:
        outputs = llm.generate(list(prompts), greedy, False, strategy=strategy)
    return [sample.metrics for output in outputs for sample in output.outputs]


def _rate(metrics: Iterable[Metrics]) -> float:
    right = tried = 0
    for each in metrics:
        for (proposed, accepted), steps in each.outcomes.items():
            right += steps * accepted
            tried += steps * max(1, min(accepted + 1, proposed))
    return right / max(tried, 1)
