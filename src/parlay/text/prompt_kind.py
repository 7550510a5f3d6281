"""Tells which kind of task a prompt asks for, by a few cheap, readable rules. The kind hints at the drafters that will
help."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby

from parlay.types import SamplingParams, Tokenizer

PROSE = "prose"
FORM = "form"
"""The kind of requests with structured output, whatever their prompts say."""

_HEAD, _TAIL = 240, 240  # characters read at the beginning and the end of a prompt, where the task is
_CODE_LOOK = 1600  # characters searched for code
_LONG = 600  # a prompt of this many characters includes a text
_TEXT = 200  # a prompt of this many characters has something to edit
_LANGUAGES = (
    "arabic|chinese|czech|danish|dutch|english|finnish|french|german|greek|hindi|italian|japanese|korean|latin|"
    "norwegian|polish|portuguese|russian|spanish|swedish|turkish|ukrainian|vietnamese"
)
_NUMBERS = r"(?:\d+|two|three|four|five|six|seven|eight|nine|ten|some|several|a few)"
_POLITE = r"\A\W*(?:please |can you |could you |now )?"


def _rule(*patterns: str) -> re.Pattern[str]:
    return re.compile("|".join(patterns), re.MULTILINE)


_GIVEN = _rule(  # the prompt holds a text to be read, whose topic says nothing about the answer
    _POLITE + r"(?:summari[sz]e|tl;dr|extract|passage|text|document|article|context|references?)\b",
    _POLITE + r"(?:answer the|use this|use the|read the)\b.{0,40}\b(?:text|question|passage|article|context)",
)
_TRANSLATION = _rule(
    r"\btranslate\b|\btranslation (?:of|from|into|to)\b",
    rf"\b(?:mean|say|said|written|put|be) (?:this |that |it )?in (?:{_LANGUAGES})\b",
)
_EDIT = _rule(
    _POLITE + r"(?:rewrite|rephrase|paraphrase|edit|correct|proofread|fix|revise|improve|refactor|modify|change|"
    r"replace|remove|rename|add|update|move|reformat|shorten|polish|make|use|convert|reorder|increase|put|allow|don't)\b",
    r"\b(?:correct|fix|edit|rewrite|modify|change|proofread) (?:the|this|these|my|all|any|each)\b",
)
_CODE_TEXT = _rule(
    r"```",
    r"^\s*(?:def|class|func|fn|public|private|const|let|var|package|#include)\b.*[\w);{:>.]$(?<=[;{:>])",
    r"^(?:import [\w.]+|from [\w.]+ import .+|package \w+|use [\w:]+;)$",
    r"[)\w\]]\s*\{\s*$|\);\s*$|^\s*</\w+>",
)
_CODE = _rule(
    r"\b(?:python|javascript|typescript|java|rust|golang|sql|html|css|php|bash|regex|regexp|django|numpy)\b|\bc\+\+|\bc#",
    r"\bwrite (?:an? )?(?:\w+ ){0,3}(?:function|method|class|script|program|query|algorithm|code|unit tests?)\b",
    r"\b(?:implement|debug|compile|refactor) \w+",
    r"\b(?:a|go|the) program that\b|\bsource code\b",
    r"\b(?:function|algorithm|program|method)\b.{0,60}\b(?:array|list|string|tree|graph|integers?|tuple|recursion|matrix)",
)
_MATHS = _rule(
    r"\b(?:solve|calculate|compute|simplify|differentiate|integrate|prove|derivative)\b",
    r"\b(?:percent|probability|equation|remainder|divisible|perimeter|hypotenuse|polynomial|inequality)\b",
    r"\b(?:reason step by step|which of them|who is the \w+est|riddle|deduce|logically|true or false)\b",
    r"\b(?:older|taller|shorter|heavier|faster) than\b.*\?",
    r"\d ?%|\d ?[-+*/=^] ?\d|\b\d+x\b",
)
_AMOUNT = _rule(r"\bhow (?:many|much|long|far|old|fast|tall)\b|\bwhat (?:is|was|are|percent\w*|fraction)\b|\btotal\b")
_DIGIT = re.compile(r"\d")
_LIST = _rule(
    rf"\b(?:list|name|give|suggest|write|provide|tell|recommend|propose|think of|come up with)\b(?: me)? {_NUMBERS} \w",
    _POLITE + r"(?:list|enumerate|brainstorm)\b",
    r"\b(?:make|create|give|write|provide)(?: me)? an? (?:\w+ )?list\b",
    r"\b(?:bullet points?|bulleted|shopping list|to-?do list|synonyms|checklist)\b",
)
_EXTRACTION = _rule(
    r"\b(?:summari[sz]e|summary of|extract|highlights)\b",
    r"\b(?:based on|according to|from|using|use) (?:the|this|these|that) (?:\w+ )?"
    r"(?:text|passages?|articles?|documents?|paragraph|context|contract|report|reviews?|table)\b",
    r"\b(?:as|in|into) (?:an? )?(?:json|csv|yaml|xml)\b",
    r"\b(?:identify|detect|classify|count) (?:and \w+ )?(?:the|all|any|which|how)\b",
    r"\breferences?:",
)
_DIALOGUE = _rule(
    r"\b(?:pretend|behave|respond|answer|speak) as (?:if|though|a|an|the|that|you)\b|\bact as\b",
    r"\b(?:role-?play|play the role|take on the role|in the (?:voice|persona|character) of|embody|persona)\b",
    r"\A\W*(?:(?:imagine|suppose|assume) (?:that )?)?you are (?:an? |the |now )?\w",
    r"\b(?:next line of|in the first person|introduce yourself|i want you to be|let us play|let's play)\b",
    r"\b(?:dialogue|conversation) (?:between|with)\b",
    _POLITE + r"(?:be|picture yourself as) \w+.{0,30}\b(?:for a while|and)\b",
    r"\A\W*how would \w+(?: \w+){0,5} explain\b|\b(?:imagine|picture) yourself\b",
    r"\b(?:reporter|visitor|interviewer) (?:asks|and you)\b",
)


def kind_of(text: str) -> str:
    """Return the kind of task that a prompt asks for: one of `parlay.types.KINDS`, or `PROSE` if no rule applies."""
    return next(_kinds(text), PROSE)


def _kinds(text: str) -> Iterator[str]:
    """Yield the kinds whose rules apply, in order of precedence: editing code is an edit, not code."""
    asked = (text if len(text) <= _HEAD + _TAIL else f"{text[:_HEAD]}\n{text[-_TAIL:]}").lower()
    if _GIVEN.search(asked):
        yield "extraction"
    if _TRANSLATION.search(asked):
        yield "translation"
    has_code = _CODE_TEXT.search(text, 0, _CODE_LOOK) is not None
    if (has_code or len(text) >= _TEXT) and _EDIT.search(asked):
        yield "edit"
    if has_code or _CODE.search(asked):
        yield "code"
    if _DIALOGUE.search(asked):
        yield "dialogue"
    if _EXTRACTION.search(asked):
        yield "extraction"
    if _LIST.search(asked):
        yield "list"
    if len(text) < 2 * _LONG and (_MATHS.search(asked) or (_DIGIT.search(asked) and _AMOUNT.search(asked))):
        yield "maths"
    if len(text) >= _LONG:
        yield "extraction"


_ROLES = frozenset({"system", "user", "assistant", "model", "tool", "human", "bot"})
_READ = 128
"""Tokens read at the beginning of a text, and at its end."""


class PromptClassifier:
    """Tells the kind of a request by the last text in its prompt. Special tokens separate a prompt's texts."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder if tokenizer is not None else {}
        self._special = frozenset(token for token, each in added.items() if each.special)

    def of(self, prompt: Sequence[int], params: SamplingParams) -> str:
        """Return the kind of the request with this prompt; empty if the prompt has no text."""
        if params.form is not None:
            return FORM
        if self._tokenizer is None:
            return ""
        for special, ids in groupby(reversed(prompt), self._special.__contains__):
            content = "" if special else _without_role(self._text([*ids][::-1]))
            if content:
                return kind_of(content)
        return ""

    def _text(self, ids: Sequence[int]) -> str:
        assert self._tokenizer is not None
        if len(ids) <= 2 * _READ:
            return self._tokenizer.decode(ids)
        return f"{self._tokenizer.decode(ids[:_READ])}\n{self._tokenizer.decode(ids[-_READ:])}"


def _without_role(text: str) -> str:
    """Remove the line that names the role from a turn of a conversation."""
    role, _, content = text.strip().partition("\n")
    return content.strip() if role.strip().lower() in _ROLES else text.strip()
