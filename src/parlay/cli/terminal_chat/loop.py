"""The loop of a chat: reads a line, and runs its command or answers it."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import TextIO

from parlay.cli import Terminated
from parlay.cli.ensemble_flags import quoted
from parlay.cli.terminal_chat.commands import AnswerAgain, Leave, State, run_command
from parlay.cli.terminal_chat.screen import Screen
from parlay.llm.jobs import Stream
from parlay.llm.llm import LLM
from parlay.llm.outputs import CompletionOutput
from parlay.system.terminal import Interrupt, Tint, shown, speed
from parlay.types import ParlayError, SamplingParams

_CHUNK = '"""'
_LEAST_ROOM = 64
"""Least tokens of room for an answer; older messages are dropped until there is that much."""


@dataclass(slots=True)
class Chat:
    """``read(prompt)`` returns a line and raises EOFError at the end; answers go to ``out``, everything else to
    ``notes``."""

    llm: LLM
    state: State
    read: Callable[[str], str]
    out: TextIO
    notes: TextIO
    tint: Tint

    def run(self) -> None:
        """Chat until the user leaves."""
        while True:
            try:
                line = self.read("> ").strip()
                if line.startswith(_CHUNK):
                    self._say(self._rest(line))
                elif line.startswith("/"):
                    self._obey(line)
                else:
                    self._say(line)
            except (Leave, EOFError):
                return
            except Terminated:
                raise
            except KeyboardInterrupt:
                self._note("(/exit or Ctrl-D leaves)")

    def _rest(self, line: str) -> str:
        """Read lines up to the closing triple quotes; ``line`` begins with the opening ones. Raises EOFError if the
        input ends before them."""
        lines = [line.removeprefix(_CHUNK)]
        try:
            while not lines[-1].endswith(_CHUNK):
                lines.append(self.read("… ").rstrip())
        except EOFError:
            self._note(f"error: the last message was not sent: end it with {_CHUNK}")
            raise
        return "\n".join(lines).removesuffix(_CHUNK)

    def _say(self, text: str) -> None:
        if text.strip():
            self.state.conversation.add("user", text.strip())
            self._answer()

    def _obey(self, line: str) -> None:
        before = self.state.settings
        try:
            answer = run_command(self.state, line)
            if self.state.settings.strategy != before.strategy:
                self._try_strategy()
            self._note(answer)
        except AnswerAgain:
            self._answer()
        except (ParlayError, ValueError) as error:
            self.state.settings = before
            self._note(f"error: {error}")

    def _try_strategy(self) -> None:
        """Decode one token with the chosen strategy. Raises ParlayError or ValueError if the strategy can't be used
        here."""
        params = SamplingParams(temperature=0, max_tokens=1)
        with closing(self.llm.stream("a", params, strategy=self.state.settings.strategy, store=False)) as stream:
            list(stream)

    def _answer(self) -> None:
        """Decode an answer to the last message. If that fails, that message is removed again."""
        conversation = self.state.conversation
        before = conversation.messages[:-1]
        try:
            sample = self._decode()
        except (ParlayError, ValueError) as error:
            conversation.messages = before
            self._note(f"error: {' '.join(str(error).split())}")
            return
        except KeyboardInterrupt:  # a second Ctrl-C, which does not wait for the current step
            conversation.messages = before
            raise
        conversation.add("assistant", sample.text)
        metrics = sample.metrics
        ends = {"length": "; cut by max_tokens, /set max_tokens N allows more", "abort": "; interrupted"}
        self._note(
            f"[{metrics.completion_tokens} tokens, {metrics.tokens_per_step:.2f} a step, "
            f"{speed(metrics.tokens_per_second)}, {sample.strategy}{ends.get(sample.finish_reason, '')}]"
        )
        if sample.error is not None:
            self._note(f"error: {sample.error}")
        if sample.origins:
            self._note(quoted(sample))

    def _decode(self) -> CompletionOutput:
        self._make_room()
        settings = self.state.settings
        screen = Screen(self.out, self.tint, lambda: shutil.get_terminal_size().columns)
        stream = self.llm.stream(self.state.conversation.whole(), settings.params, strategy=settings.strategy)
        with Interrupt() as interrupt:
            _write(stream, screen, interrupt)
        return stream.output.outputs[0]

    def _make_room(self) -> None:
        """Drop the oldest messages if the context has no room for an answer, and print that."""
        conversation, dropped = self.state.conversation, 0
        while (room := self._room()) < _LEAST_ROOM and conversation.drop_oldest():
            dropped += 1
        if dropped and room > 0:
            messages = "message and its answer do" if dropped == 1 else "messages and their answers do"
            self._note(
                f"(the context holds {self.llm.engine.longest:,} tokens: the oldest {dropped} {messages} not fit "
                "and are forgotten)"
            )

    def _room(self) -> int:
        """Tokens left for the answer; 0 if the conversation can't be encoded."""
        try:
            job = self.llm.job(self.state.conversation.whole(), self.state.settings.params)
        except ValueError:
            return 0
        return self.llm.engine.longest - len(job.samples[0].request.prompt)

    def _note(self, line: str) -> None:
        print(shown(line, self.notes), file=self.notes, flush=True)


def _write(stream: Stream, screen: Screen, interrupt: Interrupt) -> None:
    """Decode to the end or to Ctrl-C, and show the text as it is committed."""
    try:
        with closing(stream):
            for event in stream:
                screen.write(event.pieces, len(event.token_ids))
                if interrupt.noted:
                    break
    finally:
        screen.end()


def read_line(prompt: str) -> str:
    """Read a line of standard input; a terminal has a prompt, editing and history."""
    if sys.stdin.isatty():
        try:
            return input(prompt)
        except Terminated:
            raise
        except (EOFError, KeyboardInterrupt):
            print()  # ends the prompt's line
            raise
    try:
        line = sys.stdin.buffer.readline().decode("utf-8")  # strict, whatever the locale does
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input is not UTF-8 (byte {error.start}): convert it, such as with iconv") from None
    if not line:
        raise EOFError
    return line.removesuffix("\n").removesuffix("\r")
