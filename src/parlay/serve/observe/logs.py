"""The log: one line per finished request, and a formatter for lines of JSON."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime

from parlay.serve.finished import Finished


class JsonLines(logging.Formatter):
    """Formats a record as a JSON object in one line: ``time``, ``level``, ``logger``, ``message``, and ``request`` and
    ``error`` if there are any."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if "request" in record.__dict__:
            entry["request"] = record.__dict__["request"]
        if record.exc_info:
            entry["error"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False, default=str)


logger = logging.getLogger(__name__)


def log_request(request: Finished) -> None:
    """Log a finished request at level info: numbers and names, but no text."""
    if not logger.isEnabledFor(logging.INFO):
        return
    entry = _fields(request)
    logger.info("%s", " ".join(f"{name}={value}" for name, value in entry.items()), extra={"request": entry})


def _fields(request: Finished) -> dict[str, str | int | float | None]:
    first = request.output.outputs[0]
    return {
        "id": request.output.request_id,
        "request_id": request.request_id,
        "model": request.model,
        "strategy": first.strategy,
        "finish_reason": ",".join(sample.finish_reason for sample in request.output.outputs),
        "prompt_tokens": len(request.output.prompt_token_ids),
        "cached_tokens": first.metrics.cached_tokens,
        "completion_tokens": request.tokens,
        "tokens_per_step": round(first.metrics.tokens_per_step, 3),
        "seconds": round(request.seconds, 6),
        "queue_seconds": round(request.queue_seconds, 6),
        "first_token_seconds": round(request.seconds_to_first, 6),
    }
