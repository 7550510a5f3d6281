"""Turns an item into the ids that a model reads, in the model's chat format if it has one, with filler if asked for."""

from __future__ import annotations

from collections.abc import Sequence

from parlay.bench.wave import Ids
from parlay.bench.workloads import Message
from parlay.bench.workloads.filler import book
from parlay.llm.llm import LLM
from parlay.types import ParlayError

_LETTERS_PER_TOKEN = 8
"""More than any tokenizer has for such text, so that the filler is long enough."""
_FILLER_SEED = 5


def conversation_ids(llm: LLM, messages: Sequence[Message]) -> Ids:
    """A conversation up to the next answer. Raises ParlayError where the model's template refuses it in any form."""
    if llm.tokenizer is None or not llm.tokenizer.chat_template:
        return text_ids(llm, "\n\n".join(message.content for message in messages) + "\n\n")
    try:
        return _rendered(llm, messages)
    except ParlayError:
        return _rendered(llm, simplified(messages))


def text_ids(llm: LLM, text: str) -> Ids:
    """The ids of a text to continue."""
    return llm.job(text).samples[0].request.prompt


def simplified(messages: Sequence[Message]) -> list[Message]:
    """The messages for templates that allow only users and assistants in turns: all others become the user's."""
    turns: list[Message] = []
    for message in messages:
        role = "assistant" if message.role == "assistant" else "user"
        if turns and turns[-1].role == role:
            turns[-1] = Message(role, f"{turns[-1].content}\n\n{message.content}")
        else:
            turns.append(Message(role, message.content))
    return turns


def padded(llm: LLM, ids: Ids, context: int) -> Ids:
    """The prompt lengthened to ``context`` tokens by filler, placed after the token that begins every text."""
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
