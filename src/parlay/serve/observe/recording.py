"""Records prompts and answers in files, so that drafters can be trained on a server's own traffic: `--record`.

Only requests of keys whose owners agreed are kept, after masking, and only up to a number of bytes. A separate thread
writes: no request waits for the disk, and if it is too slow or full, records are lost.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from queue import Full, Queue

from parlay.serve.finished import Finished
from parlay.types import ParlayError

MASK = "[masked]"
_NAME = "traffic-{:06d}.jsonl"
_FILES = 8
"""Number of files among which the allowed bytes are divided; the oldest is deleted for a new one."""
_WAITING = 256
"""Most requests that wait to be written; further ones are dropped."""
_KEPT_ENDS = ("stop", "length")

logger = logging.getLogger(__name__)


class TrafficRecord:
    """Writes each finished sample as a line ``{"prompt": TEXT, "answer": TEXT, "framed": true}``.

    ``framed`` means that both texts are as the model saw them, with the template's special tokens. ``owners`` are
    hashes of the keys whose requests are kept; a request with ``"store": false`` never is. Text that matches one of
    ``masks`` is replaced by `MASK`. Raises ParlayError if ``folder`` can't be written to.
    """

    def __init__(
        self, folder: Path, owners: frozenset[str], *, most_bytes: int, masks: Sequence[re.Pattern[str]] = ()
    ) -> None:
        self._owners, self._masks = owners, masks
        self._files = RotatedFiles(folder, most_bytes)
        self._queue: Queue[Finished | None] = Queue(_WAITING)
        self._losing = False
        self._thread = threading.Thread(target=self._write, name="parlay-record", daemon=True)
        self._thread.start()

    def finished(self, request: Finished) -> None:
        """Queue the request's samples without blocking."""
        if request.owner not in self._owners or not request.store or request.tokenizer is None:
            return
        try:
            self._queue.put_nowait(request)
        except Full:
            self._lose("they come faster than they can be written")

    def close(self) -> None:
        """Write what is queued, and stop."""
        self._queue.put(None)
        self._thread.join()
        self._files.close()

    def _write(self) -> None:
        while (request := self._queue.get()) is not None:
            try:
                for line in self._lines(request):
                    self._files.write(line)
            except OSError as error:
                self._lose(str(error))
            except Exception:  # a model's own tokenizer may raise anything
                logger.exception("a request could not be recorded")

    def _lines(self, request: Finished) -> Iterator[bytes]:
        tokenizer = request.tokenizer
        assert tokenizer is not None, "`finished` has seen to it"
        prompt = self._masked(tokenizer.decode(request.output.prompt_token_ids, skip_special_tokens=False))
        for sample in request.output.outputs:
            if sample.finish_reason in _KEPT_ENDS and sample.token_ids:
                answer = self._masked(tokenizer.decode(sample.token_ids, skip_special_tokens=False))
                line = json.dumps({"prompt": prompt, "answer": answer, "framed": True}, ensure_ascii=False)
                yield f"{line}\n".encode(errors="replace")

    def _masked(self, text: str) -> str:
        for mask in self._masks:
            text = mask.sub(MASK, text)
        return text

    def _lose(self, reason: str) -> None:
        """Warn once that requests are not recorded."""
        if not self._losing:
            self._losing = True
            logger.warning("some requests are not recorded: %s", reason)


class RotatedFiles:
    """Files in ``folder`` that only this user can read, of at most ``most_bytes`` in all, including those of earlier
    runs.

    Raises ParlayError if none can be written.
    """

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self._folder, self._most = folder, most_bytes
        self._part = max(1, most_bytes // _FILES)
        self._open: int | None = None
        self._size = 0
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._next_file()
        except OSError as error:
            raise ParlayError(f"can't record in {folder}: {error.strerror}") from error

    def write(self, line: bytes) -> None:
        """Write a line in one system call, so that no file has half a line. A line longer than a file's limit is
        dropped."""
        if len(line) > self._part:
            return
        if self._open is None or self._size + len(line) > self._part:
            self._next_file()
        assert self._open is not None
        os.write(self._open, line)
        self._size += len(line)

    def close(self) -> None:
        if self._open is not None:
            os.close(self._open)
            self._open = None

    def _next_file(self) -> None:
        self.close()
        found = sorted(self._folder.glob("traffic-*.jsonl"))
        sizes = {path: path.stat().st_size for path in found}
        for path in found:
            if sum(sizes.values()) + self._part > self._most:
                del sizes[path]
                path.unlink()
        number = 1 + max((int(path.stem.rpartition("-")[2]) for path in found), default=0)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        self._open, self._size = os.open(self._folder / _NAME.format(number), flags, 0o600), 0
