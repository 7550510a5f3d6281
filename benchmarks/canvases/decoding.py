"""Decodes prompts in this process, to get answers to train on or to count tokens per step of each strategy."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from parlay import LLM, SamplingParams
from parlay.text.chat_template import render


def write_answers(options: argparse.Namespace) -> None:
    """Write a line for each prompt: the prompt in the model's chat template, and the model's answer. Empty answers
    are left out."""
    rows = [json.loads(line) for line in options.data.read_text(encoding="utf-8").splitlines()][: options.prompts]
    llm = LLM(options.model)
    params = SamplingParams(temperature=0, max_tokens=options.tokens)
    answers = _answers(llm, rows, params, "none", chat=True)
    assert llm.tokenizer is not None
    with options.out.open("w", encoding="utf-8") as out:
        for row, answer in zip(rows, answers, strict=True):
            prompt = render(llm.tokenizer, [{"role": "user", "content": row["prompt"]}])
            if not answer.outputs[0].text.strip():
                continue
            out.write(json.dumps({"prompt": prompt, "answer": answer.outputs[0].text, "framed": True}) + "\n")


def measure(options: argparse.Namespace) -> None:
    """Print a JSON row for each strategy. ``same`` counts texts equal to those of the first strategy."""
    rows = [json.loads(line) for line in options.data.read_text(encoding="utf-8").splitlines()][: options.prompts]
    llm = LLM(options.model, dtype=options.dtype, max_num_seqs=options.together)
    params = SamplingParams(temperature=options.temperature, seed=0, max_tokens=options.tokens)
    first: list[tuple[int, ...]] = []
    for strategy in options.strategies:
        began = time.perf_counter()
        samples = [each.outputs[0] for each in _answers(llm, rows, params, strategy, chat=options.chat)]
        seconds = time.perf_counter() - began
        texts = [tuple(sample.token_ids) for sample in samples]
        first = first or texts
        steps, tokens = sum(sample.metrics.steps for sample in samples), sum(map(len, texts))
        right = sum(sample.text.strip() == row["answer"].strip() for sample, row in zip(samples, rows, strict=True))
        row = {
            "model": Path(options.model).name, "strategy": strategy, "temperature": options.temperature,
            "prompts": len(rows), "tokens": tokens, "steps": steps, "tokens_per_step": round(tokens / steps, 3),
            "rows": sum(sample.metrics.rows for sample in samples),
            "seconds": round(seconds, 2), "same": sum(map(tuple.__eq__, texts, first)), "right": right,
        }  # fmt: skip
        print(json.dumps(row), flush=True)


def _answers(llm: LLM, rows: list[dict[str, Any]], params: SamplingParams, strategy: str, *, chat: bool) -> list[Any]:
    if chat:
        return llm.chat([[{"role": "user", "content": row["prompt"]}] for row in rows], params, strategy=strategy)
    return llm.generate([row["prompt"] for row in rows], params, strategy=strategy)
