"""`parlay serve`: serves models over an OpenAI-compatible HTTP API."""

from __future__ import annotations

import argparse
import logging
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from parlay.cli import listening, serve_drafter, serve_models
from parlay.cli.ensemble_flags import add_ensemble_flags
from parlay.cli.flags import add_option_flags, add_rank_flags, values_from, whole
from parlay.cli.opening import pack_ahead, uncollected
from parlay.cli.serve_devices import add_devices_flag, choose_processes
from parlay.cli.serve_record import add_record_arguments, recording
from parlay.cli.serve_replicas import add_replica_arguments, check_replicas, serve_replicas
from parlay.serve.settings import IDLE_SECONDS, MOST_URGENT, PROMPT_LOG, KeyLimits, ServeOptions, Settings

if TYPE_CHECKING:
    from fastapi import FastAPI

    from parlay.serve.finished import Observer

TRACING_PACKAGES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    serve_models.add_model_arguments(parser)
    serve_drafter.add_arguments(parser)
    _add_network_flags(parser)
    _add_limit_flags(parser)
    _add_watching_flags(parser)
    add_replica_arguments(parser)
    add_devices_flag(parser)
    add_record_arguments(parser)
    add_option_flags(parser, ServeOptions, ["strict", "parse_special"])
    fim = parser.add_argument_group("fill in the middle")
    add_option_flags(fim, ServeOptions, ["infill_order", "infill_suffix", "cache_reuse"])
    add_option_flags(parser, ServeOptions, ["score_by", "ngrams"])
    add_ensemble_flags(parser)
    add_rank_flags(parser)


def _add_network_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("network and access")
    listening.add_address_flags(group)
    listening.add_key_flags(group)
    group.add_argument("--no-auth", action="store_true", help="require no API key, even from other machines")
    group.add_argument(
        "--cors-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="allow web pages of this origin to send requests (CORS); may be given several times (default: none)",
    )


def _add_watching_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("logs and traces")
    listening.add_log_flags(group)
    add_option_flags(group, ServeOptions, ["log_prompts"])
    group.add_argument(
        "--otlp-traces-endpoint",
        metavar="URL",
        help="send a span of each request to this OpenTelemetry collector, as in http://localhost:4318/v1/traces",
    )


def _add_limit_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("limits")
    sizes = ("max_body_bytes", "max_prompt_tokens", "max_tokens", "default_max_tokens", "max_n", "concurrency")
    add_option_flags(group, ServeOptions, sizes)
    for flag, default, text in (
        ("--key-requests", None, "most requests of one API key at once"),
        ("--key-tokens", None, "tokens of prompts and outputs that one API key may use per minute"),
        ("--key-priority", MOST_URGENT, "most urgent priority that an API key may ask for"),
        ("--max-waiting", 256, "most samples in the queue; further requests get an error"),
    ):
        shown = "none" if default is None else default
        group.add_argument(flag, type=whole, default=default, metavar="N", help=f"{text} (default: {shown})")
    add_option_flags(group, ServeOptions, ("responses_kept", "request_timeout", "drain_seconds"))


def run(options: argparse.Namespace) -> int:
    listening.set_up_logging(options)
    allowed = settings(options)
    check_replicas(options)
    if options.drafter_only:
        return _serve_drafter(options, allowed)
    models = serve_models.chosen_models(options)
    serve_models.check_flags(options, len(models))
    listening.check_packages(listening.PACKAGES, "parlay serve", "serve")
    if options.devices:
        choose_processes(options, list(models.values()))
        check_replicas(options)
    with listening.listen(options.host, options.port) as listener:
        welcome = f"parlay serves {', '.join(models)} at {listening.url_of(listener)}"
        if options.replicas > 1:
            serve_models.find_models(options, models)
            return serve_replicas(options, allowed, listener, welcome)
        serve_on(options, listener, lambda: listening.announce(welcome))
    return 0


def _serve_drafter(options: argparse.Namespace, allowed: Settings) -> int:
    serve_drafter.check(options)
    listening.check_packages(listening.PACKAGES, "parlay serve", "serve")
    with listening.listen(options.host, options.port) as listener:
        serve_drafter.serve(options, allowed, listener, listening.url_of(listener))
    return 0


def serve_on(options: argparse.Namespace, listener: socket.socket, ready: Callable[[], None]) -> None:
    """Serve in this process until it is told to end; ``ready`` is called when requests are accepted."""
    if options.log_prompts:
        logging.getLogger(PROMPT_LOG).setLevel(logging.INFO)
    allowed, models = settings(options), serve_models.chosen_models(options)
    with _observers(options, allowed) as observers:
        _serve(options, _with_idle_seconds(allowed, options, len(models)), models, listener, observers, ready=ready)


def _serve(
    options: argparse.Namespace,
    allowed: Settings,
    models: Mapping[str, str],
    listener: socket.socket,
    observers: Sequence[Observer],
    *,
    ready: Callable[[], None],
) -> None:
    first = serve_models.find_models(options, models)
    with pack_ahead(models[first], options) if first is not None else nullcontext():
        app = _app(options, allowed, models, observers, first)
        from parlay.serve.server import Server  # here, as it imports FastAPI

        Server(app, ready, access_log=options.log_level in ("debug", "info")).run(sockets=[listener])


def _app(
    options: argparse.Namespace,
    allowed: Settings,
    models: Mapping[str, str],
    observers: Sequence[Observer],
    first: str | None,
) -> FastAPI:
    """Make the application; it loads the model named ``first`` at its start."""
    with uncollected():
        from parlay.llm.vocabulary import Vocabularies
        from parlay.serve.app import create_app  # here, as these import FastAPI and torch

    named = len(options.models) + len(options.model)
    loader_of = serve_models.loading(options, vocabularies := Vocabularies(serve_models.KEPT + named))
    hosted = {name: loader_of(model) for name, model in models.items()}
    pulled = loader_of if options.allow_pull else None
    app = create_app(hosted, allowed, observers, pulled, serve_models.cascades(options, models))
    if first is not None:
        app.state.registry.load_now(first)
    serve_models.load_adapters(options, app.state.registry, first)
    serve_models.read_ahead([*models.values()][1:named], vocabularies, options.end_tokens)
    return app


@contextmanager
def _observers(options: argparse.Namespace, allowed: Settings) -> Iterator[list[Observer]]:
    """Observers of finished requests other than metrics and log. At the end they send and write what is pending."""
    with recording(options, allowed) as kept, _tracing(options.otlp_traces_endpoint) as traced:
        yield [*kept, *traced]


@contextmanager
def _tracing(endpoint: str | None) -> Iterator[list[Observer]]:
    if endpoint is None:
        yield []
        return
    listening.check_packages(TRACING_PACKAGES, "--otlp-traces-endpoint", "otel")
    from parlay.serve.observe.tracing import Tracer

    tracer = Tracer(endpoint)
    try:
        yield [tracer.finished]
    finally:
        tracer.close()


def _with_idle_seconds(allowed: Settings, options: argparse.Namespace, models: int) -> Settings:
    seconds: float | None = options.idle_seconds
    return replace(allowed, idle_seconds=IDLE_SECONDS if seconds is None and models > 1 else seconds)


# ------------------------------------------------------------------------------------------------- network and access


def _check_access(options: argparse.Namespace, keys: tuple[str, ...]) -> None:
    if keys and options.no_auth:
        raise ValueError("--no-auth can't be used with API keys: remove one of them")
    if not keys and not listening.is_loopback(options.host) and not options.no_auth:
        raise ValueError(
            f"other machines can reach {options.host}: require keys with --api-key-file FILE, or allow everyone with "
            "--no-auth"
        )


def _check_collector(endpoint: str | None) -> None:
    """Raises ValueError for an address that is no URL, as every span would be dropped without a word."""
    if endpoint is not None and not endpoint.startswith(("http://", "https://")):
        raise ValueError(
            f"--otlp-traces-endpoint {endpoint}: give the collector's URL, as in http://localhost:4318/v1/traces"
        )


def _check_origins(origins: Sequence[str]) -> None:
    """Raises ValueError for a text that no browser sends as an origin, so it would allow no page."""
    for origin in origins:
        _, separator, host = origin.partition("://")
        if origin not in ("*", "null") and (not separator or not host or "/" in host):
            raise ValueError(
                f"--cors-origin {origin}: give a scheme and a host without a path, as in https://example.com or "
                "http://localhost:3000"
            )


def settings(options: argparse.Namespace) -> Settings:
    """Make the server's settings from the flags. Raises ValueError for a limit out of range, and if strangers could use
    the server."""
    default = KeyLimits(requests=options.key_requests, tokens=options.key_tokens, priority=options.key_priority)
    own = listening.read_keys(options, default)
    keys = tuple(own)
    _check_access(options, keys)
    listening.check_port(options.port)
    _check_collector(options.otlp_traces_endpoint)
    _check_origins(options.cors_origin)
    if options.router_memory == "per-key" and not keys:
        raise ValueError("--router-memory per-key needs API keys: add --api-key-file")
    values = values_from(ServeOptions, options) | {"default_max_tokens": options.default_max_tokens or None}
    return Settings(
        **values,
        keys=keys,
        key_limits=default,
        own_limits=own,
        hosts=(*listening.LOOPBACK_NAMES, options.host) if not keys and not options.no_auth else (),
        cors_origins=tuple(options.cors_origin),
    )
