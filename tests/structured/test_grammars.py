"""What can be asked for, and that everything else is refused in one line that says why."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from parlay.structured.grammars import Checker, Grammars
from parlay.structured.schemas import within_grammar
from parlay.testing.toy_tokenizers import letters
from parlay.types import ParlayError, StructuredOutputsParams

Spells = Callable[[StructuredOutputsParams, str], bool]


@pytest.fixture
def spells(grammars: Grammars, tokenizer: PreTrainedTokenizerBase) -> Spells:
    """Whether a text can be written, and can end there."""

    def ask(wanted: StructuredOutputsParams, text: str) -> bool:
        constraint = grammars.compile(wanted).constraint({0})
        ids = tokenizer.encode(text, add_special_tokens=False)
        following_V = constraint.allowed(0, ids)
        return constraint.legal(ids) == len(ids) and following_V is not None and bool(following_V[0])

    return ask


@pytest.mark.parametrize(
    ("wanted", "good", "bad"),
    [
        ({"json": {"type": "integer"}}, ["12", "-3"], ["1.5", '"1"', ""]),
        ({"json": '{"enum": ["a", "b"]}'}, ['"a"'], ["a", '"c"']),
        ({"json_object": True}, ["{}", '{\n  "a": [1, {"b": null}]\n}'], ["[]", "{", "{}x"]),
        ({"regex": "[a-c]{2}-(x|y)"}, ["ab-x", "cc-y"], ["ab-", "abc-x", "ab-xx"]),
        (
            {"choice": ['say "hi"\\', "no\nnever", "é😀", "no", "\x00\x7f\u2028"]},
            ['say "hi"\\', "no\nnever", "é😀", "no", "\x00\x7f\u2028"],
            ["say", "nono"],
        ),
        ({"grammar": 'start: "a" inner? "b"\ninner: "(" inner ")" | "x"'}, ["ab", "axb", "a((x))b"], ["a(xb"]),
        ({"grammar": 'root ::= "a" rest\nrest ::= [0-9]+ | "-" root'}, ["a1", "a-a22"], ["a", "a-"]),
    ],
)
def test_each_kind_allows_its_own_texts_and_no_others(
    spells: Spells, wanted: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    params = StructuredOutputsParams(**wanted)
    assert [text for text in good if not spells(params, text)] == []
    assert [text for text in bad if spells(params, text)] == []


def test_white_space_between_the_parts_of_json_is_a_space_or_an_indented_line(spells: Spells) -> None:
    """Small models write all the white space that they may."""
    spaced = [StructuredOutputsParams(json_object=True)]
    spaced.append(StructuredOutputsParams(grammar=f"start: {within_grammar({'type': 'object'})}"))
    for wanted in spaced:
        assert all(spells(wanted, text) for text in ("{ }", "{\n}", "{\n" + " " * 20 + "}", '{"a": [1,\n\t2 ]}'))
        assert not any(spells(wanted, text) for text in ("{  }", "{\n\n}", "{ \n}", "{\n" + " " * 21 + "}"))


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({}, "must have exactly one of json, json_object, regex, choice, grammar, got none"),
        ({"regex": "a", "json_object": True}, "got json_object and regex"),
        ({"regex": ""}, "regex must be a non-empty string"),
        ({"grammar": 3}, "grammar must be a non-empty string"),
        ({"json": ["object"]}, "json must be a JSON schema, as a string or as an object"),
        ({"choice": []}, "choice must be a list of one or more strings"),
        ({"choice": "yes"}, "choice must be a list of one or more strings"),
        ({"choice": ["yes", ""]}, "non-empty strings"),
        ({"choice": [1]}, "must be a list of non-empty strings"),
    ],
)
def test_what_is_no_question_is_refused_at_once(wanted: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StructuredOutputsParams(**wanted)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"json": "{"}, "json is not JSON: Expecting property name"),
        ({"json": "[]"}, "must be a JSON schema, which is an object"),
        ({"json": "false"}, "structured_outputs.json is a schema that no text follows: give another"),
        ({"json": {"const": {1, 2}}}, "json is not JSON: Object of type set"),
        ({"json": {"type": "thing"}}, "Invalid type: thing"),
        ({"json": {"not": {"type": "string"}}}, 'structured_outputs has "not", which can'),
        ({"json": {"type": "string", "minLength": 3, "maxLength": 2}}, "Unsatisfiable schema"),
        ({"json": {"$ref": "https://example.org/schema"}}, "does not fetch resources"),
        ({"regex": "a("}, "unclosed group"),
        ({"regex": "()"}, "only the empty text"),
        ({"grammar": "start: thing"}, 'unknown name: "thing"'),
        ({"grammar": "hello"}, "Expected ::="),
        ({"grammar": "start: start"}, "no text that this model's tokens can write"),
    ],
)
def test_what_is_not_valid_is_a_value_error_of_one_line(
    grammars: Grammars, wanted: Mapping[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        grammars.compile(StructuredOutputsParams(**wanted))
    assert "\n" not in str(caught.value)


def test_a_grammar_is_compiled_once(grammars: Grammars) -> None:
    first = grammars.compile(StructuredOutputsParams(json={"type": "number"}))
    assert grammars.compile(StructuredOutputsParams(json='{"type": "number"}')) is first


def byte_letters(alphabet: str) -> PreTrainedTokenizerFast:
    """As GPT-2's, with few letters."""
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_a_text_that_the_vocabulary_can_not_begin_is_refused() -> None:
    with pytest.raises(ValueError, match="no text that this model's tokens can write"):
        Grammars(byte_letters("$ab"), 3, [0]).compile(StructuredOutputsParams(regex="xyz"))


def test_a_dead_end_is_an_error_where_it_is_and_nowhere_else() -> None:
    """`ax` needs a letter that the vocabulary lacks: known after the a, and forgotten again before it."""
    constraint = Grammars(byte_letters("$ab"), 3, [0]).compile(StructuredOutputsParams(regex="b|ax")).constraint({0})
    for _ in range(2):
        with pytest.raises(ParlayError, match="can't go on here"):
            constraint.allowed(0, [1])
        first_V = constraint.allowed(0, [])
        assert first_V is not None
        assert first_V.tolist() == [False, True, True]
    assert constraint.commit(2)


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [(None, "this model came without one"), (letters("abc"), "can't be used with this model's tokenizer")],
)
def test_without_a_tokenizer_that_can_be_read_there_is_no_structured_output(
    tokenizer: PreTrainedTokenizerFast | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Grammars(tokenizer, 3, [0]).compile(StructuredOutputsParams(regex="a"))


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, grammars: Grammars) -> None:
    monkeypatch.setattr("parlay.structured.grammars.find_spec", lambda name: None)
    with pytest.raises(ParlayError, match=r"pip install 'parlay\[structured\]'"):
        grammars.compile(StructuredOutputsParams(regex="a"))


def test_who_asks_for_one_form_at_once_waits_for_one_compilation(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bytes] = []
    check = Checker.check

    def slow(self: Checker, question: bytes) -> str:
        asked.append(question)
        time.sleep(0.3)
        return check(self, question)

    monkeypatch.setattr(Checker, "check", slow)
    wanted = StructuredOutputsParams(regex="together")
    with ThreadPoolExecutor(6) as pool:
        own = [pool.submit(grammars.compile, wanted, "one") for _ in range(5)]
        other = pool.submit(grammars.compile, wanted, "another")
    assert len({id(each.result()) for each in own}) == 1
    assert other.result() is not own[0].result()
    assert len(asked) == 2  # one for each owner


def test_who_waits_for_a_compilation_that_fails_hears_why(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Checker, question: bytes) -> str:
        time.sleep(0.2)
        raise ParlayError("no process")

    with monkeypatch.context() as patch:
        patch.setattr(Checker, "check", fail)
        with ThreadPoolExecutor(3) as pool:
            asked = [pool.submit(grammars.compile, StructuredOutputsParams(regex="fails")) for _ in range(3)]
        assert [str(each.exception()) for each in asked] == ["no process"] * 3
    assert grammars.compile(StructuredOutputsParams(regex="fails")) is not None


def test_a_vocabulary_that_is_read_beforehand_is_not_read_again(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars = Grammars(tokenizer, len(tokenizer), [0])
    grammars.prepare()

    def refuse(*_: object) -> None:
        raise AssertionError("it was read again")

    monkeypatch.setattr(Grammars, "_read", refuse)
    assert grammars.compile(StructuredOutputsParams(choice=["yes"])).constraint({0}).legal([]) == 0


def test_a_tokenizer_that_spells_nothing_is_told_to_whoever_asks() -> None:
    grammars = Grammars(None, 8, [0])
    grammars.prepare()
    with pytest.raises(ValueError, match="came without one"):
        grammars.compile(StructuredOutputsParams(choice=["yes"]))
