"""`parlay chat`: talk with a model at the terminal."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from parlay.cli import flags
from parlay.cli.ensemble_flags import add_ensemble_flags
from parlay.cli.opening import named_model, open_llm
from parlay.cli.parser import unicode_text
from parlay.system.terminal import Tint
from parlay.text.chat_template import SAMPLING

if TYPE_CHECKING:
    from parlay.cli.terminal_chat.commands import State
    from parlay.strategies.spelling import StrategySpec

DEFAULTS: Mapping[str, object] = {"max_tokens": 1024, **SAMPLING}
"""Used where the model's makers recommend nothing."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("named", nargs="?", metavar="MODEL", help=flags.MODEL)
    parser.add_argument("--model", help="the same as MODEL")
    flags.add_loading_flags(parser)
    parser.add_argument("--system", type=unicode_text, default="", metavar="TEXT", help="system message")
    parser.add_argument("--load", type=Path, metavar="FILE", help="continue a conversation that /save wrote")
    flags.add_context_flag(parser)
    flags.add_tokenizer_flag(parser)
    flags.add_strategy_flags(parser, "decoding strategy; parlay strategies lists them (default: auto)")
    flags.add_router_memory_flag(parser)
    parser.set_defaults(certificates=[])
    flags.add_sampling_flags(
        parser, DEFAULTS, "values that the model's makers recommend take the place of these defaults"
    )
    add_ensemble_flags(parser)
    flags.add_rank_flags(parser)


def run(options: argparse.Namespace) -> int:
    strategy = flags.chosen_strategy(options)
    from parlay.cli.terminal_chat.commands import State
    from parlay.cli.terminal_chat.conversation import ChatSettings, Conversation, read_conversation
    from parlay.models.fetch.pulled import named_or_default
    from parlay.models.fetch.resolving import resolve

    conversation = read_conversation(options.load) if options.load else Conversation()
    if options.system:
        conversation.system = options.system
    options.model = named_or_default(named_model(options))
    resolve(options.model)  # reports a missing model before importing torch, which takes seconds
    from parlay.models.sampling_defaults import sampling_defaults

    settings = ChatSettings(flags.sampling_params(options, {**DEFAULTS, **sampling_defaults(options.model)}))
    _talk(options, strategy, State(conversation, settings))
    return 0


def _talk(options: argparse.Namespace, strategy: StrategySpec | None, state: State) -> None:
    from parlay.cli.terminal_chat.loop import Chat, read_line

    if isinstance(sys.stdin, io.TextIOWrapper) and sys.stdin.isatty():
        import readline  # noqa: F401 (line editing and history)

        sys.stdin.reconfigure(errors="surrogateescape")  # a key that is not text spoils only its line
    with open_llm(options, strategy) as llm:
        if llm.tokenizer is None or not llm.tokenizer.chat_template:
            raise ValueError(
                f"{options.model} has no chat template: use parlay generate, or name a tokenizer with one by "
                "--tokenizer"
            )
        print(f"{options.model}: /help lists the commands, /exit leaves", file=sys.stderr)
        Chat(llm, state, read_line, sys.stdout, sys.stderr, Tint(sys.stdout)).run()
