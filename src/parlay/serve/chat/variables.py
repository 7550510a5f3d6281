"""Variables of chat templates: which of those that a request brings its model's template knows."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from parlay.llm.input_processor import check_variables
from parlay.serve.chat.request import ChatRequest
from parlay.serve.errors import ApiError
from parlay.serve.protocol.sampling_from_body import FieldNames, refused


@dataclass(frozen=True, slots=True)
class Variables:
    """``values`` are for the template. ``unused`` are the fields of the request that it knows nothing of."""

    values: dict[str, Any]
    unused: tuple[str, ...]


def template_variables(chat: ChatRequest, template: str, names: FieldNames) -> Variables:
    """Raises ApiError for a variable that no request may set, and for a verbosity that the template does not know."""
    try:
        check_variables(chat.variables)
    except ValueError as error:
        raise refused(error, names) from None
    values, unused = {}, []
    for name, value in chat.variables.items():
        if knows(template, name):
            values[name] = value
        else:
            unused.append(f"{names.others.get('chat_template_kwargs', 'chat_template_kwargs')}.{name}")
    if chat.effort is not None:
        found = _effort(chat.effort, template)
        values = found | values
        unused += [] if found else [names.others.get("reasoning_effort", "reasoning_effort")]
    if chat.verbosity is not None:
        if knows(template, "verbosity"):
            values.setdefault("verbosity", chat.verbosity)
        else:
            unused.append(_unused_verbosity(chat.verbosity, names))
    if not knows(template, "reasoning_content"):
        told = enumerate(chat.messages)
        unused += [f"{names.prompt}[{place}].reasoning_content" for place, one in told if one.reasoning is not None]
    return Variables(values, tuple(unused))


def _unused_verbosity(verbosity: str, names: FieldNames) -> str:
    """The field's name. Raises ApiError if leaving it out changes what the client may expect."""
    field = names.others.get("verbosity", "verbosity")
    if verbosity != "medium":
        message = f"{field} is {verbosity!r}, and this model knows none: leave it out"
        raise ApiError(400, message, field, "unsupported_field")
    return field


def _effort(effort: str, template: str) -> dict[str, Any]:
    """A template may know degrees of reasoning, or only whether there is any."""
    if knows(template, "reasoning_effort"):
        return {"reasoning_effort": effort}
    return {"enable_thinking": effort != "none"} if knows(template, "enable_thinking") else {}


def knows(template: str, name: str) -> bool:
    return re.search(rf"\b{re.escape(name)}\b", template) is not None
