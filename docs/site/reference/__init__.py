"""Parts of the reference that are made from the package when the site is built, by the name that a page gives them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import cli_reference

from reference import code_map, families, http, measured, parameters, strategies

GENERATORS: Mapping[str, Callable[..., str]] = {
    "accept-rules": strategies.accept_rules,
    "commands": cli_reference.reference,
    "environment": parameters.environment,
    "families": families.families,
    "forwards": measured.forwards,
    "http-endpoints": http.endpoints,
    "http-fields": http.fields,
    "map": code_map.code_map,
    "measured-kinds": measured.kinds,
    "metrics": http.metrics,
    "options": parameters.options,
    "origins": measured.origins,
    "parameters": parameters.parameters,
    "peers": measured.peers,
    "quality": measured.quality,
    "spec-bench": measured.spec_bench,
    "strategies": strategies.strategies,
    "strategy-index": strategies.index,
}
