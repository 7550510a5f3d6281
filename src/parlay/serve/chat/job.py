"""From a chat request to a job, and to how its answers are read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from parlay.llm.input_processor import ChatOptions, RequestOptions
from parlay.llm.jobs import Job
from parlay.serve.chat.answers import AnswerShape
from parlay.serve.chat.forms import answer_form
from parlay.serve.chat.prompting import conversation
from parlay.serve.chat.request import ChatRequest
from parlay.serve.chat.variables import template_variables
from parlay.serve.hosted import Served
from parlay.serve.protocol.sampling_from_body import FieldNames, prepare
from parlay.serve.settings import Settings
from parlay.text.reasoning import END, reasons, template_text
from parlay.types import SamplingParams


@dataclass(frozen=True, slots=True)
class ChatJob:
    """A chat request made ready to run. ``unused`` are its fields that the model's chat template knows nothing of."""

    job: Job
    answers: AnswerShape
    names: FieldNames
    unused: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ChatQuestion:
    """A chat request that may be put to any model; see `parlay.serve.cascades.Question`."""

    chat: ChatRequest
    settings: Settings
    names: FieldNames

    @property
    def params(self) -> SamplingParams:
        return self.chat.params

    @property
    def options(self) -> RequestOptions:
        return self.chat.options

    @property
    def plain(self) -> bool:
        return not self.chat.functions and self.chat.answer_schema is None

    def but(self, params: SamplingParams, options: RequestOptions) -> Self:
        return replace(self, chat=replace(self.chat, params=params, options=options))

    def ready(self, served: Served) -> ChatJob:
        """Raises ApiError for what the model can't take."""
        return chat_job(served, self.chat, self.settings, self.names)

    def job(self, served: Served) -> Job:
        return self.ready(served).job


def chat_job(served: Served, chat: ChatRequest, settings: Settings, names: FieldNames) -> ChatJob:
    """Raises ApiError for what the model can't take."""
    template = chat_template(served)
    form = answer_form(chat, template)
    names = names.with_form(form.field)
    messages, tools = conversation(chat, template)
    found = template_variables(chat, template, names)
    options = ChatOptions(
        tools=tools, variables=found.values, begin_answer=chat.begin_answer, continue_final=chat.continue_final
    )
    params = replace(chat.params, structured_outputs=form.form)
    begins = [*([form.calls.begin] if form.calls is not None else []), *([END] if reasons(template) else [])]
    if any(_is_special(served, mark) for mark in begins):
        params = replace(params, skip_special_tokens=False)  # or the mark would not be seen
    job = prepare(served, messages, params, chat.options, settings=settings, names=names, chat=options)
    answers = AnswerShape(
        calls=form.calls,
        functions={function.name: function.parameters or {} for function in chat.functions},
        single=chat.single_call,
        certain=chat.must_call or chat.answer_schema is None,
        thoughts=job.thoughts,
    )
    return ChatJob(job, answers, names, found.unused)


def _is_special(served: Served, mark: str) -> bool:
    tokenizer = served.tokenizer
    return tokenizer is not None and mark in tokenizer.all_special_tokens


def chat_template(served: Served) -> str:
    """The model's chat templates as one text; empty where there is none."""
    tokenizer = served.tokenizer
    return template_text(tokenizer) if tokenizer is not None else ""
