"""Controls a runner's process: starts it at its first request, times it out if it hangs, and ends it."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from parlay.bench.provenance import ROOT
from parlay.bench.stopwatch import Reading
from parlay.types import ParlayError

END_SECONDS = 10.0


class Failed(ParlayError):
    """A mode has no answer; the message says why in one line."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Time limits in seconds: for the first answer of a mode, which may load, convert and compile, and for each
    later one."""

    load: float = 420.0
    answer: float = 90.0


class Worker:
    """One process and the modes that it serves. A mode that fails is not asked again; the process is restarted for the
    others.

    Its standard error goes to the file ``log``.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], log: Path, limits: Limits | None = None
    ) -> None:
        self._command = tuple(command)
        self._environment = dict(os.environ) | dict(environment)
        self._log = log
        self._limits = limits or Limits()
        self._process: subprocess.Popen[str] | None = None
        self._replies: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._ready: set[str] = set()
        self._failed: dict[str, str] = {}
        self.version = ""
        """The engine's version, once it has started."""
        self._closed = False

    def decode(self, mode: str, ids: Sequence[int], most: int) -> Reading:
        """Decode ``most`` tokens of one prompt. Raises Failed; after that, every call for the same mode raises it at
        once."""
        if self._closed:
            raise Failed("the run is over")
        if mode in self._failed:
            raise Failed(self._failed[mode])
        try:
            reply = self._ask(mode, {"mode": mode, "ids": list(ids), "most": most})
            if "error" in reply:
                raise Failed(reply["error"])
        except Failed as error:
            self._failed[mode] = str(error)
            raise
        self._ready.add(mode)
        return Reading(**(reply | {"tokens": tuple(reply["tokens"])}))

    def close(self) -> None:
        """End the process and all that it has started. Another thread may be waiting for its answer."""
        self._closed = True
        process = self._process
        if process is not None:
            assert process.stdin is not None
            with suppress(OSError, subprocess.TimeoutExpired):
                process.stdin.close()
                process.wait(END_SECONDS)
            self._kill(process)

    def _kill(self, process: subprocess.Popen[str]) -> None:
        self._process = None
        self._ready.clear()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # it leads a group of its own
        process.wait()

    def _ask(self, mode: str, asked: Mapping[str, Any]) -> dict[str, Any]:
        process = self._running()
        assert process.stdin is not None
        with suppress(OSError):  # it has ended: then there is no reply
            process.stdin.write(json.dumps(asked) + "\n")
            process.stdin.flush()
        return self._reply(process, self._limits.answer if mode in self._ready else self._limits.load)

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None:
            self._process = process = self._start()
            assert process.stdout is not None
            self._replies = queue.SimpleQueue()
            threading.Thread(target=_read, args=(process.stdout, self._replies), daemon=True).start()
            self.version = self._reply(process, self._limits.load)["version"]
        return self._process

    def _start(self) -> subprocess.Popen[str]:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("a", encoding="utf-8") as log:
            return subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=ROOT,
                env=self._environment,
                start_new_session=True,
            )

    def _reply(self, process: subprocess.Popen[str], seconds: float) -> dict[str, Any]:
        """Return the next reply. Raises Failed if none comes in time or the process has ended; the next call starts
        a new one."""
        try:
            line = self._replies.get(timeout=seconds)
        except queue.Empty:
            self._kill(process)
            raise Failed(f"no answer within {seconds:.0f} s") from None
        if line is None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_SECONDS)
            code = process.returncode
            self._kill(process)
            raise Failed(f"the process ended with {code}: {_last_line(self._log)}"[:300])
        reply: dict[str, Any] = json.loads(line)
        return reply


def _read(source: IO[str], replies: queue.SimpleQueue[str | None]) -> None:
    """Pass lines on to a queue, and None at their end."""
    for line in source:
        replies.put(line)
    replies.put(None)


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"
