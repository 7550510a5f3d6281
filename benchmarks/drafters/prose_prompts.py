"""Writes prompts for prose, of twelve kinds, to which a target's answers train a draft head.

    python -m benchmarks.drafters.prose_prompts --data DIR --out prompts.jsonl
    parlay train eagle3 --model MODEL --prompts prompts.jsonl --out my-head

Templates are filled with topics, names and roles; passages come from books and speeches in the public domain, PEPs and
EIPs, meetings of QMSum's training part and sentences of Tatoeba, all from the folder ``--data``. The same seed gives
the same prompts. No prompt of a benchmark is among them.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from benchmarks.commands import one_line_errors
from benchmarks.options import command_parser
from parlay.bench.workloads.files import read_text, records

_FILLED = (("writing", 650), ("roleplay", 420), ("stem", 520), ("humanities", 480), ("advice", 230))
_QUESTIONS, _PUZZLES, _SUMMARIES, _PASSAGES, _TASKS, _MEETINGS = 900, 330, 520, 380, 300, 120
_SENTENCES = (("eng-deu", "German", 900), ("eng-fra", "French", 200))
_TURNS, _MEETING_CHARACTERS, _SHORTEST = 12, 2600, 25
_NAME = re.compile(r"\b([A-Z][a-z]+(?: [A-Z][a-z]+)+|[A-Z][a-z]{4,})\b")
_SUMMARISE = [
    "Summarize: {p}", "Summarize: {p}", "Summarise the following text in a few sentences.\n\n{p}",
    "{p}\n\nGive a short summary of this.", "What are the key points of this text?\n\n{p}", "tl;dr of this:\n{p}",
]  # fmt: skip
_ASK_PASSAGES = [
    "Answer the question from the passages.\n\n{d}\n\nQuestion: {q}?",
    "{d}\n\nUsing the text above, answer: {q}?",
    "Context: {d}\n\nQuestion: {q}\nAnswer:",
    "You get some documents and a question about them. Answer from the documents.\n{d}\nquestion: {q}",
]
_ABOUT = [
    "who is {x}", "what is said about {x}", "what happened to {x}", "why is {x} mentioned", "where was {x}",
    "what does the text say of {x}", "when was that, and what did {x} have to do with it",
]  # fmt: skip
_EXTRACT = [
    "List all names of people and places in this text as JSON.\n\n{p}",
    "Extract the main facts of this text as a bulleted list.\n\n{p}",
    "Which dates and numbers occur here? Answer in a table.\n\n{p}",
    "Find the main idea and three supporting details.\n\n{p}",
    "Extract the verbs of the first two sentences.\n\n{p}",
    "Answer with a CSV of each person named and what is said of them.\n\n{p}",
    "How would you rate the mood of this text from 1 to 5? Give a reason.\n\n{p}",
    "Rewrite this text in simple modern English.\n\n{p}",
    "Correct mistakes of grammar and spelling, if there are any.\n\n{p}",
]
_MEETING = ["Summarize this part of a meeting.\n\n", "What was discussed and decided here?\n\n", "Summarize: "]

_SUBJECTS = ((0.35, "countries"), (0.7, "people"), (0.9, "things"), (1.0, "topics"))
"""What short questions are about, and the share of questions up to each."""

Prompt = tuple[str, str]
"""The kind of a prompt, and its text."""
Words = dict[str, list[str]]


@cache
def words() -> Words:
    """Topics, names, roles and templates, by what they are."""
    found: Words = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    return found


def filled(draw: random.Random) -> Iterator[Prompt]:
    """Templates for writing, roles, explanations, discussions and advice, each with a topic of its own."""
    for kind, count in _FILLED:
        seen: set[str] = set()
        while len(seen) < count:
            template = draw.choice(words()[kind])
            topic, other = draw.sample(words()["topics"], 2)
            text = template.format(t=topic, u=other, p=draw.choice(words()["personas"]))
            if text not in seen:
                seen.add(text)
                yield kind, text


def puzzles(draw: random.Random) -> Iterator[Prompt]:
    """Questions that want a few steps of reasoning."""
    for _ in range(_PUZZLES):
        a, b, c, d = draw.sample(words()["names"], 4)
        relation, objects = draw.choice(words()["relations"]), draw.choice(words()["objects"])
        n = [draw.randrange(2, 40) for _ in range(4)]
        odd = ", ".join(draw.sample(words()["objects"], 3)), draw.choice(words()["topics"])
        texts = [
            f"{a} is {relation} than {b}. {c} is {relation} than {a}. {d} is {relation} than {c}. "
            f"Is {b} {relation} than {d}? Explain.",
            f"{a}, {b}, {c} and {d} sit in a row. {a} sits left of {b}. {c} sits at one end. {d} does not sit beside "
            f"{a}. Which orders are possible?",
            f"{a} has {n[0]} {objects}. {b} has {n[1]} more. They give {n[2] % 5 + 1} each to {c}. "
            "Who has the most, and why?",
            f"{a} says that {b} lies. {b} says that {c} lies. {c} says that both lie. Who tells the truth?",
            f"If all {objects} in a box are red, and {a} takes one from the box, what can we say about it? "
            "And if only some are red?",
            f"{a}'s mother has a sister, {b}. {b} has a son, {c}. How is {c} related to {a}?",
            f"{a} leaves at {n[0] % 12 + 1} o'clock and walks {n[1] % 7 + 2} kilometres an hour. {b} leaves an hour "
            f"later on a bicycle, three times as fast. When does {b} overtake {a}?",
            f"A shop has {n[0] + 50} {objects}. On Monday it sells half of them, on Tuesday {n[1] % 20 + 1}. "
            f"How many are left? Is that more than {n[2]}?",
            f"Which of these words does not belong with the others: {odd[0]}, {odd[1]}? Give your reasons.",
            f"{a} wants to visit {b}, {c} and {d} on one day, each for {n[0] % 3 + 1} hours, and must be home after "
            f"{n[1] % 4 + 8} hours. Is that possible? What assumptions do you make?",
        ]
        yield "reasoning", draw.choice(texts)


def questions(draw: random.Random) -> Iterator[Prompt]:
    """Short questions of knowledge, most of them in small letters and without a mark, as people type them."""
    seen: set[str] = set()
    while len(seen) < _QUESTIONS:
        which = draw.random()
        subject = next(name for share, name in _SUBJECTS if which < share)
        text = draw.choice(words()[f"of_{subject}"]).format(draw.choice(words()[subject]))
        if text not in seen:
            seen.add(text)
            yield "qa", text if draw.random() < 0.6 else f"{text[0].upper()}{text[1:]}?"


class Passages:
    """Passages of books, speeches and technical documents, which begin and end with a sentence."""

    def __init__(self, data: Path, draw: random.Random) -> None:
        names = (
            ("books-pd/train-01", "books-pd/train-03"),
            ("us-speeches-pd/inaugural", "us-speeches-pd/state_union"),
            ("tech-prose-cc0/peps", "tech-prose-cc0/eips"),
        )
        texts = [[text for name in some for text in _texts(data / f"{name}.jsonl.zst")] for some in names]
        self._sources = [[text for text in some if len(text) > 4000] for some in texts]
        self._draw = draw

    def one(self, least: int, most: int) -> str:
        """A passage of ``least`` to ``most`` characters, in one line or with its own lines."""
        source = self._draw.choices(self._sources, (0.5, 0.25, 0.25))[0]
        text, length = self._draw.choice(source), self._draw.randrange(least, most)
        start = self._draw.randrange(max(1, len(text) - length))
        part = text[start : start + length]
        first = part.find(". ")
        part = part[first + 2 :] if 0 < first < 200 else part
        last = part.rfind(". ")
        part = part[: last + 1] if last > len(part) // 2 else part
        if self._draw.random() < 0.7:
            return re.sub(r"\s*\n\s*", " ", part).strip()
        return re.sub(r"\s+\n", "\n", part).strip()


def of_passages(passages: Passages, draw: random.Random) -> Iterator[Prompt]:
    """Summaries, questions about passages, and tasks on a passage."""
    for _ in range(_SUMMARIES):
        text = passages.one(900, 2600)
        yield "summary", draw.choice(_SUMMARISE).format(p=text)
    for _ in range(_PASSAGES):
        texts = [passages.one(350, 900) for _ in range(draw.choice((1, 2, 2, 3)))]
        names = [name for text in texts for name in _NAME.findall(text[20:])] or ["the author"]
        name = draw.choice(names)
        asked = draw.choice(_ABOUT).format(x=name)
        plain = draw.random() < 0.5
        quoted = "\n".join(texts if plain else [f"[{place}] {text}" for place, text in enumerate(texts, start=1)])
        yield "rag", draw.choice(_ASK_PASSAGES).format(d=quoted, q=asked)
    for _ in range(_TASKS):
        text = passages.one(400, 1100)
        yield "extraction", draw.choice(_EXTRACT).format(p=text)


def meetings(data: Path, draw: random.Random) -> Iterator[Prompt]:
    """Some turns of a meeting, to be summarised."""
    for _, row in draw.sample(list(records(data / "qmsum/train.jsonl.zst")), _MEETINGS):
        turns = row.get("meeting_transcripts") or row.get("transcripts") or []
        if turns:
            start = draw.randrange(max(1, len(turns) - _TURNS))
            said = "\n".join(f"{turn['speaker']}: {turn['content']}" for turn in turns[start : start + _TURNS])
            yield "meeting", draw.choice(_MEETING) + said[:_MEETING_CHARACTERS]


def translations(data: Path, draw: random.Random) -> Iterator[Prompt]:
    """One to three sentences, most of them to be translated into English."""
    for file, language, count in _SENTENCES:
        lines = read_text(data / f"tatoeba/{file}.tsv.zst").splitlines()
        pairs = [line.split("\t")[:2] for line in lines if "\t" in line]
        pairs = [pair for pair in pairs if len(pair[0]) > _SHORTEST]
        for _ in range(count):
            some = draw.sample(pairs, draw.choice((1, 1, 2, 2, 3)))
            english, other = (" ".join(pair[side] for pair in some) for side in (0, 1))
            if draw.random() >= 0.8:
                yield "translation", f"Translate English to {language}: {english}"
                continue
            named = f"Translate {language} to English: {other}"
            others = [f"Translate into English: {other}", f"What does this mean in English?\n{other}"]
            yield "translation", draw.choice([named, named, *others])


def prompts(data: Path, seed: int) -> list[dict[str, str]]:
    """All prompts in a drawn order."""
    draw = random.Random(seed)
    found = [*filled(draw), *puzzles(draw), *questions(draw)]
    found += of_passages(Passages(data, draw), draw)
    found += [*meetings(data, draw), *translations(data, draw)]
    made = [{"category": kind, "prompt": text.strip()} for kind, text in found]
    draw.shuffle(made)
    return made


def _texts(path: Path) -> list[str]:
    return [row.get("text") or row.get("body") or "" for _, row in records(path)]


def main() -> None:
    parser = command_parser("drafters.prose_prompts", __doc__)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="the folder of the texts' sets")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the file of prompts, JSON lines")
    parser.add_argument("--seed", type=int, default=20261201, metavar="N", help="(default: 20261201)")
    options: argparse.Namespace = parser.parse_args()
    made = prompts(options.data, options.seed)
    options.out.write_text("".join(json.dumps(one) + "\n" for one in made), encoding="utf-8")
    print(f"{len(made)} prompts")


if __name__ == "__main__":
    with one_line_errors("drafters.prose_prompts"):
        main()
