"""Chat templates: the text that a model expects of a conversation, as its tokenizer's template writes it.

A template is a program that came with a model. It runs in a sandbox with bounds (`template_sandbox`) and sees plain
values alone. What it is given, and what is added to jinja2's language, is as in transformers' ``apply_chat_template``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from parlay.text import template_sandbox
from parlay.text.control_tokens import cut, cut_messages, pieces
from parlay.types import Tokenizer

Messages = Sequence[Mapping[str, Any]]
"""A conversation: {"role": ..., "content": ...} each. Content is a text, or a list of {"type": "text", "text": ...}."""

Tools = Sequence[Mapping[str, Any]]
"""Functions that the model may call: {"type": "function", "function": {"name": ..., "parameters": ...}} each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """How a conversation becomes a prompt. ``variables`` are for templates that know of them.

    ``template`` takes the place of the model's own. One that knows no ``tools`` gets them as a system message.
    ``begin_answer``: the prompt ends where the assistant's turn begins. ``continue_final``: it ends with the last
    message, which the answer goes on with. ``parse_special``: control tokens that messages, tools or variables spell
    are read as such, and not as text.
    """

    tools: Tools = ()
    variables: Mapping[str, Any] = field(default_factory=dict)
    template: str | None = None
    begin_answer: bool = True
    continue_final: bool = False
    parse_special: bool = False


SAMPLING: Mapping[str, float] = {"temperature": 0.7, "top_p": 0.95}
"""How chats sample where the model's makers recommend nothing."""

SET_HERE = frozenset(
    {
        *("messages", "conversation", "tools", "documents", "chat_template", "raise_exception", "strftime_now"),
        *("add_generation_prompt", "continue_final_message", "tokenize", "return_dict", "return_tensors"),
        *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"),
    }
)
"""Names that no variable of a request may have: those that `render` gives a template, and transformers' own."""

_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Fields under which a message tells its reasoning. Templates read the first, or the second."""

_MARK = "[[the answer goes on here]] "
"""Stands after the message that is to be continued. Its space shows whether the template cut spaces away there."""


def render(
    tokenizer: Tokenizer,
    messages: Messages,
    *,
    tools: Tools = (),
    variables: Mapping[str, Any] | None = None,
    template: str | None = None,
    begin_answer: bool = True,
    continue_final: bool = False,
) -> str:
    """The text of ``messages``. ``tools`` and ``variables`` are for templates that know of them.

    ``template`` takes the place of the model's own.
    ``begin_answer``: it ends where the assistant's turn begins. ``continue_final``: it ends with the last message,
    which the answer goes on with. Raises ValueError for what can't be rendered, and TemplateError for what the template
    refuses or fails at.
    """
    if not messages:
        raise ValueError("the conversation is empty: give one message at least")
    template = template or _chosen(tokenizer, with_tools=bool(tools))
    turns = [_turn(message, template) for message in messages]
    if continue_final:
        _mark(turns[-1], template)
    given = {
        **tokenizer.special_tokens_map,
        **_plain(variables or {}),
        "messages": turns,
        "tools": _plain(tools) or None,
        "documents": None,
        "add_generation_prompt": begin_answer and not continue_final,
    }
    text = template_sandbox.render(template, given)
    return _cut(text, str(messages[-1]["content"])) if continue_final else text


def render_pieces(
    tokenizer: Tokenizer,
    messages: Messages,
    *,
    tools: Tools = (),
    variables: Mapping[str, Any] | None = None,
    template: str | None = None,
    begin_answer: bool = True,
    continue_final: bool = False,
) -> list[str]:
    """`render` in pieces to be encoded one by one (`tokenize.encode_pieces`).

    So the control tokens are those of the template, and none that a message, a tool or a variable spells.
    """
    text = render(
        tokenizer,
        cut_messages(tokenizer, messages),
        tools=cut(tokenizer, tools),
        variables=cut(tokenizer, variables or {}),
        template=template,
        begin_answer=begin_answer,
        continue_final=continue_final,
    )
    return pieces(text)


_TOOLS_OF_SYSTEM = re.compile(r"""message\[['"]tools['"]\]""")
"""In templates that read tools from the system message, as JSON: Phi-4-mini's."""


def takes_tools(template: str) -> bool:
    return re.search(r"\btools\b", template) is not None


def told_of_tools(
    tokenizer: Tokenizer, messages: Messages, tools: Tools, template: str | None = None
) -> tuple[Messages, Tools]:
    """Messages and tools to `render`. A template that knows no tools gets them in the first system message."""
    chosen = template or _chosen(tokenizer, with_tools=True) if tools and messages else ""
    if not chosen:
        return messages, tools
    listed = json.dumps([tool.get("function", tool) for tool in tools], ensure_ascii=False)
    if _TOOLS_OF_SYSTEM.search(chosen):
        system = messages[0] if messages[0].get("role") == "system" else {"role": "system", "content": ""}
        return [{**system, "tools": listed}, *(message for message in messages if message is not system)], ()
    if takes_tools(chosen):
        return messages, tools
    text = f'You can call these functions. A call is {{"name": ..., "arguments": {{...}}}} and nothing else.\n{listed}'
    first, *others = messages
    if first.get("role") == "system":
        return [{**first, "content": f"{first.get('content') or ''}\n\n{text}"}, *others], ()
    return [{"role": "system", "content": text}, *messages], ()


def _chosen(tokenizer: Tokenizer, *, with_tools: bool) -> str:
    """The model's template; of several the one for tools where there are some, else the default."""
    found = tokenizer.chat_template
    if not found:
        raise ValueError("this model has no chat template")
    if isinstance(found, str):
        return found
    name = "tool_use" if with_tools and "tool_use" in found else "default"
    if name not in found:
        raise ValueError(f"this model has chat templates for {', '.join(sorted(found))}, and no default one")
    return found[name]


_ASKS_FOR_NO_CONTENT = re.compile(r"""\bcontent(['"]\])? is (not )?none""")
"""In templates that write calls, or no text beside them, only where content is none: those of DeepSeek R1."""
_JOINS_ARGUMENTS = re.compile(r"""\barguments(['"]\])?\s*\+""")
"""In templates that join a call's arguments to other texts, and so want them as a text of JSON: DeepSeek's."""


def _turn(message: Mapping[str, Any], template: str) -> dict[str, Any]:
    """A message with what it says alone, and its reasoning under the names that templates read."""
    turn = {name: _plain(value) for name, value in message.items() if value is not None}
    calls = turn.get("tool_calls")
    if calls and not turn.get("content") and _ASKS_FOR_NO_CONTENT.search(template):
        turn["content"] = None
    if isinstance(calls, list):
        as_text = _JOINS_ARGUMENTS.search(template) is not None
        turn["tool_calls"] = [_with_arguments(call, as_text=as_text) for call in calls]
    reasoning = next((turn[name] for name in _REASONING if name in turn), None)
    return turn if reasoning is None else {"thinking": reasoning, **turn, "reasoning_content": reasoning}


def _with_arguments(call: Any, *, as_text: bool) -> Any:
    """A call with its arguments as JSON in a text, or else as an object, in whichever way they were given."""
    if not isinstance(call, dict):
        return call
    if "function" in call:
        return {**call, "function": _with_arguments(call["function"], as_text=as_text)}
    given = call.get("arguments")
    if as_text and isinstance(given, dict):
        return {**call, "arguments": json.dumps(given, ensure_ascii=False)}
    if not as_text and isinstance(given, str):
        with suppress(ValueError, RecursionError):
            read = json.loads(given)
            return {**call, "arguments": read} if isinstance(read, dict) else call
    return call


def _plain(value: object) -> Any:
    """The same as values of JSON: the sandbox knows nothing of what the methods of other objects do."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # not what a class of its own makes of it
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    raise ValueError(f"a chat template can't be given a value of type {type(value).__name__}: give values of JSON")


def _mark(turn: dict[str, Any], template: str) -> None:
    """Marks the end of the content, so that it can be found in the text."""
    content = turn.get("content")
    if not isinstance(content, str):
        raise ValueError("the last message has no content to continue")
    if "content" not in template:
        raise ValueError("the chat template does not write the content of messages, so that none can be continued")
    turn["content"] = content + _MARK


def _cut(text: str, content: str) -> str:
    """The text up to the last mark."""
    before, mark, after = text.rpartition(_MARK.strip())
    if not mark or content.strip() not in text:
        raise ValueError("the chat template changes the last message, so that it can't be continued")
    return (before if after.startswith(" ") else before.rstrip()).replace(_MARK, "")


def check_variables(variables: Mapping[str, Any]) -> None:
    """Raises ValueError for a variable that a template can't be given."""
    for name in variables:
        if name in SET_HERE:
            raise ValueError(f"chat_template_kwargs can't hold {name}, which has a value already: leave it out")


def with_system(messages: Messages, text: str) -> Messages:
    """The conversation with this system message in place of its own."""
    own = ("system", "developer")
    others = [each for each in messages if not isinstance(each, Mapping) or each.get("role") not in own]
    return [{"role": "system", "content": text}, *others]


def plain_messages(messages: Messages) -> list[dict[str, Any]]:
    """The messages with the parts of each content joined to one text. Raises ValueError for a part that is no text."""
    return [{**message, "content": _joined(message.get("content"), place)} for place, message in enumerate(messages)]


def _joined(content: object, place: int) -> object:
    if not isinstance(content, list | tuple):
        return content
    for number, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f"messages[{place}].content[{number}] is no text: give {{'type': 'text', 'text': ...}}")
    return "".join(part["text"] for part in content)
