"""What a checkpoint is measured by, on held-out text: loss by kind, exact copies by length, JSON calls that parse."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from parlay.train.chat import END, ChatTurn, render_chat
from parlay.train.corpus import call_dialogues, is_heldout, read_corpus
from parlay.train.store import IGNORE, Batches, Stream
from parlay.train.tasks import Task, TaskMaker, make_sources

BUCKETS = ((50, 100), (100, 150), (150, 201))
ROWS = 8


@dataclass(frozen=True, slots=True)
class Call:
    """The conversation before an assistant's JSON call, and that call."""

    dialogue: str
    turns: tuple[ChatTurn, ...]
    answer: str


@dataclass(frozen=True, slots=True)
class CheckSet:
    """Held-out tasks: exact copies, edits, calls."""

    copies: list[Task]
    edits: list[Task]
    calls: list[Call]


def make_checks(
    data: Path, tokenizer: PreTrainedTokenizerFast, *, copies: int, edits: int, dialogues: int, seed: int = 1
) -> CheckSet:
    """Held-out documents in wordings and layouts never trained on; ``copies`` and ``edits`` of each length or sort."""
    maker = TaskMaker(make_sources(read_corpus(data), heldout=True), heldout=True)
    rng = random.Random(seed)
    copied = make_copies(maker, tokenizer, copies, rng)
    return CheckSet(copied, make_edits(maker, edits, rng), make_calls(data, dialogues, rng))


def make_copies(maker: TaskMaker, tokenizer: PreTrainedTokenizerFast, each: int, rng: random.Random) -> list[Task]:
    """``each`` copy tasks for every bucket of answer lengths in tokens."""
    chosen: dict[tuple[int, int], list[Task]] = {bucket: [] for bucket in BUCKETS}
    while any(len(tasks) < each for tasks in chosen.values()):
        task = maker.copy(rng, rng.randint(150, 900))
        assert task is not None
        bucket = bucket_of(len(tokenizer.encode(task.answer, add_special_tokens=False)))
        if bucket in chosen and len(chosen[bucket]) < each:
            chosen[bucket].append(task)
    return [task for tasks in chosen.values() for task in tasks]


def bucket_of(length: int) -> tuple[int, int]:
    """The bucket that holds ``length``; (0, 0) when none does."""
    return next((bucket for bucket in BUCKETS if bucket[0] <= length < bucket[1]), (0, 0))


def make_edits(maker: TaskMaker, each: int, rng: random.Random) -> list[Task]:
    """``each`` tasks of every other sort that edits a text."""
    tasks: list[Task] = []
    for make in (maker.replace, maker.rename, maker.typo, maker.fill, maker.set_field, maker.drop):
        made = (make(rng, rng.randint(200, 700)) for _ in range(20 * each))
        tasks.extend([task for task in made if task is not None][:each])
    return tasks


def make_calls(data: Path, dialogues: int, rng: random.Random) -> list[Call]:
    """Every JSON call of ``dialogues`` held-out dialogues."""
    heldout = [(key, turns) for key, turns in call_dialogues(data) if is_heldout(key)]
    heldout = [(key, turns) for key, turns in heldout if any(is_call(turn) for turn in turns)]
    calls: list[Call] = []
    for key, turns in rng.sample(heldout, min(dialogues, len(heldout))):
        calls.extend(Call(key, tuple(turns[:at]), turn.text) for at, turn in enumerate(turns) if is_call(turn))
    return calls


def is_call(turn: ChatTurn) -> bool:
    """True for an assistant turn that is a JSON call."""
    return turn.role == "assistant" and turn.text.startswith('{"name"')


@torch.inference_mode()
def losses(
    model: Qwen3ForCausalLM, streams: dict[str, Stream], *, kinds: list[str], rows: int, length: int = 512
) -> dict[str, float]:
    """Mean nats per token on ``rows`` held-out rows of each of ``kinds`` that has enough text."""
    batches = Batches(streams, model.config.vocab_size, seed=7)
    result = {}
    long_enough = {kind for kind, stream in streams.items() if len(stream.tokens) > length + 1}
    for kind in kinds:
        if kind in streams.keys() - long_enough or not long_enough:
            continue
        ids, labels = (torch.from_numpy(part) for part in batches.draw(0, rows, length, {kind: 1.0}))
        parts = (slice(start, start + ROWS) for start in range(0, rows, ROWS))
        total = sum(summed_loss(model, ids[part], labels[part]) for part in parts)
        result[kind] = total / int((labels != IGNORE).sum())
    return result


def summed_loss(model: Qwen3ForCausalLM, ids: Tensor, labels: Tensor) -> float:
    """Cross-entropy summed over the tokens of a batch."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=ids, use_cache=False).logits
    return float(F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum"))


class Outcome(NamedTuple):
    """Whether greedy decoding gives every token of the answer, and whether it does and ends there."""

    right: bool
    ends: bool


@torch.inference_mode()
def exact(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, tasks: list[Task]) -> list[Outcome]:
    """What greedy decoding makes of each task.

    One forward on prompt and answer tells: greedy decoding walks along the answer exactly while the
    arg-max at every position is the answer's next token.
    """
    rows = [
        (tokenizer.encode(task.prompt), tokenizer.encode(task.answer + END, add_special_tokens=False)) for task in tasks
    ]
    order = sorted(range(len(rows)), key=lambda at: len(rows[at][0]) + len(rows[at][1]))
    result = [Outcome(False, False)] * len(rows)
    for start in range(0, len(order), ROWS):
        chosen = order[start : start + ROWS]
        for at, outcome in zip(chosen, exact_rows(model, [rows[at] for at in chosen]), strict=True):
            result[at] = outcome
    return result


def exact_rows(model: Qwen3ForCausalLM, rows: list[tuple[list[int], list[int]]]) -> list[Outcome]:
    """`exact` for one batch of (prompt ids, ids of answer and end), padded on the right."""
    longest = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids = np.zeros((len(rows), longest), dtype=np.int64)
    for row, (prompt, answer) in zip(ids, rows, strict=True):
        row[: len(prompt) + len(answer)] = prompt + answer
    best = model(input_ids=torch.from_numpy(ids), use_cache=False).logits.argmax(-1)
    spans = [(len(prompt) - 1, len(prompt) + len(answer) - 1) for prompt, answer in rows]
    found = [best[at, a:b].tolist() for at, (a, b) in enumerate(spans)]
    return [
        Outcome(tokens[:-1] == answer[:-1], tokens == answer) for tokens, (_, answer) in zip(found, rows, strict=True)
    ]


@torch.inference_mode()
def generate(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, prompts: list[str], *, tokens: int
) -> list[str]:
    """Greedy answers, without the closing special token."""
    texts: list[str] = []
    for start in range(0, len(prompts), 2 * ROWS):
        batch = tokenizer(prompts[start : start + 2 * ROWS], return_tensors="pt", padding=True, padding_side="left")
        ends = [tokenizer.convert_tokens_to_ids(END), tokenizer.pad_token_id]
        out = model.generate(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=ends,
            pad_token_id=tokenizer.pad_token_id,
            use_cache=True,
        )
        answers = out[:, batch["input_ids"].shape[1] :]
        texts.extend(tokenizer.batch_decode(answers, skip_special_tokens=True))
    return texts


def parses(text: str) -> bool:
    """True for a JSON object with a name and arguments."""
    try:
        call = json.loads(text)
    except json.JSONDecodeError:
        return False
    return isinstance(call, dict) and isinstance(call.get("name"), str) and isinstance(call.get("arguments"), dict)


def call_rates(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, calls: list[Call]) -> dict[str, float]:
    """Shares of calls that parse and that are right, and of dialogues in which every call parses."""
    prompts = [render_chat(call.turns, answer_next=True) for call in calls]
    answers = generate(model, tokenizer, prompts, tokens=128)
    good: dict[str, list[bool]] = defaultdict(list)
    for call, answer in zip(calls, answers, strict=True):
        good[call.dialogue].append(parses(answer))
    pairs = list(zip(answers, calls, strict=True))
    return {
        "calls that parse": mean([parses(answer) for answer in answers]),
        "dialogues whose calls all parse": mean([all(values) for values in good.values()]),
        "calls equal to the reference": mean([parses(a) and json.loads(a) == json.loads(c.answer) for a, c in pairs]),
    }


Rates = dict[str, tuple[float, float]]
"""By name: shares of answers that are right, and that are right and end there."""


def copy_rates(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, tasks: list[Task]) -> tuple[Rates, Rates]:
    """Rates by length of the answer in tokens, and by sort of task and kind of text."""
    by_length: dict[str, list[Outcome]] = defaultdict(list)
    by_kind: dict[str, list[Outcome]] = defaultdict(list)
    for task, outcome in zip(tasks, exact(model, tokenizer, tasks), strict=True):
        low, high = bucket_of(len(tokenizer.encode(task.answer, add_special_tokens=False)))
        by_length[f"{low}-{high - 1}"].append(outcome)
        by_kind[f"{task.name} {task.source}"].append(outcome)
    return rates(by_length), rates(by_kind)


def rates(groups: dict[str, list[Outcome]]) -> Rates:
    """Shares in each group, by name."""
    return {
        name: (mean([one.right for one in found]), mean([one.ends for one in found]))
        for name, found in sorted(groups.items())
    }


def mean(values: list[bool]) -> float:
    """Share of True."""
    return sum(values) / max(1, len(values))
