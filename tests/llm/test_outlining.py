"""Answers by outline: what is read of an outline, one that never ends, and when order matters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from parlay import LLM, RequestOutput, SamplingParams
from parlay.llm import outlining
from parlay.llm.outlining import OutlineParams, read_outline, write_outlined
from parlay.types import Exactness

QUESTION = "How can I sleep better?"
PARAMS = SamplingParams(temperature=0, max_tokens=6)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("parlay-mini", dtype="float32", seed=1) as model:
        yield model


@pytest.fixture(scope="module")
def written(llm: LLM) -> RequestOutput:
    (output,) = llm.generate(QUESTION, PARAMS)
    return output


def outline(written: RequestOutput, text: str, reason: str = "stop") -> RequestOutput:
    return replace(written, outputs=(replace(written.chosen, text=text, finish_reason=reason),))


@pytest.mark.parametrize(
    ("text", "points"),
    [
        ("1. Dark room\n2. No screens.\n3. Fixed hours", ("Dark room", "No screens", "Fixed hours")),
        ("Outline:\n 1) **Dark room**\n 2) No screens:", ("Dark room", "No screens")),
        ("1. Dark\n2. Dark\n3. Quiet", ("Dark", "Quiet")),
        ("It depends.", ()),
    ],
)
def test_the_points_of_an_outline(written: RequestOutput, text: str, points: tuple[str, ...]) -> None:
    assert read_outline(outline(written, text), OutlineParams()) == (points, "")


def test_an_outline_that_never_ends_is_cut_after_a_whole_line(written: RequestOutput) -> None:
    points, note = read_outline(outline(written, "1. Dark room\n2. No scr", "length"), OutlineParams(outline_tokens=9))
    assert points == ("Dark room",)
    assert note == "the outline did not end within 9 tokens: 1 points of it are kept"
    many = "\n".join(f"{number}. point {number}" for number in range(1, 30))
    points, note = read_outline(outline(written, many), OutlineParams(points=3))
    assert points == ("point 1", "point 2", "point 3")
    assert note == "the outline has 29 points: the first 3 are kept"


def test_sections_are_joined_in_order_and_are_what_each_prompt_gives(
    llm: LLM, written: RequestOutput, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's own outline is no list, so one is put in its place."""
    plan = outline(written, "1. Dark room\n2. No screens\n3. Fixed hours")
    monkeypatch.setattr(outlining, "read_outline", lambda _, params: read_outline(plan, params))
    output = write_outlined(llm, QUESTION, PARAMS, OutlineParams(route=False))
    assert output.points == ("Dark room", "No screens", "Fixed hours")
    assert output.exactness is Exactness.LOSSY
    headings = [line for line in output.text.splitlines() if line[:2] in ("1.", "2.", "3.")]
    assert headings[:1] == ["1. Dark room"]
    for section in output.outputs:
        prompt = {"prompt_token_ids": section.prompt_token_ids}
        (alone,) = llm.generate([prompt], PARAMS, strategy="none")
        assert alone.chosen.token_ids == section.chosen.token_ids
        assert section.chosen.text.strip() in output.text


def test_without_a_list_of_points_the_answer_is_plain(llm: LLM) -> None:
    plain = llm.chat([{"role": "user", "content": QUESTION}], PARAMS)
    output = write_outlined(llm, QUESTION, PARAMS, OutlineParams(route=False, outline_tokens=8))
    assert output.points == ()
    assert "no list of points" in output.note
    assert output.text == plain[0].chosen.text
    assert output.exactness is plain[0].chosen.exactness


@pytest.mark.parametrize(("said", "planned"), [("yes", True), ("no", False)])
def test_the_router_asks_whether_order_matters(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, said: str, planned: bool
) -> None:
    """The words are two tokens of the toy model, of which it takes the first or the second."""
    monkeypatch.setattr(outlining, "stands_apart", lambda model, question: said == "yes")
    output = write_outlined(llm, QUESTION, PARAMS, OutlineParams(outline_tokens=8))
    assert (output.outline is not None) == planned
    assert ("depend on each other" in output.note) != planned


@pytest.mark.parametrize(
    "question",
    ["Prove that it holds.", "How many apples are left?", "Write a Python function.", "What is 3*4?"],
)
def test_questions_whose_answers_build_up_are_answered_plainly(llm: LLM, question: str) -> None:
    output = write_outlined(llm, question, PARAMS)
    assert (output.points, output.outline) == ((), None)
    assert output.note == "written plainly: the points would depend on each other"


@pytest.mark.parametrize("params", [{"points": 1}, {"points": 99}, {"outline_tokens": 1}])
def test_what_is_no_plan_is_refused(params: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be between"):
        OutlineParams(**params)  # type: ignore[arg-type]
