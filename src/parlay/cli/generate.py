"""`parlay generate`: prints the continuation of one prompt as it is decoded, then how long it took."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from parlay.cli import FAILURE, INTERRUPTED, flags
from parlay.cli.ensemble_flags import add_ensemble_flags, quoted
from parlay.cli.explaining import explained, going_on
from parlay.cli.opening import open_llm, read_text
from parlay.cli.parser import unicode_text
from parlay.cli.reasoning import (
    add_ahead_flags,
    add_outline_flags,
    add_vote_flags,
    ahead_params,
    check_outline,
    defaults,
    vote_line,
    vote_params,
    write_ahead,
    write_by_outline,
)
from parlay.cli.structured import add_structured_flags, naming_the_form, structured_outputs
from parlay.system.terminal import Interrupt, Tint, counted, speed, wants_colour
from parlay.types import Metrics, SamplingParams

if TYPE_CHECKING:
    from parlay.llm.jobs import Stream
    from parlay.llm.llm import LLM
    from parlay.llm.outputs import CompletionOutput, RequestOutput
    from parlay.llm.voting import VoteOutput


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "prompt",
        nargs="?",
        type=unicode_text,
        metavar="PROMPT",
        help="text to continue (default: read from standard input)",
    )
    parser.add_argument("--file", metavar="FILE", help="take the text of this file as the prompt")
    parser.add_argument("--chat", action="store_true", help="the prompt is a user's message in the model's chat format")
    parser.add_argument(
        "--system", type=unicode_text, metavar="TEXT", help="system message before the prompt; implies --chat"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object at the end instead of the text as it is decoded"
    )
    parser.add_argument(
        "--explain", action="store_true", help="say what auto chose in each step, and why; with --json as data"
    )
    flags.add_model_flags(parser)
    flags.add_context_flag(parser)
    flags.add_tokenizer_flag(parser)
    flags.add_strategy_flags(parser, "decoding strategy; parlay strategies lists them (default: auto)")
    flags.add_router_memory_flag(parser)
    flags.add_exactness_flag(parser)
    flags.add_certificate_flag(parser)
    _add_text_flags(parser)
    flags.add_sampling_flags(parser)
    add_vote_flags(parser)
    add_outline_flags(parser)
    add_ahead_flags(parser)
    add_structured_flags(parser)
    add_ensemble_flags(parser)
    flags.add_rank_flags(parser)


def _add_text_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags for texts to draft from, and for whether later requests may draft from this one."""
    parser.add_argument(
        "--document",
        action="append",
        default=[],
        metavar="FILE",
        help="text that the output may repeat; strategies that copy draft from it; may be given several times",
    )
    parser.add_argument(
        "--prediction",
        metavar="FILE",
        help="text that the output will mostly repeat, such as a file before an edit; drafts follow it",
    )
    parser.add_argument(
        "--store",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="let strategies that learn across requests learn from this one",
    )


def run(options: argparse.Namespace) -> int:
    params = replace(flags.sampling_params(options, defaults(options)), structured_outputs=structured_outputs(options))
    prompt, vote = _prompt(options), vote_params(options, params)
    check_outline(options)
    ahead = ahead_params(options)
    given: dict[str, Any] = {
        "documents": [read_text(name, "document") for name in options.document],
        "exactness": options.exactness,
        "prediction": None if options.prediction is None else read_text(options.prediction, "prediction"),
    }
    tint = Tint(sys.stdout)
    with ExitStack() as stack:
        llm = stack.enter_context(open_llm(options, strategy := flags.chosen_strategy(options)))
        _check_template(options, llm, prompt)
        stack.enter_context(naming_the_form(options))
        if options.outline or ahead is not None:  # these show nothing before their end
            write = partial(write_ahead, ahead=ahead) if ahead is not None else write_by_outline
            return write(options, llm, prompt, params)
        interrupt = stack.enter_context(Interrupt())
        stream = llm.stream(prompt, params, strategy=strategy, store=options.store, vote=vote, **given)
        _write(stream, interrupt, None if options.json else tint)
        output, sample = stream.output, stream.output.chosen
        room = llm.engine.longest - sample.metrics.prompt_tokens
        wants_chat = bool(isinstance(prompt, str) and llm.tokenizer and llm.tokenizer.chat_template)
        explanation = explained(sample.metrics, _overlaps(llm, output, given)) if options.explain else None
    if options.json:
        print(json.dumps(_report(sample, output.vote, whole=options.explain)))
    _summarise(sample, params, tint)
    if sample.origins:
        print(quoted(sample), file=sys.stderr)
    if output.vote is not None:
        print(vote_line(output, output.vote), file=sys.stderr)
    _note(explanation, params, room)
    if wants_chat and _ended_at_once(sample, params):
        print("parlay: note: the model wrote no text: if it is a chat model, add --chat", file=sys.stderr)
    cut = params.structured_outputs is not None and sample.finish_reason == "length"
    error = sample.error or (output.vote and output.vote.error) or (_CUT if cut else None)
    if error is not None:
        print(f"parlay: error: {error}", file=sys.stderr)
        return FAILURE
    return INTERRUPTED if interrupt.noted else 0


def _ended_at_once(sample: CompletionOutput, params: SamplingParams) -> bool:
    """Whether the model itself ended its text at hardly a token, without a stop text or a form."""
    free = not params.stop and params.structured_outputs is None
    return free and len(sample.token_ids) < 2 and sample.finish_reason == "stop"


_CUT = "the text is incomplete, because max_tokens cut it, so it does not have the form asked for: raise --max-tokens"


def _overlaps(llm: LLM, output: RequestOutput, given: Mapping[str, Any]) -> list[bool]:
    """For each token, whether it continues a document, a prediction, the prompt, or the output so far."""
    texts = filter(None, [given["prediction"], *given["documents"]])
    references = [llm.vocabulary.required_tokenizer.encode(text, add_special_tokens=False) for text in texts]
    return going_on(output.chosen.token_ids, output.prompt_token_ids, references)


def _check_template(options: argparse.Namespace, llm: LLM, prompt: object) -> None:
    """Raises ValueError for a conversation if the model has no chat template."""
    if not isinstance(prompt, str) and not (llm.tokenizer and llm.tokenizer.chat_template):
        raise ValueError(
            f"{options.model} has no chat template: remove --chat and --system, or name a tokenizer with one by "
            "--tokenizer"
        )


def _note(note: str | None, params: SamplingParams, room: int) -> None:
    """Print the router's choices, if asked for, and a note if max_tokens exceeds the room in the context."""
    if note is not None:
        print(note, file=sys.stderr)
    if params.max_tokens is not None and params.max_tokens > room:
        print(f"parlay: note: the context has room for only {room:,} tokens after this prompt", file=sys.stderr)


# ----------------------------------------------------------------------------------------------------------- prompt


def prompt_text(options: argparse.Namespace) -> str:
    """The prompt from the argument, the file or standard input. Raises ValueError if there is no text."""
    if options.file is not None and options.prompt is not None:
        raise ValueError("the prompt is given twice, as an argument and with --file: remove one of them")
    text = options.prompt
    if text is None:
        text = _without_end(read_text(options.file, "prompt")) if options.file is not None else _read_stdin()
    if not text:
        raise ValueError("the prompt is empty: give it as an argument, with --file, or on standard input")
    return str(text)


def _prompt(options: argparse.Namespace) -> str | list[dict[str, str]]:
    """The prompt as text, or as a conversation. Raises ValueError if there is none."""
    text = prompt_text(options)
    system = [("system", options.system)] if options.system is not None else []
    if not options.chat and not system:
        return text
    return [{"role": role, "content": content} for role, content in [*system, ("user", text)]]


def _read_stdin() -> str:
    """Read standard input, without its last line end."""
    if sys.stdin.isatty():
        raise ValueError("the prompt is missing: give it as an argument, with --file, or on standard input")
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input is not UTF-8 (byte {error.start}): convert it, such as with iconv") from None
    return _without_end(text)


def _without_end(text: str) -> str:
    """Remove the line end that editors and `echo` add."""
    return text.removesuffix("\n").removesuffix("\r")


# ---------------------------------------------------------------------------------------------------------- output


def _write(stream: Stream, interrupt: Interrupt, tint: Tint | None) -> None:
    """Decode to the end or to Ctrl-C; with a tint, print the text as it is committed (after a vote, the chosen one)."""
    last = "\n"
    try:
        with closing(stream):
            for event in stream:
                pieces = event.pieces
                if stream.votes:
                    pieces = event.output.chosen.pieces if event.output is not None else ()
                if tint is not None and pieces:
                    sys.stdout.write("".join(tint(piece.text, piece.source) for piece in pieces))
                    sys.stdout.flush()
                    last = pieces[-1].text[-1:] or last
                if interrupt.noted:
                    break
    finally:
        if last != "\n":  # otherwise an error would follow in the text's last line
            print(flush=True)


def _report(sample: CompletionOutput, vote: VoteOutput | None, *, whole: bool) -> dict[str, object]:
    """The result as JSON; with ``whole`` it has an entry for each stretch of steps, perhaps one per token."""
    record = sample.metrics.router
    router = None if record is None else record.as_data(whole=whole)
    return {
        **({} if vote is None else {"vote": asdict(vote)}),
        "text": sample.text,
        "token_ids": list(sample.token_ids),
        **({"writers": list(sample.writers)} if sample.writers else {}),
        "finish_reason": sample.finish_reason,
        **({"attributions": [asdict(part) for part in sample.attributions]} if sample.origins else {}),
        "metrics": {**_metrics(sample.metrics), "router": router, "seed": sample.seed},
    }


def _metrics(metrics: Metrics) -> dict[str, object]:
    return {
        "strategy": metrics.strategy,
        "exactness": metrics.exactness,
        "prompt_tokens": metrics.prompt_tokens,
        "completion_tokens": metrics.completion_tokens,
        "steps": metrics.steps,
        "tokens_per_step": metrics.tokens_per_step,
        "draft_tokens": metrics.draft_tokens,
        "accepted_tokens": metrics.accepted_tokens,
        "acceptance_rate": metrics.acceptance_rate,
        "seconds": metrics.seconds,
        "tokens_per_second": metrics.tokens_per_second,
        "prefill_seconds": metrics.prefill_seconds,
        "draft_seconds": metrics.draft_seconds,
        "verify_seconds": metrics.verify_seconds,
        "overhead_seconds": metrics.overhead_seconds,
        "escaped_at": metrics.escaped_at,
        "lost_members": metrics.lost_members,
    }


def _summarise(sample: CompletionOutput, params: SamplingParams, tint: Tint) -> None:
    """Print two lines on standard error: the time it took, and how well the drafts did."""
    from parlay.system import threads

    metrics = sample.metrics
    seed = "" if params.greedy else f"; seed {sample.seed}"
    pace = f", {speed(metrics.tokens_per_second)}" if metrics.tokens_per_second else ""  # a single step has no speed
    print(
        f"{counted(metrics.completion_tokens, 'token')} in {counted(metrics.steps, 'step')} "
        f"({metrics.tokens_per_step:.2f} a step){pace} after {metrics.prefill_seconds:.2f} s of prefill; "
        f"{_ENDS[sample.finish_reason]}\n"
        f"{metrics.strategy} [{metrics.exactness}], {counted(threads.count(), 'thread')}: "
        f"{_drafts(metrics, tint)}{seed}",
        file=sys.stderr,
    )


_ENDS = {"stop": "came to an end", "length": "length reached", "abort": "interrupted", "error": "failed"}


def _drafts(metrics: Metrics, tint: Tint) -> str:
    """Accepted and drafted tokens per drafter, in the colour of its text."""
    if not metrics.draft_tokens:
        return "nothing drafted"
    counts = metrics.drafted_by_source.items()
    parts = [f"{metrics.accepted_by_source.get(source, 0)} of {drafted} from {source}" for source, drafted in counts]
    if wants_colour(sys.stderr):
        parts = [tint(part, source) for part, (source, _) in zip(parts, counts, strict=True)]
    return f"accepted {', '.join(parts)}"
