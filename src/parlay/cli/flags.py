"""Command-line flags made from the fields of options classes and of `SamplingParams`."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from parlay.certificates.requirement import Allowed
from parlay.certificates.requirement import parse as allowed_by
from parlay.cli.parser import unicode_text
from parlay.models.fetch.pulled import DEFAULT_MODEL
from parlay.options import LoadOptions, Option, Options, RankOptions, UsageError, options_of, read_config
from parlay.options import whole as read_whole
from parlay.types import SamplingParams

if TYPE_CHECKING:
    from parlay.strategies.spelling import StrategySpec

SAMPLING_HELP = {
    "max_tokens": "most tokens to write; -1: until the model ends; -n is short for it, as in llama.cpp",
    "temperature": "0: always the likeliest token (greedy); 1: sample the model's own distribution",
    "top_k": "sample only from the N likeliest tokens; 0: from all",
    "top_p": "sample only from the likeliest tokens that together have this probability (nucleus)",
    "min_p": "drop tokens less likely than this share of the likeliest token's probability",
    "typical_p": "sample only from the most typical tokens that together have this probability",
    "repetition_penalty": "above 1: make tokens of the prompt and the output less likely",
    "presence_penalty": "above 0: make each token that is in the output less likely",
    "frequency_penalty": "above 0: make tokens less likely each time they occur in the output",
    "seed": "the same seed gives the same text (default: a random one, which is reported)",
    "min_tokens": "least tokens to write",
    "stop": "end before this text; may be given several times",
    "include_stop_str_in_output": "keep the text of --stop at the end of the output",
    "ignore_eos": "continue after the model's end-of-text token",
    "skip_special_tokens": "remove special tokens from the output (default: yes)",
    "guidance_scale": "above 1: move the text away from what the negative prompt leads to; 1: off",
    "negative_prompt": "text that --guidance-scale moves away from; in a chat a system message (default: last token)",
}
PYTHON_ONLY = frozenset(
    {"n", "logit_bias", "bad_words", "allowed_token_ids", "truncate_prompt_tokens", "logits_processors"}
    | {"stop_token_ids", "logprobs", "prompt_logprobs", "logprobs_mode", "structured_outputs"}
)
"""Fields of SamplingParams without a flag."""
DEFAULTS: Mapping[str, object] = {"max_tokens": 256, "temperature": 0.0}
"""Defaults that differ from SamplingParams': greedy text, longer than vLLM's 16 tokens."""
HOT = 2.0
"""Higher temperatures cause a warning; OpenAI's API refuses them."""
UNLIMITED = -1
"""As most tokens to write: until the model ends. Parameters have None for it."""
ALIASES = {"max_tokens": "max_new_tokens"}

T = TypeVar("T", bound=Options)
Value = TypeVar("Value")

_METAVARS = {int: "N", float: "X", Path: "PATH"}


def whole(text: str) -> int:
    """Parse a flag's integer."""
    try:
        return read_whole(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r:.60}") from None


def whole_from(least: int, most: int = 1 << 40) -> Callable[[str], int]:
    """Make a parser of integers from ``least`` to ``most``."""

    def read(text: str) -> int:
        value = int(text) if text.strip().isdecimal() and len(text) < 20 else -1
        if not least <= value <= most:
            upto = f" and at most {most}" * (value > most)
            raise argparse.ArgumentTypeError(f"must be a whole number of at least {least}{upto}, got {text!r:.60}")
        return value

    return read


def not_negative(text: str) -> float:
    """Parse a flag's finite number of at least 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of at least 0, got {text!r:.60}")
    return value


def positive(text: str) -> float:
    """Parse a flag's finite number above 0."""
    value = not_negative(text)
    if value == 0:
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return value


def comma_list(read: Callable[[str], Value]) -> Callable[[str], tuple[Value, ...]]:
    """Make a parser of values separated by commas; duplicates are dropped."""
    return lambda text: tuple(dict.fromkeys(read(each) for each in text.split(",")))


_READERS: Mapping[str, tuple[Callable[[str], object], str]] = {"int": (whole, "N"), "float": (float, "X")}


MODEL = (
    "local folder or GGUF file, Hugging Face Hub id (with :QUANTISATION for a GGUF file there), or a name from parlay "
    f"models (default: {DEFAULT_MODEL}, downloaded at first use)"
)

CONTEXT = "context length: most tokens of prompt and output together (default: the model's)"


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that choose a model and how to run it, which all decoding commands share. Without --model the
    default is `pulled.default_model`."""
    parser.add_argument("--model", help=MODEL)
    add_loading_flags(parser)


def add_loading_flags(parser: argparse._ActionsContainer) -> None:
    """Add the flags for loading the model; those of draft models are in `add_draft_flags`."""
    add_option_flags(parser, LoadOptions, [name for name in options_of(LoadOptions) if name != "draft_quantize"])


def add_rank_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that spread a model over several processes."""
    add_option_flags(parser.add_argument_group("ranks", "several processes run the model together"), RankOptions)


def add_context_flag(parser: argparse._ActionsContainer) -> None:
    """Add the flags for the length of prompt and output, and for the memory of the KV cache."""
    parser.add_argument("--max-model-len", type=whole, metavar="N", help=CONTEXT)
    parser.add_argument(
        "--memory",
        metavar="SIZE",
        help="memory for the KV cache and drafters, as in 2GiB; weights=SIZE, alone or after a comma, limits the "
        "memory of weights, and the rest is read from disk (on a GPU: from host memory)",
    )
    add_prefix_cache_flags(parser)


def add_prefix_cache_flags(parser: argparse._ActionsContainer) -> None:
    """Add the flags for the file that keeps cached prefixes between processes."""
    parser.add_argument(
        "--prefix-cache",
        type=Path,
        metavar="FILE",
        help="load cached prefixes from this file at the start, and save them at the end; it contains tokens of "
        "prompts and answers (default: none)",
    )
    parser.add_argument(
        "--prefix-cache-size",
        metavar="SIZE",
        default="1GiB",
        help="largest size of the file of --prefix-cache (default: 1GiB)",
    )


def add_tokenizer_flag(parser: argparse._ActionsContainer) -> None:
    """Add the flag for models whose own tokenizer is missing or can't be read."""
    parser.add_argument(
        "--tokenizer", metavar="MODEL", help="folder or Hub id of a tokenizer (default: the model's own)"
    )


def add_strategy_flags(parser: argparse._ActionsContainer, help: str) -> None:
    """Add the flags of the decoding strategy, for `chosen_strategy`. A wrong name is reported before anything is
    loaded."""
    parser.add_argument("--strategy", type=strategy, metavar="NAME[:KEY=VALUE,...]", help=help)
    add_draft_flags(parser, "draft model, for the strategies auto and draft-model (default: none)")
    add_effort_flag(parser)


def add_draft_flags(parser: argparse._ActionsContainer, help: str) -> None:
    """Add the flags of the draft model and how to load it."""
    parser.add_argument("--draft-model", metavar="MODEL", help=help)
    add_option_flags(parser, LoadOptions, ["draft_quantize"])


def add_effort_flag(parser: argparse._ActionsContainer) -> None:
    """Add the flag for how aggressively strategies with several drafters draft. The choices are repeated here, as help
    does not import the router."""
    parser.add_argument(
        "--effort",
        choices=("low", "medium", "high"),
        help="how aggressively the strategy auto drafts; short for auto:effort=... (default: medium)",
    )


def chosen_strategy(options: argparse.Namespace) -> StrategySpec | None:
    """Read ``--strategy`` and ``--effort``; None means the default strategy.

    Effort without a strategy is the default strategy's. Raises UsageError if the strategy has no effort.
    """
    named = cast("StrategySpec | None", options.strategy)
    if named is not None and dict(named.parameters).get("k") == 0:
        print(f"parlay: note: {named} drafts nothing: this is plain decoding", file=sys.stderr)
    if options.effort is None:
        return named
    from parlay.strategies.entry import DEFAULT_STRATEGY
    from parlay.strategies.spelling import parse, with_effort

    return with_effort(named or parse(DEFAULT_STRATEGY), options.effort)


def add_router_memory_flag(parser: argparse._ActionsContainer, *, keys: bool = False) -> None:
    """Add the flag for keeping what routers learn; with ``keys`` it can be kept for each API key separately."""
    by_key = "; per-key: separate ones for each API key" if keys else ""
    parser.add_argument(
        "--router-memory",
        choices=("shared", "per-key", "off") if keys else ("shared", "off"),
        default="shared",
        help="reuse drafting statistics of earlier runs, which contain no text (see parlay router)"
        f"{by_key}; off: neither read nor write them (default: shared)",
    )


def add_exactness_flag(parser: argparse._ActionsContainer) -> None:
    """Add the flag for the weakest guarantee that the user accepts. A wrong value is reported before anything is
    loaded."""
    parser.add_argument(
        "--exactness",
        type=exactness,
        metavar="LEVEL",
        help="weakest guarantee that you accept: bits, seed, distribution, lossy, or lossy:floor=X, certified to give "
        "a share X of good answers (default: the strategy's own)",
    )


def add_certificate_flag(parser: argparse._ActionsContainer) -> None:
    """Add the flag for certificates, by which a floor allows lossy strategies."""
    parser.add_argument(
        "--certificate",
        action="append",
        default=[],
        dest="certificates",
        metavar="FILE",
        help="certificate that allows lossy decoding (see parlay calibrate); may be given several times",
    )


def exactness(text: str) -> Allowed:
    """Parse a flag's exactness."""
    try:
        return allowed_by(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def strategy(text: str) -> StrategySpec:
    """Parse a flag's strategy."""
    from parlay.strategies.spelling import parse  # here, as help needs no catalogue

    try:
        return parse(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def add_option_flags(
    parser: argparse._ActionsContainer,
    declared: type[Options],
    names: Iterable[str] | None = None,
    help: Mapping[str, str] | None = None,
) -> None:
    """A flag for each field of an options class, or for those of these ``names``; ``help`` has other texts for some."""
    options, texts = options_of(declared), help or {}
    for name in options if names is None else names:
        option = options[name]
        _add_flag(parser, option, texts.get(name, option.help), default=option.default, required=option.required)


def add_config_flags(parser: argparse.ArgumentParser, declared: type[Options]) -> None:
    """Add a flag for each field, and --config for a file with values of the others; for `options_or_config`."""
    help = "YAML file of lines KEY: VALUE for these options; a flag counts before it"
    parser.add_argument("--config", type=Path, metavar="FILE", help=help)
    for option in options_of(declared).values():
        _add_flag(parser, option, option.help, default=argparse.SUPPRESS, required=False)


def _add_flag(
    parser: argparse._ActionsContainer, option: Option, help: str, *, default: object, required: bool
) -> None:
    reading = _reading(option) | ({} if option.type is bool else {"required": required})
    name, shown = f"--{option.flag or option.name.replace('_', '-')}", _shown(option.default)
    parser.add_argument(name, dest=option.name, default=default, help=help + shown, **reading)


def options_or_config(declared: type[T], arguments: argparse.Namespace) -> T:
    """Make options from flags, else from the config file, else from defaults.

    Raises UsageError for a value out of range, a missing required option, and an invalid config.
    """
    known = options_of(declared)
    from_file = read_config(arguments.config, declared) if arguments.config is not None else {}
    values = {**from_file, **{name: value for name, value in vars(arguments).items() if name in known}}
    missing = [name for name, option in known.items() if option.required and name not in values]
    if missing:
        raise UsageError(f"--{missing[0].replace('_', '-')} is missing: add it, or set it in the file of --config")
    return declared(**values)


def options_from(declared: type[T], arguments: argparse.Namespace) -> T:
    """Make options from parsed arguments; a field without a flag keeps its default.

    Raises UsageError for a value out of range.
    """
    return declared(**values_from(declared, arguments))


def values_from(declared: type[Options], arguments: argparse.Namespace) -> dict[str, Any]:
    """The fields of an options class that parsed arguments give, by name."""
    given = vars(arguments)
    return {name: given[name] for name in options_of(declared) if name in given}


def _reading(option: Option) -> dict[str, Any]:
    """The keyword arguments of `add_argument` for an option."""
    if option.type is bool:
        return {"action": "store_true" if option.switch else argparse.BooleanOptionalAction}
    metavar = None if option.choices else option.metavar or _METAVARS.get(option.type)
    return {
        "type": whole if option.type is int else option.type,
        "choices": option.choices or None,
        "metavar": metavar,
    }


def _shown(default: object) -> str:
    """The default as help shows it; empty if there is nothing to show."""
    hidden = default in (MISSING, None, "", ()) or isinstance(default, bool)
    shown = f"{default:g}" if isinstance(default, float) else default
    return "" if hidden else f" (default: {shown})"


def add_sampling_flags(
    parser: argparse.ArgumentParser, defaults: Mapping[str, object] = DEFAULTS, note: str | None = None
) -> None:
    """Add a flag for each sampling field, with ``defaults`` in its help. Flags that are not given are missing from the
    namespace."""
    group = parser.add_argument_group("sampling", note)
    for field in _sampling_fields():
        names = [name for name in (field.name, ALIASES.get(field.name)) if name]
        group.add_argument(
            *("--" + name.replace("_", "-") for name in names),
            dest=field.name,
            default=argparse.SUPPRESS,
            help=SAMPLING_HELP[field.name] + _shown(defaults.get(field.name, field.default)),
            **_kind(field),
        )


def sampling_params(options: argparse.Namespace, defaults: Mapping[str, object] = DEFAULTS) -> SamplingParams:
    """Read the sampling flags, with ``defaults`` for those not given. Raises ValueError for a value out of range or
    without effect."""
    values = vars(options)
    chosen = {field.name: values[field.name] for field in _sampling_fields() if field.name in values}
    if chosen.get("max_tokens") == UNLIMITED:
        chosen["max_tokens"] = None
    params = SamplingParams(**{**defaults, **chosen})
    if params.negative_prompt is not None and params.guidance_scale == 1:
        raise UsageError(
            "--negative-prompt has no effect without --guidance-scale other than 1: "
            "add --guidance-scale other than 1, or remove it"
        )
    if params.temperature > HOT:
        print(f"parlay: note: {hot(params.temperature)}", file=sys.stderr)
    return params


def hot(temperature: float) -> str:
    """A warning about a temperature above `HOT`."""
    return f"temperature {temperature:g} is above {HOT:g}: most models then write nonsense; 0.7 to 1 is usual"


def _sampling_fields() -> list[Field[Any]]:
    return [field for field in fields(SamplingParams) if field.name not in PYTHON_ONLY]


def _kind(field: Field[Any]) -> dict[str, Any]:
    """The keyword arguments of `add_argument` for a field, from its annotation."""
    kind = str(field.type).removesuffix(" | None")
    if kind == "bool":
        return {"action": argparse.BooleanOptionalAction} if field.default is True else {"action": "store_true"}
    if kind.startswith("str"):
        text = {"type": unicode_text, "metavar": "TEXT"}
        return {"action": "append", **text} if kind == "str | Sequence[str]" else text
    reader, metavar = _READERS[kind]
    return {"type": reader, "metavar": metavar}
