"""`parlay serve`: models behind an OpenAI-compatible HTTP API."""

from __future__ import annotations

import argparse
import logging
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from parlay.cli import listening, serve_drafter, serve_models
from parlay.cli.ensemble_flags import add_ensemble_flags
from parlay.cli.flags import add_rank_flags, whole
from parlay.cli.opening import pack_ahead, uncollected
from parlay.cli.serve_devices import add_devices_flag, choose_processes
from parlay.cli.serve_record import add_record_arguments, recording
from parlay.cli.serve_replicas import add_replica_arguments, check_replicas, serve_replicas
from parlay.serve.settings import PROMPT_LOG, InfillOrder, KeyLimits, Settings
from parlay.types import ScoreBy

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
    parser.add_argument(
        "--strict",
        action="store_true",
        help="treat fields of requests that have no effect as errors; otherwise a header and the log name them",
    )
    parser.add_argument(
        "--parse-special",
        action="store_true",
        help="read control tokens that messages spell as such, so that clients can write system messages; otherwise "
        "they are text",
    )
    _add_infill_flags(parser)
    parser.add_argument(
        "--score-by",
        choices=get_args(ScoreBy),
        default="cosine",
        help="how /v1/score and /v1/rerank compare texts: by embeddings, or by the answer yes or no of a chat model "
        "such as Qwen3-Reranker (default: cosine)",
    )

    parser.add_argument(
        "--ngrams",
        type=Path,
        metavar="FILE",
        help="n-gram model by which superposed drafts are scored (parlay suggest)",
    )
    add_ensemble_flags(parser)
    add_rank_flags(parser)


def _add_infill_flags(parser: argparse.ArgumentParser) -> None:
    """Add what decides how fill-in-the-middle lays out a file, and what it reads anew."""
    group = parser.add_argument_group("fill in the middle")
    group.add_argument(
        "--infill-order",
        choices=get_args(InfillOrder),
        default="psm",
        help="where fill-in-the-middle cuts the text before the cursor; what is behind the cut follows the suffix, so "
        "that typing on leaves the suffix cached; within a word that suits /infill alone. psm: nowhere; line: at the "
        "start of the line; spm: at the start of the text, for models trained on it (default: psm)",
    )
    group.add_argument(
        "--infill-suffix",
        type=whole,
        metavar="TOKENS",
        help="how many tokens of the text behind the cursor fill-in-the-middle reads at most; with psm they are read "
        "again at each keystroke (default: all)",
    )
    group.add_argument(
        "--cache-reuse",
        type=whole,
        default=0,
        metavar="TOKENS",
        help="let fill-in-the-middle reuse the cache of runs of at least so many tokens that an earlier request had at "
        "another place, as llama-server does; faster, and lossy: suggestions may differ (default: 0, off)",
    )


def _add_network_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("network and access")
    listening.add_address_flags(group)
    listening.add_key_flags(group)
    group.add_argument("--no-auth", action="store_true", help="ask for no key, even from other machines")
    group.add_argument(
        "--cors-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="let web pages of this origin send requests; may be given several times (default: none)",
    )


def _add_watching_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("logs and traces")
    listening.add_log_flags(group)
    group.add_argument("--log-prompts", action="store_true", help="log the bodies of requests, prompts included")
    group.add_argument(
        "--otlp-traces-endpoint",
        metavar="URL",
        help="send a span of each request to this OpenTelemetry collector, as in http://localhost:4318/v1/traces",
    )


def _add_limit_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("limits")
    for flag, kind, metavar, default, text in _LIMITS:
        shown = "none" if default is None else f"{default:g}" if kind is float else str(default)
        group.add_argument(flag, type=kind, default=default, metavar=metavar, help=f"{text} (default: {shown})")


_DEFAULTS = Settings()
_LIMITS: tuple[tuple[str, Callable[[str], float], str, float | None, str], ...] = (
    ("--max-body-bytes", whole, "N", _DEFAULTS.max_body_bytes, "most bytes of a request's body"),
    (
        "--max-prompt-tokens",
        whole,
        "N",
        _DEFAULTS.max_prompt_tokens,
        "most tokens of a prompt, if less than the model holds",
    ),
    ("--max-tokens", whole, "N", _DEFAULTS.max_tokens, "most tokens of an output, if less than the model holds"),
    (
        "--default-max-tokens",
        whole,
        "N",
        _DEFAULTS.default_max_tokens,
        "most tokens of an output whose request names no max_tokens; 0: what the model holds",
    ),
    ("--max-n", whole, "N", _DEFAULTS.max_n, "most samples of a request"),
    ("--max-concurrency", whole, "N", _DEFAULTS.concurrency, "most requests under way at once"),
    ("--key-requests", whole, "N", None, "most requests of one API key under way at once"),
    ("--key-tokens", whole, "N", None, "tokens of prompts and outputs that one API key may use per minute"),
    ("--key-priority", whole, "N", _DEFAULTS.key_limits.priority, "most urgent priority that an API key may ask for"),
    ("--max-waiting", whole, "N", 256, "most samples that wait for a place in a step"),
    (
        "--responses-kept",
        whole,
        "N",
        _DEFAULTS.responses_kept,
        "earlier responses that are kept for each API key",
    ),
    ("--timeout", float, "SECONDS", _DEFAULTS.request_timeout, "most time for one request"),
    (
        "--drain-seconds",
        float,
        "SECONDS",
        _DEFAULTS.drain_seconds,
        "time that running requests have to finish when the server stops",
    ),
)


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
    """Serve in this process until it is told to end; ``ready`` is called when requests are taken."""
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
        from parlay.serve.server import Server  # here, because it loads FastAPI

        Server(app, ready, access_log=options.log_level in ("debug", "info")).run(sockets=[listener])


def _app(
    options: argparse.Namespace,
    allowed: Settings,
    models: Mapping[str, str],
    observers: Sequence[Observer],
    first: str | None,
) -> FastAPI:
    """Make the application, which loads the model named ``first`` as soon as it is served."""
    with uncollected():
        from parlay.llm.vocabulary import Vocabularies
        from parlay.serve.app import create_app  # here, because these load FastAPI and torch

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
    """Who hears of finished requests beside metrics and log. What they have not sent or written is so at the end."""
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
    return replace(allowed, idle_seconds=serve_models.IDLE_SECONDS if seconds is None and models > 1 else seconds)


# ------------------------------------------------------------------------------------------------- network and access


def _check_access(options: argparse.Namespace, keys: tuple[str, ...]) -> None:
    if keys and options.no_auth:
        raise ValueError("there are API keys and --no-auth: choose one")
    if not keys and not listening.is_loopback(options.host) and not options.no_auth:
        raise ValueError(
            f"other machines can reach {options.host}: ask for a key with --api-key-file FILE, or let anyone in with "
            "--no-auth"
        )


def settings(options: argparse.Namespace) -> Settings:
    """Read what the flags allow. Raises ValueError for a limit out of range, or if strangers could get in."""
    default = KeyLimits(requests=options.key_requests, tokens=options.key_tokens, priority=options.key_priority)
    own = listening.read_keys(options, default)
    keys = tuple(own)
    _check_access(options, keys)
    listening.check_port(options.port)
    if options.router_memory == "per-key" and not keys:
        raise ValueError("--router-memory per-key tells requests apart by their API key: give keys with --api-key-file")
    return Settings(
        keys=keys,
        key_limits=default,
        own_limits=own,
        hosts=(*listening.LOOPBACK_NAMES, options.host) if not keys and not options.no_auth else (),
        cors_origins=tuple(options.cors_origin),
        max_body_bytes=options.max_body_bytes,
        max_prompt_tokens=options.max_prompt_tokens,
        max_tokens=options.max_tokens,
        default_max_tokens=options.default_max_tokens or None,
        max_n=options.max_n,
        concurrency=options.max_concurrency,
        request_timeout=options.timeout,
        drain_seconds=options.drain_seconds,
        max_loaded=options.max_loaded,
        idle_seconds=options.idle_seconds,
        log_prompts=options.log_prompts,
        strict=options.strict,
        parse_special=options.parse_special,
        infill_order=options.infill_order,
        infill_suffix=options.infill_suffix,
        cache_reuse=options.cache_reuse,
        responses_kept=options.responses_kept,
        lora_folder=options.lora_folder,
        score_by=options.score_by,
        ngrams=options.ngrams,
    )
