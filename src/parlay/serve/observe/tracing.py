"""OpenTelemetry traces: a span for each request, sent to a collector. This module is imported only if traces are
enabled."""

from __future__ import annotations

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import Attributes

from parlay import __version__
from parlay.serve.finished import Finished

_NANOSECONDS = 1_000_000_000


class Tracer:
    """Sends spans by OTLP over HTTP to ``endpoint`` from a separate thread; spans that can't be sent are dropped.

    A request with a ``traceparent`` header continues that trace.
    """

    def __init__(self, endpoint: str) -> None:
        resource = Resource.create({SERVICE_NAME: "parlay", SERVICE_VERSION: __version__})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
        self._tracer = self._provider.get_tracer("parlay.serve")
        self._propagator = TraceContextTextMapPropagator()

    def finished(self, request: Finished) -> None:
        carrier = {} if request.trace_parent is None else {"traceparent": request.trace_parent}
        span = self._tracer.start_span(
            "llm_request",
            context=self._propagator.extract(carrier),
            kind=SpanKind.SERVER,
            start_time=int((request.ended - request.seconds) * _NANOSECONDS),
            attributes=_attributes(request),
        )
        span.end(int(request.ended * _NANOSECONDS))

    def close(self) -> None:
        """Send what has not been sent yet."""
        self._provider.shutdown()


def _attributes(request: Finished) -> Attributes:
    """Attributes with OpenTelemetry's names for generative models, vLLM's for latencies, and our own."""
    sample = request.output.outputs[0]
    return {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "parlay",
        "gen_ai.request.model": request.model,
        "gen_ai.response.model": request.model,
        "gen_ai.request.id": request.request_id or request.output.request_id,
        "gen_ai.request.n": request.params.n,
        "gen_ai.request.max_tokens": request.params.max_tokens or 0,
        "gen_ai.request.temperature": request.params.temperature,
        "gen_ai.request.top_p": request.params.top_p,
        "gen_ai.usage.input_tokens": len(request.output.prompt_token_ids),
        "gen_ai.usage.output_tokens": request.tokens,
        "gen_ai.response.finish_reasons": [one.finish_reason for one in request.output.outputs],
        "gen_ai.latency.e2e": request.seconds,
        "gen_ai.latency.time_in_queue": request.queue_seconds,
        "gen_ai.latency.time_to_first_token": request.seconds_to_first,
        "gen_ai.latency.time_in_model_prefill": request.prefill_seconds,
        "gen_ai.latency.time_in_model_decode": request.decode_seconds,
        "parlay.strategy": sample.strategy,
        "parlay.tokens_per_step": sample.metrics.tokens_per_step,
    }
