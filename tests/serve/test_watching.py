"""How a server is watched: probes, its load, its log as JSON, and traces."""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from fastapi import FastAPI
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from starlette.testclient import TestClient

from parlay.aio import AsyncLLM
from parlay.serve.app import create_app
from parlay.serve.observe.logs import JsonLines
from parlay.serve.observe.tracing import Tracer

BODY = {"prompt": "A secret tide.", "max_tokens": 6, "ignore_eos": True}
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def test_ping_is_health_and_needs_no_key(make_app: Callable[..., FastAPI]) -> None:
    client = TestClient(make_app(keys=("sesame",)))
    assert client.get("/ping").json() == {"status": "ok"}
    assert client.head("/ping").status_code == 200


def test_load_counts_the_requests_under_way(make_app: Callable[..., FastAPI]) -> None:
    app = make_app(keys=("sesame",))
    client = TestClient(app)
    key = {"Authorization": "Bearer sesame"}
    assert client.get("/load").status_code == 401
    assert client.get("/load", headers=key).json() == {"server_load": 0}
    app.state.limiter.enter("")
    assert client.get("/load", headers=key).json() == {"server_load": 1}


def test_the_log_has_a_line_for_each_request_and_nothing_of_its_text(
    client: TestClient, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "parlay.serve.observe.logs"):
        client.post("/v1/completions", json=BODY, headers={"X-Request-Id": "mine-1"})
        answers = [
            client.post("/v1/completions", json=BODY, headers={"X-Request-Id": strange})
            for strange in ("x" * 500, "mine model=other")
        ]
    first, *others = (json.loads(JsonLines().format(record)) for record in caplog.records)
    assert first["logger"] == "parlay.serve.observe.logs"
    assert first["level"] == "info"
    told = first["request"]
    assert (told["request_id"], told["model"], told["completion_tokens"]) == ("mine-1", "parlay-mini", 6)
    assert 0 < told["first_token_seconds"] <= told["seconds"]
    assert "secret" not in json.dumps(first)
    made = [answer.headers["x-request-id"] for answer in answers]
    assert [other["request"]["request_id"] for other in others] == made


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/health", 200), ("GET", "/v1/none", 404), ("PUT", "/v1/models", 405), ("POST", "/v1/messages", 400)],
)
def test_every_answer_has_the_id_of_its_request(client: TestClient, method: str, path: str, status: int) -> None:
    """OpenAI's clients show ``x-request-id`` in their errors, and Anthropic's ``request-id``."""
    own = client.request(method, path, headers={"X-Request-Id": "mine-1"})
    made = [
        client.request(method, path, headers={b"X-Request-Id": sent}) for sent in (b"", b"\xe9", b"a b", b"x" * 129)
    ]
    assert own.status_code == status
    assert own.headers.get_list("x-request-id") == ["mine-1"]
    ids = [answer.headers["x-request-id"] for answer in made]
    assert all(each.startswith("req_") for each in ids)
    assert len(set(ids)) == len(ids)
    assert own.headers.get("request-id") == ("mine-1" if path == "/v1/messages" else None)


def test_a_bug_s_answer_has_the_id_too(make_app: Callable[..., FastAPI]) -> None:
    app = make_app()

    @app.get("/broken")
    def broken() -> None:
        raise RuntimeError("a bug")

    answer = TestClient(app, raise_server_exceptions=False).get("/broken", headers={"X-Request-Id": "mine-1"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (500, "mine-1")


# ------------------------------------------------------------------------------------------------------------- traces


@contextmanager
def collector() -> Iterator[tuple[str, list[ExportTraceServiceRequest]]]:
    """The address of a collector, and what it has been sent."""
    sent: list[ExportTraceServiceRequest] = []

    class Collect(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            sent.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Collect)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", sent
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_request_is_a_span_in_the_trace_of_its_client(engine: AsyncLLM) -> None:
    with collector() as (endpoint, sent):
        tracer = Tracer(endpoint)
        client = TestClient(create_app({"mini": engine}, observers=[tracer.finished]))
        answer = client.post("/v1/completions", json=BODY, headers={"traceparent": f"00-{TRACE}-{SPAN}-01"})
        assert answer.status_code == 200
        tracer.close()
    (span,) = (
        span for batch in sent for of in batch.resource_spans for scope in of.scope_spans for span in scope.spans
    )
    assert (span.name, span.trace_id.hex(), span.parent_span_id.hex()) == ("llm_request", TRACE, SPAN)
    told = {pair.key: pair.value for pair in span.attributes}
    assert told["gen_ai.request.model"].string_value == "mini"
    assert told["gen_ai.usage.output_tokens"].int_value == 6
    assert told["gen_ai.latency.e2e"].double_value > 0
    assert span.end_time_unix_nano > span.start_time_unix_nano
    assert "secret" not in str(span)


def test_requests_are_answered_though_no_collector_listens(engine: AsyncLLM) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
    tracer = Tracer(f"http://127.0.0.1:{port}/v1/traces")
    client = TestClient(create_app({"mini": engine}, observers=[tracer.finished]))
    assert client.post("/v1/completions", json=BODY).status_code == 200


def test_nothing_of_opentelemetry_is_loaded_unless_traces_are_asked_for() -> None:
    """Other libraries load its interfaces, not what collects and sends."""
    modules = "[name for name in sys.modules if name.startswith(('opentelemetry.sdk', 'opentelemetry.exporter'))]"
    code = f"import sys, parlay.cli.serve, parlay.serve.app; print({modules})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
