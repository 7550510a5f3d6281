"""Writes the tokenizer of a model's folder as keys of a GGUF file, if GGUF can express it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from parlay.models.config import read_json
from parlay.models.gguf.metadata import keys_as_read
from parlay.models.gguf.splitting import GPT2, SPLITTINGS
from parlay.models.gguf.tokenizer import build
from parlay.models.gguf.writing import KeyValue
from parlay.models.loading import load_tokenizer
from parlay.models.tokenizers.plain import panics_as_errors
from parlay.types import ParlayError

_KEY = "tokenizer.ggml."
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_PROBE = (
    "Hello, it's 12345 o'clock — don't WAIT!  Two  spaces,\ttabs\n\nand \r\nlines:   \n  if (x==1) {return 'a';}\n"
    "Größe naïve Ωμέγα русский 日本語のテキスト 한국어 العربية हिन्दी 😀👍🏽 ½²³ e\u0301 _snake_case camelCase <b>http://a.b/c?d=e</b>"
)
"""A text in many scripts on which the written tokenizer must agree with the folder's."""
_ENDS = ("eot", "eom")
"""Keys for end tokens besides the tokenizer's own."""
Json = Mapping[str, Any]


def tokenizer_keys(folder: Path, vocab_size: int, eos_ids: Sequence[int]) -> dict[str, KeyValue]:
    """The tokenizer and chat templates in ``folder`` as GGUF keys.

    Raises ParlayError, in one line, for a tokenizer that GGUF can't express, as the file would tokenize differently.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ParlayError(f"{folder} has no tokenizer.json: save the model's tokenizer with transformers there")
    tokenizer_json = read_json(path)
    try:
        return _keys(folder, tokenizer_json, vocab_size, eos_ids)
    except (ValueError, KeyError, TypeError) as error:
        reason = error if isinstance(error, ValueError) else f"a part of it is not as expected ({error!r:.60})"
        raise ParlayError(f"the tokenizer {path} can't be written into a GGUF file: {reason}") from None


def _keys(folder: Path, tokenizer_json: Json, vocab_size: int, eos_ids: Sequence[int]) -> dict[str, KeyValue]:
    model = tokenizer_json["model"]
    if model.get("type") != "BPE":
        raise ValueError(f"it is of the kind {model.get('type')!r:.40}, not BPE")
    tokens, types = _tokens(tokenizer_json, vocab_size)
    keys: dict[str, KeyValue] = {_KEY + "tokens": tokens, _KEY + "token_type": types}
    keys |= _sentence_piece(tokenizer_json, tokens) if model.get("byte_fallback") else _byte_level(tokenizer_json)
    loaded = load_tokenizer(folder)
    numbers = {token: number for number, token in enumerate(tokens)}
    keys |= _special_ids(loaded.special_tokens_map, numbers, eos_ids)
    template = loaded.chat_template
    for name, text in (template if isinstance(template, dict) else {"default": template}).items():
        if isinstance(text, str):
            keys["tokenizer.chat_template" + ("" if name == "default" else f".{name}")] = text
    return _agreeing(Backend.from_file(str(folder / "tokenizer.json")), keys)


def _tokens(tokenizer_json: Json, vocab_size: int) -> tuple[list[str], list[int]]:
    """All tokens by id, with their types; unused ids get a name that no text produces."""
    model, added = tokenizer_json["model"], {token["id"]: token for token in tokenizer_json.get("added_tokens", ())}
    names: dict[int, str] = {number: token for token, number in model["vocab"].items()}
    names |= {number: token["content"] for number, token in added.items()}
    if max(names) >= vocab_size:
        raise ValueError(f"it has a token {max(names)}, and the model's vocabulary ends at {vocab_size - 1}")
    tokens = [names.get(number, f"[PAD{number}]") for number in range(vocab_size)]
    types = [_NORMAL if number in names else _UNUSED for number in range(vocab_size)]
    for number, token in added.items():
        types[number] = _CONTROL if token.get("special") else _USER_DEFINED
    if model.get("byte_fallback"):
        for number, token in enumerate(tokens):
            if len(token) == 6 and token.startswith("<0x"):
                types[number] = _BYTE
            elif token == model.get("unk_token"):
                types[number] = _UNKNOWN
    return tokens, types


def _byte_level(tokenizer_json: Json) -> dict[str, KeyValue]:
    model, parts = tokenizer_json["model"], list(_parts(tokenizer_json.get("pre_tokenizer")))
    expressions = tuple(expression for part in parts for expression in _expressions(part))
    composed = [part.get("type") for part in _parts(tokenizer_json.get("normalizer"))]
    if composed not in ([], ["NFC"]):
        raise ValueError(f"its normalizer is {composed!r:.60}")
    fitting = [
        name
        for name, splitting in SPLITTINGS.items()
        if splitting.expressions == expressions
        and splitting.composed == bool(composed)
        and splitting.whole_words == bool(model.get("ignore_merges"))
    ]
    if not fitting:
        raise ValueError("GGUF has no name for how it cuts text into words, or Parlay does not know it")
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    return {_KEY + "model": "gpt2", _KEY + "pre": fitting[0], _KEY + "merges": merges}


def _parts(tokenizer_json: Json | None) -> Iterator[Json]:
    """The steps of a normalizer or pre-tokenizer, with sequences flattened."""
    if tokenizer_json is None:
        return
    if tokenizer_json.get("type") != "Sequence":
        yield tokenizer_json
        return
    for part in tokenizer_json.get("pretokenizers", tokenizer_json.get("normalizers", ())):
        yield from _parts(part)


def _expressions(part: Json) -> tuple[str, ...]:
    """The regular expressions with which a step splits text."""
    kind = part.get("type")
    if kind == "ByteLevel" and not part.get("add_prefix_space"):
        return (GPT2,) if part.get("use_regex", True) else ()
    if kind == "Digits" and part.get("individual_digits"):
        return (r"\p{N}",)
    if kind == "Split" and part.get("behavior") == "Isolated" and not part.get("invert") and "Regex" in part["pattern"]:
        return (part["pattern"]["Regex"],)
    raise ValueError(f"GGUF has no words for its step {kind!r:.40}")


def _sentence_piece(tokenizer_json: Json, tokens: Sequence[str]) -> dict[str, KeyValue]:
    """Keys of SentencePiece: scores fall in merge order, and a token that no merge produces has the lowest."""
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in tokenizer_json["model"]["merges"]]
    ranks: dict[str, int] = {}
    for rank, (left, right) in enumerate(merges):
        ranks.setdefault(left + right, rank)
    steps = [*_parts(tokenizer_json.get("normalizer")), *_parts(tokenizer_json.get("pre_tokenizer"))]
    before = any(
        step.get("type") == "Prepend" or (step.get("type") == "Metaspace" and step.get("prepend_scheme") != "never")
        for step in steps
    )
    return {
        _KEY + "model": "llama",
        _KEY + "pre": "default",
        _KEY + "scores": [-float(ranks.get(token, len(merges))) for token in tokens],
        _KEY + "add_space_prefix": before,
    }


def _special_ids(special: Mapping[str, str], numbers: Mapping[str, int], eos_ids: Sequence[int]) -> dict[str, KeyValue]:
    named = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    tokenizer_json = {short: str(special[name]) for name, short in named.items() if special.get(name)}
    found = {short: numbers[token] for short, token in tokenizer_json.items() if token in numbers}
    ends = [number for number in eos_ids if number != found.get("eos")]
    if "eos" not in found and ends:
        found["eos"] = ends.pop(0)
    found |= dict(zip(_ENDS, ends, strict=False))
    return {f"{_KEY}{name}_token_id": number for name, number in found.items()}


def _agreeing(expected: Backend, keys: dict[str, KeyValue]) -> dict[str, KeyValue]:
    """Add the keys for the tokens around a text. Raises ValueError if the two tokenizers disagree on the probe."""
    wanted, inner = expected.encode(_PROBE).ids, expected.encode(_PROBE, add_special_tokens=False).ids
    start = next((place for place in range(len(wanted)) if wanted[place : place + len(inner)] == inner), 0)
    first, last = wanted[:start], wanted[start + len(inner) :]
    around = {"bos": first == [keys.get(_KEY + "bos_token_id")], "eos": last == [keys.get(_KEY + "eos_token_id")]}
    keys |= {f"{_KEY}add_{name}_token": there for name, there in around.items()}
    with panics_as_errors():
        found = build(keys_as_read(keys)).encode(_PROBE).ids
    if found != wanted:
        raise ValueError("read back it would give other tokens")
    return keys
