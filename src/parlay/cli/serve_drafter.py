"""`parlay serve --drafter-only`: serves a drafter to other processes, without a target."""

from __future__ import annotations

import argparse
import socket
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from parlay.cli.flags import chosen_strategy, options_from
from parlay.cli.opening import uncollected
from parlay.drafters.options import DRAFT_MODEL
from parlay.models.fetch.pulled import DEFAULT_MODEL
from parlay.options import LoadOptions
from parlay.serve.settings import Settings
from parlay.strategies.catalogue import find
from parlay.strategies.entry import K
from parlay.strategies.spelling import StrategySpec, parse

if TYPE_CHECKING:
    from fastapi import FastAPI

    from parlay.serve.drafter.hosted import HostedDrafter

_ELSEWHERE = {
    "model_dir": "--model-dir",
    "certificates": "--certificate",
    "cascade": "--cascade",
    "record": "--record",
    "allow_pull": "--allow-pull",
}
"""Flags that need a target."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--drafter-only",
        action="store_true",
        help="serve drafts to other processes, whose strategy is remote:url=...: of MODEL itself, or of the --strategy "
        "that drafts in MODEL's vocabulary",
    )


def check(options: argparse.Namespace) -> tuple[str, StrategySpec]:
    """Read the model and drafter from the flags. Raises ValueError for a drafter that can't be served, and for flags
    that it does not support."""
    words = [*options.models, *options.model] or [DEFAULT_MODEL]
    if len(words) > 1:
        raise ValueError(f"--drafter-only works with one model, got {len(words)}: name one")
    for name, flag in _ELSEWHERE.items():
        if vars(options)[name]:
            raise ValueError(f"{flag} can't be used with --drafter-only: remove one of them")
    spec = chosen_strategy(options) or parse(DRAFT_MODEL)
    entry = find(spec.name)
    if entry.routes or entry.selects or not entry.factory:
        raise ValueError(f"--drafter-only: {spec.name} is not a drafter: name one, or union:of=... of several")
    return words[0], spec


def serve(options: argparse.Namespace, allowed: Settings, listener: socket.socket, url: str) -> None:
    """Serve until the process is told to end."""
    name, spec = check(options)
    app = _app(name, spec, options, allowed)
    from parlay.serve.server import Server  # here, as it imports FastAPI

    accesses = options.log_level in ("debug", "info")
    welcome = f"parlay drafts with {spec} in the vocabulary of {name} at {url}"
    Server(app, lambda: print(welcome, flush=True), access_log=accesses).run(sockets=[listener])


def _app(name: str, spec: StrategySpec, options: argparse.Namespace, allowed: Settings) -> FastAPI:
    with uncollected():
        from parlay.serve.drafter.app import create_drafter_app  # here, as it imports FastAPI

        return create_drafter_app(open_drafter(name, spec, options), allowed)


def open_drafter(name: str, spec: StrategySpec, options: argparse.Namespace) -> HostedDrafter:
    """Build the drafter for the vocabulary of model ``name``. Raises ParlayError if it can't be built."""
    from parlay import models
    from parlay.cache import Budget, parse_bytes  # here, as they import torch
    from parlay.drafters.remote.service import DraftService
    from parlay.drafters.resources import Resources
    from parlay.drafters.state_room import StateRoom
    from parlay.drafters.stores.datastore_file import fingerprint
    from parlay.drafters.token_text import check_tokens_suffice
    from parlay.models.fetch.resolving import resolve, resolve_tokenizer
    from parlay.models.loading import load_tokenizer, read_config
    from parlay.router.policies import Plain
    from parlay.serve.drafter.hosted import DrafterInfo, HostedDrafter
    from parlay.strategies.building import build, build_rule
    from parlay.strategies.built import RunnerCache
    from parlay.types import Strategy

    found, closing = resolve(name), ExitStack()
    config, tokenizer = read_config(found), load_tokenizer(resolve_tokenizer(options.tokenizer or name))
    budget = Budget(parse_bytes(options.memory) if options.memory is not None else None)
    load = options_from(LoadOptions, options)
    resources = Resources(
        config.vocab_size,
        RunnerCache(partial(models.load, options=load, budget=budget)),
        default_draft=options.draft_model or name,
        tokenizer=tokenizer,
        open_tokenizer=lambda other: load_tokenizer(resolve_tokenizer(other)),
        closing=closing,
        room=StateRoom(budget),
    )
    drafter = build(spec, resources)
    assert drafter is not None
    check_tokens_suffice(Strategy(str(spec), (drafter,), build_rule(spec), Plain()), "a remote target")
    longest = min(config.max_context, options.max_model_len or config.max_context)
    service = DraftService(drafter, config.vocab_size, longest, most_nodes=int(str(spec.settings[K])))
    return HostedDrafter(DrafterInfo(str(spec), config.vocab_size, fingerprint(tokenizer)), service, closing)
