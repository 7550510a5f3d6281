"""Tokenizers that need no transformers do what those of transformers do, and are taken only where they can."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from parlay.models.fetch.resolving import resolve
from parlay.models.gguf.tokenizer import build
from parlay.models.tokenizers.folder import load_template, load_tokenizer
from parlay.models.tokenizers.plain import PlainTokenizer
from parlay.models.tokenizers.transformers_form import in_transformers
from parlay.text.detokenizer import make_detokenizer
from parlay.text.tokenize import encode, encode_all
from parlay.types import ParlayError
from tests.models.test_gguf_tokenizer import byte_level, sentence_piece

FOLDER = resolve("parlay-mini")
KINDS: dict[str, Callable[[], Any]] = {
    "bytes": lambda: build(byte_level("llama-bpe")),
    "pieces": lambda: build(sentence_piece()),
}
SPECIAL = {"bytes": {"bos_token": "<|end|>", "eos_token": "hell"}, "pieces": {"bos_token": "<s>", "unk_token": "<unk>"}}
"""One of them is an ordinary token in the vocabulary, as files that mark no tokens have it."""

OURS = {kind: PlainTokenizer(KINDS[kind](), SPECIAL[kind]) for kind in KINDS}
THEIRS = {
    kind: PreTrainedTokenizerFast(tokenizer_object=KINDS[kind](), clean_up_tokenization_spaces=False, **SPECIAL[kind])
    for kind in KINDS
}
OURS["folder"], THEIRS["folder"] = load_tokenizer(FOLDER), PreTrainedTokenizerFast.from_pretrained(FOLDER)

PARTS = ["h", "e", "l", "o", " ", "  ", "hell", "<|end|>", "<s>", "<tool>", "a", "b", "é", "日", "🙂"]
texts = st.lists(st.sampled_from(PARTS), max_size=12).map("".join)


@pytest.mark.parametrize("kind", OURS)
@settings(max_examples=60, deadline=None)
@given(text=texts)
def test_ids_and_texts_are_those_of_transformers(kind: str, text: str) -> None:
    ours, theirs = OURS[kind], THEIRS[kind]
    for special in (True, False):
        expected = theirs.encode(text, add_special_tokens=special)
        assert encode(ours, text, special=special) == ours.encode(text, add_special_tokens=special) == expected
        assert encode(theirs, text, special=special) == expected
        assert in_transformers(ours).encode(text, add_special_tokens=special) == expected
    for skip in (True, False):
        whole = theirs.decode(expected, skip_special_tokens=skip)
        assert ours.decode(expected, skip_special_tokens=skip) == whole
        streams = [make_detokenizer(each, skip) for each in (ours, theirs)]
        pieces = [[stream.push(token) for token in expected] for stream in streams]
        assert pieces[0] == pieces[1]
        assert whole.startswith("".join(pieces[0]))


@pytest.mark.parametrize("kind", OURS)
def test_long_texts_are_no_different(kind: str) -> None:
    """Long texts take other calls of the library, during which other threads run."""
    text = "hello <s> 🙂 日 " * 2_000
    ids = THEIRS[kind].encode(text)
    assert len(ids) > 10_000
    assert OURS[kind].encode(text) == ids
    for skip in (True, False):
        assert OURS[kind].decode(ids, skip_special_tokens=skip) == THEIRS[kind].decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", OURS)
def test_what_is_known_of_tokens_is_what_transformers_knows(kind: str) -> None:
    ours, theirs = OURS[kind], THEIRS[kind]
    assert (len(ours), ours.get_vocab()) == (len(theirs), theirs.get_vocab())
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "special_tokens_map", "all_special_tokens", "is_fast"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.chat_template == theirs.chat_template
    added = [{token: repr(one) for token, one in each.added_tokens_decoder.items()} for each in (ours, theirs)]
    assert added[0] == added[1]
    assert [ours.convert_ids_to_tokens(token) for token in range(len(ours))] == theirs.convert_ids_to_tokens(
        list(range(len(theirs)))
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(FOLDER / name, tmp_path)
    return tmp_path


def configure(folder: Path, **said: object) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | said))


@pytest.mark.parametrize(
    "said",
    [
        {"tokenizer_class": "LlamaTokenizer"},
        {"add_bos_token": False},
        {"sep_token": "<sep>"},
        {"extra_special_tokens": ["<more>"]},
        {"added_tokens_decoder": {"0": {"content": "<|endoftext|>", "special": True, "lstrip": True}}},
        {"chat_template": [{"name": "default", "template": "x"}]},
    ],
    ids=lambda said: next(iter(said)),
)
def test_a_folder_that_says_more_is_left_to_transformers(folder: Path, said: dict[str, object]) -> None:
    (folder / "chat_template.jinja").unlink()
    assert isinstance(load_tokenizer(folder), PlainTokenizer)
    configure(folder, **said)
    assert not isinstance(load_tokenizer(folder), PlainTokenizer)


def test_what_agrees_with_tokenizer_json_changes_nothing(folder: Path) -> None:
    token = {"content": "<|endoftext|>", "special": True, "lstrip": False, "rstrip": False, "normalized": False}
    configure(folder, added_tokens_decoder={"0": token}, clean_up_tokenization_spaces=True, model_max_length=9)
    found = load_tokenizer(folder)
    assert isinstance(found, PlainTokenizer)
    assert found.encode("a , b .") == OURS["folder"].encode("a , b .")
    assert found.decode(found.encode("a , b .")[1:]) == "a , b ."


@pytest.mark.parametrize("content", ["{", "{}", '{"model": {"type": "BPE"}}'])
def test_a_damaged_file_is_one_line(folder: Path, content: str) -> None:
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(ParlayError, match=r"^can't load a tokenizer from [^\n]*$"):
        load_tokenizer(folder)


REPEATED = {"type": "Replace", "pattern": {"String": "a"}, "content": "aaaaaaaaaa"}
STEPS: list[tuple[dict[str, object], str]] = [
    ({"normalizer": {"type": "Sequence", "normalizers": [REPEATED] * 30}}, "make one letter into more than 100"),
    ({"decoder": {"type": "Sequence", "decoders": [REPEATED] * 30}}, "make one letter into more than 100"),
    ({"normalizer": {**REPEATED, "pattern": {"Regex": ""}, "content": "b" * 1000}}, "make one letter into more"),
    (
        {
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [{"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}] * 40,
            }
        },
        "make one letter into more",
    ),
    ({"normalizer": {"type": "Prepend", "prepend": "b" * 1000}}, "make one letter into more"),
    ({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [], "end_of_word_suffix": "b" * 1000}}, "long beginnings"),
    ({"model": {"type": "WordPiece", "vocab": {"a": 0}, "max_input_chars_per_word": 10**9}}, "over 1000 letters"),
]


@pytest.mark.parametrize(("steps", "message"), STEPS)
def test_steps_that_make_a_text_grow_without_end_are_refused(
    folder: Path, steps: dict[str, object], message: str
) -> None:
    """Before any is run: tokens that were added are read by them when the file is loaded."""
    stored = folder / "tokenizer.json"
    stored.write_text(json.dumps({**json.loads(stored.read_text()), **steps}))
    with pytest.raises(ParlayError, match=message) as caught:
        load_tokenizer(folder)
    assert len(str(caught.value).splitlines()) == 1


def test_a_tokenizer_without_tokens_is_refused(folder: Path) -> None:
    stored = json.loads((folder / "tokenizer.json").read_text())
    stored |= {"model": {"type": "BPE", "vocab": {}, "merges": []}, "added_tokens": [], "post_processor": None}
    (folder / "tokenizer.json").write_text(json.dumps(stored))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(ParlayError, match="it has no tokens"):
        load_tokenizer(folder)


@pytest.mark.parametrize("template", [5, {"a": "b"}, [{"name": "default", "template": 5}], ["a", 7]])
def test_a_template_that_is_no_text_is_one_line(folder: Path, template: object) -> None:
    (folder / "chat_template.jinja").unlink()
    configure(folder, chat_template=template)
    for load in (load_tokenizer, load_template):
        with pytest.raises(ParlayError, match="its chat template is no text"):
            load(folder)


def test_a_panic_of_the_library_is_an_error_of_one_line() -> None:
    """A regex of a model's tokenizer that goes back and forth for ever at some text."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+$|(.*)*x"), "isolated")
    hostile = "a" * 40 + "b"
    for failing in (
        lambda: PlainTokenizer(backend, {}).encode(hostile),
        lambda: encode_all(PlainTokenizer(backend, {}), [hostile], special=False),
    ):
        with pytest.raises(ValueError, match="this model's tokenizer failed") as caught:
            failing()
        assert "\n" not in str(caught.value)
