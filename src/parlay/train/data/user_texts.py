"""Texts to train on: their shards on disk, and texts that the user gives.

The target only reads given texts, which is several times faster than writing its own. Acceptance is not measured on
them, unless the target writes no texts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from parlay.system.user_cache import saved_whole, written_whole
from parlay.text import corpus
from parlay.text.tokenize import encode
from parlay.train.data.prompts import ChatFrame, PromptAndAnswer, conversation_of, read_conversations, refuse_broken
from parlay.types import ParlayError, Tokenizer

_SHARD = 128
_SHORTEST = 8
"""The last piece of a document is kept if it has at least this many tokens."""
_PROSE = (".txt", ".md")
_DIGEST = "given.sha256"


@dataclass(frozen=True, slots=True)
class UserTexts:
    """Texts that the user gives: prompts with answers, and documents."""

    conversations: tuple[PromptAndAnswer, ...] = ()
    documents: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Cut:
    """Limits in tokens: of a prompt, of an answer, of one row, and of all documents together."""

    prompt: int
    answer: int
    row: int
    documents: int


def read_user_texts(path: Path, *, skip_broken: bool = False) -> UserTexts:
    """Read a file of conversations, a text file, or a folder of text files and JSON lines.

    Raises ParlayError if there is no text, and for a broken line unless ``skip_broken``.
    """
    if not path.is_dir() and path.suffix not in _PROSE:
        return UserTexts(tuple(read_conversations(path, skip_broken=skip_broken)))
    found = [each for source in corpus.sources([str(path)]) for each in _texts(source, skip_broken)]
    if not found:
        raise ParlayError(f"no text in {path}: name a folder of text files, or of .jsonl files, in UTF-8")
    return UserTexts(
        tuple(each for each in found if isinstance(each, PromptAndAnswer)),
        tuple(each for each in found if isinstance(each, str)),
    )


def _texts(source: corpus.CorpusSource, skip_broken: bool) -> Iterator[PromptAndAnswer | str]:
    """Yield the conversations and documents of one file."""
    if source.path.suffix != ".jsonl":
        yield from (text for text, _ in corpus.documents(source) or () if text.strip())
        return
    broken: list[str] = []
    for number, line in corpus.lines(source):
        try:
            yield conversation_of(line) or corpus.text_of(line, f"{source.path}, line {number}")
        except (ValueError, RecursionError) as error:
            broken.append(f"{error}; or prompt and answer")
    if broken:
        refuse_broken(broken[0], len(broken), skip_broken)


def encode_user_texts(given: UserTexts, tokenizer: Tokenizer, cut: Cut) -> list[TrainingText]:
    """Tokenise texts: conversations in the model's chat template, documents cut into rows. None counts as the target's.

    Recorded conversations keep their end, as much as fits into a row. If documents have more tokens than
    ``cut.documents``, rows are chosen evenly from all of them. Raises ParlayError if no row is long enough.
    """
    return [TrainingText(text.ids, len(text.ids)) for text in encode_answers(given, tokenizer, cut)]


def encode_answers(given: UserTexts, tokenizer: Tokenizer, cut: Cut) -> list[TrainingText]:
    """Like `encode_user_texts`, but with ``answer`` set: the place where a conversation's answer begins, 1 in
    documents.

    All rows of one document have the same ``document`` number.
    """
    asked = _conversations(given.conversations, tokenizer, cut)
    rows = _spread(list(_rows(given.documents, tokenizer, cut.row)), cut.documents)
    if not asked and not rows:
        raise ParlayError(f"the texts given are too short: no document has {_SHORTEST} tokens")
    return [*asked, *(TrainingText(ids, 1, len(asked) + document) for document, ids in rows)]


def _conversations(found: Sequence[PromptAndAnswer], tokenizer: Tokenizer, cut: Cut) -> list[TrainingText]:
    frame = ChatFrame.of_prompts(tokenizer) if not all(each.framed for each in found) else ChatFrame((), ())
    texts: list[TrainingText] = []
    for each in found:
        words = encode(tokenizer, each.prompt, special=False)
        prompt = words if each.framed else frame.around(words[: cut.prompt])
        answer = encode(tokenizer, each.answer, special=False)[: cut.answer]
        ids = (*prompt, *answer)[-cut.row :]
        texts.append(TrainingText(ids, max(1, len(ids) - len(answer)), len(texts)))
    return texts


def _rows(documents: Sequence[str], tokenizer: Tokenizer, longest: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield rows with their document's number; each begins with the tokenizer's begin-of-text tokens."""
    begin = tuple(encode(tokenizer, "", special=True))
    size = longest - len(begin)
    for document, ids in enumerate(corpus.encode(((text, len(text)) for text in documents), tokenizer)):
        pieces = (ids[start : start + size].tolist() for start in range(0, len(ids), size))
        yield from ((document, (*begin, *piece)) for piece in pieces if len(piece) >= _SHORTEST)


def _spread(rows: Sequence[tuple[int, tuple[int, ...]]], most: int) -> Sequence[tuple[int, tuple[int, ...]]]:
    """Choose rows evenly from all of them, so that they have about ``most`` tokens together."""
    tokens = sum(len(ids) for _, ids in rows)
    count = max(1, len(rows) * most // tokens) if tokens > most else len(rows)
    return [rows[place * len(rows) // count] for place in range(count)]


def save_user_texts(folder: Path, texts: Sequence[TrainingText]) -> None:
    """Write the missing shards of these texts.

    Raises ParlayError if the folder holds shards of other texts.
    """
    folder.mkdir(parents=True, exist_ok=True)
    numbers = np.array([number for text in texts for number in (len(text.ids), *text.ids)], np.int32)
    digest = hashlib.sha256(numbers.tobytes()).hexdigest()
    known = folder / _DIGEST
    if known.exists() and known.read_text(encoding="utf-8") != digest:
        raise ParlayError(f"{folder} was filled with other texts than --texts holds now: name another folder by --work")
    with written_whole(known) as part:
        part.write_text(digest, encoding="utf-8")
    for number, start in enumerate(range(0, len(texts), _SHARD)):
        path = given_path(folder, number)
        if not path.exists():
            save_shard(path, texts[start : start + _SHARD])


_FILLED = "filled.json"


def check_filled(folder: Path, filling: Mapping[str, str]) -> None:
    """Record which options the texts and states in a work folder depend on.

    Raises ParlayError if the folder was filled with other options. States of another model of the same shape, for
    example, could not be told from this model's. A record without texts, left by a run that failed, is replaced.
    """
    path, known = folder / _FILLED, dict[str, str]()
    with suppress(OSError, ValueError):
        if any(each != path for each in folder.iterdir()):
            known = {str(name): str(value) for name, value in json.loads(path.read_text(encoding="utf-8")).items()}
    for name, value in filling.items():
        if known.get(name, value) != value:
            flag = f"--{name.replace('_', '-')}"
            raise ParlayError(f"{folder} holds texts of another {flag}: name another folder by --work", name)
    folder.mkdir(parents=True, exist_ok=True)
    with saved_whole(path) as part:
        part.write_text(json.dumps({**known, **filling}, indent=1) + "\n", encoding="utf-8")


_PATTERN = "texts-{:05d}.npz"
_GIVEN = "texts-given-{:05d}.npz"


@dataclass(frozen=True, slots=True)
class TrainingText:
    """One conversation as token ids. Those from ``answer`` on were written by the target.

    ``document``: the number of the document or conversation that the row comes from.
    """

    ids: tuple[int, ...]
    answer: int
    document: int = 0


def shard_path(folder: Path, number: int) -> Path:
    """Return the path of shard ``number`` in ``folder``, whether or not it exists."""
    return folder / _PATTERN.format(number)


def save_shard(path: Path, texts: Sequence[TrainingText]) -> None:
    """Write the texts; ``path`` is replaced atomically."""
    ids = np.array([token for text in texts for token in text.ids], dtype=np.int32)
    lengths = np.array([len(text.ids) for text in texts], dtype=np.int32)
    answers = np.array([text.answer for text in texts], dtype=np.int32)
    with saved_whole(path) as part, part.open("wb") as file:
        np.savez(file, ids=ids, lengths=lengths, answers=answers)


def load_shard(path: Path) -> list[TrainingText]:
    """Read the texts of one shard. Raises ParlayError if the file is damaged."""
    try:
        with np.load(path, allow_pickle=False) as saved:
            ids, lengths, answers = saved["ids"], saved["lengths"], saved["answers"]
    except (OSError, EOFError, ValueError, KeyError, BadZipFile) as error:
        raise ParlayError(f"{path} is damaged ({error}): delete it, and it is written again") from error
    if int(lengths.sum()) != len(ids) or len(lengths) != len(answers):
        raise ParlayError(f"{path} is damaged (its lengths do not add up): delete it, and it is written again")
    return list(_split(ids, lengths, answers))


def given_path(folder: Path, number: int) -> Path:
    """Return the path of shard ``number`` of the texts that the target did not write."""
    return folder / _GIVEN.format(number)


def shards(folder: Path) -> list[Path]:
    """Return the paths of all shards in ``folder``, sorted."""
    return sorted(folder.glob("texts-*.npz"))


def _split(
    ids: npt.NDArray[np.int32], lengths: npt.NDArray[np.int32], answers: npt.NDArray[np.int32]
) -> Iterator[TrainingText]:
    ends = np.cumsum(lengths)
    for end, length, answer in zip(ends.tolist(), lengths.tolist(), answers.tolist(), strict=True):
        yield TrainingText(tuple(ids[end - length : end].tolist()), answer)
