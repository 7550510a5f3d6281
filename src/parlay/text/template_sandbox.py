"""Renders chat templates, which are programs that come with a model.

Templates run in jinja2's sandbox, which denies access to Python's internals; only the filters and functions that chat
templates use are offered. A sandbox can't stop every way to waste time. So every unknown template runs in a process of
its own, which is killed if it takes too much time or memory.
"""

from __future__ import annotations

import hashlib
import json
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from parlay.system.bounded_process import Answer, BoundedProcess, LimitMet, NoAnswer, serve
from parlay.types import MachineBusy

KNOWN = frozenset(
    {
        "eb753c5bc18237a05e1f35b469ad9469a0fc6e66966937b0af3ec8c56b1e0de1",  # parlay-mini
        "872be49dbb638044ad01b60388f48d469ff2980e5f0dccdc22ec907db54d0788",  # SmolLM2
        "cd8e9439f0570856fd70470bf8889ebd8b5d1107207f67a5efb46e342330527f",  # Qwen2.5
        "d5495a1e5db0611132a97e46a65dbb64a642a499421228b9c8b93229097fa9a4",  # Qwen2.5-Coder
    }
)
"""SHA-256 of templates that were reviewed and found harmless; they are rendered in this process."""

CPU_SECONDS = 2.0
"""Seconds of CPU time for one rendering. A conversation of 10 million characters takes a tenth of that."""
MEMORY = 512 << 20
"""Bytes of memory for one rendering."""
STACK = 16 << 20
MOST_TEXT = 64 << 20
"""The most characters that a template may write."""

_FILTERS = frozenset(
    {
        *("abs", "batch", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float", "format"),
        *("groupby", "indent", "int", "items", "join", "last", "length", "list", "lower", "map", "max", "min"),
        *("reject", "rejectattr", "replace", "reverse", "round", "safe", "select", "selectattr", "slice", "sort"),
        *("string", "sum", "title", "trim", "truncate", "unique", "upper", "urlencode"),
    }
)


def render(template: str, variables: dict[str, Any]) -> str:
    """Return the text that a template writes. ``variables`` are JSON values.

    Raises TemplateError if the template refuses the conversation, fails, or exceeds a limit, and MachineBusy if its
    process got too little CPU time to answer.
    """
    if hashlib.sha256(template.encode(errors="replace")).hexdigest() in KNOWN:
        return _compiled(template).render(variables)
    question = json.dumps([template, variables]).encode()
    try:
        answer = json.loads(_process().ask(question, CPU_SECONDS))
    except NoAnswer as error:
        raise MachineBusy(f"the chat template took more than {error}, on a busy machine: try again") from None
    except LimitMet as error:
        raise TemplateError(f"it takes more than {error}") from None
    if "error" in answer:
        raise TemplateError(answer["error"])
    return str(answer["text"])


def prepare(template: str) -> None:
    """Start the process now, so that the first rendering of an unknown template need not wait for it."""
    if hashlib.sha256(template.encode(errors="replace")).hexdigest() not in KNOWN:
        _process().start()


@lru_cache(maxsize=1)
def _process() -> BoundedProcess:
    return BoundedProcess("parlay.text.template_sandbox", b"", "a chat template")


def _answering(first: bytes) -> Answer:
    return _answer


def _answer(question: bytes) -> bytes:
    template, variables = json.loads(question)
    try:
        text = _compiled(template).render(variables)
        if len(text) > MOST_TEXT:
            raise SecurityError(f"it writes {len(text)} characters, and the limit is {MOST_TEXT}")
        return json.dumps({"text": text}).encode()
    except MemoryError:
        return json.dumps({"error": "it takes more than the memory allowed"}).encode()
    except Exception as error:  # a template can fail in any way
        return json.dumps({"error": str(error) or type(error).__name__}).encode()


class _Generation(Extension):
    """``{% generation %}``, which marks the assistant's text for training. It renders its content unchanged."""

    tags = {"generation"}  # noqa: RUF012 (the type that jinja2 declares)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Namespace(Namespace):
    """jinja2's namespace, which refuses names that begin with an underscore: they could give access to Python's
    internals."""

    def __init__(*args: Any, **attributes: Any) -> None:
        self, *given = args
        for name in dict(*given, **attributes):
            _refuse_private(name)
        Namespace.__init__(self, *given, **attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        Namespace.__setitem__(self, name, value)


def _refuse_private(name: object) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"a chat template can't store {name!r}: names may not begin with an underscore")


class _Dict:
    """Lets templates call ``dict`` without access to the class itself."""

    def __call__(self, *given: Any, **items: Any) -> dict[str, Any]:
        return dict(*given, **items)

    def fromkeys(self, names: Any, value: Any = None) -> dict[str, Any]:
        return dict.fromkeys(names, value)


@lru_cache(maxsize=64)
def _compiled(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters = {name: environment.filters[name] for name in _FILTERS} | {"tojson": _to_json}
    environment.globals = {
        "range": environment.globals["range"],
        "raise_exception": _refuse,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "namespace": _Namespace,
        "dict": _Dict(),
    }
    return environment.from_string(template)


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Format a value as JSON, without the HTML escapes of jinja2's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


if __name__ == "__main__":
    serve(_answering, memory=MEMORY, stack=STACK)
