"""The client of a drafting service: one connection, a thread that waits for it, and a deadline for all callers."""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from queue import SimpleQueue
from typing import Any, Protocol
from urllib.parse import urlsplit
from uuid import uuid4

from parlay.drafters.remote.messages import DRAFTS_PATH, INFO_PATH, VERSION, Answer, BadAnswer, TextUpdate, read_answers
from parlay.options import UsageError
from parlay.types import ParlayError

KEY_VARIABLE = "PARLAY_DRAFTER_KEY"
"""Environment variable with the API key of a service, if it needs one."""
_SECONDS = 10.0
"""The longest that the thread waits for a service. Callers wait only until their deadline."""
_LATE = 8
"""How many late answers in a row are logged as a failure."""
_MOST_BYTES = 1 << 24
_log = logging.getLogger(__name__)


class OtherVocabulary(UsageError):
    """The service's token ids are of another vocabulary."""


class Link(Protocol):
    """Asks a service for drafts."""

    def ask(self, updates: Sequence[TextUpdate], over: Sequence[int]) -> list[Answer] | None:
        """The answer to each update; None if there is none in time. ``over``: texts to forget."""
        ...


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The meaning of ids: how many there are, and the tokenizer's fingerprint if known."""

    size: int
    fingerprint: str = ""


class Connection:
    """Sends requests to one URL over a connection that stays open. One thread uses it."""

    def __init__(self, url: str, timeout: float = _SECONDS) -> None:
        """Raises UsageError if ``url`` is not the URL of a service."""
        try:
            parts = urlsplit(url)
            port = parts.port
            (parts.hostname or "").encode("idna")
        except ValueError:
            raise UsageError(f"url must be http://HOST:PORT, got {url:.80}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"url must be http://HOST:PORT, got {url:.80}")
        if parts.username or parts.password:
            raise UsageError(f"url must not contain a key, because logs show it: put the key into {KEY_VARIABLE}")
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        self._make: Callable[[], HTTPConnection] = lambda: kind(parts.hostname or "", port, timeout=timeout)
        self._prefix = parts.path.rstrip("/")
        key = os.environ.get(KEY_VARIABLE, "").strip()
        if not key.isascii() or not key.isprintable():
            raise UsageError(f"{KEY_VARIABLE} must be an API key of printable ASCII without spaces")
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._open: HTTPConnection | None = None

    def send(self, method: str, path: str, body: bytes | None = None) -> object:
        """Send a request and return the JSON of the reply. Raises BadAnswer if there is none, or it is not JSON."""
        for last in (self._open is None, True):  # the service may have closed an idle connection
            try:
                return self._try(method, path, body)
            except (OSError, HTTPException) as error:
                self.close()
                if last:
                    raise BadAnswer(f"no answer ({error or type(error).__name__})") from None
        raise AssertionError

    def _try(self, method: str, path: str, body: bytes | None) -> object:
        connection = self._open = self._open or self._make()
        connection.request(method, self._prefix + path, body, self._headers)
        response = connection.getresponse()
        content = response.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            self.close()
            raise BadAnswer(f"it answered with more than {_MOST_BYTES} bytes")
        try:
            reply = json.loads(content)
        except (ValueError, RecursionError):
            reply = None
        if response.status != 200:
            raise BadAnswer(f"it answered with status {response.status}{_said(reply)}")
        if reply is None:
            raise BadAnswer("it did not answer with JSON")
        return reply

    def close(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None

    def cut(self) -> None:
        """Abort the request under way, from any thread: an answer that trickles in would never end."""
        opened = self._open
        if opened is not None and isinstance(opened.sock, socket.socket):
            with suppress(OSError):
                opened.sock.shutdown(socket.SHUT_RDWR)


def _said(reply: object) -> str:
    error = reply.get("error") if isinstance(reply, Mapping) else None
    message = error.get("message") if isinstance(error, Mapping) else None
    return f": {' '.join(message.split())[:200]}" if isinstance(message, str) else ""


@dataclass(eq=False)
class _Job:
    updates: Sequence[TextUpdate]
    over: Sequence[int]
    asked: float
    answers: list[Answer] = field(default_factory=list)
    error: ParlayError | None = None
    done: threading.Event = field(default_factory=threading.Event)


class ServiceLink:
    """A `Link` over HTTP. Callers wait ``deadline`` seconds at most, and a failed service is left alone for ``retry``.

    While a late answer is outstanding, nothing else is asked. A failure is logged once, until the service answers
    again; a few late answers are not logged.
    """

    def __init__(
        self,
        url: str,
        vocabulary: Vocabulary,
        source: str,
        *,
        deadline: float,
        retry: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Ask the service what it is. Raises UsageError for an invalid URL, and for a service with another vocabulary.

        If it does not answer now, it is asked again later.
        """
        self._connection = Connection(url)
        self._url, self._vocabulary, self._source = url, vocabulary, source
        self._deadline, self._retry, self._clock = deadline, retry, clock
        self._client = uuid4().hex
        self._checked = False
        self._again_at = 0.0
        self._failed = False
        self._late: _Job | None = None
        self._late_ones = 0
        """Answers in a row that came after the deadline, or have not come."""
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        try:
            self._check()
        except BadAnswer as error:
            self._fail(error)
        self._thread = threading.Thread(target=self._work, name="parlay-drafts", daemon=True)
        self._thread.start()

    def ask(self, updates: Sequence[TextUpdate], over: Sequence[int]) -> list[Answer] | None:
        if self._is_waiting() or self._clock() < self._again_at:
            return None
        job = _Job(updates, over, self._clock())
        self._jobs.put(job)
        if not job.done.wait(self._deadline):
            self._note_late(job)
            return None
        if job.error is not None:
            self._fail(job.error)
            return None
        self._late_ones = 0
        if self._failed:
            self._failed = False
            _log.warning("the drafter at %s answers again", self._url)
        return job.answers

    def _is_waiting(self) -> bool:
        """Whether a late answer is outstanding. If it takes too long, the request is aborted."""
        if self._late is None:
            return False
        if not self._late.done.is_set():
            if self._clock() - self._late.asked > 2 * _SECONDS:
                self._connection.cut()
            return True
        late, self._late = self._late, None
        if late.error is not None:
            self._fail(late.error)
        return False

    def _note_late(self, job: _Job) -> None:
        self._late = job
        self._late_ones += 1
        if self._late_ones == _LATE and not self._failed:
            self._failed = True
            _log.warning(
                "the drafter at %s: %d answers in a row took over %g ms (deadline_ms): requests go on without drafts",
                self._url,
                _LATE,
                1000 * self._deadline,
            )

    def close(self) -> None:
        """Tell the thread to end, without waiting for it."""
        self._jobs.put(None)

    def _fail(self, error: ParlayError) -> None:
        self._again_at = self._clock() + self._retry
        if not self._failed:
            self._failed = True
            _log.warning(
                "the drafter at %s: %s; requests are decoded without drafts, and it is asked again every %g seconds",
                self._url,
                error,
                self._retry,
            )

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._check()
                job.answers = self._drafts(job)
            except ParlayError as error:
                self._checked = False
                job.error = error
            except Exception as error:  # the thread must live on, or all callers would wait for it
                self._checked = False
                job.error = BadAnswer(f"{type(error).__name__}: {error}")
            job.done.set()
        self._connection.close()

    def _drafts(self, job: _Job) -> list[Answer]:
        body: dict[str, Any] = {
            "client": self._client,
            "tokenizer": self._vocabulary.fingerprint,
            "over": list(job.over),
            "texts": [update.as_json() for update in job.updates],
        }
        content = json.dumps(body, separators=(",", ":")).encode()
        reply = self._connection.send("POST", DRAFTS_PATH, content)
        return read_answers(reply, job.updates, self._vocabulary.size, self._source)

    def _check(self) -> None:
        """Ask for the service's vocabulary, once per working connection. Raises OtherVocabulary, BadAnswer."""
        if self._checked:
            return
        info = self._connection.send("GET", INFO_PATH)
        if not isinstance(info, Mapping) or info.get("version") != VERSION:
            raise BadAnswer(f"it is not a drafter of version {VERSION}: start it with parlay serve --drafter-only")
        known, theirs = self._vocabulary, info.get("tokenizer")
        if known.fingerprint and theirs and theirs != known.fingerprint:
            raise OtherVocabulary(
                f"the drafter at {self._url} has another tokenizer than the target: choose a model with the target's"
            )
        if not (known.fingerprint and theirs) and info.get("vocab_size") != known.size:
            raise OtherVocabulary(
                f"the drafter at {self._url} has a vocabulary of {info.get('vocab_size')!s:.20} tokens and the "
                f"target one of {known.size}: choose a model with the target's tokenizer"
            )
        self._checked = True
