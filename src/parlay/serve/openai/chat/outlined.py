"""`outline` of `/v1/chat/completions`: the model plans first, then writes all sections at once; a stream sends them in
order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fastapi import Request
from starlette.responses import JSONResponse, Response

from parlay.llm.outlining import (
    IN_ORDER,
    NO_POINTS,
    ROUTE_VARIABLES,
    OutlineParams,
    builds_up,
    heading,
    joined,
    outline_prompt,
    outline_sampling,
    read_outline,
    route_prompt,
    route_sampling,
    route_words,
    section_prompts,
)
from parlay.llm.outputs import RequestOutput, StreamEvent
from parlay.serve.chat.answers import Text, Thought
from parlay.serve.chat.job import ChatJob, chat_job
from parlay.serve.chat.request import ChatRequest
from parlay.serve.errors import ApiError
from parlay.serve.hosted import Served
from parlay.serve.openai.chat.contents import NAMES
from parlay.serve.openai.chat.reply import AnswerMessage, ChatReply, ChatShape, Finish, finish_word, reasoning_tokens
from parlay.serve.openai.chunks import chunk_frames
from parlay.serve.protocol.answering import Chunk, answer_streamed, answer_whole, in_thread, nobody_waits, outputs_of
from parlay.serve.protocol.body import note_ignored
from parlay.serve.protocol.logprobs import Speller
from parlay.serve.protocol.outlining import OutlineReply
from parlay.serve.protocol.running import ClientGone, make_run, while_client_waits
from parlay.serve.protocol.usage import extras, usage
from parlay.serve.settings import Settings
from parlay.types import Exactness, SamplingParams


@dataclass(frozen=True, slots=True)
class Plan:
    """The sections to write, under their ``points``, or one plain answer. ``spent`` are the outputs of planning."""

    chats: tuple[ChatJob, ...]
    points: tuple[str, ...]
    note: str
    spent: tuple[RequestOutput, ...]

    @property
    def reply(self) -> OutlineReply:
        return {"points": list(self.points), "note": self.note}


@dataclass(frozen=True, slots=True)
class Outlined:
    """A chat request that is answered by an outline; its last message is the question."""

    served: Served
    chat: ChatRequest
    params: OutlineParams
    request: Request
    settings: Settings

    async def answer(self, *, stream: bool, wants_usage: bool, explain: bool) -> Response:
        """Plan, then write; if the client leaves, both end. Raises ApiError, Busy and Closed."""
        try:
            plan = await while_client_waits(self.request, self._plan())
        except ClientGone:
            return nobody_waits()
        first = plan.chats[0]
        note_ignored(self.request, self.settings, first.unused)
        served = self.served
        shape = ChatShape(
            model=served.name,
            speller=Speller(served.tokenizer),
            logprobs=False,
            explain=explain,
            answers=first.answers,
        )
        run = make_run(served, [chat.job for chat in plan.chats], first.names, self.request, self.settings)
        if stream:
            return await answer_streamed(self.request, run, OutlinedChunks(plan, shape, wants_usage=wants_usage))
        return await answer_whole(self.request, run, lambda outputs: JSONResponse(outlined_reply(outputs, plan, shape)))

    async def _plan(self) -> Plan:
        question, params = self.chat.messages[-1].content, self.params
        spent: list[RequestOutput] = []
        if params.route:
            if builds_up(question):
                return await self._plain(IN_ORDER, spent)
            try:
                words = await in_thread(self.request, lambda: route_words(self.served.llm), heavy=False)
            except ValueError as error:
                raise ApiError(400, str(error), "outline.route") from None
            spent.append(await self._ask(route_prompt(question), route_sampling(words), ROUTE_VARIABLES))
            if spent[-1].chosen.token_ids != (words.yes,):
                return await self._plain(IN_ORDER, spent)
        spent.append(await self._ask(outline_prompt(question, params), outline_sampling(self.chat.params, params)))
        points, note = read_outline(spent[-1], params)
        if len(points) < 2:
            return await self._plain(NO_POINTS, spent)
        asked = section_prompts(question, points)
        chats = await in_thread(self.request, lambda: [self._ready(each) for each in asked], heavy=False)
        return Plan(tuple(chats), points, note, tuple(spent))

    async def _plain(self, note: str, spent: Sequence[RequestOutput]) -> Plan:
        question = self.chat.messages[-1].content
        chat = await in_thread(self.request, lambda: self._ready(question), heavy=False)
        return Plan((chat,), (), note, tuple(spent))

    async def _ask(
        self, content: str, params: SamplingParams, variables: Mapping[str, object] | None = None
    ) -> RequestOutput:
        chat = await in_thread(self.request, lambda: self._ready(content, params, variables), heavy=False)
        run = make_run(self.served, [chat.job], chat.names, self.request, self.settings)
        (output,) = await outputs_of(run)
        return output

    def _ready(
        self, content: str, params: SamplingParams | None = None, variables: Mapping[str, object] | None = None
    ) -> ChatJob:
        """The job of the same conversation with another last message. Raises ApiError if the model can't run it."""
        chat = self.chat
        *before, last = chat.messages
        chat = replace(
            chat,
            messages=(*before, replace(last, content=content)),
            params=params or chat.params,
            variables={**chat.variables, **(variables or {})},
        )
        return chat_job(self.served, chat, self.settings, NAMES)


def outlined_reply(outputs: Sequence[RequestOutput], plan: Plan, shape: ChatShape) -> ChatReply:
    """One choice: the sections under their points, or the plain answer."""
    read = [shape.answers.read(output.chosen.text) for output in outputs]
    texts = ["".join(delta.text for delta in deltas if isinstance(delta, Text)) for deltas in read]
    thought = "".join(delta.text for deltas in read for delta in deltas if isinstance(delta, Thought))
    content = joined(plan.points, texts) if plan.points else texts[0]
    message: AnswerMessage = {"role": "assistant", "content": content, "refusal": None}
    if thought:
        message["reasoning_content"] = thought
    return {
        "id": shape.id,
        "object": "chat.completion",
        "created": shape.created,
        "model": shape.model,
        "choices": [
            {
                "index": 0,
                "message": message,
                "logprobs": None,
                "finish_reason": _finish(outputs),
                "outline": plan.reply,
            }
        ],
        "usage": usage([*plan.spent, *outputs], _reasoned(outputs, shape)),
        "system_fingerprint": None,
        **extras(_told(outputs, plan), explain=shape.explain),
    }


def _finish(outputs: Sequence[RequestOutput]) -> Finish:
    """The finish reason of an answer, some sections of which may have been cut."""
    cut = any(output.chosen.finish_reason == "length" for output in outputs)
    return finish_word("length" if cut else "stop")


def _reasoned(outputs: Sequence[RequestOutput], shape: ChatShape) -> int:
    return sum(reasoning_tokens(output.chosen, shape) for output in outputs)


def _told(outputs: Sequence[RequestOutput], plan: Plan) -> list[RequestOutput]:
    """The outputs; sections are marked as lossy, as the model alone would not have written this text."""
    if not plan.points:
        return list(outputs)
    return [
        replace(output, outputs=tuple(replace(one, exactness=Exactness.LOSSY) for one in output.outputs))
        for output in outputs
    ]


class OutlinedChunks:
    """The chunks of one choice: a section is sent as it is decoded once those before it are over; until then it is held
    back."""

    def __init__(self, plan: Plan, shape: ChatShape, *, wants_usage: bool) -> None:
        self._plan, self._shape, self._wants_usage = plan, shape, wants_usage
        self._readers = [chat.answers.reader() for chat in plan.chats]
        self._texts = [""] * len(plan.chats)
        """Text of each section that has not been sent."""
        self._thoughts = [""] * len(plan.chats)
        self._current = 0
        self._begun = [False] * len(plan.chats)
        """Whether some of the current section's own text has been sent."""
        self._headed = [False] * len(plan.chats)
        self._outputs: dict[int, RequestOutput] = {}
        self.frames = chunk_frames(shape, "chat.completion.chunk")

    def failure(self, error: ApiError) -> Sequence[Chunk]:
        return [error.body]

    def opening(self) -> Sequence[Chunk]:
        delta = {"role": "assistant", "content": ""}
        return [{"choices": [{**_choice(delta), "outline": self._plan.reply}]}]

    def add(self, place: int, event: StreamEvent) -> Sequence[Chunk]:
        reader = self._readers[place]
        deltas = reader.feed(event.text) + (reader.finish() if event.finish_reason is not None else [])
        self._texts[place] += "".join(delta.text for delta in deltas if isinstance(delta, Text))
        self._thoughts[place] += "".join(delta.text for delta in deltas if isinstance(delta, Thought))
        if event.output is not None:
            self._outputs[place] = event.output
        thought, text = self._released()
        delta = {**({"reasoning_content": thought} if thought else {}), **({"content": text} if text else {})}
        if len(self._outputs) == len(self._readers):
            return self._last(delta)
        return [{"choices": [_choice(delta)]}] if delta else []

    def _released(self) -> tuple[str, str]:
        """The reasoning and text that can be sent now, in order."""
        thought = text = ""
        while True:
            place = self._current
            thought += self._thoughts[place]
            self._thoughts[place] = ""
            text += self._of_section(place)
            if place not in self._outputs or place + 1 == len(self._readers):
                return thought, text
            self._current = place + 1

    def _of_section(self, place: int) -> str:
        """Take what can be sent of a section: its heading, then its text without surrounding white space."""
        own, points = self._texts[place], self._plan.points
        if not points:
            self._texts[place] = ""
            return own
        head = "" if self._headed[place] else heading(place + 1, points[place])
        own = own if self._begun[place] else own.lstrip()
        kept = own.rstrip()
        self._headed[place], self._begun[place] = True, self._begun[place] or bool(kept)
        self._texts[place] = own[len(kept) :]
        return head + kept

    def _last(self, delta: Mapping[str, object]) -> Sequence[Chunk]:
        """The last text, and the facts of the whole request."""
        outputs = [self._outputs[place] for place in range(len(self._readers))]
        choice = {**_choice(delta), "finish_reason": _finish(outputs)}
        facts = extras(_told(outputs, self._plan), explain=self._shape.explain)
        if not self._wants_usage:
            return [{"choices": [choice], **facts}]
        counts = usage([*self._plan.spent, *outputs], _reasoned(outputs, self._shape))
        return [{"choices": [choice]}, {"choices": [], "usage": counts, **facts}]


def _choice(delta: Mapping[str, object]) -> dict[str, object]:
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
