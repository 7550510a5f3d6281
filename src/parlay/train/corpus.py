"""Reads a data directory into documents by kind of text, each with a held-out part.

The split is a pure function of a document's own key (title, dialogue id, English sentence ...), so that
every run, and every check made later on a finished checkpoint, sees the same held-out documents.
"""

from __future__ import annotations

import hashlib
import io
import json
import random
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zstandard

from parlay.train.chat import END_OF_TEXT, ChatTurn, render_chat

HELDOUT_ONE_IN = 20
BOOK_CHARS = 110_000
SKIPPED_PACKAGES = {"site-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "lib2to3", "__pycache__"}


@dataclass(frozen=True, slots=True)
class Document:
    """One training document. ``text`` may hold special tokens (chat-shaped kinds do)."""

    key: str
    text: str
    heldout: bool


def is_heldout(key: str) -> bool:
    """True for about one key in ``HELDOUT_ONE_IN``, the same on every machine."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big") % HELDOUT_ONE_IN == 0


def read_lines(path: Path) -> Iterator[str]:
    """Lines of a UTF-8 file, decompressed when its name ends in ``.zst``."""
    with path.open("rb") as raw:
        stream = zstandard.ZstdDecompressor().stream_reader(raw) if path.suffix == ".zst" else raw
        for line in io.TextIOWrapper(stream, encoding="utf-8"):
            yield line.rstrip("\n")


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Objects of a JSON-lines file."""
    for line in read_lines(path):
        yield json.loads(line)


def read_array(path: Path) -> list[dict[str, Any]]:
    """Objects of a file that holds one JSON array."""
    records: list[dict[str, Any]] = json.loads("\n".join(read_lines(path)))
    return records


def books(data: Path) -> Iterator[Document]:
    """A slice of each book; the author-disjoint held-out file is held out whole."""
    for path in sorted((data / "books-pd").glob("*.jsonl.zst")):
        heldout = path.name.startswith("heldout")
        for record in read_records(path):
            text = record["text"]
            start = len(text) // 3 if len(text) > 2 * BOOK_CHARS else 0
            start = text.find("\n\n", start) + 2 if start else 0
            yield Document(record["title"], text[start : start + BOOK_CHARS], heldout)


def technical(data: Path) -> Iterator[Document]:
    """Enhancement proposals of Python and Ethereum."""
    for path in sorted((data / "tech-prose-cc0").glob("*.jsonl.zst")):
        for record in read_records(path):
            yield Document(record["title"], record["text"], is_heldout(record["title"]))


def speeches(data: Path) -> Iterator[Document]:
    """Inaugural and State of the Union addresses."""
    for path in sorted((data / "us-speeches-pd").glob("*.jsonl.zst")):
        for record in read_records(path):
            yield Document(record["title"], record["text"], is_heldout(record["title"]))


def library_root() -> Path:
    """Where the running Python keeps its standard library."""
    return Path(sysconfig.get_path("stdlib"))


def standard_library() -> Iterator[Document]:
    """Modules of the standard library (PSF licence), comments kept."""
    root = library_root()
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if SKIPPED_PACKAGES.isdisjoint(name.parts):
            text = path.read_text(encoding="utf-8", errors="replace")
            yield Document(str(name), text, is_heldout(str(name)))


def python_tasks(data: Path) -> Iterator[Document]:
    """MBPP's training ids (1-10 and 511-974) as questions and answers."""
    for record in read_records(data / "mbpp" / "mbpp.jsonl"):
        number = int(record["task_id"])
        if number > 10 and number < 511:
            continue
        code = record["code"].replace("\r\n", "\n").replace("\t", "    ")
        question = record["text"] + ("\nIt must pass: " + record["test_list"][0] if number % 2 else "")
        text = render_chat([ChatTurn("user", question), ChatTurn("assistant", code)])
        yield Document(f"mbpp-{number}", text, is_heldout(f"mbpp-{number}"))


def puzzles(data: Path) -> Iterator[Document]:
    """Python programming puzzles: the condition, then a solution."""
    for record in read_array(data / "p3-puzzles" / "puzzles_no_humaneval.json.zst"):
        key = str(record["name"]).split(":", maxsplit=1)[0]
        if not record["sol_bodies"] or len(record["sat"]) > 2000:
            continue
        solution = "\n".join((record["sol_header"], record["sol_docstring"], record["sol_bodies"][0]))
        yield Document(key, f"{record['sat']}\n\n{solution}\n", is_heldout(key))


def code(data: Path) -> Iterator[Document]:
    """Python: the standard library, small tasks, puzzles."""
    yield from standard_library()
    yield from python_tasks(data)
    yield from puzzles(data)


def maths(data: Path) -> Iterator[Document]:
    """Worked problems, calculator marks (``<<48/2=24>>``) stripped; half chat, half plain."""
    for index, record in enumerate(read_records(data / "gsm8k" / "train.jsonl.zst")):
        question, answer = record["question"], strip_marks(record["answer"])
        if index % 2:
            text = f"Question: {question}\nAnswer: {answer}\n"
        else:
            text = render_chat([ChatTurn("user", question), ChatTurn("assistant", answer)])
        yield Document(question, text, is_heldout(question))


def strip_marks(answer: str) -> str:
    """Removes every ``<<...>>`` from a worked answer."""
    head, *rest = answer.split("<<")
    return head + "".join(part.split(">>", maxsplit=1)[-1] for part in rest)


def instructions(data: Path) -> Iterator[Document]:
    """People's instructions with answers, and one-sentence summaries of abstracts."""
    for prompt, answer in instruction_pairs(data):
        if len(prompt) + len(answer) < 5000 and is_mostly_ascii(prompt + answer):
            text = render_chat([ChatTurn("user", prompt), ChatTurn("assistant", answer)])
            yield Document(prompt, text, is_heldout(prompt))


def instruction_pairs(data: Path) -> Iterator[tuple[str, str]]:
    """(prompt, answer) of the instruction sets."""
    for record in read_records(data / "oasst-commitpackft-sample" / "oasstcommitpackftmanual.jsonl.zst"):
        yield record["prompt"].strip(), record["completion"].strip()
    for name in ("seed_tasks.jsonl", "user_oriented_instructions.jsonl"):
        for record in read_records(data / "self-instruct-human" / name):
            instance = record["instances"][0]
            yield f"{record['instruction']}\n\n{instance['input']}".strip(), instance["output"].strip()
    for record in read_records(data / "scitldr" / "train.jsonl.zst"):
        abstract = " ".join(record["source"])
        yield f"Summarise this abstract in one sentence.\n\n{abstract}", record["target"][0].strip()


def is_mostly_ascii(text: str) -> bool:
    """True when at least 98 in 100 characters are ASCII."""
    return sum(character < "\x80" for character in text) >= 0.98 * len(text)


CALL_SYSTEM = "You take coffee orders. Answer with a JSON call, or with a short reply."


def calls(data: Path) -> Iterator[Document]:
    """Dialogues whose assistant turns are JSON calls or short replies."""
    for dialogue_id, turns in call_dialogues(data):
        yield Document(dialogue_id, render_chat(turns), is_heldout(dialogue_id))


def call_dialogues(data: Path) -> Iterator[tuple[str, list[ChatTurn]]]:
    """(id, turns) of every dialogue whose requests and responses are all valid JSON."""
    for record in read_records(data / "taskmaster4" / "tm4_dialogs.jsonl.zst"):
        turns = [ChatTurn("system", CALL_SYSTEM)]
        try:
            for turn in record["turns"]:
                turns.append(ChatTurn(turn["speaker"], turn["text"]))
                turns.extend(call_turns(turn.get("ann", [])))
        except json.JSONDecodeError:
            continue
        yield record["id"], turns


def call_turns(annotations: list[list[str]]) -> Iterator[ChatTurn]:
    """Assistant calls and tool results of one annotated turn."""
    name = ""
    for label, value in annotations:
        if label == "api_call":
            name = value
        elif label == "request":
            call = {"name": name, "arguments": json.loads(value)}
            yield ChatTurn("assistant", json.dumps(call, ensure_ascii=False))
        elif label == "response":
            yield ChatTurn("tool", json.dumps(json.loads(value), ensure_ascii=False))


TRANSLATE = ("Translate to {}: {}", "How do you say this in {}? {}", "Put this into {}: {}", "{} translation of: {}")
BACK = ("Translate to English: {}", "What does this mean in English? {}", "Put this into English: {}")


def translation(data: Path) -> Iterator[Document]:
    """Sentence pairs, both directions, in lists as long as a short page; split by the English side."""
    for language, code_name in (("French", "fra"), ("German", "deu")):
        pending: dict[bool, list[str]] = {False: [], True: []}
        lines = list(read_lines(data / "tatoeba" / f"eng-{code_name}.tsv.zst"))
        random.Random(0).shuffle(lines)  # the file is sorted by length
        for index, line in enumerate(lines):
            english, foreign = line.split("\t")[:2]
            heldout = is_heldout(english)
            pending[heldout].append(translation_chat(language, english, foreign, index))
            if len(pending[heldout]) == 8:
                yield Document(english, END_OF_TEXT.join(pending[heldout]), heldout)
                pending[heldout] = []


def translation_chat(language: str, english: str, foreign: str, index: int) -> str:
    """One pair as a question and an answer, two times in three out of English."""
    if index % 3:
        question, answer = TRANSLATE[index % 4].format(language, english), foreign
    else:
        question, answer = BACK[index // 3 % 3].format(foreign), english
    return render_chat([ChatTurn("user", question), ChatTurn("assistant", answer)])


KINDS: dict[str, Callable[[Path], Iterator[Document]]] = {
    "prose": books,
    "technical": technical,
    "speech": speeches,
    "code": code,
    "maths": maths,
    "instructions": instructions,
    "calls": calls,
    "translation": translation,
}


def read_corpus(data: Path) -> dict[str, list[Document]]:
    """Documents of every kind under ``data``.

    Raises:
        ValueError: when ``data`` lacks a folder that a kind needs.
    """
    if not data.is_dir():
        raise ValueError(f"--data {data} is no directory; name a folder laid out as docs/models.md says")
    try:
        return {kind: list(read(data)) for kind, read in KINDS.items()}
    except FileNotFoundError as error:
        raise ValueError(f"--data {data} lacks {error.filename}; docs/models.md lists what it must hold") from error
