"""`parlay generate --vote`, `--outline` and `--steps-model`: their flags, and what is printed about the outcome."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from parlay.cli import FAILURE
from parlay.cli.flags import DEFAULTS, chosen_strategy, options_from, whole
from parlay.cli.parser import unicode_text
from parlay.options import LoadOptions, UsageError
from parlay.system.terminal import counted, shown

if TYPE_CHECKING:
    from parlay.llm.llm import LLM
    from parlay.llm.outlining import OutlinedOutput
    from parlay.llm.outputs import RequestOutput
    from parlay.llm.steps_ahead import AheadOutput, AheadParams
    from parlay.llm.voting import VoteOutput, VoteParams
    from parlay.types import SamplingParams

TEMPERATURE = 0.7
"""The default temperature of a vote: at 0 all chains would be the same."""


def add_vote_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("vote", "several chains of thought decide on one answer (self-consistency)")
    group.add_argument(
        "--vote",
        dest="vote_n",
        type=whole,
        metavar="N",
        help=f"decode up to N chains; the default of --temperature is then {TEMPERATURE:g}",
    )
    group.add_argument(
        "--answer",
        dest="vote_answer",
        type=unicode_text,
        metavar="RULE",
        help="where a chain's answer is: number (the last one), boxed (the last \\boxed{}), or a regular expression, "
        "whose first group is the answer (default: number)",
    )
    group.add_argument(
        "--vote-by", choices=("votes", "score"), help="most votes win, or the likeliest chain does (default: votes)"
    )
    group.add_argument(
        "--vote-confidence",
        type=float,
        metavar="P",
        help="stop once the answer would win the full vote with this probability; the full vote may then differ "
        "(default: once the other chains can't change the answer)",
    )
    group.add_argument(
        "--vote-at-once",
        type=whole,
        metavar="N",
        help="chains that decode together; fewer cost fewer tokens, and may take longer (default: all)",
    )
    group.add_argument(
        "--vote-refill",
        action="store_true",
        default=None,
        help="with --vote-at-once: begin another chain whenever one ends; costs more tokens, and takes less time",
    )


def vote_params(options: argparse.Namespace, params: SamplingParams) -> VoteParams | None:
    """Make the vote's parameters from the flags. Raises UsageError for flags of a vote without --vote, and for invalid
    parameters."""
    from parlay.llm.voting import VoteParams  # here, as help needs none of it

    given = {
        "answer": options.vote_answer,
        "by": options.vote_by,
        "confidence": options.vote_confidence,
        "at_once": options.vote_at_once,
        "refill": options.vote_refill,
    }
    given = {name: value for name, value in given.items() if value is not None}
    if options.vote_n is not None:
        vote = VoteParams(n=options.vote_n, **given)
        vote.sampling(params)  # reports a mistake now instead of after loading the model
        return vote
    if given:
        raise UsageError("--answer and the --vote-... flags work only with --vote N, the number of chains: add it")
    return None


def defaults(options: argparse.Namespace) -> Mapping[str, object]:
    """The defaults of the sampling flags, with `TEMPERATURE` for a vote."""
    return DEFAULTS if options.vote_n is None else {**DEFAULTS, "temperature": TEMPERATURE}


def vote_line(output: RequestOutput, vote: VoteOutput) -> str:
    """The outcome of a vote in a line."""
    tokens = sum(len(one.token_ids) for one in output.outputs)
    cut = sum(one.finish_reason == "length" for one in output.outputs)
    ended, chains = len(vote.answers) - len(vote.stopped), len(vote.answers)
    if vote.answer is None:
        hint = f" (--max-tokens cut {cut} of them)" if cut else ""
        return f"no vote: none of the {ended} chains that ended has an answer{hint}; this is the text of the first"
    reason = {
        "all": "all chains ended",
        "decided": f"{chains - ended} of {chains} chains were stopped, and could not have changed it",
        "confidence": f"{chains - ended} of {chains} chains were stopped, and would hardly have changed it",
        "interrupted": "interrupted",
    }[vote.ended]
    agreed = ", ".join(f"{answer} has {votes}" for answer, votes in list(vote.votes.items())[:5])
    return f"vote: {vote.answer} ({agreed} of {ended} votes), {tokens} tokens in all; {reason}"


# --------------------------------------------------------------------------------------------------------- outlines


def add_outline_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("outline", "plan the answer, and write all its sections at once (lossy)")
    group.add_argument(
        "--outline",
        action="store_true",
        help="the prompt is a question whose answer has points; where order matters, it is answered plainly",
    )
    group.add_argument(
        "--outline-model", metavar="MODEL", help="smaller model that writes the outline, of any tokenizer"
    )


def check_outline(options: argparse.Namespace) -> None:
    """Raises UsageError for flags that can't be combined with an outline."""
    if options.outline_model is not None and not options.outline:
        raise UsageError("--outline-model works only with --outline: add it")
    if options.outline and (given := _given(options, system=options.system)):
        raise UsageError(f"--outline can't be used with --{given[0]}: remove one of them")


def _given(options: argparse.Namespace, **others: object) -> list[str]:
    """Return which of these flags and of ``others`` are given: neither an outline nor steps ahead can use them."""
    flags = {"vote": options.vote_n, **others, "prediction": options.prediction, "document": options.document}
    flags |= {"explain": options.explain, "exactness": options.exactness}
    return [name for name, value in flags.items() if value]


def write_by_outline(
    options: argparse.Namespace, llm: LLM, prompt: str | list[dict[str, str]], params: SamplingParams
) -> int:
    """Print the answer, and the plan on standard error."""
    from parlay.llm.llm import LLM
    from parlay.llm.outlining import write_outlined

    question = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    with ExitStack() as opened:
        small = None
        if options.outline_model is not None:
            load = options_from(LoadOptions, options)
            small = opened.enter_context(LLM(options.outline_model, load=load, router_memory="off"))
        output = write_outlined(llm, question, params, outliner=small)
    print(json.dumps(_report(output)) if options.json else shown(output.text, sys.stdout))
    tokens = sum(len(each.chosen.token_ids) for each in output.outputs)
    planned = f"{len(output.points)} sections at once" if output.points else "no sections"
    print(f"{planned}, {tokens} tokens [{output.exactness}]", file=sys.stderr)
    if output.note:
        print(f"parlay: note: {output.note}", file=sys.stderr)
    return 0


def _report(output: OutlinedOutput) -> dict[str, object]:
    return {
        "text": output.text,
        "points": list(output.points),
        "note": output.note,
        "exactness": output.exactness,
        "sections": [each.chosen.text for each in output.outputs],
    }


# ------------------------------------------------------------------------------------------------------- steps ahead


def add_ahead_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "steps ahead", "a small model drafts several steps of reasoning, and the model checks them in one batch"
    )
    group.add_argument(
        "--steps-model",
        dest="drafter",
        metavar="MODEL",
        help="smaller model of the same tokenizer that drafts steps of the answer",
    )
    group.add_argument(
        "--steps-ahead", dest="steps", type=whole, metavar="N", help="steps that are drafted at once (default: 3)"
    )
    group.add_argument(
        "--steps-until",
        dest="until",
        choices=("line", "sentence"),
        help="where a step ends (default: at the end of a line)",
    )
    group.add_argument(
        "--steps-judge",
        dest="judge",
        choices=("exact", "model"),
        help="a drafted step stands if the model writes the same tokens, or if it says that both mean the same, which "
        "is lossy (default: exact)",
    )


def ahead_params(options: argparse.Namespace) -> AheadParams | None:
    """Make the parameters of steps ahead from the flags. Raises UsageError for flags that contradict each other,
    ValueError for values out of range, and ParlayError for a missing model."""
    given = {"steps": options.steps, "until": options.until, "judge": options.judge}
    given = {name: value for name, value in given.items() if value is not None}
    if options.drafter is None:
        if given:
            raise UsageError(
                "--steps-ahead and the other --steps-... flags work only with --steps-model, the model that "
                "drafts steps: add it"
            )
        return None
    if named := _given(options, outline=options.outline):
        raise UsageError(f"--steps-model can't be used with --{named[0]}: remove one of them")
    from parlay.llm.steps_ahead import AheadParams  # here, as nothing else needs torch before models are found
    from parlay.models.fetch.resolving import resolve

    params = AheadParams(**given)
    resolve(options.drafter)
    return params


def write_ahead(
    options: argparse.Namespace,
    llm: LLM,
    prompt: str | list[dict[str, str]],
    params: SamplingParams,
    ahead: AheadParams,
) -> int:
    """Print the answer, and on standard error how well the drafted steps did."""
    from parlay.llm.llm import LLM

    load = replace(options_from(LoadOptions, options), quantize=None, lora=None)
    with LLM(options.drafter, load=load, router_memory="off") as small:
        output = llm.reason_ahead(prompt, params, ahead, drafter=small, strategy=chosen_strategy(options))
    print(json.dumps(_told_ahead(output)) if options.json else shown(output.text, sys.stdout))
    tokens, rounds = len(output.token_ids), output.rounds
    print(
        f"{counted(tokens, 'token')} in {counted(rounds, 'round')}, "
        f"{output.accepted} of {output.drafted} drafted steps stood; "
        f"{output.seconds:.2f} s, {output.draft_seconds:.2f} of them drafting [{output.exactness}]",
        file=sys.stderr,
    )
    if output.error is not None:
        print(f"parlay: error: {output.error}", file=sys.stderr)
        return FAILURE
    return 0


def _told_ahead(output: AheadOutput) -> dict[str, object]:
    return {
        "text": output.text,
        "token_ids": list(output.token_ids),
        "writers": list(output.writers),
        "finish_reason": output.finish_reason,
        "exactness": output.exactness,
        "rounds": output.rounds,
        "drafted": output.drafted,
        "accepted": output.accepted,
        "seconds": output.seconds,
        "draft_seconds": output.draft_seconds,
    }
