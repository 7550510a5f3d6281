"""Skeleton-of-Thought (Ning et al. 2023, arXiv:2307.15337): an outline first, then all its sections at once.

First it decides whether the points of an answer stand on their own. They do not if the question's words ask for a
proof, a program or a calculation; otherwise the model is asked. If they do not, the answer is written plainly.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from parlay.llm.judging import Words, words_of
from parlay.llm.outputs import RequestOutput
from parlay.types import Exactness, FieldError, SamplingParams

if TYPE_CHECKING:
    from parlay.llm.llm import LLM

_POINT = re.compile(r"^\s*(?:\*\*)?\d{1,3}[.)]\s*(\S[^\n]*)", re.MULTILINE)
_ORDERED = re.compile(
    r"\b(prove|proof|derive|solve|calculat\w*|comput(?:e|ing)|how (?:many|much)|step by step|program|function|script|"
    r"code|story|poem|translat\w+|rewrit\w+|summar\w+)\b|\d\s*[-+*/=^]\s*\d",
    re.IGNORECASE,
)
"""Words in questions whose answers must be written in order."""
_LONGEST_POINT = 200
"""The most characters of a heading."""
IN_ORDER = "written plainly: the points would depend on each other"
NO_POINTS = "written plainly: the outline has no list of points"
ROUTE_VARIABLES = {"enable_thinking": False}
"""Variables of the chat template when the model is asked about the question."""
GAP = "\n\n"
"""Text between sections."""
_ROUTE = (
    "Question: {question}\n\nCould this be answered by a numbered list of points, each of which can be written without "
    "having read the others? Calculations, proofs, programs, stories and short answers can't. Answer yes or no."
)
_OUTLINE = (
    "{question}\n\nDo not answer yet. Write only the outline of your answer: a numbered list of 3 to {points} points, "
    "each of 3 to 6 words, one a line, and nothing else."
)
_SECTION = (
    "{question}\n\nThis is the outline of the answer:\n{outline}\n\nWrite point {number}, {point!r}, in one or two "
    "sentences. Write no other point, no heading and no number."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutlineParams:
    """How an answer is planned. ``points``: the most sections.

    An outline longer than ``outline_tokens`` is cut after its last whole line. With ``route=False``, every question
    gets an outline. Raises ValueError for values out of range.
    """

    points: int = 8
    outline_tokens: int = 160
    route: bool = True

    def __post_init__(self) -> None:
        if not 2 <= self.points <= 32:
            raise FieldError("points", f"must be between 2 and 32, got {self.points}")
        if not 8 <= self.outline_tokens <= 4096:
            raise FieldError("outline_tokens", f"must be between 8 and 4096, got {self.outline_tokens}")


@dataclass(frozen=True, slots=True, kw_only=True)
class OutlinedOutput:
    """An answer in sections. ``points``: their headings; empty if the answer was written plainly.

    ``note``: why it was written plainly, or where the outline was cut; else empty. ``outputs``: the sections, or the
    plain answer. ``outline``: the request that wrote the outline. An answer with sections is lossy: the model alone
    would not have written this text.
    """

    text: str
    points: tuple[str, ...]
    note: str
    outline: RequestOutput | None
    outputs: tuple[RequestOutput, ...]

    @property
    def exactness(self) -> Exactness:
        """The exactness of the text."""
        return Exactness.LOSSY if self.points else self.outputs[0].chosen.exactness


def write_outlined(
    llm: LLM,
    question: str,
    sampling_params: SamplingParams | None = None,
    params: OutlineParams | None = None,
    *,
    outliner: LLM | None = None,
) -> OutlinedOutput:
    """Answer a question by an outline whose sections are decoded together, or plainly where order matters.

    ``sampling_params`` apply to each section. ``outliner`` writes the outline: a smaller model with any tokenizer, or
    by default the same model. Raises what `LLM.chat` raises, and ValueError if the model can't be asked yes or no.
    """
    params = params or OutlineParams()
    sampling_params = sampling_params or llm.get_default_sampling_params()
    if params.route and not stands_apart(llm, question):
        return _plain(llm, question, sampling_params, None, IN_ORDER)
    sampling = outline_sampling(sampling_params, params)
    (outline,) = (outliner or llm).chat(_message(outline_prompt(question, params)), sampling, False)
    points, note = read_outline(outline, params)
    if len(points) < 2:
        return _plain(llm, question, sampling_params, outline, NO_POINTS)
    sections = llm.chat([_message(asked) for asked in section_prompts(question, points)], sampling_params, False)
    text = joined(points, [section.chosen.text for section in sections])
    return OutlinedOutput(text=text, points=points, note=note, outline=outline, outputs=tuple(sections))


def outline_prompt(question: str, params: OutlineParams) -> str:
    """The prompt that asks for an outline."""
    return _OUTLINE.format(question=question, points=params.points)


def outline_sampling(sampling_params: SamplingParams, params: OutlineParams) -> SamplingParams:
    """Sampling parameters of an outline, from those of its sections."""
    return replace(sampling_params, n=1, max_tokens=params.outline_tokens, min_tokens=0)


def section_prompts(question: str, points: Sequence[str]) -> list[str]:
    """The prompts that ask for each section."""
    outline = "\n".join(f"{number}. {point}" for number, point in enumerate(points, 1))
    return [
        _SECTION.format(question=question, outline=outline, number=number, point=point)
        for number, point in enumerate(points, 1)
    ]


def heading(number: int, point: str) -> str:
    """The heading of section ``number``, counted from 1, with the gap before it."""
    return f"{'' if number == 1 else GAP}{number}. {point}\n"


def joined(points: Sequence[str], sections: Sequence[str]) -> str:
    """The answer: the sections in order, each below its heading."""
    each = enumerate(zip(points, sections, strict=True), 1)
    return "".join(heading(number, point) + section.strip() for number, (point, section) in each)


def read_outline(outline: RequestOutput, params: OutlineParams) -> tuple[tuple[str, ...], str]:
    """The points of an outline without repetitions, and a note on what was cut."""
    text, cut = outline.chosen.text, outline.chosen.finish_reason == "length"
    if cut:
        text = text[: text.rfind("\n") + 1]
    found = [point.strip().rstrip(".:").replace("**", "")[:_LONGEST_POINT] for point in _POINT.findall(text)]
    every = tuple(dict.fromkeys(point for point in found if point))
    kept = every[: params.points]
    if cut:
        return kept, f"the outline did not end within {params.outline_tokens} tokens: {len(kept)} points of it are kept"
    return kept, f"the outline has {len(every)} points: the first {len(kept)} are kept" if every != kept else ""


def stands_apart(llm: LLM, question: str) -> bool:
    """Whether each point of the answer can be written without the others: by the question's words, then by the model.

    Raises ValueError if yes and no are not one token each for the model, ParlayError if it has no chat template.
    """
    if builds_up(question):
        return False
    words = route_words(llm)
    asked = _message(route_prompt(question))
    (output,) = llm.chat(asked, route_sampling(words), False, chat_template_kwargs=dict(ROUTE_VARIABLES))
    return output.chosen.token_ids == (words.yes,)


def builds_up(question: str) -> bool:
    """Whether the question's words say that later parts of its answer build on earlier ones."""
    return _ORDERED.search(question) is not None


def route_words(llm: LLM) -> Words:
    """The ids of yes and no. Raises ValueError if they are not one token each for the model."""
    try:
        return words_of(llm)
    except ValueError:
        raise ValueError(
            "the router can't ask this model yes or no, which are not one token each to it: take another model, or "
            'remove the router by OutlineParams(route=False), or "route": false over HTTP'
        ) from None


def route_prompt(question: str) -> str:
    """The prompt that asks whether the points of an answer stand on their own."""
    return _ROUTE.format(question=question)


def route_sampling(words: Words) -> SamplingParams:
    """Sampling parameters for that question: greedy, one of both words."""
    return SamplingParams(max_tokens=1, temperature=0, allowed_token_ids=list(words))


def _plain(llm: LLM, question: str, params: SamplingParams, outline: RequestOutput | None, note: str) -> OutlinedOutput:
    outputs = llm.chat(_message(question), params, False)
    return OutlinedOutput(text=outputs[0].chosen.text, points=(), note=note, outline=outline, outputs=tuple(outputs))


def _message(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]
