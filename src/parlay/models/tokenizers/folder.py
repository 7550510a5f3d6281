"""The tokenizer in a model's folder, without importing transformers if tokenizer.json describes it completely."""

from __future__ import annotations

import base64
import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from parlay.models.config import read_json
from parlay.models.fetch.hub import hash_of
from parlay.models.tokenizers.plain import PlainTokenizer, panics_as_errors
from parlay.types import ParlayError, Tokenizer, one_line

_CLASSES = frozenset({"PreTrainedTokenizerFast", "TokenizersBackend"})
"""transformers' tokenizer classes that add nothing to tokenizer.json."""
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_UNDERSTOOD = frozenset(
    {
        *_SPECIAL,
        *("tokenizer_class", "backend", "is_local", "model_input_names", "model_max_length", "padding_side"),
        *("added_tokens_decoder", "chat_template", "clean_up_tokenization_spaces", "extra_special_tokens"),
    }
)
"""Keys of tokenizer_config.json that change nothing or are handled here."""
_FILES = ("tokenizer*", "vocab*", "*.model", "*.spm", "*.tiktoken")
"""A folder with a tokenizer has at least one of these files."""
_COPIED = (".json", ".txt", ".jinja", ".model", ".spm", ".tiktoken")
_MORE_TEMPLATES = "additional_chat_templates"
_MOST_GROWTH, _LONGEST_WORD, _LONGEST_FORM = 100, 1000, 64
"""Most letters that a tokenizer's steps may make of one, besides Unicode's normal forms; published ones make up to 16.
Most letters of a word that is split by trying all pieces. More than the bytes of the longest normal form of a letter in
Unicode."""
_ADDED = {"Prepend": "prepend", "Append": "append", "Metaspace": "replacement"}
"""Steps that insert the text of one of their keys, with that key."""
_OTHERS = ("added_tokens.json", "special_tokens_map.json", _MORE_TEMPLATES)
"""Other files that may describe a tokenizer."""


def has_tokenizer(directory: Path) -> bool:
    """Whether the folder has a file of a tokenizer. Without one transformers would make an empty tokenizer."""
    return any(path for pattern in _FILES for path in directory.glob(pattern))


def load_tokenizer(directory: Path) -> Tokenizer:
    """Load the folder's tokenizer. Raises ParlayError if it is missing or can't be read."""
    if not has_tokenizer(directory):
        raise _unreadable(directory, ValueError("there is none; copy tokenizer.json there, or name another"))
    try:
        with panics_as_errors():
            check_steps(directory / "tokenizer.json")
            found = _plain(directory) or _of_transformers(directory)
            if not len(found):
                raise ValueError("it has no tokens")
    except Exception as error:  # the libraries raise no narrower type
        raise _unreadable(directory, error) from error
    return found


def tokenizer_digest(directory: Path) -> str:
    """A hash of a folder's tokenizer, without building it; empty if no single file describes it."""
    stored = directory / "tokenizer.json"
    return hash_of(stored) if stored.is_file() else ""


def load_template(directory: Path) -> str:
    """The chat templates of a folder, joined. Raises ParlayError for an invalid file."""
    described = directory / "tokenizer_config.json"
    try:
        found = _template(directory, read_json(described) if described.is_file() else {})
        others = [path.read_text(encoding="utf-8") for path in sorted(directory.glob(f"{_MORE_TEMPLATES}/*.jinja"))]
    except (OSError, ValueError) as error:
        raise ParlayError(f"can't read the chat templates of {directory}: {error}") from None
    listed = found if isinstance(found, list) else [{"template": found}]
    named = [entry.get("template") for entry in listed if isinstance(entry, Mapping)]
    return "\n".join(text for text in (*named, *others) if isinstance(text, str))


def save_tokenizer(tokenizer: PlainTokenizer, directory: Path) -> None:
    """Write a tokenizer with its chat templates into a folder, in transformers' format."""
    tokenizer.backend_tokenizer.save(str(directory / "tokenizer.json"))
    declared: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.special_tokens_map}
    templates = tokenizer.chat_template
    if isinstance(templates, dict):
        declared["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    elif templates is not None:
        (directory / "chat_template.jinja").write_text(templates, encoding="utf-8")
    (directory / "tokenizer_config.json").write_text(json.dumps(declared, indent=2) + "\n", encoding="utf-8")


def copy_texts(source: Path, directory: Path) -> None:
    """Copy a folder's files other than weights: config, tokenizer and templates."""
    directory.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.is_file() and "safetensors" not in file.name and file.suffix in _COPIED:
            shutil.copyfile(file, directory / file.name)


def _of_transformers(directory: Path) -> Tokenizer:
    from transformers import AutoTokenizer  # here, as importing it takes two seconds

    found: Tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    return found


def check_steps(stored: Path) -> None:
    """Raises ValueError if steps of a tokenizer.json could make a text grow without bound or take forever.

    They already run while it is loaded, on the added tokens.
    """
    declared = read_json(stored) if stored.is_file() else {}
    before, after = (
        _growth(declared.get("normalizer")) * _growth(declared.get("pre_tokenizer")),
        _growth(declared.get("decoder")),
    )
    if max(before, after) > _MOST_GROWTH:
        raise ValueError(f"its steps make one letter into more than {_MOST_GROWTH}")
    model = declared.get("model")
    if isinstance(model, Mapping):
        around = [len(str(model.get(name) or "")) for name in ("continuing_subword_prefix", "end_of_word_suffix")]
        longest = model.get("max_input_chars_per_word", 0)
        if max(around) > _MOST_GROWTH or not isinstance(longest, int) or longest > _LONGEST_WORD:
            raise ValueError(f"its words have over {_LONGEST_WORD} letters, or their pieces long beginnings or ends")


def _growth(step: object) -> float:
    """The most letters that a step, with those inside it, may make of one; Unicode's normal forms do not count."""
    if not isinstance(step, Mapping):
        return 1
    kind, own = step.get("type"), 1.0
    if kind == "Replace":
        pattern, put = step.get("pattern"), len(str(step.get("content")))
        found = len(str(pattern.get("String", ""))) if isinstance(pattern, Mapping) else 0
        own = put / found if found else 1 + put
    elif kind in _ADDED:
        own = 1 + len(str(step.get(_ADDED[kind], "")))
    elif kind == "ByteLevel":
        own = 4
    elif kind == "Precompiled":
        own = _longest_form(str(step.get("precompiled_charsmap"))) / _LONGEST_FORM
    nested = (each for steps in step.values() if isinstance(steps, list) for each in steps)
    return math.prod((max(own, 1.0), *map(_growth, nested)))


def _longest_form(charsmap: str) -> int:
    """Bytes of the longest replacement of a letter in one of SentencePiece's tables."""
    table = base64.b64decode(charsmap)
    return max(map(len, table[4 + int.from_bytes(table[:4], "little") :].split(b"\0")))


def _unreadable(directory: Path, error: Exception) -> ParlayError:
    reason = one_line(error)[:300]
    if reason.startswith("Couldn't instantiate the backend tokenizer"):
        reason = "there is no tokenizer.json; copy it there, or name another"
    elif type(error) is Exception:  # as the library tokenizers raises for a file that it can't parse
        reason = f"tokenizer.json is damaged or unknown here ({reason})"
    return ParlayError(f"can't load a tokenizer from {directory}: {reason}")


def _plain(directory: Path) -> PlainTokenizer | None:
    """The tokenizer that transformers would make, or None if a file has anything that is not handled here."""
    described, stored = directory / "tokenizer_config.json", directory / "tokenizer.json"
    if not described.is_file() or not stored.is_file() or any((directory / name).exists() for name in _OTHERS):
        return None
    declared: Mapping[str, Any] = read_json(described)
    template = _template(directory, declared)
    if (
        declared.get("tokenizer_class") not in _CLASSES
        or not declared.keys() <= _UNDERSTOOD
        or isinstance(template, list)
    ):
        return None
    backend = Backend.from_file(str(stored))
    special = {name: declared[name] for name in _SPECIAL if declared.get(name) is not None}
    return PlainTokenizer(backend, special, template) if _says_no_more(declared, special, backend) else None


def _says_no_more(declared: Mapping[str, Any], special: Mapping[str, Any], backend: Backend) -> bool:
    """Whether tokenizer.json has every token that the config names, with the same properties."""
    known: Mapping[int, AddedToken] = backend.get_added_tokens_decoder()
    marked = {token.content for token in known.values() if token.special}
    if declared.get("extra_special_tokens") or not all(token in marked for token in map(str, special.values())):
        return False
    if declared.get("clean_up_tokenization_spaces") and type(backend.model).__name__ != "BPE":
        return False
    listed: Mapping[str, Mapping[str, Any]] = declared.get("added_tokens_decoder", {})
    return all(int(number) in known and _same(known[int(number)], token) for number, token in listed.items())


def _same(token: AddedToken, declared: Mapping[str, Any]) -> bool:
    has = {name: declared.get(name, False) for name in ("lstrip", "normalized", "rstrip", "single_word", "special")}
    return repr(token) == repr(AddedToken(declared["content"], **has))


def _template(directory: Path, declared: Mapping[str, Any]) -> Any:
    """The template's text, a list if there are several, or None."""
    alone = directory / "chat_template.jinja"
    found = alone.read_text(encoding="utf-8") if alone.is_file() else declared.get("chat_template")
    entries = [each if isinstance(each, Mapping) else {} for each in found] if isinstance(found, list) else []
    texts = [each.get("template") for each in entries] if isinstance(found, list) else [found]
    if found is not None and not all(isinstance(text, str) for text in texts):
        raise ValueError("its chat template is no text")
    return found
