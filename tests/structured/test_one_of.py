"""`oneOf`: no text comes out that fits two parts, which a strict validator would refuse."""

from __future__ import annotations

from typing import Any

import pytest

from parlay.structured.schemas import restated
from tests.structured.test_schemas import allows

INTEGER = {"type": "integer"}


def an_object(*required: str, **fields: Any) -> dict[str, Any]:
    return {"type": "object", "properties": fields, "required": list(required)}


A, B = an_object("a", a=INTEGER), an_object("b", b=INTEGER)
AB = an_object("a", "b", a=INTEGER, b=INTEGER)
TAGGED = {kind: an_object("kind", kind={"const": kind}) for kind in ("x", "y")}
REFERENCES = [{"$ref": f"#/$defs/{kind}"} for kind in TAGGED]


@pytest.mark.parametrize(
    "parts",
    [
        [A, AB],  # an object with both fields fits either, because A says nothing of others
        [an_object(a=INTEGER), an_object(b=INTEGER)],
        [an_object("v", v=A), an_object("v", v=AB)],
        [{"type": "object", "patternProperties": {"^a": INTEGER}, "required": ["ab"]}, B],
        [{"enum": [1, 2]}, {"enum": [2.0, 3]}],
        [{"type": ["null", "string"]}, {"type": ["integer", "string"]}],
        [{"minimum": 1}, {"type": "string"}],
        [A, {"$ref": "#"}],
    ],
)
def test_parts_that_may_overlap_are_refused(parts: list[Any]) -> None:
    with pytest.raises(ValueError, match="oneOf whose parts may fit one text: write anyOf"):
        allows({"oneOf": parts}, {})


@pytest.mark.parametrize(
    ("parts", "good", "bad"),
    [
        ([A, B], [{"a": 1}, {"b": 1}], [{"a": 1, "b": 1}, {}]),
        ([{**A, "additionalProperties": False}, AB], [{"a": 1}, {"a": 1, "b": 1}], [{"b": 1}]),
        ([*TAGGED.values()], [{"kind": "x"}, {"kind": "y"}], [{"kind": "z"}]),
        (REFERENCES, [{"kind": "x"}, {"kind": "y"}], [{"kind": "z"}]),
        ([an_object("v", v=TAGGED["x"]), an_object("v", v=TAGGED["y"])], [{"v": {"kind": "y"}}], [{"v": {}}]),
        ([{"const": 1}, {"enum": [2, "1"]}, {"const": True}], [1, 2, "1", True], [3]),
        ([{"type": ["null", "string"]}, {"anyOf": [INTEGER, {"type": "array"}]}], [None, "a", 1, []], [True]),
        ([{"oneOf": [INTEGER, A]}, {"allOf": [{"type": "string"}]}], [1, {"a": 1}, "a"], [None]),
    ],
)
def test_parts_that_are_apart_are_taken(parts: list[Any], good: list[object], bad: list[object]) -> None:
    schema = {"oneOf": parts, "$defs": TAGGED}
    assert [value for value in good if not allows(schema, value)] == []
    assert [value for value in bad if allows(schema, value)] == []


def test_an_endless_comparison_ends() -> None:
    nested = {"$defs": {kind: an_object("v", "w", v=ref, w=ref) for kind, ref in zip("xy", REFERENCES, strict=True)}}
    assert "oneOf" in restated({"oneOf": REFERENCES, **nested})
    many = [an_object("kind", kind={"const": f"{number}"}) for number in range(2000)]
    assert "oneOf" in restated({"oneOf": many})
