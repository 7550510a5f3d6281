"""Flags that choose the models or the datastore that write together with the model, and what of a text comes from the
datastore."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING

from parlay.options import (
    ALPHA,
    BETA,
    ENSEMBLE_RULES,
    NEIGHBOURS,
    NEST_ALPHA,
    NEST_TAU,
    Ensemble,
    Nest,
    UsageError,
    read_weights,
)
from parlay.system.terminal import printable

if TYPE_CHECKING:
    from parlay.llm.outputs import CompletionOutput


def add_ensemble_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags for `chosen_ensemble`: other models or a datastore that write with the model."""
    group = parser.add_argument_group("several models", "other models write the text together with the model")
    group.add_argument(
        "--ensemble",
        action="append",
        default=[],
        metavar="MODEL",
        help="another model, whose predictions are combined with --model's; may be given several times (default: none)",
    )
    group.add_argument(
        "--ensemble-rule",
        choices=ENSEMBLE_RULES,
        default=ENSEMBLE_RULES[0],
        help="how to combine the models' next-token distributions; certainty: the surest model's; contrast: against a "
        f"weaker model; defer: a trained head chooses the model (default: {ENSEMBLE_RULES[0]})",
    )
    group.add_argument(
        "--ensemble-weights",
        default="",
        metavar="W,W",
        help="a weight for each model, --model's own first (default: equal)",
    )
    group.add_argument(
        "--ensemble-drop-failed",
        action="store_true",
        help="if a model of the ensemble fails, continue without it and report it (default: end the request)",
    )
    group.add_argument(
        "--ensemble-deadline",
        type=float,
        metavar="SECONDS",
        help="continue without a model whose forward takes longer, and report it (default: wait for all)",
    )
    _add_flags_of_rules(group)
    _add_nest_flags(parser.add_argument_group("quoted texts", "the model quotes texts, and says which"))


def _add_nest_flags(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--nest",
        metavar="FILE",
        help="datastore (parlay datastore build --states) whose texts the model may quote; results name each token's "
        "document (default: none)",
    )
    parser.add_argument(
        "--nest-neighbours",
        type=int,
        default=NEIGHBOURS,
        metavar="N",
        help=f"states of the datastore to look up for each token (default: {NEIGHBOURS})",
    )
    parser.add_argument(
        "--nest-alpha",
        type=float,
        default=NEST_ALPHA,
        metavar="X",
        help="ratio of nearest to farthest squared distance at which model and datastore have the same weight; lower "
        f"trusts the model more (default: {NEST_ALPHA:g})",
    )
    parser.add_argument(
        "--nest-tau",
        type=float,
        default=NEST_TAU,
        metavar="X",
        help=f"how slowly the weights change around --nest-alpha (default: {NEST_TAU:g})",
    )


def _add_flags_of_rules(parser: argparse._ActionsContainer) -> None:
    """Add the flags that only some rules use."""
    parser.add_argument(
        "--contrast-alpha",
        type=float,
        default=ALPHA,
        metavar="X",
        help="rule contrast: drop tokens below this share of the highest probability (default: 0.1)",
    )
    parser.add_argument(
        "--contrast-beta",
        type=float,
        default=BETA,
        metavar="X",
        help="rule contrast: how far to move away from the weaker model (default: 0.5)",
    )
    parser.add_argument(
        "--ensemble-head",
        default="",
        metavar="FOLDER",
        help="rule defer: folder of the head that chooses the model (see parlay train defer)",
    )
    parser.add_argument(
        "--ensemble-threshold",
        type=float,
        metavar="P",
        help="rule defer: use the other model above this probability of the head (default: set in its folder)",
    )


def chosen_ensemble(options: argparse.Namespace) -> Ensemble | Nest | None:
    """Read the flags of `add_ensemble_flags`; None if none is given, or if the command has no such flags.

    Raises UsageError if both a datastore and other models are given.
    """
    if "ensemble" not in options:
        return None
    if options.nest is not None and options.ensemble:
        raise UsageError("--nest and --ensemble can't be used together: remove one of them")
    _refuse_idle(options)
    if options.nest is not None:
        return Nest(options.nest, options.nest_neighbours, options.nest_alpha, options.nest_tau)
    if not options.ensemble:
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


_OF_RULES = {"contrast_alpha": ALPHA, "contrast_beta": BETA}
_OF_ENSEMBLES: dict[str, object] = {
    "ensemble_rule": ENSEMBLE_RULES[0],
    "ensemble_weights": "",
    "ensemble_drop_failed": False,
    "ensemble_deadline": None,
    "ensemble_head": "",
    "ensemble_threshold": None,
    **_OF_RULES,
}
_OF_NEST: dict[str, object] = {"nest_neighbours": NEIGHBOURS, "nest_alpha": NEST_ALPHA, "nest_tau": NEST_TAU}


def _refuse_idle(options: argparse.Namespace) -> None:
    """Raises UsageError for a flag that would have no effect."""

    def check(usual: Mapping[str, object], missing: str) -> None:
        for name, default in usual.items():
            if vars(options)[name] != default:
                raise UsageError(
                    f"--{name.replace('_', '-')} has no effect without {missing}: add {missing}, or remove it"
                )

    if not options.ensemble:
        check(_OF_ENSEMBLES, "--ensemble MODEL")
    elif options.ensemble_rule != "contrast":
        check(_OF_RULES, "--ensemble-rule contrast")
    if options.nest is None:
        check(_OF_NEST, "--nest FILE")


def quoted(sample: CompletionOutput) -> str:
    """The parts of a text that come from documents of the datastore, as a line."""
    parts = [f"{part.tokens} of {printable(part.document)} from token {part.position}" for part in sample.attributions]
    return f"tokens quoted: {'; '.join(parts) or 'none'}"
