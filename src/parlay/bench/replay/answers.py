"""Reads files of recorded answers: prompts, a model's answers, and the texts that an answer may copy from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parlay.bench.workloads.files import records

OUTPUTS = ("output", "answer", "response", "completion")
"""Fields that may hold the answer. The first of them that a record has is taken."""
SHAPES = (
    f"an answer in one of the fields {', '.join(OUTPUTS)} and a question in prompt or instruction (and input), or the "
    "fields query, docs and result"
)


@dataclass(frozen=True, slots=True)
class RecordedAnswer:
    """One recorded answer, its prompt, and its references: texts that the answer may quote."""

    prompt: str
    output: str
    references: tuple[str, ...] = ()


def read_answers(path: Path) -> Iterator[RecordedAnswer]:
    """Read the answers in a file of JSON lines or of one JSON array, plain or compressed with zstd or gzip.

    Raises ValueError for a file that can't be read or is not text, and for the first record that is not a recorded
    answer, with its number.
    """
    for place, record in records(path):
        where = f"{path}, {place}"
        if not isinstance(record, Mapping):
            raise ValueError(f"{where}: not an object, but {type(record).__name__}: an answer has {SHAPES}")
        yield _answer(record, where)


def _answer(record: Mapping[str, Any], where: str) -> RecordedAnswer:
    """Convert a record by the first shape that fits."""
    if "query" in record and "result" in record:
        return _with_documents(record, where)
    output = next((name for name in OUTPUTS if name in record), None)
    if output is None or not {"prompt", "instruction"} & record.keys():
        raise ValueError(f"{where}: not a recorded answer, which has {SHAPES}")
    references = tuple(_strings(record, "references", where))
    if "prompt" in record:
        return RecordedAnswer(_string(record, "prompt", where), _string(record, output, where), references)
    source = _string(record, "input", where) if record.get("input") else ""
    prompt = "\n\n".join(filter(None, (source, _string(record, "instruction", where))))
    return RecordedAnswer(prompt, _string(record, output, where), references or tuple(filter(None, (source,))))


def _with_documents(record: Mapping[str, Any], where: str) -> RecordedAnswer:
    """Convert a record of LLMA. Documents that the query does not quote come before it; all of them are references."""
    query, documents = _string(record, "query", where), _strings(record, "docs", where)
    if not isinstance(record["result"], Mapping):
        raise ValueError(f"{where}: result is not an object with a text")
    unquoted = [document for document in documents if document not in query]
    return RecordedAnswer("\n\n".join([*unquoted, query]), _string(record["result"], "text", where), tuple(documents))


def _string(record: Mapping[str, Any], name: str, where: str) -> str:
    value = record.get(name)
    if not isinstance(value, str):
        raise ValueError(f"{where}: {name} is not a text")
    try:
        return value.encode().decode()
    except UnicodeEncodeError:
        raise ValueError(f"{where}: {name} is not valid Unicode") from None


def _strings(record: Mapping[str, Any], name: str, where: str) -> list[str]:
    values = record.get(name, [])
    if not isinstance(values, list):
        raise ValueError(f"{where}: {name} is not a list of texts")
    return [_string({name: value}, name, where) for value in values]
