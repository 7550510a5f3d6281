"""No constraint is too much: it works, or it is refused in one line that names the limit, and the process lives on."""

from __future__ import annotations

from typing import Any

import pytest

from parlay.structured import checker
from parlay.structured.grammars import Grammars
from parlay.types import MachineBusy, StructuredOutputsParams, Tokenizer
from tests.system.late import late_answers

SLOW = "more than 25 ms of CPU time"


def rules(count: int) -> dict[str, Any]:
    chain = "\n".join(f'r{n}: "a" r{n + 1}' for n in range(count))
    return {"grammar": f'start: r0\n{chain}\nr{count}: "b"'}


def references(count: int) -> dict[str, Any]:
    chain = {f"d{n}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{n + 1}"}}} for n in range(count)}
    return {"json": {"$ref": "#/$defs/d0", "$defs": {**chain, f"d{count}": {"type": "integer"}}}}


def required(count: int) -> dict[str, Any]:
    return {"json": {"type": "object", "required": [f"name{n}" for n in range(count)]}}


def choices(count: int) -> dict[str, Any]:
    return {"choice": [f"choice {n}" for n in range(count)]}


def objects(count: int) -> dict[str, Any]:
    one = [
        {"type": "object", "properties": {f"p{n}": {"type": "integer"}}, "required": [f"p{n}"]} for n in range(count)
    ]
    return {"json": {"anyOf": one}}


def nested(count: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(count):
        schema = {"type": "array", "items": schema}
    return {"json": schema}


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow machines compile what is not too large, too, and find what is."""
    monkeypatch.setattr("parlay.structured.grammars.CPU_SECONDS", 60.0)


@pytest.mark.parametrize("wanted", [rules(3000), references(2500), choices(2000), objects(3000), required(3000)])
def test_a_large_constraint_works(grammars: Grammars, wanted: dict[str, Any]) -> None:
    constraint = grammars.compile(StructuredOutputsParams(**wanted)).constraint({0})
    for _ in range(3):
        following_V = constraint.allowed(constraint.committed, [])
        assert following_V is not None
        constraint.commit(int(following_V.nonzero()[-1]))


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (rules(20_000), "20002 rules, and the limit is 5000"),
        (references(20_000), "20001 references, and the limit is 5000"),
        (required(50_000), "50000 names in properties and required, and the limit is 10000"),
        (choices(30_000), "30000 texts, and the limit is 20000"),
        (nested(20_000), "levels, and the limit is 100"),
        ({"regex": "a" * 2_000_000}, "2000000 bytes, and the limit is 1048576"),
        ({"json": {"enum": ["a" * 2_000_000]}}, "^structured_outputs.json has 2000014 bytes, and the limit is 1048576"),
        ({"regex": "a{1000000}"}, f"too complex .lexer error: too many expressions|{SLOW}"),
        (
            {"json": {"type": "object", "properties": {f"p{n}": {} for n in range(4000)}}},
            f"max is 10000|{SLOW}",
        ),
        ({"regex": "the quick " * 20_000}, f"{SLOW} for one token, which is the limit"),
    ],
)
def test_what_is_too_large_is_refused_with_its_limit(grammars: Grammars, wanted: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        grammars.compile(StructuredOutputsParams(**wanted))
    assert "\n" not in str(caught.value)
    assert "panic" not in str(caught.value)


def test_what_ends_the_checker_is_refused_and_the_next_one_is_compiled(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The size is no limit here, so the compiler runs out of stack."""
    monkeypatch.setattr("parlay.structured.limits.RULES", 10**9)
    assert checker.STACK < 100_000 * 1024
    for _ in range(2):
        with pytest.raises(ValueError, match="more than the memory or stack allowed to compile"):
            grammars.compile(StructuredOutputsParams(**rules(35_000)))
    assert grammars.compile(StructuredOutputsParams(regex="a|b")) is not None


def test_what_takes_long_to_compile_is_refused_with_the_time_that_there_is(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("parlay.structured.limits.NAMES", 10**9)
    monkeypatch.setattr("parlay.structured.grammars.CPU_SECONDS", 0.1)
    with pytest.raises(ValueError, match=r"more than the 0\.1 seconds of CPU time allowed to compile"):
        Grammars(tokenizer, 4096, [0]).compile(StructuredOutputsParams(**required(70_000)))


def test_a_checker_that_does_not_answer_is_given_up_and_the_next_attempt_is_compiled(
    grammars: Grammars,
) -> None:
    """A busy machine is no fault of the definition, so this refusal is not kept."""
    wanted = StructuredOutputsParams(**required(4321))
    with (
        late_answers(),
        pytest.raises(MachineBusy, match="more than the 600 seconds allowed to compile, on a busy"),
    ):
        grammars.compile(wanted)
    assert grammars.compile(wanted) is not None


def test_a_refusal_is_kept_and_owners_share_nothing(grammars: Grammars) -> None:
    slow = StructuredOutputsParams(**required(5000))
    first = grammars.compile(slow, "one")
    assert grammars.compile(slow, "one") is first
    assert grammars.compile(slow, "another") is not first


def test_who_asks_for_many_constraints_evicts_his_own(grammars: Grammars) -> None:
    rare = grammars.compile(StructuredOutputsParams(regex="rare"), "rare")
    for number in range(150):
        grammars.compile(StructuredOutputsParams(regex=f"a{number}"), "greedy")
    assert grammars.compile(StructuredOutputsParams(regex="rare"), "rare") is rare
