"""Options of the proposer, which vLLM passes as ``additional_config={"parlay": {...}}``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from parlay.options import Options, UsageError, nearest, option, options_of

KEY = "parlay"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposerOptions(Options):
    """How `Proposer` drafts. Raises UsageError for a value that is not allowed."""

    strategy: str = option(
        "auto:of=prompt-lookup+suffix-automaton",
        "strategy, as parlay strategies lists them, that needs only tokens; none: never draft",
    )
    share_outputs: bool = option(
        False,
        "let stores learn from one request for later ones; vLLM does not say whose a request is, so only where all "
        "requests may see each other's texts",
    )
    log_seconds: float = option(60.0, "seconds between log lines of what was drafted; 0: none", low=0)


def read_options(additional_config: object, where: str = "additional_config") -> ProposerOptions:
    """Read the options from vLLM's ``additional_config``; ``where`` names their place in errors.

    Raises UsageError for an unknown option.
    """
    given = additional_config.get(KEY, {}) if isinstance(additional_config, Mapping) else {}
    if not isinstance(given, Mapping):
        raise UsageError(f'{where}: "{KEY}" must be an object of options, got {type(given).__name__}')
    known = options_of(ProposerOptions)
    for name, value in given.items():
        if name not in known:
            raise UsageError(f'{where}: "{KEY}" has no option {name!r}: {nearest(str(name), known)}')
        known[name].check(f"{KEY}.{name}", value)
    return ProposerOptions(**given)
