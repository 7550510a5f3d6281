"""Answers that change their kind: prose that the model itself wrote, a copied document, function calls, prose again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import NamedTuple

from benchmarks.regimes.forced import Ids
from parlay.bench.loops import first_loop
from parlay.bench.prepare import conversation_ids
from parlay.bench.records import PLAIN
from parlay.bench.workloads import Item, Message, load
from parlay.bench.workloads.files import records
from parlay.llm import LLM
from parlay.text.prompts import TokensPrompt
from parlay.types import SamplingParams

PROSE, COPY, CALLS = "prose", "copy", "calls"
ORDERS = (
    (PROSE, COPY, CALLS, PROSE),
    (CALLS, PROSE, COPY, PROSE),
    (COPY, PROSE, CALLS, PROSE),
    (PROSE, CALLS, COPY, PROSE),
)
QUESTIONS, BUILT_IN_QUESTIONS = ("spec-bench/stem", "spec-bench/humanities", "spec-bench/writing"), ("prose",)
DOCUMENTS, BUILT_IN_DOCUMENTS = ("editeval", "spec-bench/summarization"), ("edit",)
_BEGINNING = 12  # tokens of an answer to the question alone, with which later prose begins: the model then goes on
_SHORTEST = 0.6  # of the wanted length that prose must have
_TRIES = 6  # for each part that is wanted: small models loop
_RUN = 8  # tokens of a copy
_MOST_COPIED, _LEAST_VARIED = 0.25, 0.4  # share of prose that may be copied; of different tokens in it
_SHORT, _LETTERS = 350, 700  # of a document; of longer ones the beginning is taken
_CALLS = "bfcl/answer_BFCL_v4_parallel.jsonl.zst"
_DRINKS = ("latte", "espresso", "cappuccino", "mocha", "tea", "flat white", "cocoa")
_SIZES = ("small", "large", "medium")


class Stretch(NamedTuple):
    """One kind of text: tokens ``start`` to ``end`` of the answer."""

    kind: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Given:
    """A prompt, the answer that every strategy is to write, and where its kinds are."""

    name: str
    prompt: Ids
    answer: Ids
    stretches: tuple[Stretch, ...]


class Call(NamedTuple):
    """Of a function, by name."""

    name: str
    arguments: dict[str, object]

    @property
    def described(self) -> str:
        return f"{self.name}({', '.join(self.arguments)})"


class Material(NamedTuple):
    """What a text is made of beside prose: a document, and function calls."""

    document: str
    calls: Sequence[Call]

    def asked(self, question: str) -> str:
        """The prompt: document, functions, and a question."""
        functions = "\n".join(dict.fromkeys(call.described for call in self.calls))
        return f"Text:\n\n{self.document}\n\nFunctions:\n\n{functions}\n\n{question}"

    @property
    def called(self) -> str:
        """The calls as JSON, one a line."""
        return "\n".join(json.dumps(call._asdict()) for call in self.calls)


def questions(data: Path | None) -> Iterator[str]:
    """Without end. Of published sets where there is ``data``, of built-in ones elsewhere."""
    return cycle(_texts(QUESTIONS if data else BUILT_IN_QUESTIONS, data))


def materials(data: Path | None) -> Iterator[Material]:
    """Without end, as `questions`."""
    found = _texts(DOCUMENTS if data else BUILT_IN_DOCUMENTS, data)
    documents = cycle([text for text in found if len(text) >= _SHORT] or found)
    return (Material(document, calls) for document, calls in zip(documents, cycle(_calls(data)), strict=False))


def _texts(names: Sequence[str], data: Path | None) -> list[str]:
    """Of several sets in turn; the beginnings of long ones."""
    sets = [[_text(item)[:_LETTERS] for item in workload.items] for workload in load(names, data=data)]
    return [text for group in zip(*sets, strict=False) for text in group]


def _text(item: Item) -> str:
    """What is predicted, if that is known; else what is asked."""
    return item.prediction or item.prompt or item.messages[-1].content


def _calls(data: Path | None) -> Iterator[list[Call]]:
    """Calls that belong together: the answers to four published tasks, or orders."""
    if data is None:
        yield from (_orders(first) for first in range(len(_DRINKS)))
        return
    answers = [_answer(record) for _, record in records(data / _CALLS)]
    for first in range(0, len(answers) - 3, 4):
        yield [call for answer in answers[first : first + 4] for call in answer]


def _answer(record: dict[str, list[dict[str, dict[str, list[object]]]]]) -> list[Call]:
    """The calls of one task; of values that would all be right the first."""
    calls = [(name, arguments) for call in record["ground_truth"] for name, arguments in call.items()]
    return [Call(name, {key: values[0] for key, values in arguments.items()}) for name, arguments in calls]


def _orders(first: int) -> list[Call]:
    numbers = range(first, first + 12)
    return [
        Call("order", {"drink": _DRINKS[at % len(_DRINKS)], "size": _SIZES[at % len(_SIZES)], "count": 1 + at % 4})
        for at in numbers
    ]


class Scribe:
    """Makes texts for a model. Stretches have at most ``length`` tokens."""

    def __init__(self, llm: LLM, length: int, questions: Iterator[str]) -> None:
        self._llm, self._length, self._questions = llm, length, questions

    def texts(self, materials: Iterator[Material], count: int) -> list[Given]:
        """So many, in turns of the `ORDERS`. Fewer if nothing that the model writes is fit."""
        made: list[Given] = []
        for material in islice(materials, _TRIES * count):
            if len(made) == count:
                break
            given = self._made(str(len(made) + 1), material, ORDERS[len(made) % len(ORDERS)])
            made += [given] if given else []
        return made

    def _made(self, name: str, material: Material, order: Sequence[str]) -> Given | None:
        """One text; None if prose that the model writes is not fit."""
        asked = material.asked(next(self._questions))
        prompt = conversation_ids(self._llm, [Message("user", asked)])
        parts = {COPY: material.document, CALLS: material.called}
        answer: Ids = ()
        stretches: list[Stretch] = []
        for kind in order:
            new = self._prose(prompt, answer) if kind == PROSE else self._ids(parts[kind], answer)
            if not new:
                return None
            stretches.append(Stretch(kind, len(answer), len(answer) + len(new)))
            answer += new
        return Given(name, prompt, answer, tuple(stretches))

    def _prose(self, prompt: Ids, answer: Ids) -> Ids:
        """What the model goes on with, as far as that is fit; nothing if that is hardly anything."""
        beginnings = self._beginnings(answer) if answer else iter([()])
        for beginning in islice(beginnings, _TRIES):
            before = prompt + answer + beginning
            new = fit(beginning + self._written(before, self._length - len(beginning)), before)
            if len(new) >= _SHORTEST * self._length:
                return new
        return ()

    def _beginnings(self, answer: Ids) -> Iterator[Ids]:
        """Where something stands already, the model would go on with that, so prose begins there with the first words
        of its answer to a question alone.
        """
        for question in self._questions:
            alone = conversation_ids(self._llm, [Message("user", question)])
            yield self._ids("", answer) + self._written(alone, _BEGINNING)

    def _ids(self, text: str, answer: Ids) -> Ids:
        """The first tokens of a text that follows an answer."""
        tokenizer = self._llm.get_tokenizer()
        return tuple(tokenizer.encode("\n\n" * bool(answer) + text, add_special_tokens=False))[: self._length]

    def _written(self, text: Ids, count: int) -> Ids:
        """What the model writes greedily, without an end before that."""
        params = SamplingParams(temperature=0, max_tokens=count, min_tokens=count)
        (output,) = self._llm.generate(TokensPrompt(prompt_token_ids=text), params, strategy=PLAIN, store=False)
        return tuple(output.outputs[0].token_ids)


def fit(new: Ids, before: Ids) -> Ids:
    """Prose up to where it loops; nothing if much of it is copied, or if it hardly varies, as numbers in order.

    All that would make another kind of text of it.
    """
    new = new[: first_loop(new)]
    return new if copied(new, before) <= _MOST_COPIED and len({*new}) >= _LEAST_VARIED * len(new) else ()


def copied(new: Ids, before: Ids) -> float:
    """The share of tokens within runs of `_RUN` that stand in the text before."""
    known = {before[at : at + _RUN] for at in range(len(before) - _RUN + 1)}
    starts = [at for at in range(len(new) - _RUN + 1) if new[at : at + _RUN] in known]
    return len({place for at in starts for place in range(at, at + _RUN)}) / max(1, len(new))


def kept(path: Path) -> list[Given]:
    """Texts that were made before. Raises ValueError for a file that holds something else."""
    try:
        return [
            Given(
                each["name"],
                tuple(each["prompt"]),
                tuple(each["answer"]),
                tuple([Stretch(*stretch) for stretch in each["stretches"]]),
            )
            for each in json.loads(path.read_text(encoding="utf-8"))
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} holds no texts ({error}): remove it") from None


def keep(path: Path, texts: Sequence[Given]) -> None:
    """To be read by `kept`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([asdict(each) for each in texts]), encoding="utf-8")


def digest(texts: Sequence[Given]) -> str:
    """Twelve digits that change with any token."""
    return hashlib.sha256(repr([asdict(each) for each in texts]).encode()).hexdigest()[:12]
