"""Measure tokens per step, texts and correct answers of canvas models: `python -m benchmarks.canvases`.

``tasks DIR`` writes training texts and questions: copy, reverse, sort or replace letters. ``answers`` lets a model
answer prompts greedily, so that it can be trained on its own texts. ``measure`` decodes prompts with each strategy and
prints a JSON line for each.

``mixed DIR`` writes texts of three kinds: look-ups of fields, the same fields as JSON, and sums worked out step by
step. Requests of the first two kinds may be decoded lossily under a floor; sums must be exact. ``serve`` sends such
requests to a server: first with one strategy for all of them, then with what each request allows.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.canvases.decoding import measure, write_answers
from benchmarks.canvases.texts import TOKENS, write_mixed, write_tasks
from benchmarks.canvases.trace import serve
from benchmarks.commands import one_line_errors
from benchmarks.options import command_parser


@one_line_errors("canvases")
def main() -> None:
    parser = command_parser("canvases", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    _add_texts(commands)
    _add_serve(commands)
    _add_decoding(commands)
    options = parser.parse_args()
    options.run(options)


def _add_texts(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    for name, write, count, held in (("tasks", write_tasks, 4000, 200), ("mixed", write_mixed, 30_000, 1200)):
        texts = commands.add_parser(name)
        texts.add_argument("folder", type=Path)
        texts.add_argument("--count", type=int, default=count)
        texts.add_argument("--held", type=int, default=held)
        texts.add_argument("--seed", type=int, default=0)
        texts.set_defaults(run=write)


def _add_serve(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    serving = commands.add_parser("serve")
    serving.add_argument("--model", required=True)
    serving.add_argument("--data", type=Path, required=True)
    serving.add_argument(
        "--certificate", type=Path, help="written by parlay calibrate; without it every request is exact"
    )
    serving.add_argument("--strategies", nargs="+", default=["none", "auto"], help="the first must decode exactly")
    serving.add_argument("--usual", default="auto", help="the server's strategy for requests that name none")
    serving.add_argument("--floor", default="lossy:floor=0.95")
    serving.add_argument("--prompts", type=int, default=60, help="measured requests; others are sent first, unmeasured")
    serving.add_argument(
        "--kinds",
        nargs="+",
        default=[*TOKENS],
        choices=TOKENS,
        help="kinds of requests, in the order in which they repeat",
    )
    serving.add_argument("--clients", type=int, default=1, help="requests at once")
    serving.add_argument("--rounds", type=int, default=5)
    serving.add_argument("--audit-share", type=float, default=0.02)
    serving.set_defaults(run=serve)


def _add_decoding(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    answering = commands.add_parser("answers")
    answering.add_argument("--model", required=True)
    answering.add_argument("--data", type=Path, required=True)
    answering.add_argument("--out", type=Path, required=True)
    answering.add_argument("--prompts", type=int, default=1000)
    answering.add_argument("--tokens", type=int, default=112)
    answering.set_defaults(run=write_answers)
    measuring = commands.add_parser("measure")
    measuring.add_argument("--model", required=True)
    measuring.add_argument("--data", type=Path, required=True)
    measuring.add_argument("--strategies", nargs="+", default=["none"])
    measuring.add_argument("--prompts", type=int, default=100)
    measuring.add_argument("--tokens", type=int, default=64)
    measuring.add_argument("--temperature", type=float, default=0.0)
    measuring.add_argument("--dtype", default="float32")
    measuring.add_argument(
        "--together",
        type=int,
        default=32,
        help="prompts decoded at once; the more there are, the fewer draft rows each gets",
    )
    measuring.add_argument("--chat", action="store_true", help="ask in the model's chat template")
    measuring.set_defaults(run=measure)


if __name__ == "__main__":
    main()
