"""Models as Ollama's API describes them."""

from __future__ import annotations

import hashlib
import time
from datetime import UTC, datetime
from typing import Any

from parlay.models.facts import Description, ModelFacts, spell_parameters
from parlay.serve.chat.job import chat_template
from parlay.serve.hosted import HostedModel, Served
from parlay.serve.registry import LATEST
from parlay.serve.settings import Settings
from parlay.text.chat_template import takes_tools
from parlay.text.reasoning import tags_of

_FOREVER = "9999-12-31T23:59:59Z"
_CENTURY = 100 * 365 * 86400.0
"""Seconds. A longer time would end at a date that datetime can't hold."""


def digest_of(name: str) -> str:
    """A stand-in digest for a model whose files are unknown."""
    return hashlib.sha256(name.encode()).hexdigest()


def listed(model: HostedModel, facts: ModelFacts | None) -> dict[str, Any]:
    made = datetime.fromtimestamp(model.created, UTC).isoformat().replace("+00:00", "Z")
    name = model.name if ":" in model.name else model.name + LATEST  # clients look it up under this name only
    return {
        "name": name,
        "model": name,
        "modified_at": made,
        "size": 0 if facts is None else facts.bytes,
        "digest": digest_of(model.name) if facts is None else facts.digest,
        "details": _details(facts),
    }


def _details(facts: ModelFacts | None) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": "" if facts is None else facts.form,
        "family": "" if facts is None else facts.family,
        "families": [] if facts is None else [facts.family],
        "parameter_size": "" if facts is None else spell_parameters(facts.parameters),
        "quantization_level": "" if facts is None else facts.quantization,
    }


def running(model: HostedModel, facts: ModelFacts | None, settings: Settings) -> dict[str, Any]:
    keep = settings.idle_seconds if model.keep_alive is None else model.keep_alive
    expires = _FOREVER
    if model.loader is not None and keep is not None and keep < _CENTURY:
        left = model.used - time.monotonic() + keep
        expires = datetime.fromtimestamp(time.time() + left, UTC).isoformat().replace("+00:00", "Z")
    return {**listed(model, facts), "expires_at": expires, "size_vram": 0, "context_length": model.max_model_len}


def described(served: Served) -> Description:
    """Describe a loaded model as its files would be described, but with the server's context length."""
    spec = served.spec
    return Description(
        max_context=served.max_model_len,
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        num_layers=spec.num_layers,
        template=chat_template(served),
    )


def shown(model: HostedModel, facts: ModelFacts | None, description: Description) -> dict[str, Any]:
    abilities = {
        "completion": True,
        "tools": takes_tools(description.template),
        "thinking": tags_of(description.template) is not None,
    }
    return {
        "modelfile": "",
        "parameters": "",
        "template": description.template,
        "details": _details(facts),
        "model_info": {
            "general.architecture": "parlay",
            **({} if facts is None else {"general.parameter_count": facts.parameters}),
            "parlay.context_length": model.max_model_len or description.max_context,
            "parlay.embedding_length": description.hidden_size,
            "parlay.block_count": description.num_layers,
            "parlay.vocab_size": description.vocab_size,
        },
        "capabilities": [ability for ability, there in abilities.items() if there],
        "modified_at": listed(model, facts)["modified_at"],
    }
