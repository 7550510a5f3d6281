"""Commands of a chat, lines that begin with a slash: each changes the conversation, or how answers are decoded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from parlay.cli.flags import HOT, UNLIMITED, hot
from parlay.cli.terminal_chat.conversation import ChatSettings, Conversation, is_text, read_conversation
from parlay.options import UsageError, nearest, user_path, whole
from parlay.system.terminal import counted, short
from parlay.system.user_cache import check_output
from parlay.types import ParlayError, SamplingParams


class Leave(Exception):
    """Raised when the user leaves."""


class AnswerAgain(Exception):
    """Raised when the last message is to be answered again."""


@dataclass(slots=True)
class State:
    """The state that commands may change."""

    conversation: Conversation
    settings: ChatSettings


@dataclass(frozen=True, slots=True)
class ChatCommand:
    """A command; ``run(state, argument)`` returns the line to show. It raises ParlayError or ValueError if something is
    wrong."""

    name: str
    argument: str
    help: str
    run: Callable[[State, str], str]


def run_command(state: State, line: str) -> str:
    """Run a line ``/name argument``; returns what to show.

    Raises ParlayError or ValueError if something is wrong; Leave and AnswerAgain are for the loop.
    """
    name, _, argument = line[1:].strip().partition(" ")
    name = _SYNONYMS.get(name, name)
    if name not in COMMANDS:
        raise ValueError(f"there is no /{short(name)}: {nearest(f'/{name}', [f'/{known}' for known in COMMANDS])}")
    return COMMANDS[name].run(state, argument.strip())


def _help(state: State, argument: str) -> str:
    width = max(len(f"/{each.name} {each.argument}") for each in COMMANDS.values())
    return "\n".join(f"{f'/{each.name} {each.argument}':{width}}  {each.help}" for each in COMMANDS.values())


def _strategy(state: State, argument: str) -> str:
    from parlay.strategies.spelling import parse  # here, as help needs no catalogue

    if argument:
        state.settings = replace(state.settings, strategy=str(parse(argument)))
    return f"strategy: {state.settings.strategy or 'the default'}"


def _system(state: State, argument: str) -> str:
    if not is_text(argument):
        raise ValueError("the system message is not valid Unicode text")
    state.conversation.system = argument
    return "system message set" if argument else "no system message"


def _seed(state: State, argument: str) -> str:
    if argument and not argument.isdecimal():
        raise ValueError(
            f"/seed {short(argument)}: give a whole number of at least 0, or nothing for a new seed each time"
        )
    try:
        seed = whole(argument) if argument else None
    except UsageError as error:
        raise ValueError(f"/seed {error}") from None
    state.settings = replace(state.settings, params=replace(state.settings.params, seed=seed))
    return f"seed: {'new for each answer' if seed is None else seed}"


def _set(state: State, argument: str) -> str:
    """``NAME VALUE`` for a number of `SamplingParams`; ``NAME`` alone shows it, and nothing shows all of them."""
    name, _, text = argument.replace("=", " ").partition(" ")
    name, text = name.replace("-", "_"), text.strip()
    params = state.settings.params
    if not name:
        return ", ".join(f"{each} {value:g}" for each, value in _numbers(params).items())
    if name not in _numbers(params):
        raise ValueError(f"/set {short(name)}: {nearest(name, _numbers(params))}")
    if not text:
        return f"{name}: {_numbers(params)[name]:g}"
    value: Any
    try:
        value = float(text) if name in _FRACTIONS else whole(text)
    except UsageError as error:
        raise ValueError(f"/set {name} {error}") from None
    except ValueError:
        raise ValueError(f"/set {name} {short(text)}: give a number") from None
    given: Any = None if name == "max_tokens" and value == UNLIMITED else value
    state.settings = replace(state.settings, params=replace(params, **{name: given}))
    warning = f" ({hot(value)})" if name == "temperature" and value > HOT else ""
    return f"{name}: {value:g}{warning}"


def _numbers(params: SamplingParams) -> dict[str, float]:
    """The numeric parameters, by name."""
    values = dataclasses.asdict(replace(params, logits_processors=(), structured_outputs=None))
    return {name: UNLIMITED if values[name] is None else values[name] for name in (*_WHOLE, *_FRACTIONS)}


_WHOLE = ("max_tokens", "min_tokens", "top_k")
_FRACTIONS = (
    *("temperature", "top_p", "min_p", "typical_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)


def _save(state: State, argument: str) -> str:
    path = _path("save", argument)
    try:
        check_output(path)
        state.conversation.save(path)
    except OSError as error:
        raise ParlayError(f"/save {short(path)}: {error.strerror}") from None
    except ValueError as error:  # an invalid path, or text that can't be encoded
        raise ParlayError(f"/save {short(path)}: {error}") from None
    return f"saved in {path}"


def _load(state: State, argument: str) -> str:
    state.conversation = read_conversation(_path("load", argument))
    return f"{counted(len(state.conversation.messages), 'message')} loaded"


def _path(name: str, argument: str) -> Path:
    if not argument:
        raise ValueError(f"/{name}: name a file, as in /{name} chat.json")
    return user_path(argument)


def _retry(state: State, argument: str) -> str:
    if not state.conversation.take_back():
        raise ValueError("/retry: there is no message to repeat yet")
    raise AnswerAgain


def _clear(state: State, argument: str) -> str:
    state.conversation.messages.clear()
    return "a new conversation begins; the system message stays"


def _exit(state: State, argument: str) -> str:
    raise Leave


COMMANDS = {
    each.name: each
    for each in (
        ChatCommand("help", "", "list the commands", _help),
        ChatCommand("strategy", "[NAME]", "decode with another strategy, or show which one it is", _strategy),
        ChatCommand("system", "[TEXT]", "set the system message, or remove it", _system),
        ChatCommand("set", "[NAME VALUE]", "set a sampling parameter, as in /set temperature 0, or show them", _set),
        ChatCommand("seed", "[N]", "the same seed gives the same answer; without N a new one each time", _seed),
        ChatCommand("retry", "", "answer the last message again", _retry),
        ChatCommand("save", "FILE", "write the conversation to a JSON file", _save),
        ChatCommand("load", "FILE", "go on with a saved conversation", _load),
        ChatCommand("clear", "", "begin a new conversation", _clear),
        ChatCommand("exit", "", "leave; /quit, /bye and Ctrl-D do too", _exit),
    )
}
"""The commands by name, in the order of /help."""
_SYNONYMS = {"quit": "exit", "bye": "exit", "q": "exit", "?": "help"}
