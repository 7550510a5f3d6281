"""Replies of `/completion` and `/infill`, whole and as a stream of events."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import to_json

from parlay.llm.jobs import Sample
from parlay.llm.outputs import CompletionOutput, RequestOutput, StreamEvent
from parlay.serve.errors import ApiError
from parlay.serve.llama_server import LAST_FIELD
from parlay.serve.protocol.answering import Chunk
from parlay.serve.protocol.resume_comments import EVENT_STREAM
from parlay.serve.protocol.usage import summary
from parlay.types import Metrics, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaShape:
    """The values that all replies to one request share. ``fields`` are the fields to return; None: all.

    ``begun`` is the beginning of the answer, which the client has already: its text and tokens are not told.
    """

    model: str
    params: SamplingParams
    max_model_len: int
    silent: bool
    tokens: bool
    fields: Sequence[str] | None
    begun: str = ""

    def given_tokens(self, ends: Sequence[int]) -> int:
        """How many tokens write nothing that the client lacks, given the text's length after each token."""
        return bisect_right(ends, len(self.begun)) if self.begun else 0

    def reply(self, output: RequestOutput, place: int = 0, *, streamed: bool = False) -> dict[str, Any]:
        """The whole answer to the prompt at ``place``, or with ``streamed`` the last event of a stream, whose text has
        been sent."""
        sample = output.outputs[0]
        ids = () if self.silent else sample.token_ids[self.given_tokens(sample.text_ends) :]
        whole = {
            "index": place,
            "content": "" if streamed or self.silent else sample.text[len(self.begun) :],
            "tokens": [] if streamed or not self.tokens else list(ids),
            "id_slot": 0,
            LAST_FIELD: True,
            "model": self.model,
            "tokens_predicted": len(ids),
            "tokens_evaluated": len(output.prompt_token_ids),
            "generation_settings": self._settings(sample),
            "prompt": output.prompt or "",
            "has_new_line": "\n" in sample.text,
            "truncated": False,
            **_stop(sample),
            "tokens_cached": len(output.prompt_token_ids) + len(ids),
            "timings": _timings(sample.metrics, len(ids)),
            "parlay": summary([sample]),
        }
        return whole if self.fields is None else _chosen(whole, self.fields)

    def _settings(self, sample: CompletionOutput) -> dict[str, Any]:
        params = self.params
        return {
            "n_predict": 0 if self.silent else -1 if params.max_tokens is None else params.max_tokens,
            "n_ctx": self.max_model_len,
            "seed": sample.seed,
            "temperature": params.temperature,
            "top_k": params.top_k,
            "top_p": params.top_p,
            "min_p": params.min_p,
            "typical_p": params.typical_p,
            "repeat_penalty": params.repetition_penalty,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "stop": [params.stop] if isinstance(params.stop, str) else list(params.stop or ()),
            "ignore_eos": params.ignore_eos,
        }


def _stop(sample: CompletionOutput) -> dict[str, str]:
    """Whether a stop text, an end token or a limit ended the answer."""
    word = sample.stop_reason if isinstance(sample.stop_reason, str) else ""
    kind = "word" if word else "eos" if sample.finish_reason == "stop" else "limit"
    return {"stop_type": kind, "stopping_word": word}


def _timings(metrics: Metrics, predicted: int) -> dict[str, float]:
    read = metrics.prompt_tokens - metrics.cached_tokens
    reading = metrics.prefill_seconds * 1e3
    predicting = (metrics.seconds - metrics.prefill_seconds) * 1e3
    return {
        "cache_n": metrics.cached_tokens,
        "prompt_n": read,
        "prompt_ms": reading,
        "prompt_per_token_ms": reading / max(read, 1),
        "prompt_per_second": read / reading * 1e3 if reading else 0.0,
        "predicted_n": predicted,
        "predicted_ms": predicting,
        "predicted_per_token_ms": predicting / max(predicted, 1),
        "predicted_per_second": predicted / predicting * 1e3 if predicting else 0.0,
        "draft_n": metrics.draft_tokens,
        "draft_n_accepted": metrics.accepted_tokens,
    }


def _chosen(whole: Mapping[str, Any], fields: Sequence[str]) -> dict[str, Any]:
    """The named fields; a nested one, such as ``timings/prompt_n``, moves to the top level. Missing fields are left
    out."""
    found: dict[str, Any] = {}
    for path in fields:
        value: Any = whole
        for name in path.split("/"):
            value = value.get(name) if isinstance(value, Mapping) else None
        if value is not None:
            found[path.rpartition("/")[2]] = value
    return found


class _EventFrames:
    """Server-sent events without names, and without a closing event."""

    media_type = EVENT_STREAM
    end = b""

    def encode(self, chunk: Chunk) -> bytes:
        return b"data: " + to_json(chunk) + b"\n\n"


class LlamaChunks:
    """Turns what each step adds into the events of a stream."""

    frames = _EventFrames()

    def __init__(self, shape: LlamaShape, sample: Sample) -> None:
        self._shape, self._sample, self._prompt_tokens = shape, sample, len(sample.request.prompt)
        self._told = len(sample.tokens)  # sent by the server that began the stream
        self._begun = max(0, len(shape.begun) - len(sample.released))

    def opening(self) -> Sequence[Chunk]:
        return []

    def add(self, place: int, event: StreamEvent) -> Sequence[Chunk]:
        del place  # there is only one job
        given = self._shape.given_tokens(() if self._sample.text is None else self._sample.text.ends)
        ids = event.token_ids[max(0, given - self._told) :]
        self._told += len(event.token_ids)
        text = event.text[self._begun :]
        self._begun -= len(event.text) - len(text)
        chunks: list[Chunk] = []
        if (text or ids) and not self._shape.silent:
            counts = {"tokens_predicted": self._told - given, "tokens_evaluated": self._prompt_tokens}
            part = {"index": 0, "content": text, "tokens": list(ids), LAST_FIELD: False, "id_slot": 0}
            chunks.append({**part, **counts})
        if event.output is not None:
            chunks.append(self._shape.reply(event.output, streamed=True))
        return chunks

    def failure(self, error: ApiError) -> Sequence[Chunk]:
        return [error.body]
