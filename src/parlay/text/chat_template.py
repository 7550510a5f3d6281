"""Renders a conversation as text with the model's chat template.

A template is a program that comes with a model. It runs in a sandbox with limits (`template_sandbox`), and sees only
plain values. It gets the same variables and the same extensions of jinja2's language as in transformers'
``apply_chat_template``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from parlay.text import template_sandbox
from parlay.text.control_tokens import cut, cut_messages, pieces
from parlay.types import FieldError, MachineBusy, ParlayError, Tokenizer, one_line

Messages = Sequence[Mapping[str, Any]]
"""A conversation: messages {"role": ..., "content": ...}. Content is a text, or a list of {"type": "text", "text":
...}."""

Tools = Sequence[Mapping[str, Any]]
"""Functions that the model may call: a list of {"type": "function", "function": {"name": ..., "parameters": ...}}."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """How a conversation becomes a prompt.

    ``variables`` are passed to the template. ``template`` replaces the model's own. If the template does not know
    ``tools``, they are described in a system message. ``begin_answer``: the prompt ends where the assistant's turn
    begins. ``continue_final``: the prompt ends with the last message, which the answer continues. ``parse_special``:
    control tokens spelled in messages, tools or variables are read as control tokens, not as text.
    """

    tools: Tools = ()
    variables: Mapping[str, Any] = field(default_factory=dict)
    template: str | None = None
    begin_answer: bool = True
    continue_final: bool = False
    parse_special: bool = False


SAMPLING: Mapping[str, float] = {"temperature": 0.7, "top_p": 0.95}
"""How chats are sampled if the model's makers recommend nothing."""

SET_HERE = frozenset(
    {
        *("messages", "conversation", "tools", "documents", "chat_template", "raise_exception", "strftime_now"),
        *("add_generation_prompt", "continue_final_message", "tokenize", "return_dict", "return_tensors"),
        *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"),
    }
)
"""Names that no variable of a request may have, because `render` sets them or transformers reserves them."""

_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Fields in which a message may have its reasoning. Templates read the first or the second."""

_MARK = "[[the answer goes on here]] "
"""Marks the end of the message to be continued. The trailing space shows whether the template strips spaces there."""


NO_TEMPLATE = "this model has no chat template: use generate() with a plain prompt"

T = TypeVar("T")


def in_format(tokenizer: Tokenizer, messages: Messages, options: ChatOptions, write: Callable[..., T]) -> T:
    """Return the conversation in the model's chat format, as ``write`` returns it: `render` or `render_pieces`.

    Raises ParlayError if there is no template or it refuses the conversation; ValueError for a value that is not a
    conversation, for content that is not text, and for variables that `check_variables` refuses.
    """
    if not (options.template or tokenizer.chat_template):
        raise ParlayError(NO_TEMPLATE)
    check_messages(messages)
    check_variables(options.variables)
    plain, tools = told_of_tools(tokenizer, plain_messages(messages), options.tools, options.template)
    try:
        return write(
            tokenizer,
            plain,
            tools=tools,
            variables=options.variables,
            template=options.template,
            begin_answer=options.begin_answer,
            continue_final=options.continue_final,
        )
    except (ValueError, MachineBusy):
        raise
    except Exception as error:  # a template is a program, and may raise anything
        raise ParlayError(f"this model's chat template refuses the conversation: {one_line(error)}") from error


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
    """Return the text of ``messages``. ``tools`` and ``variables`` are passed to the template.

    ``template`` replaces the model's own. ``begin_answer``: the text ends where the assistant's turn begins.
    ``continue_final``: it ends with the last message, which the answer continues. Raises ValueError for a conversation
    that can't be rendered, and TemplateError if the template refuses or fails.
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
    """Render as `render` does, in pieces that are to be encoded one by one (`tokenize.encode_pieces`).

    Control tokens then come only from the template, never from the text of a message, a tool or a variable.
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
"""Matches templates that read tools from the system message, as JSON: Phi-4-mini's."""


def takes_tools(template: str) -> bool:
    return re.search(r"\btools\b", template) is not None


def _check_tools(tools: object) -> None:
    listed = tools if isinstance(tools, Sequence) and not isinstance(tools, str) else [None]
    if not all(isinstance(tool, Mapping) for tool in listed):
        raise FieldError("tools", "must be a list of functions, each {'type': 'function', 'function': {...}}")


def told_of_tools(
    tokenizer: Tokenizer, messages: Messages, tools: Tools, template: str | None = None
) -> tuple[Messages, Tools]:
    """Return messages and tools for `render`. If the template does not know tools, the first system message describes
    them."""
    _check_tools(tools)
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
    """Return the model's template. Of several, it is the one for tools if there are tools, else the default."""
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
"""Matches templates that write tool calls, or write them alone, only if the content is none: DeepSeek R1's."""
_JOINS_ARGUMENTS = re.compile(r"""\barguments(['"]\])?\s*\+""")
"""Matches templates that concatenate a call's arguments, and so need them as JSON text: DeepSeek's."""


def _turn(message: Mapping[str, Any], template: str) -> dict[str, Any]:
    """Return a message without empty fields, with its reasoning under the names that templates read."""
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
    """Return a call with its arguments as JSON text if ``as_text``, else as an object. They may be given in either
    form."""
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
    """Copy the value as plain JSON values, because the sandbox can't control methods of other objects."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # not the string of a subclass
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    raise ValueError(f"a chat template can't be given a value of type {type(value).__name__}: give values of JSON")


def _mark(turn: dict[str, Any], template: str) -> None:
    """Mark the end of the content, so that it can be found in the rendered text."""
    content = turn.get("content")
    if not isinstance(content, str):
        raise ValueError("the last message has no content to continue")
    if "content" not in template:
        raise ValueError("the chat template does not write the content of messages, so that none can be continued")
    turn["content"] = content + _MARK


def _cut(text: str, content: str) -> str:
    """Return the text up to the last mark."""
    before, mark, after = text.rpartition(_MARK.strip())
    if not mark or content.strip() not in text:
        raise ValueError("the chat template changes the last message, so that it can't be continued")
    return (before if after.startswith(" ") else before.rstrip()).replace(_MARK, "")


def check_messages(messages: object) -> None:
    """Raises ValueError for a value that is not a list of messages, each with a role."""
    listed = messages if isinstance(messages, Sequence) and not isinstance(messages, str | bytes) else [None]
    if not all(isinstance(each, Mapping) for each in listed):
        raise ValueError("a conversation is a list of messages, each {'role': ..., 'content': ...}")
    for place, message in enumerate(listed):
        if not isinstance(message.get("role"), str):
            raise ValueError(f"messages[{place}] has no role: give it one, such as user")


def check_variables(variables: Mapping[str, Any]) -> None:
    """Raises ValueError for a variable that can't be passed to a template."""
    for name in variables:
        if name in SET_HERE:
            raise FieldError("chat_template_kwargs", f"can't hold {name}, which has a value already: remove it")


def with_system(messages: Messages, text: str) -> Messages:
    """Return the conversation with ``text`` as its only system message."""
    own = ("system", "developer")
    others = [each for each in messages if not isinstance(each, Mapping) or each.get("role") not in own]
    return [{"role": "system", "content": text}, *others]


def plain_messages(messages: Messages) -> list[dict[str, Any]]:
    """Join the parts of each message's content to one text.

    Raises ValueError for a part that is not text, and for a message without content that is not an assistant's, which
    may hold calls of tools alone.
    """
    for place, message in enumerate(messages):
        if message.get("content") is None and message.get("role") != "assistant":
            raise ValueError(f"messages[{place}] has no content: give it a text")
    return [{**message, "content": _joined(message.get("content"), place)} for place, message in enumerate(messages)]


def _joined(content: object, place: int) -> object:
    if not isinstance(content, list | tuple):
        return content
    for number, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f"messages[{place}].content[{number}] is no text: give {{'type': 'text', 'text': ...}}")
    return "".join(part["text"] for part in content)
