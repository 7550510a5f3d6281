"""Generated tasks whose answer is a copy of their input, exactly or with one edit, in chat form."""

from __future__ import annotations

import json
import random
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from parlay.train import edits, wording
from parlay.train.chat import ChatTurn, render_chat
from parlay.train.corpus import Document
from parlay.train.edits import Edit
from parlay.train.records import Record, make_record

JSON_TURN = re.compile(r"<\|(?:system|assistant)\|>(\{.*?)<\|end\|>")
CHARS = (150, 750)
SHORT_CHARS = (15, 140)  # many per row: where a text begins and ends is learned by the number of examples
LONG_CHARS = (900, 3000)
# Shares of the kinds of text that are copied and edited. Training has more of what is hard to copy: code and JSON, in
# which the same few tokens stand in several places.
SHARES = {"prose": 18, "code": 37, "speech": 8, "technical": 17, "json": 20}
HELDOUT_SHARES = {"prose": 30, "code": 30, "speech": 12, "technical": 13, "json": 15}


class Task(NamedTuple):
    """A prompt and the one right answer to it; ``source`` names the kind of text."""

    name: str
    source: str
    turns: tuple[ChatTurn, ...]
    answer: str

    @property
    def prompt(self) -> str:
        """Text up to where the answer begins."""
        return render_chat(self.turns, answer_next=True)

    @property
    def text(self) -> str:
        """The whole task as training text."""
        return render_chat([*self.turns, ChatTurn("assistant", self.answer)])


@dataclass(frozen=True, slots=True)
class Sources:
    """Texts that tasks are made from, by kind, all from one side of the held-out split."""

    texts: dict[str, list[str]]
    functions: list[str]
    words: list[str]

    def pick(self, rng: random.Random, kind: str) -> str:
        """A whole document of ``kind``."""
        return rng.choice(self.texts[kind])


def make_sources(corpus: dict[str, list[Document]], *, heldout: bool) -> Sources:
    """Sources out of the training or the held-out documents."""
    kinds = ("prose", "technical", "speech", "code", "calls")
    texts = {kind: [d.text for d in corpus[kind] if d.heldout == heldout and len(d.text) > 600] for kind in kinds}
    texts["code"] = [text for text in texts["code"] if "<|" not in text]
    texts["calls"] = [found for text in texts["calls"] for found in JSON_TURN.findall(text)]
    functions = [function for text in texts["code"] for function in edits.functions(text) if 120 < len(function) < 2600]
    words = sorted({word.lower() for text in texts["speech"] for word in edits.WORD.findall(text)})
    return Sources(texts, functions, words)


def span(text: str, chars: int, rng: random.Random) -> str:
    """A stretch of about ``chars`` characters that starts at a line or word and ends at one."""
    start = rng.randrange(max(1, len(text) - chars))
    near = range(start, min(start + 200, len(text)))
    line = next((at + 1 for at in near if text[at] == "\n"), None) if rng.random() < 0.5 else None
    start = line or next((at + 1 for at in near if text[at] in " \n"), start)
    end = min(start + chars, len(text))
    end = next((at for at in range(end, min(end + 30, len(text))) if text[at] in " \n"), end)
    return text[start:end].strip("\n ") or text[:chars].strip()


def code_span(text: str, chars: int, rng: random.Random) -> str:
    """Whole lines of code, about ``chars`` characters, without the indentation that they share."""
    lines = text.split("\n")
    at = rng.randrange(len(lines))
    taken: list[str] = []
    while at < len(lines) and sum(map(len, taken)) < chars:
        taken.append(lines[at])
        at += 1
    return textwrap.dedent("\n".join(taken)).strip() or text[:chars].strip()


def json_lines(sources: Sources, chars: int, rng: random.Random) -> str:
    """JSON: one made-up record, pretty-printed or not, or several calls on a line each."""
    if rng.random() < 0.5:
        rows = [make_record(rng).values for _ in range(max(1, chars // 160))]
        return json.dumps(rows if len(rows) > 1 else rows[0], indent=rng.choice((None, 2, 4)))
    taken: list[str] = []
    while sum(map(len, taken)) < chars:
        taken.append(sources.pick(rng, "calls"))
    return "\n".join(taken)


def any_span(sources: Sources, shares: dict[str, int], chars: int, rng: random.Random) -> tuple[str, str]:
    """(kind, text) of a span of any kind of text in ``shares``."""
    kind = rng.choices(list(shares), list(shares.values()))[0]
    if kind == "json":
        return kind, json_lines(sources, chars, rng)
    cut = code_span if kind == "code" else span
    return kind, cut(sources.pick(rng, kind), chars, rng)


@dataclass(frozen=True, slots=True)
class TaskMaker:
    """Makes tasks from ``sources``; ``heldout`` chooses the wordings and layouts never trained on."""

    sources: Sources
    heldout: bool = False

    @property
    def shares(self) -> dict[str, int]:
        """Shares of the kinds of text."""
        return HELDOUT_SHARES if self.heldout else SHARES

    def chat(self, rng: random.Random, instruction: str, text: str) -> tuple[ChatTurn, ...]:
        """The turns before the answer."""
        layout = self.layout(rng)
        turns = (ChatTurn("user", layout.format(instruction=instruction, text=text)),)
        return (ChatTurn("system", rng.choice(wording.SYSTEMS)), *turns) if rng.random() < 0.25 else turns

    def layout(self, rng: random.Random) -> str:
        """Where the instruction and the text go."""
        return rng.choice(wording.HELDOUT_LAYOUTS) if self.heldout else wording.made_layout(rng)

    def wordings(self, usual: Sequence[str], heldout: Sequence[str]) -> Sequence[str]:
        """The set of wordings to draw from."""
        return heldout if self.heldout else usual

    def copy(self, rng: random.Random, chars: int) -> Task | None:
        """Repeat this text exactly."""
        kind, text = any_span(self.sources, self.shares, chars, rng)
        instruction = rng.choice(self.wordings(wording.COPY, wording.HELDOUT_COPY))
        return Task("copy", kind, self.chat(rng, instruction, text), text)

    def edit(self, name: str, kind: str, edit: Edit | None, rng: random.Random, wordings: Sequence[str]) -> Task | None:
        """A task out of an edit; None stays None."""
        if edit is None or not edit.after.strip():
            return None
        instruction = rng.choice(wordings).format(old=edit.old, new=edit.new, start=edit.old)
        return Task(name, kind, self.chat(rng, instruction, edit.before), edit.after)

    def replace(self, rng: random.Random, chars: int) -> Task | None:
        """Replace a word."""
        kind, text = any_span(self.sources, self.shares, chars, rng)
        wordings = self.wordings(wording.REPLACE, wording.HELDOUT_REPLACE)
        return self.edit("replace", kind, edits.replace_word(text, self.sources.words, rng), rng, wordings)

    def rename(self, rng: random.Random, chars: int) -> Task | None:
        """Rename a variable."""
        function = rng.choice(self.sources.functions)
        if len(function) > 1.5 * chars:
            return None
        wordings = self.wordings(wording.RENAME, wording.HELDOUT_RENAME)
        return self.edit("rename", "code", edits.rename(function, rng), rng, wordings)

    def typo(self, rng: random.Random, chars: int) -> Task | None:
        """Fix a typo."""
        kind = rng.choice(("prose", "speech", "technical"))
        edit = edits.misspell(span(self.sources.pick(rng, kind), chars, rng), rng)
        return self.edit("typo", kind, edit, rng, self.wordings(wording.TYPO, wording.HELDOUT_TYPO))

    def drop(self, rng: random.Random, chars: int) -> Task | None:
        """Delete a sentence, or a line of code."""
        if rng.random() < 0.5:
            edit = edits.drop_line(code_span(self.sources.pick(rng, "code"), chars, rng), rng)
            return self.edit("drop", "code", edit, rng, wording.DROP_LINE)
        kind = rng.choice(("prose", "speech", "technical"))
        edit = edits.drop_sentence(span(self.sources.pick(rng, kind), chars, rng), rng)
        return self.edit("drop", kind, edit, rng, wording.DROP)

    def comment(self, rng: random.Random, chars: int) -> Task | None:
        """Add a line to a function."""
        function = rng.choice(self.sources.functions)
        if len(function) > 1.5 * chars:
            return None
        line = "# " + " ".join(rng.sample(self.sources.words, rng.randint(2, 6)))
        return self.edit("comment", "code", Edit(line, "", function, f"{line}\n{function}"), rng, wording.ADD_COMMENT)

    def set_field(self, rng: random.Random, chars: int) -> Task | None:
        """Change one field of a JSON object."""
        record, other = make_record(rng), make_record(rng)
        key = rng.choice(list(record.values))
        value = rng.choice(list(other.values.values()))
        indent = rng.choice((None, None, 2))
        before, after = (json.dumps(values, indent=indent) for values in (record.values, {**record.values, key: value}))
        return self.edit("set", "json", Edit(key, json.dumps(value), before, after), rng, wording.SET_FIELD)

    def quote(self, rng: random.Random, chars: int) -> Task | None:
        """Copy one paragraph out of several."""
        kind = rng.choice(("prose", "speech", "technical"))
        text = span(self.sources.pick(rng, kind), 2 * chars, rng)
        paragraphs = [part for part in text.split("\n\n") if part.strip()]
        return self.edit("quote", kind, edits.quote(paragraphs, rng), rng, wording.QUOTE)

    def fill(self, rng: random.Random, chars: int) -> Task | None:
        """Fill a JSON object, or name one field, from a paragraph; other records around it distract."""
        records = [make_record(rng) for _ in range(rng.choice((1, 1, 2, 3)))]
        asked = records[0]
        if any(set(other.values) & set(asked.values) for other in records[1:]):
            return None
        text = " ".join(record.sentence for record in rng.sample(records, len(records)))
        if rng.random() < 0.3:
            return self.field(rng, asked, text)
        keys = rng.sample(list(asked.values), rng.randint(2, len(asked.values)))
        instruction = rng.choice(wording.FILL).format(keys=", ".join(keys))
        return Task("fill", "json", self.chat(rng, instruction, text), asked.dump(keys))

    def field(self, rng: random.Random, record: Record, text: str) -> Task:
        """Name one field of a record."""
        key = rng.choice(list(record.values))
        instruction = rng.choice(wording.FIELD).format(key=key)
        return Task("field", "json", self.chat(rng, instruction, text), str(record.values[key]))

    def makers(self) -> dict[Callable[[random.Random, int], Task | None], float]:
        """Every sort of task with its share."""
        return {
            self.copy: 0.42,
            self.replace: 0.12,
            self.rename: 0.13,
            self.typo: 0.08,
            self.drop: 0.06,
            self.comment: 0.03,
            self.set_field: 0.05,
            self.quote: 0.03,
            self.fill: 0.08,
        }

    def tasks(self, rng: random.Random, chars: tuple[int, int]) -> Iterator[Task]:
        """Endless tasks whose texts have between ``chars`` characters."""
        makers = self.makers()
        while True:
            make = rng.choices(list(makers), list(makers.values()))[0]
            task = make(rng, rng.randint(*chars))
            if task is not None:
                yield task


def task_documents(sources: Sources, count: int, chars: tuple[int, int], seed: int) -> Iterator[str]:
    """``count`` training texts."""
    stream = TaskMaker(sources).tasks(random.Random(seed), chars)
    for _ in range(count):
        yield next(stream).text
