"""The tokenizer and chat template of a GGUF file, built once and cached on disk.

The families that Parlay runs have three kinds: byte-level BPE (``gpt2``), SentencePiece's BPE with scores (``llama``),
and BPE of characters with merges (``gemma4``). A ``tokenizer.json`` beside the file takes precedence.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from parlay.models.fetch.hub import hash_of
from parlay.models.gguf.file import read_parts
from parlay.models.gguf.reader import TOKENIZER, BadGguf, Header, Strings, Value
from parlay.models.gguf.splitting import SPLITTINGS
from parlay.models.tokenizers.folder import check_steps
from parlay.models.tokenizers.plain import PlainTokenizer, panics_as_errors
from parlay.system.user_cache import user_cache, written_whole

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_SPECIAL_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_BESIDE = "tokenizer.json"
_FORM = 2
"""Increased when the same keys make a different tokenizer, so that cached ones are not used any more."""
_WORD = "▁"
"""SentencePiece's symbol for a space."""
_TO_TEXT = [decoders.Replace(_WORD, " "), decoders.ByteFallback(), decoders.Fuse()]
_LONGEST_MERGED = 1 << 10
"""Most letters of a token that is built from two others; each of its splits is tried, which takes too long beyond
that."""
_INSTEAD = "name the model's own tokenizer (--tokenizer FOLDER_OR_HUB_ID)"


def load_tokenizer(path: Path) -> PlainTokenizer:
    """The tokenizer of the GGUF file at ``path``, with its chat template.

    Raises BadGguf, in one line, for a tokenizer that is damaged or of an unsupported kind.
    """
    header = read_parts(path)[0]
    beside = path.with_name(_BESIDE)
    try:
        if beside.is_file():
            return _checked(_opened(header.keys, beside), header.keys)
        return _kept(header)
    except ValueError as error:
        raise BadGguf(f"{path}: {error}") from None


def tokenizer_digest(path: Path) -> str:
    """A hash of the tokenizer of the GGUF file at ``path``, without building it."""
    beside = path.with_name(_BESIDE)
    return hash_of(beside) if beside.is_file() else read_parts(path)[0].tokenizer


def load_template(path: Path) -> str:
    """The chat templates of the GGUF file at ``path``, joined. Raises BadGguf for a damaged file."""
    found = _templates(read_parts(path)[0].keys)
    return "\n".join(found.values()) if isinstance(found, dict) else found or ""


def _kept(header: Header) -> PlainTokenizer:
    """Load the tokenizer from the cache, which takes half the time, or build it and cache it."""
    kept = user_cache() / "tokenizers" / f"{header.tokenizer}-{_FORM}.json"
    if kept.is_file():
        with suppress(ValueError):  # an unreadable one is built again
            return _opened(header.keys, kept)
    with panics_as_errors():
        tokenizer = build(header.keys)
    with suppress(OSError), written_whole(kept) as part:  # a read-only cache only costs time
        part.write_text(_compact(tokenizer), encoding="utf-8")
    return _plain(header.keys, tokenizer)


def _compact(tokenizer: Tokenizer) -> str:
    """The tokenizer as JSON that loads a third faster: without indents, and with a merge's two tokens in one string.

    If a token contains a space, which separates the two, merges stay pairs.
    """
    state = json.loads(tokenizer.to_str())
    merges = state["model"]["merges"]
    if not any(" " in token for merge in merges for token in merge):
        state["model"]["merges"] = [" ".join(merge) for merge in merges]
    return json.dumps(state, ensure_ascii=False, separators=(",", ":"))


def _opened(keys: Mapping[str, Value], path: Path) -> PlainTokenizer:
    try:
        if path.name == _BESIDE:  # others were made here
            check_steps(path)
        with panics_as_errors():
            tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no narrower type
        raise ValueError(f"the {_BESIDE} for it can't be read: {error}") from None
    return _plain(keys, tokenizer)


def _plain(keys: Mapping[str, Value], tokenizer: Tokenizer) -> PlainTokenizer:
    """Wrap a tokenizer with the names of its special tokens and its chat templates."""
    ids = {name: _token_id(keys, short) for name, short in _SPECIAL_TOKENS.items()}
    special = {name: tokenizer.id_to_token(number) for name, number in ids.items() if number is not None}
    known = {name: token for name, token in special.items() if token is not None}
    return PlainTokenizer(tokenizer, known, _templates(keys))


def _checked(tokenizer: PlainTokenizer, keys: Mapping[str, Value]) -> PlainTokenizer:
    """Return the tokenizer if it can be this model's. Raises ValueError for more tokens than the model has."""
    known = keys.get(TOKENIZER + "tokens")
    if isinstance(known, Strings) and len(tokenizer) > len(known):
        raise ValueError(
            f"the {_BESIDE} beside it has {len(tokenizer)} tokens, and the model {len(known)}: "
            f"move it away, or {_INSTEAD}"
        )
    return tokenizer


def _templates(keys: Mapping[str, Value]) -> str | dict[str, str] | None:
    """The only template, or several by name, or None."""
    start = "tokenizer.chat_template"
    default = keys.get(start)
    named = {key[len(start) + 1 :]: value for key, value in keys.items() if key.startswith(start + ".")}
    found = {name: text for name, text in {"default": default, **named}.items() if isinstance(text, str)}
    return found.get("default") if set(found) <= {"default"} else found


def build(keys: Mapping[str, Value]) -> Tokenizer:
    """Build the tokenizer that the keys describe. Raises ValueError, in one line, if that fails."""
    kind = keys.get(TOKENIZER + "model")
    if kind not in _BUILDERS:
        shown = "none" if kind is None else f"of the kind {kind!r:.40}"
        raise ValueError(f"its tokenizer is {shown}, which Parlay can't make: {_INSTEAD}")
    tokens = _strings(keys, "tokens")
    if len(set(tokens)) < len(tokens):
        raise ValueError(f"tokens occur twice in {TOKENIZER}tokens: {_INSTEAD}")
    types = _numbers(keys, "token_type", len(tokens)) or [_NORMAL] * len(tokens)
    tokenizer, bos = _BUILDERS[str(kind)](keys, tokens, types)
    tokenizer.add_tokens([_added(token) for token, type in zip(tokens, types, strict=True) if type == _USER_DEFINED])
    tokenizer.add_special_tokens(
        [_added(token) for token, type in zip(tokens, types, strict=True) if type in (_CONTROL, _UNKNOWN)]
    )
    _surround(tokenizer, keys, bos)
    return tokenizer


def _byte_level(keys: Mapping[str, Value], tokens: list[str], types: list[int]) -> tuple[Tokenizer, bool]:
    """Byte-level BPE: pairs are merged in the file's order, within words split by the model's own expressions."""
    name = keys.get(TOKENIZER + "pre")
    splitting = SPLITTINGS.get(str(name))
    if splitting is None:
        shown = "missing" if name is None else f"{name!r:.40}, which Parlay does not know"
        raise ValueError(f"the key {TOKENIZER}pre is {shown}: {_INSTEAD}")
    merges = [_pair(merge) for merge in _strings(keys, "merges")]
    tokenizer = _pairs(tokens, merges, ignore_merges=splitting.whole_words)
    if splitting.composed:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = splitting.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, splitting.bos


def _sentence_piece(keys: Mapping[str, Value], tokens: list[str], types: list[int]) -> tuple[Tokenizer, bool]:
    """SentencePiece: pairs are merged by the score of the result; unknown characters become byte tokens."""
    scores = _numbers(keys, "scores", len(tokens))
    if scores is None:
        raise ValueError(f"the key {TOKENIZER}scores is missing: {_INSTEAD}")
    tokenizer = _with_bytes(keys, tokens, _merges(tokens, types, scores))
    prefix = keys.get(TOKENIZER + "add_space_prefix", True)
    spaces = normalizers.Replace(" ", _WORD)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_WORD), spaces]) if prefix else spaces
    tokenizer.decoder = decoders.Sequence([*_TO_TEXT, decoders.Strip(" ", 1, 0)] if prefix else _TO_TEXT)
    return tokenizer, True


def _merged(keys: Mapping[str, Value], tokens: list[str], types: list[int]) -> tuple[Tokenizer, bool]:
    """BPE of characters: pairs are merged in the file's order; runs of newlines that are tokens are matched whole."""
    tokenizer = _with_bytes(keys, tokens, [_pair(merge) for merge in _strings(keys, "merges")])
    tokenizer.normalizer = normalizers.Replace(" ", _WORD)
    tokenizer.decoder = decoders.Sequence(_TO_TEXT)
    tokenizer.add_tokens([_added(token) for token in tokens if len(token) > 1 and not token.strip("\n")])
    return tokenizer, True


def _with_bytes(keys: Mapping[str, Value], tokens: list[str], merges: list[tuple[str, str]]) -> Tokenizer:
    """BPE of characters in which unknown characters become byte tokens."""
    unknown = _token_id(keys, "unknown")
    return _pairs(
        tokens, merges, byte_fallback=True, fuse_unk=True, unk_token=tokens[0 if unknown is None else unknown]
    )


_BUILDERS: Mapping[object, Callable[[Mapping[str, Value], list[str], list[int]], tuple[Tokenizer, bool]]] = {
    "gpt2": _byte_level,
    "llama": _sentence_piece,
    "gemma4": _merged,
}


def _pairs(tokens: list[str], merges: list[tuple[str, str]], **options: Any) -> Tokenizer:
    vocabulary = {token: number for number, token in enumerate(tokens)}
    try:
        return Tokenizer(models.BPE(vocab=vocabulary, merges=merges, **options))
    except Exception as error:  # the library raises no narrower type
        raise ValueError(f"its tokenizer's merges don't fit its tokens ({error}): {_INSTEAD}") from None


def _merges(tokens: list[str], types: list[int], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to build a token from two others, by score, then by token id."""
    numbers = {token: number for number, token in enumerate(tokens)}
    found: list[tuple[float, int, int]] = []
    for token, type, score in zip(tokens, types, scores, strict=True):
        if type != _NORMAL:
            continue
        if len(token) > _LONGEST_MERGED:
            raise ValueError(f"a token in {TOKENIZER}tokens has {len(token)} letters: {_INSTEAD}")
        for cut in range(1, len(token)):
            left, right = numbers.get(token[:cut]), numbers.get(token[cut:])
            if left is not None and right is not None:
                found.append((-score, left, right))
    return [(tokens[left], tokens[right]) for _, left, right in sorted(found)]


def _pair(merge: str) -> tuple[str, str]:
    """Split a merge at the space between its two tokens; the first may begin with a space."""
    left, _, right = merge[1:].partition(" ")
    return merge[:1] + left, right


def _added(token: str) -> AddedToken:
    """A token that is matched before any other processing of the text."""
    return AddedToken(token, normalized=False)


def _surround(tokenizer: Tokenizer, keys: Mapping[str, Value], bos: bool) -> None:
    """Add the tokens that the file wants around a text; chat templates write their own."""
    wanted = {"bos": keys.get(TOKENIZER + "add_bos_token", bos), "eos": keys.get(TOKENIZER + "add_eos_token", False)}
    tokens = {name: token for name, want in wanted.items() if want and (token := _token(keys, name)) is not None}
    if not tokens:
        return
    before, after = ([tokens[name]] if name in tokens else [] for name in ("bos", "eos"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *before, "$B:1", *after],
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in tokens.values()],
    )


def _strings(keys: Mapping[str, Value], name: str) -> list[str]:
    value = keys.get(TOKENIZER + name)
    if not isinstance(value, Strings) or not len(value):
        raise ValueError(f"the key {TOKENIZER}{name} is missing: {_INSTEAD}")
    return value.read()


def _numbers(keys: Mapping[str, Value], name: str, count: int) -> list[Any] | None:
    """One number per token, or None if the key is missing."""
    value = keys.get(TOKENIZER + name)
    if value is None:
        return None
    if not isinstance(value, tuple) or len(value) != count:
        raise ValueError(f"the key {TOKENIZER}{name} has no number for each of {count} tokens")
    return list(value)


def _token(keys: Mapping[str, Value], name: str) -> str | None:
    """The token named by ``NAME_token_id``, or None if the key is missing."""
    number, tokens = _token_id(keys, name), keys.get(TOKENIZER + "tokens")
    return tokens[number] if number is not None and isinstance(tokens, Strings) else None


def _token_id(keys: Mapping[str, Value], name: str) -> int | None:
    """The id in ``NAME_token_id``, or None if the key is missing."""
    value, tokens = keys.get(f"{TOKENIZER}{name}_token_id"), keys.get(TOKENIZER + "tokens")
    if value is None or not isinstance(tokens, Strings):
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < len(tokens):
        raise ValueError(f"the key {TOKENIZER}{name}_token_id is {value!r:.40}, which is not a token")
    return value
