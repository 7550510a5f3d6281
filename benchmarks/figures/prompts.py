"""Prompts by kind of text, drawn from held-out documents: a pure function of the data, the same on every machine."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from parlay.bench import workloads
from parlay.bench.workloads import Item, Workload
from parlay.train import checks
from parlay.train.chat import ChatTurn, render_chat
from parlay.train.corpus import Document, is_heldout, read_corpus, read_lines, read_records
from parlay.train.tasks import Task, TaskMaker, make_sources

KINDS = ("edit", "copy", "calls", "maths", "code", "prose", "translation")
ANSWER_TOKENS = (80, 150)
OPENING_TOKENS = 96
SEED = 20
DRAWS = 200
"""How often to draw for each prompt wanted."""

Draw = Callable[[random.Random], str | None]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as text and ids; ``number`` tells the prompts of a kind apart."""

    kind: str
    number: int
    text: str
    ids: tuple[int, ...]


def as_workload(kind: str, prompts: Sequence[Prompt]) -> Workload:
    """The same for `parlay.bench`."""
    return Workload(kind, tuple(Item(id=str(prompt.number), prompt=prompt.text) for prompt in prompts))


def built_in(tokenizer: PreTrainedTokenizerBase, count: int) -> dict[str, list[Prompt]]:
    """Prompts written for this project, for machines without the data; at most ``count`` of each kind."""
    chosen: dict[str, list[Prompt]] = {}
    for kind in KINDS:
        texts = [as_text(item) for item in workloads.load([kind], count)[0].items]
        chosen[kind] = [Prompt(kind, at, text, tuple(tokenizer.encode(text))) for at, text in enumerate(texts)]
    return chosen


def as_text(item: Item) -> str:
    """A prompt as the built-in models read it."""
    turns = [ChatTurn(message.role, message.content) for message in item.messages]
    return item.prompt or render_chat(turns, answer_next=True)


def heldout(data: Path, tokenizer: PreTrainedTokenizerBase, count: int, cache: Path) -> dict[str, list[Prompt]]:
    """``count`` prompts of each kind from the held-out documents under ``data``; drawn once, then kept in ``cache``."""
    origin = f"{data.resolve()}\n{SEED}\n{count}\n{tokenizer.backend_tokenizer.to_str()}"
    stored = cache / f"prompts-{hashlib.sha256(origin.encode()).hexdigest()[:12]}.json"
    if stored.exists():
        texts: dict[str, list[str]] = json.loads(stored.read_text(encoding="utf-8"))
    else:
        texts = {kind: draw_texts(draw, count) for kind, draw in drawers(data, tokenizer).items()}
        cache.mkdir(parents=True, exist_ok=True)
        stored.write_text(json.dumps(texts), encoding="utf-8")
    return {
        kind: [Prompt(kind, at, text, tuple(tokenizer.encode(text))) for at, text in enumerate(texts[kind])]
        for kind in KINDS
    }


def draw_texts(draw: Draw, count: int) -> list[str]:
    """The first ``count`` different texts that ``draw`` yields; fewer where the data give no more."""
    rng = random.Random(SEED)
    texts: dict[str, None] = {}
    for _ in range(DRAWS * count):
        if len(texts) == count:
            break
        text = draw(rng)
        if text is not None:
            texts[text] = None
    return list(texts)


def drawers(data: Path, tokenizer: PreTrainedTokenizerBase) -> dict[str, Draw]:
    """For each kind what draws one prompt, or None where a draw came out too short or too long."""
    corpus = read_corpus(data)
    maker = TaskMaker(make_sources(corpus, heldout=True), heldout=True)
    # Only the edits that have wordings of their own for held-out tasks.
    edits = (maker.replace, maker.rename, maker.typo)
    calls = checks.make_calls(data, 400, random.Random(SEED))
    questions = list(held_out_questions(data))
    sentences = list(held_out_sentences(data))
    return {
        "edit": lambda rng: fitting(rng.choice(edits)(rng, rng.randint(280, 480)), tokenizer),
        "copy": lambda rng: fitting(maker.copy(rng, rng.randint(280, 480)), tokenizer),
        "calls": lambda rng: render_chat(rng.choice(calls).turns, answer_next=True),
        "maths": lambda rng: ask(rng.choice(questions)),
        "code": opening(corpus["code"], tokenizer, minimum=4000),
        "prose": opening(corpus["prose"], tokenizer, minimum=20_000),
        "translation": lambda rng: ask(rng.choice(sentences)),
    }


def fitting(task: Task | None, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The prompt of a task whose right answer is about as long as what is generated."""
    if task is None:
        return None
    low, high = ANSWER_TOKENS
    return task.prompt if low <= len(tokenizer.encode(task.answer)) <= high else None


def ask(question: str) -> str:
    """A question, up to where the answer begins."""
    return render_chat([ChatTurn("user", question)], answer_next=True)


def held_out_questions(data: Path) -> Iterator[str]:
    """Maths problems."""
    for record in read_records(data / "gsm8k" / "train.jsonl.zst"):
        if is_heldout(record["question"]):
            yield record["question"]


def held_out_sentences(data: Path) -> Iterator[str]:
    """Long sentences to translate out of English."""
    for language, code in (("French", "fra"), ("German", "deu")):
        for line in read_lines(data / "tatoeba" / f"eng-{code}.tsv.zst"):
            english = line.split("\t")[0]
            if len(english) > 90 and is_heldout(english):
                yield f"Translate to {language}: {english}"


def opening(documents: list[Document], tokenizer: PreTrainedTokenizerBase, *, minimum: int) -> Draw:
    """Draws a stretch of plain text that begins at a line, to be continued."""
    texts = [d.text for d in documents if d.heldout and len(d.text) > minimum and "<|" not in d.text]

    def draw(rng: random.Random) -> str | None:
        text = rng.choice(texts)
        start = text.find("\n", rng.randrange(len(text) // 2)) + 1
        ids = tokenizer.encode(text[start : start + 8 * OPENING_TOKENS])
        return str(tokenizer.decode(ids[:OPENING_TOKENS])) if len(ids) >= OPENING_TOKENS else None

    return draw
