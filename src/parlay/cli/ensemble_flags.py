"""The flags that say which models write together, and how."""

from __future__ import annotations

import argparse

from parlay.options import ALPHA, BETA, ENSEMBLE_RULES, Ensemble, read_weights


def add_ensemble_flags(parser: argparse._ActionsContainer) -> None:
    """Which other models write with the model, for `chosen_ensemble`."""
    parser.add_argument(
        "--ensemble",
        action="append",
        default=[],
        metavar="MODEL",
        help="another model that writes with the model; may be given several times (default: none)",
    )
    parser.add_argument(
        "--ensemble-rule",
        choices=ENSEMBLE_RULES,
        default=ENSEMBLE_RULES[0],
        help="how one law is made of all: mean or product of the laws, the majority of their likeliest tokens, the "
        "surest model, the contrast to a weaker one, or the model that a trained head chooses at each token (default: "
        f"{ENSEMBLE_RULES[0]})",
    )
    parser.add_argument(
        "--ensemble-weights",
        default="",
        metavar="W,W",
        help="a weight for each model, --model's own first (default: equal)",
    )
    parser.add_argument(
        "--ensemble-drop-failed",
        action="store_true",
        help="where a model of the ensemble fails, go on without it; the result says so (default: end the request)",
    )
    parser.add_argument(
        "--ensemble-deadline",
        type=float,
        metavar="SECONDS",
        help="a text goes on without a model whose forward takes longer; the result says so (default: all are awaited)",
    )
    _add_flags_of_rules(parser)


def _add_flags_of_rules(parser: argparse._ActionsContainer) -> None:
    """Numbers and a folder that single rules read."""
    parser.add_argument(
        "--contrast-alpha",
        type=float,
        default=ALPHA,
        metavar="X",
        help="contrast drops tokens below this share of the highest probability (default: 0.1)",
    )
    parser.add_argument(
        "--contrast-beta",
        type=float,
        default=BETA,
        metavar="X",
        help="how far contrast moves away from the weaker model (default: 0.5)",
    )
    parser.add_argument(
        "--ensemble-head",
        default="",
        metavar="FOLDER",
        help="rule defer: the head that says where the other model writes, from parlay train defer",
    )
    parser.add_argument(
        "--ensemble-threshold",
        type=float,
        metavar="P",
        help="rule defer: the other model writes where the head is surer than this (default: as its folder says)",
    )


def chosen_ensemble(options: argparse.Namespace) -> Ensemble | None:
    """Read what `add_ensemble_flags` added; None where no model is named, or a command has no such flags."""
    if not vars(options).get("ensemble"):
        return None
    return Ensemble(
        options.ensemble,
        options.ensemble_rule,
        read_weights(options.ensemble_weights),
        options.contrast_alpha,
        options.contrast_beta,
        drop_failed=options.ensemble_drop_failed,
        deadline=options.ensemble_deadline,
        head=options.ensemble_head,
        threshold=options.ensemble_threshold,
    )
