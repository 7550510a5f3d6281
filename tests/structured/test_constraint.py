"""A constraint is a function of the committed tokens and a path: looking leaves no trace, and forced tokens are."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from parlay.structured.constraint import GrammarConstraint
from parlay.structured.grammars import Grammars
from parlay.types import ParlayError, StructuredOutputsParams, Tokenizer

END, OTHER_END = 4, 0


def options(mask_V: Tensor | None) -> list[int]:
    assert mask_V is not None
    ids: list[int] = mask_V.nonzero()[:, 0].tolist()
    return ids


def made(grammars: Grammars, stop_ids: frozenset[int] = frozenset({END}), **wanted: Any) -> GrammarConstraint:
    return grammars.compile(StructuredOutputsParams(**wanted)).constraint(stop_ids)


REGEXES = st.recursive(
    st.sampled_from(["a", "the ", "[0-9]", "[a-f]{2}", "é", "-"]),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda two: f"({two[0]}|{two[1]})"),
        inner.map(lambda one: f"({one}){{1,3}}"),
        inner.map(lambda one: f"({one})?x"),
    ),
    max_leaves=6,
)
VALUES = st.recursive(
    st.sampled_from([{"type": "integer"}, {"type": "boolean"}, {"enum": ["red", "blue"]}, {"type": "null"}]),
    lambda inner: st.one_of(
        inner.map(lambda one: {"type": "array", "items": one, "minItems": 1, "maxItems": 2}),
        st.dictionaries(st.sampled_from(["name", "size", "count"]), inner, min_size=1, max_size=2).map(
            lambda fields: {
                "type": "object",
                "properties": fields,
                "required": [*fields],
                "additionalProperties": False,
            }
        ),
    ),
    max_leaves=4,
)


def fits(value: Any, schema: dict[str, Any]) -> bool:
    """What the schemas above mean."""
    if "enum" in schema:
        return value in schema["enum"]
    kind = schema["type"]
    if kind == "array":
        return isinstance(value, list) and 1 <= len(value) <= 2 and all(fits(one, schema["items"]) for one in value)
    if kind == "object":
        named = schema["properties"]
        return isinstance(value, dict) and {*value} == {*named} and all(fits(value[key], named[key]) for key in named)
    return type(value) is {"integer": int, "boolean": bool, "null": type(None)}[kind]


def walk(grammars: Grammars, wanted: StructuredOutputsParams, data: st.DataObject, most: int = 40) -> list[int] | None:
    """A random allowed text, with everything checked at each of its tokens; None if it found no end."""
    grammar = grammars.compile(wanted)
    constraint = grammar.constraint({END, OTHER_END})
    output: list[int] = []
    for _ in range(most):
        following = options(constraint.allowed(len(output), []))
        forced = constraint.forced(8)
        ahead = [data.draw(st.sampled_from(following))]
        look_around(grammar.constraint({END, OTHER_END}), constraint, output, forced)
        if ahead[0] in (END, OTHER_END):
            assert constraint.commit(ahead[0])
            return output
        assert constraint.legal([*ahead, END]) >= 1
        output += ahead
        if constraint.commit(ahead[0]):
            return output
    return None


def look_around(fresh: GrammarConstraint, used: GrammarConstraint, output: list[int], forced: tuple[int, ...]) -> None:
    """The one that has looked at much says what one says that has not; each forced token has no alternative."""
    for token in output:
        assert not fresh.commit(token)
    assert options(fresh.allowed(len(output), [])) == options(used.allowed(len(output), []))
    assert options(fresh.allowed(0, output)) == options(used.allowed(len(output), []))
    assert fresh.allowed(len(output) // 2, [*output[len(output) // 2 :], 3]) is None
    assert fresh.legal(forced) == len(forced)
    for depth, token in enumerate(forced):
        assert options(fresh.allowed(len(output), forced[:depth])) == [token]
    assert fresh.forced(8) == forced == used.forced(8)


@settings(max_examples=25, deadline=None)
@given(pattern=REGEXES, data=st.data())
def test_random_expressions_allow_matching_texts_alone(
    grammars: Grammars, tokenizer: Tokenizer, pattern: str, data: st.DataObject
) -> None:
    ids = walk(grammars, StructuredOutputsParams(regex=pattern), data)
    assert ids is None or re.fullmatch(pattern, str(tokenizer.decode(ids)))


@settings(max_examples=25, deadline=None)
@given(schema=VALUES, data=st.data())
def test_random_schemas_allow_valid_json_alone(
    grammars: Grammars, tokenizer: Tokenizer, schema: dict[str, Any], data: st.DataObject
) -> None:
    ids = walk(grammars, StructuredOutputsParams(json=schema), data, most=25)
    assert ids is None or fits(json.loads(str(tokenizer.decode(ids))), schema)


def test_all_special_ids_that_end_the_sample_may_come_where_the_text_may_end(grammars: Grammars) -> None:
    constraint = made(grammars, frozenset({END, 3, 100}), regex="ab*")
    assert not {END, OTHER_END, 3} & {*options(constraint.allowed(0, []))}
    constraint.commit(69)
    following = options(constraint.allowed(1, []))
    assert {END, 3} <= {*following}
    assert OTHER_END not in following
    assert 100 not in following  # an ordinary token: the grammar says where it may stand
    assert constraint.legal([70, 3]) == 2
    assert constraint.allowed(1, [END]) is None


def test_nothing_ends_a_text_that_is_to_go_on_but_its_own_end(grammars: Grammars) -> None:
    """With `ignore_eos` no id ends the sample."""
    constraint = made(grammars, frozenset(), regex="ab{1,2}")
    assert not constraint.commit(69)
    assert not constraint.commit(70)
    assert options(constraint.allowed(2, [])) == [70]
    assert constraint.commit(70)


def test_a_token_that_is_not_allowed_is_an_error_and_changes_nothing(grammars: Grammars) -> None:
    constraint = made(grammars, regex="ab")
    before = options(constraint.allowed(0, []))
    with pytest.raises(ParlayError, match="does not allow token 71"):
        constraint.commit(71)
    assert options(constraint.allowed(0, [])) == before
    assert constraint.committed == 0


def test_constraints_of_one_grammar_do_not_know_of_each_other(grammars: Grammars) -> None:
    grammar = grammars.compile(StructuredOutputsParams(regex="ab"))
    first, second = grammar.constraint({END}), grammar.constraint({END})
    before = options(second.allowed(0, []))
    first.commit(69)
    assert options(second.allowed(0, [])) == before


COUNTING = (
    "start: gen\ngen[max_tokens=5]: /.*/",
    'start: gen "!"\ngen[max_tokens=3]: /[a-z ]*/',
    'start: gen\ngen[stop="z"]: /.*/',
)


@pytest.mark.parametrize("grammar", COUNTING)
def test_looking_ahead_in_a_grammar_that_counts_tokens_leaves_no_trace_either(
    grammars: Grammars, tokenizer: Tokenizer, grammar: str
) -> None:
    looked, plain = (made(grammars, grammar=grammar) for _ in range(2))
    for _ in range(6):
        ids = options(plain.allowed(plain.committed, ()))
        path = [token for token in ids if token not in (END, OTHER_END)][:1] * 3
        ahead = looked.legal(path)
        assert all(looked.allowed(looked.committed, path[:length]) is not None for length in range(ahead + 1))
        assert options(looked.allowed(looked.committed, ())) == ids
        over = plain.commit(path[0])
        assert looked.commit(path[0]) == over
        if over:
            return
