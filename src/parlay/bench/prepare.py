"""Prepares a workload: turns each item into token ids and decodes it plainly, without measuring the time.

Small models repeat themselves, and drafters copy loops easily. So an answer ends where plain decoding's first loop
begins. A prompt whose answer loops almost at once is left out, and a note says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TypeVar

from parlay.bench.loops import FEWEST_TOKENS, first_loop, lasts, looped
from parlay.bench.records import PLAIN
from parlay.bench.wave import Answer, Ask, Ids, Prepared, Waves
from parlay.bench.workloads import Item, Message, Workload
from parlay.bench.workloads.sets import book
from parlay.llm.llm import LLM
from parlay.text.prompts import TokensPrompt
from parlay.types import ParlayError, SamplingParams

LOOPS = "the answer repeats itself at once"
NO_ROOM = "no room in the context"
_BATCH = 8
T = TypeVar("T")


@dataclass(slots=True)
class _Talk:
    """A conversation that is being prepared: its number, the messages so far, and the questions to come."""

    number: int
    item: Item
    messages: list[Message]
    questions: list[str]

    def go_on(self, answer: str) -> bool:
        """Append the answer and the next question. False if there is no further question."""
        if not self.questions:
            return False
        self.messages += [Message("assistant", answer), Message("user", self.questions.pop(0))]
        return True


@dataclass(frozen=True, slots=True)
class Preparation:
    """Prepares workloads. Answers have at most ``most`` tokens; None means each item's own limit.

    Answers are cut at loops unless ``keep_loops`` is set.
    """

    llm: LLM
    waves: Waves
    most: int | None = None
    keep_loops: bool = False

    def prepare(self, workload: Workload, temperature: float, context: int) -> Prepared:
        """Decode every item plainly, turn by turn. Callers turn exceptions into the error of the workload's rows."""
        left_out: Counter[str] = Counter()
        found: list[tuple[Ask, Answer]] = []
        talks = [
            _Talk(number, item, list(item.messages), list(item.follow_ups))
            for number, item in enumerate(workload.items)
        ]
        while talks:
            asks = [(talk, ask) for talk in talks if (ask := self._ask(talk, context)) is not None]
            left_out[NO_ROOM] += len(talks) - len(asks)
            asks = [(talk, replace(ask, seed=len(found) + at)) for at, (talk, ask) in enumerate(asks)]
            answers = list(self._answers([ask for _, ask in asks], temperature))
            found += [(ask, answer) for (_, ask), answer in zip(asks, answers, strict=True)]
            pairs = zip(asks, answers, strict=True)
            talks = [talk for (talk, _), answer in pairs if talk.go_on(self._text(answer.tokens))]
        return self._cut(found, left_out)

    def _ask(self, talk: _Talk, context: int) -> Ask | None:
        """Return the next request of a conversation; None if the model has no room for prompt and answer."""
        if context > self.llm.engine.longest:  # return early, because making so much filler takes long
            return None
        item = talk.item
        ids = text_ids(self.llm, item.prompt) if item.prompt else conversation_ids(self.llm, talk.messages)
        ids = padded(self.llm, ids, context)
        wanted = self.most or item.max_tokens
        room = self.llm.engine.longest - len(ids)
        if room < min(wanted, FEWEST_TOKENS):
            return None
        most, references = min(wanted, room), item.references
        return Ask(ids=ids, most=most, references=references, prediction=item.prediction, talk=talk.number)

    def _answers(self, asks: Sequence[Ask], temperature: float) -> Iterator[Answer]:
        for group in in_groups(asks, _BATCH):
            yield from self.waves.decode(PLAIN, group, temperature).answers

    def _text(self, tokens: Ids) -> str:
        return str(self.llm.tokenizer.decode(tokens, skip_special_tokens=True)) if self.llm.tokenizer else ""

    def _cut(self, found: Sequence[tuple[Ask, Answer]], left_out: Counter[str]) -> Prepared:
        asks: list[Ask] = []
        goals: list[Ids] = []
        for ask, answer in found:
            if not (self.keep_loops or lasts(answer.tokens)):
                left_out[LOOPS] += 1
                continue
            length = len(answer.tokens) if self.keep_loops else first_loop(answer.tokens)
            asks.append(replace(ask, most=max(length, 1)))
            goals.append(answer.tokens[:length])
        return Prepared(tuple(asks), tuple(goals), _share(found), _note(left_out, len(asks)))


def lasting(llm: LLM, workload: Workload, count: int, most: int) -> Workload:
    """Return the workload with ``count`` items, preferably items whose answer of ``most`` tokens does not loop at once.

    Answers that loop at once have too few tokens to time. Items that do not fit into the model's context come last.
    """
    ids = [first_ids(llm, item) for item in workload.items]
    fitting = [place for place, own in enumerate(ids) if len(own) + most <= llm.engine.longest]
    params = SamplingParams(temperature=0, max_tokens=most)
    prompts = [TokensPrompt(prompt_token_ids=ids[place]) for place in fitting]
    outputs = llm.generate(prompts, params, strategy=PLAIN, store=False) if prompts else []
    last = {place for place, output in zip(fitting, outputs, strict=True) if lasts(output.outputs[0].token_ids)}
    order = sorted(range(len(ids)), key=lambda place: (place not in last, place not in fitting))
    return replace(workload, items=tuple(workload.items[place] for place in order[:count]))


def first_ids(llm: LLM, item: Item) -> Ids:
    """Return the ids that the model reads before its first answer to an item."""
    return text_ids(llm, item.prompt) if item.prompt else conversation_ids(llm, item.messages)


def in_groups(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield the items in groups of ``size``; the last group may be smaller."""
    rest = iter(items)
    while group := list(islice(rest, size)):
        yield group


def _share(found: Sequence[tuple[Ask, Answer]]) -> float | None:
    """Return the share of looped tokens in all answers before they are cut; None without tokens."""
    total = sum(len(answer.tokens) for _, answer in found)
    inside = sum(looped(answer.tokens) * len(answer.tokens) for _, answer in found)
    return inside / total if total else None


def _note(left_out: Counter[str], kept: int) -> str:
    total = kept + left_out.total()
    return "; ".join(f"{count} of {total} prompts left out: {why}" for why, count in left_out.items() if count)


_LETTERS_PER_TOKEN = 8
"""More letters per token than any tokenizer has for such text, so that the filler is long enough."""
_FILLER_SEED = 5


def conversation_ids(llm: LLM, messages: Sequence[Message]) -> Ids:
    """Return the ids of a conversation up to the next answer.

    Raises ParlayError if the model's chat template refuses the messages and their `simplified` form.
    """
    if llm.tokenizer is None or not llm.tokenizer.chat_template:
        return text_ids(llm, "\n\n".join(message.content for message in messages) + "\n\n")
    try:
        return _rendered(llm, messages)
    except ParlayError:
        return _rendered(llm, simplified(messages))


def text_ids(llm: LLM, text: str) -> Ids:
    """Return the ids of a text to continue."""
    return llm.job(text).samples[0].request.prompt


def simplified(messages: Sequence[Message]) -> list[Message]:
    """Return the messages for templates in which users and assistants alternate. Other roles become the user's."""
    turns: list[Message] = []
    for message in messages:
        role = "assistant" if message.role == "assistant" else "user"
        if turns and turns[-1].role == role:
            turns[-1] = Message(role, f"{turns[-1].content}\n\n{message.content}")
        else:
            turns.append(Message(role, message.content))
    return turns


def padded(llm: LLM, ids: Ids, context: int) -> Ids:
    """Lengthen the prompt to ``context`` tokens by filler before it, but after the token that begins every text."""
    missing = context - len(ids)
    if missing <= 0 or llm.tokenizer is None:
        return ids
    text = book(_FILLER_SEED, _LETTERS_PER_TOKEN * missing)
    filler = llm.tokenizer.encode(text, add_special_tokens=False)[:missing]
    start = 1 if ids[0] == llm.tokenizer.bos_token_id else 0
    return (*ids[:start], *filler, *ids[start:])


def _rendered(llm: LLM, messages: Sequence[Message]) -> Ids:
    turns = [{"role": message.role, "content": message.content} for message in messages]
    return llm.job(turns).samples[0].request.prompt
