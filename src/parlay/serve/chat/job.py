"""From a chat request to a job, and to how its answers are read."""

from __future__ import annotations

from dataclasses import dataclass, replace

from parlay.requests import Job
from parlay.serve.chat.answers import AnswerShape
from parlay.serve.chat.forms import answer_form
from parlay.serve.chat.prompting import conversation
from parlay.serve.chat.request import ChatRequest
from parlay.serve.hosted import Served
from parlay.serve.jobs import FieldNames, prepare
from parlay.serve.settings import Settings


@dataclass(frozen=True, slots=True)
class ChatJob:
    """A chat request made ready to run."""

    job: Job
    answers: AnswerShape


def chat_job(served: Served, chat: ChatRequest, settings: Settings, names: FieldNames) -> ChatJob:
    """Raises ApiError for what the model can't take."""
    template = chat_template(served)
    form = answer_form(chat, template)
    messages, tools = conversation(chat, template)
    params = replace(chat.params, structured_outputs=form.form)
    job = prepare(served, messages, params, chat.options, settings=settings, names=names, tools=tools)
    answers = AnswerShape(
        calls=form.calls,
        names=frozenset(function.name for function in chat.functions),
        single=chat.single_call,
        certain=chat.must_call or chat.answer_schema is None,
    )
    return ChatJob(job, answers)


def chat_template(served: Served) -> str:
    """The model's chat templates as one text, to see what they know of; empty where there is none."""
    tokenizer = served.engine.llm.tokenizer
    templates = tokenizer.chat_template if tokenizer is not None else None
    if isinstance(templates, dict):
        return "\n".join(templates.values())
    return templates or ""
