"""A server that serves the page and answers as Parlay's does, with canned streams."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import FileResponse, JSONResponse, StreamingResponse

import parlay

PAGE = Path(parlay.__file__).parent / "serve" / "page"
POLICY = {"Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'"}
Step = list[tuple[str, str]]

PLAIN: list[Step] = [[(word, "target")] for word in ("The ", "cat ", "<b>sat</b> ", "on ", "the ", "mat.")]
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
STRATEGIES = [
    {"name": "none", "family": "plain", "summary": "One token per step."},
    {"name": "copycat", "family": "copy", "summary": "Copies what came before."},
    {"name": "mumbler", "family": "lossy", "summary": "Promises nothing."},
]


@dataclass(slots=True)
class Fake:
    """What the server was asked, and how it is to behave."""

    url: str = ""
    key: str = ""
    bodies: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    aborted: threading.Event = field(default_factory=threading.Event)


def refuse(message: str, status: int) -> JSONResponse:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    return JSONResponse({"error": error}, status)


def make_app(fake: Fake) -> FastAPI:
    app = FastAPI()

    @app.middleware("http")
    async def authorize(request: Request, call_next: Any) -> Response:
        public = request.url.path == "/" or request.url.path.startswith("/page/")
        if fake.key and not public and request.headers.get("authorization") != f"Bearer {fake.key}":
            return refuse("An API key is needed.", 401)
        response: Response = await call_next(request)
        return response

    @app.get("/")
    def index() -> FileResponse:
        return FileResponse(PAGE / "index.html", headers=POLICY)

    @app.get("/page/{name}")
    def static(name: str) -> FileResponse:
        return FileResponse(PAGE / name, headers=POLICY)

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": "parlay-mini"}, {"id": "another/model"}]}

    @app.get("/strategies")
    def strategies() -> list[dict[str, str]]:
        return STRATEGIES

    @app.post("/v1/completions")
    @app.post("/v1/chat/completions")
    async def decode(request: Request) -> Response:
        body = await request.json()
        fake.bodies.append((request.url.path, body))
        if ":" in body.get("strategy", ""):
            return refuse("k of copycat must be an int, got 'abc'", 400)
        return StreamingResponse(stream(fake, body), media_type="text/event-stream")

    return app


async def stream(fake: Fake, body: dict[str, Any]) -> AsyncIterator[str]:
    """An answer that the strategy decides; a prompt says that it takes for ever, or fails."""
    prompt = body.get("prompt") or body["messages"][-1]["content"]
    name = body.get("strategy", "")
    steps = ANSWERS[name]
    if prompt == "for ever":
        try:
            while True:
                yield event(choices=[choice([("on and ", "target")])])
                await asyncio.sleep(0.01)
        finally:
            fake.aborted.set()
    yield event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}])  # as chat begins
    for step in steps:
        yield event(choices=[choice(step)])
        await asyncio.sleep(0.002)
    if prompt == "fail":
        yield event(error={"message": "The engine lost this request."})
        return
    yield event(choices=[choice([], "stop")])
    yield event(**closing(name, steps, body))
    yield "data: [DONE]\n\n"


def choice(step: Step, finish_reason: str | None = None) -> dict[str, Any]:
    text = "".join(piece for piece, _ in step)
    return {"index": 0, "delta": {"content": text}, "parlay": {"pieces": step}, "finish_reason": finish_reason}


def closing(name: str, steps: list[Step], body: dict[str, Any]) -> dict[str, Any]:
    """The last chunk: what the engine counted."""
    tokens = sum(len(step) for step in steps)
    summary = {
        "strategy": name or "copycat",
        "exactness": "lossy" if name == "mumbler" else "bits",
        "seed": body["seed"],
        "accepted_by_source": {},
        "tokens_per_step": tokens / len(steps),
        "tokens_per_second": 100.0 * tokens / len(steps),
    }
    return {"choices": [], "parlay": summary, "usage": {"completion_tokens": tokens}}


def event(**chunk: Any) -> str:
    return f"data: {json.dumps(chunk)}\n\n"


@contextmanager
def serving() -> Iterator[Fake]:
    """The server in a thread of its own, on a port that was free."""
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
