"""Turns an answer into the items of a response, and the events that report them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from parlay.serve.chat.answers import Arguments, Begin, Delta, Text, Thought

Event = dict[str, Any]


class ItemWriter:
    """Makes items from an answer's deltas, one after another; ``items`` holds all, including the open one.

    Their ids derive from the ``response``'s id, so that any server that resumes it makes the same.
    """

    def __init__(self, response: str) -> None:
        self._response = response
        self.items: list[dict[str, Any]] = []
        self._open = False
        self._waiting: list[Mapping[str, Any]] = []
        """Log-probabilities of tokens whose text has not come yet, such as the first half of a character."""

    def take(self, deltas: Sequence[Delta], logprobs: Sequence[Mapping[str, Any]] = ()) -> Iterator[Event]:
        """Add deltas; yields their events. ``logprobs`` are those of the tokens from which the deltas were read."""
        for delta in deltas:
            before, self._waiting = self._waiting, []
            match delta:
                case Thought():
                    yield from self._more("reasoning", delta.text, ())
                case Text():
                    told, logprobs = [*before, *logprobs], ()
                    yield from self._more("message", delta.text, told)
                case Begin():
                    logprobs = ()
                    yield from self._close("completed")
                    yield from self._add(self._call(delta.name))
                case Arguments():
                    logprobs = ()
                    self.items[-1]["arguments"] += delta.text
                    yield self._event("function_call_arguments.delta", delta=delta.text)
        if not (deltas and isinstance(deltas[-1], Thought)):
            self._waiting += logprobs

    def finish(self, status: str) -> Iterator[Event]:
        """End the answer; yields the last events. An empty answer becomes an empty message."""
        if not self.items:
            yield from self._add(self._message())
            yield from self._add_part()
        yield from self._close(status)

    def _more(self, kind: str, text: str, logprobs: Sequence[Mapping[str, Any]]) -> Iterator[Event]:
        if not self._open or self.items[-1]["type"] != kind:
            yield from self._close("completed")
            yield from self._add(self._message() if kind == "message" else self._reasoning())
            yield from self._add_part()
        part = self.items[-1]["content"][0]
        part["text"] += text
        if kind == "message":
            part["logprobs"] += logprobs
            yield self._event("output_text.delta", content_index=0, delta=text, logprobs=list(logprobs))
        else:
            yield self._event("reasoning_text.delta", content_index=0, delta=text)

    def _add(self, item: dict[str, Any]) -> Iterator[Event]:
        self.items.append(item)
        self._open = True
        shown = {**item, "content": []} if "content" in item else dict(item)
        yield {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": shown}

    def _add_part(self) -> Iterator[Event]:
        part = self.items[-1]["content"][0]
        yield self._event("content_part.added", content_index=0, part=dict(part))

    def _close(self, status: str) -> Iterator[Event]:
        if not self._open:
            return
        self._open = False
        item = self.items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            yield self._event("function_call_arguments.done", name=item["name"], arguments=item["arguments"])
        else:
            part = item["content"][0]
            if item["type"] == "message":
                part["logprobs"] += self._waiting
                self._waiting = []
                yield self._event("output_text.done", content_index=0, text=part["text"], logprobs=part["logprobs"])
            else:
                yield self._event("reasoning_text.done", content_index=0, text=part["text"])
            yield self._event("content_part.done", content_index=0, part=part)
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}

    def _event(self, kind: str, /, **fields: object) -> Event:
        """An event about the last item."""
        place = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        return {"type": f"response.{kind}", **place, **fields}

    def _message(self) -> dict[str, Any]:
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        fields = {"type": "message", "status": "in_progress", "role": "assistant", "content": [part]}
        return {"id": self._id("msg"), **fields}

    def _reasoning(self) -> dict[str, Any]:
        part = {"type": "reasoning_text", "text": ""}
        return {"id": self._id("rs"), "type": "reasoning", "summary": [], "content": [part], "status": "in_progress"}

    def _call(self, name: str) -> dict[str, Any]:
        ids = {"id": self._id("fc"), "call_id": self._id("call")}
        return {**ids, "type": "function_call", "name": name, "arguments": "", "status": "in_progress"}

    def _id(self, kind: str) -> str:
        """The id of the next item."""
        digest = hashlib.sha256(f"{self._response} {len(self.items)}".encode())
        return f"{kind}_{digest.hexdigest()[:48]}"
