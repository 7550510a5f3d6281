"""From a chat request to a job, and to how its answers are read."""

from __future__ import annotations

from dataclasses import dataclass, replace

from parlay.requests import ChatOptions, Job
from parlay.serve.chat.answers import AnswerShape
from parlay.serve.chat.forms import answer_form
from parlay.serve.chat.prompting import conversation
from parlay.serve.chat.reasoning import Thoughts, is_open, reasons
from parlay.serve.chat.request import ChatRequest
from parlay.serve.chat.variables import template_variables
from parlay.serve.hosted import Served
from parlay.serve.jobs import FieldNames, prepare
from parlay.serve.settings import Settings

_END = 8
"""Tokens at the end of a prompt in which reasoning may begin."""


@dataclass(frozen=True, slots=True)
class ChatJob:
    """A chat request made ready to run. ``unused`` are its fields that the model's chat template knows nothing of."""

    job: Job
    answers: AnswerShape
    unused: tuple[str, ...]


def chat_job(served: Served, chat: ChatRequest, settings: Settings, names: FieldNames) -> ChatJob:
    """Raises ApiError for what the model can't take."""
    template = chat_template(served)
    form = answer_form(chat, template)
    messages, tools = conversation(chat, template)
    found = template_variables(chat, template, names)
    options = ChatOptions(
        tools=tools, variables=found.values, begin_answer=chat.begin_answer, continue_final=chat.continue_final
    )
    params = replace(chat.params, structured_outputs=form.form)
    if form.calls is not None and _is_special(served, form.calls.begin):
        params = replace(params, skip_special_tokens=False)  # or the mark of a call would not be seen
    job = prepare(served, messages, params, chat.options, settings=settings, names=names, chat=options)
    answers = AnswerShape(
        calls=form.calls,
        names=frozenset(function.name for function in chat.functions),
        single=chat.single_call,
        certain=chat.must_call or chat.answer_schema is None,
        thoughts=_thoughts(served, job, template),
    )
    return ChatJob(job, answers, found.unused)


def _is_special(served: Served, mark: str) -> bool:
    tokenizer = served.engine.llm.tokenizer
    return tokenizer is not None and mark in tokenizer.all_special_tokens


def _thoughts(served: Served, job: Job, template: str) -> Thoughts:
    """Whether there may be reasoning, or whether the prompt begins it already."""
    tokenizer = served.engine.llm.tokenizer
    if tokenizer is None or not reasons(template):
        return "none"
    end: str = tokenizer.decode(job.samples[0].request.prompt[-_END:], skip_special_tokens=False)
    return "begun" if is_open(end) else "maybe"


def chat_template(served: Served) -> str:
    """The model's chat templates as one text, to see what they know of; empty where there is none."""
    tokenizer = served.engine.llm.tokenizer
    templates = tokenizer.chat_template if tokenizer is not None else None
    if isinstance(templates, dict):
        return "\n".join(templates.values())
    return templates or ""
