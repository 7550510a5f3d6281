"""Options: frozen dataclasses whose fields declare type, default, meaning and allowed values. Imports no torch.

Command line, server, documents and error messages all use the same declaration.
"""

from __future__ import annotations

from parlay.options.declare import (
    NotNamed,
    Option,
    Options,
    Value,
    check_values,
    close_to,
    nearest,
    of_kinds,
    option,
    options_of,
    override,
    refuse_unread,
    split,
    user_path,
    whole,
)
from parlay.options.ensemble import (
    ALPHA,
    BETA,
    ENSEMBLE_RULES,
    NEIGHBOURS,
    NEST_ALPHA,
    NEST_TAU,
    Ensemble,
    Nest,
    read_weights,
)
from parlay.options.from_file import read_config
from parlay.options.load import LoadOptions
from parlay.options.ranks import SPLITS, RankOptions
from parlay.types import UsageError

__all__ = [
    "ALPHA",
    "BETA",
    "ENSEMBLE_RULES",
    "NEIGHBOURS",
    "NEST_ALPHA",
    "NEST_TAU",
    "SPLITS",
    "Ensemble",
    "LoadOptions",
    "Nest",
    "NotNamed",
    "Option",
    "Options",
    "RankOptions",
    "UsageError",
    "Value",
    "check_values",
    "close_to",
    "nearest",
    "of_kinds",
    "option",
    "options_of",
    "override",
    "read_config",
    "read_weights",
    "refuse_unread",
    "split",
    "user_path",
    "whole",
]
