"""A server that serves the page as Parlay's server does, and answers with canned streams."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.types import Send

from parlay.serve.routes import page

Step = list[tuple[str, str]]

PLAIN: list[Step] = [[(word, "target")] for word in ("The ", "cat ", "<b>sat</b> ", "on ", "the ", "mat.")]
DUET: Step = [("The ", "target"), ("cat ", "copycat"), ("sits.", "target")]
WRITERS = ["large", "large", "small"]
QUOTE: Step = [("The ", "target"), ("cat ", "target"), ("sat.", "target")]
ORIGINS = [
    {"document": "a.txt", "position": 7, "share": 0.9},
    {"document": "a.txt", "position": 8, "share": 0.9},
    {"document": "b.txt", "position": 1, "share": 0.2},
]
ANSWERS: dict[str, list[Step]] = {
    "none": PLAIN,
    "copycat": [
        [("The ", "target")],
        [("cat ", "copycat"), ("<b>sat</b> ", "copycat"), ("on ", "target")],
        [("the ", "magpie"), ("mat.", "target")],
    ],
    "mumbler": [[("The ", "target")], [("cat ", "mumbler"), ("sits.", "target")]],
}
ANSWERS[""] = ANSWERS["copycat"]
ROUTED = {
    "drafters": [
        {"drafter": "copycat", "asked": 3, "verified": 1, "trials": 0, "expected": 1.5, "accepted": 2}
        | {"expected_seconds": 0.001, "seconds": 0.002},
        {"drafter": "magpie", "asked": 2, "verified": 1, "trials": 1, "expected": 0.5, "accepted": 1}
        | {"expected_seconds": 0.0, "seconds": 0.0004},
    ],
    "reasons": {"worth most": 1, "trial": 1, "not worth its cost": 1},
    "kind": "prose",
    "life": [
        {"steps": 1, "tokens": 1, "expected": 1.0, "choices": {"not worth its cost": 1}},
        {"steps": 1, "tokens": 3, "expected": 2.5, "choices": {"copycat": 1}},
        {"steps": 1, "tokens": 2, "expected": 1.5, "choices": {"magpie": 1}},
    ],
    "power": "",
}
TEXT = "The cat <b>sat</b> on the mat."
THOUGHT = "A cat may sit."
STRATEGIES = [
    {"name": "none", "family": "plain", "exactness": "bits", "summary": "One token per step.", "parameters": {}},
    {
        "name": "copycat",
        "family": "copy",
        "exactness": "bits",
        "summary": "Copies what came before.",
        "parameters": {"k": {"type": "int", "default": 4, "help": "most"}},
    },
    {"name": "mumbler", "family": "lossy", "exactness": "lossy", "summary": "Promises nothing.", "parameters": {}},
]
METRICS = """\
# HELP parlay_steps_total Forwards of the target.
parlay_steps_total{{model="m",strategy="copycat"}} {steps}
parlay_completion_tokens_total{{model="m",strategy="copycat"}} {tokens}
parlay_requests_total{{finish_reason="stop",model="m",strategy="copycat"}} {steps}
parlay_draft_tokens_total{{model="m",source="copycat",strategy="copycat"}} 8.0
parlay_accepted_tokens_total{{model="m",source="copycat",strategy="copycat"}} 6.0
vllm:num_requests_running{{model_name="m",engine="0"}} 3.0
vllm:num_requests_waiting{{model_name="m",engine="0"}} 5.0
parlay_cache_used_tokens{{model="m"}} 250.0
parlay_cache_room_tokens{{model="m"}} 1000.0
"""


@dataclass(slots=True)
class Fake:
    """Requests that the server got, and how it is to behave.

    ``chat``: whether its model has a chat template. It says what can be chosen once ``ready`` is set.
    """

    url: str = ""
    key: str = ""
    chat: bool = True
    looks: int = 0
    bodies: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    aborted: threading.Event = field(default_factory=threading.Event)
    ready: threading.Event = field(default_factory=threading.Event)

    def reset(self) -> None:
        self.key, self.chat, self.looks = "", True, 0
        self.bodies.clear()
        self.aborted.clear()
        self.ready.set()


def refuse(message: str, status: int) -> JSONResponse:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    return JSONResponse({"error": error}, status)


def make_app(fake: Fake) -> FastAPI:
    app = FastAPI()
    app.include_router(page.router())

    @app.middleware("http")
    async def authorize(request: Request, call_next: Any) -> Response:
        public = request.url.path == "/" or request.url.path.startswith("/page/")
        if fake.key and not public and request.headers.get("authorization") != f"Bearer {fake.key}":
            return refuse("An API key is needed.", 401)
        response: Response = await call_next(request)
        return response

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": "parlay-mini"}, {"id": "another/model"}]}

    @app.get("/choices")
    def choices(model: str) -> dict[str, Any]:
        fake.ready.wait(timeout=10)
        return {
            "model": model,
            "max_model_len": 512,
            "max_tokens": None,
            "chat": fake.chat,
            "sampling": {"temperature": 0.6, "top_p": 0.9},
            "strategies": STRATEGIES if model == "parlay-mini" else STRATEGIES[:1],
        }

    @app.get("/metrics")
    def metrics() -> Response:
        fake.looks += 1
        return Response(METRICS.format(steps=10 * fake.looks, tokens=25 * fake.looks), media_type="text/plain")

    @app.post("/v1/completions")
    @app.post("/v1/chat/completions")
    async def decode(request: Request) -> Response:
        body = await request.json()
        fake.bodies.append((request.url.path, body))
        if ":" in body.get("strategy", ""):
            return refuse("k of copycat must be an int, got 'abc'", 400)
        return Closing(stream(fake, body), media_type="text/event-stream")

    return app


class Closing(StreamingResponse):
    """Ends its stream when the client goes, and not when the garbage collector comes by."""

    async def stream_response(self, send: Send) -> None:
        async with aclosing(self.body_iterator):  # type: ignore[type-var]  # ours is a generator
            await super().stream_response(send)


async def stream(fake: Fake, body: dict[str, Any]) -> AsyncIterator[str]:
    """An answer that the strategy decides. A prompt says that it takes for ever, fails, is thought about, is written by
    two models together, has the server choose, or repeats what stands after ``say``."""
    prompt = body["prompt"] if "prompt" in body else body["messages"][-1]["content"]
    name = body.get("strategy", "")
    steps = ANSWERS[name]
    if prompt.startswith("say "):
        steps = [[(word + " ", "target")] for word in prompt.removeprefix("say ").split(" ")]
    if prompt == "together":
        steps = [DUET]
    if prompt == "quote":
        steps = [QUOTE]
    if prompt == "for ever":
        try:
            while True:
                yield event(choices=[choice([("on and ", "target")])])
                await asyncio.sleep(0.01)
        finally:
            fake.aborted.set()
    yield event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}])  # as chat begins
    if prompt == "think":
        yield event(choices=[{"index": 0, "delta": {"reasoning_content": THOUGHT}}])
    for step in steps[: body.get("max_tokens")]:
        yield event(choices=[choice(step)])
        await asyncio.sleep(0.002)
    if prompt == "fail":
        yield event(error={"message": "The engine lost this request."})
        return
    yield event(choices=[choice([], "stop")])
    last = closing(name, steps, body)
    yield event(**(last | {"metrics": {"router": ROUTED}} if prompt == "choose" and body.get("explain") else last))
    yield "data: [DONE]\n\n"


def choice(step: Step, finish_reason: str | None = None) -> dict[str, Any]:
    text = "".join(piece for piece, _ in step)
    told = {"delta": {"content": text}, "text": text}  # as a chat, and as a completion
    more: dict[str, object] = {"writers": WRITERS} if step is DUET else {"origins": ORIGINS} if step is QUOTE else {}
    parlay = {"pieces": step, **more}
    return {"index": 0, **told, "parlay": parlay, "finish_reason": finish_reason}


def closing(name: str, steps: list[Step], body: dict[str, Any]) -> dict[str, Any]:
    """The last chunk: what the engine counted."""
    tokens = sum(len(step) for step in steps)
    summary = {
        "strategy": name or "copycat",
        "exactness": "lossy" if name == "mumbler" else "bits",
        "seed": body.get("seed", 5),
        "accepted_by_source": {},
        "tokens_per_step": tokens / len(steps),
        "tokens_per_second": 100.0 * tokens / len(steps),
    }
    usage = {"prompt_tokens": 10, "completion_tokens": tokens}
    return {"choices": [], "parlay": summary, "usage": usage, "metrics": {"router": None}}


def event(**chunk: Any) -> str:
    return f"data: {json.dumps(chunk)}\n\n"


@contextmanager
def serving() -> Iterator[Fake]:
    """Run the server in a thread of its own, on a free port."""
    fake = Fake()
    config = uvicorn.Config(make_app(fake), port=0, log_level="warning", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the fake server did not start"
        time.sleep(0.01)
    fake.url = "http://{}:{}/".format(*server.servers[0].sockets[0].getsockname())
    try:
        yield fake
    finally:
        server.should_exit = True
        thread.join()
