"""Strategies are compared on the same texts only: a pick by kind of work stands on nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parlay.bench.plan import report
from parlay.bench.plan.kinds import KindRate, kind_rates
from parlay.bench.plan.report import PlanCase, case, with_kinds
from parlay.cost.devices import machine
from parlay.cost.speed import DraftPlan, Setting
from tests.bench.plan.conftest import TINY

LARGE = replace(TINY, hidden_size=4096, intermediate_size=14336, num_layers=32)
PLANS = {name: [DraftPlan(name=name, nodes=16)] for name in ("usual", "other")} | {"none": [DraftPlan(name="none")]}
BOTH = {"auto": [*PLANS["usual"], DraftPlan(name="model", nodes=16)], **PLANS}


def planned(monkeypatch: pytest.MonkeyPatch, plans: report.Plans, *rates: KindRate) -> PlanCase:
    monkeypatch.setattr(report, "kinds", lambda: ["code"])
    monkeypatch.setattr(report, "rates_of", lambda name, kind: [each for each in rates if each.strategy == name])
    setting = Setting(machine("h100", "bfloat16"), LARGE, 1, 64)
    return with_kinds(case(setting, [1], None), setting, plans, list(plans))


def rate(strategy: str, texts: str, steps: float, prompts: int = 6) -> KindRate:
    return KindRate("code", strategy, texts, steps, prompts, "rows")


@pytest.mark.parametrize(("texts", "prompts", "pick"), [("a", 6, "other"), ("a", 2, "usual"), ("b", 6, "usual")])
def test_another_is_picked_only_where_it_is_faster_on_texts_of_both(
    monkeypatch: pytest.MonkeyPatch, texts: str, prompts: int, pick: str
) -> None:
    found = planned(monkeypatch, PLANS, rate("usual", "a", 1.5), rate("other", texts, 3, prompts))
    assert found.picks == {"code": pick}
    assert {each.strategy: each.high > 2 for each in found.kinds} == {"usual": False, "other": True}, "both are shown"


def test_what_chooses_is_not_beaten_on_texts_on_which_only_some_of_its_choices_were_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = (rate("usual", "a", 1.5), rate("other", "a", 3))
    assert planned(monkeypatch, BOTH, *known, rate("model", "b", 7)).picks == {"code": "auto"}
    assert planned(monkeypatch, BOTH, *known, rate("model", "a", 2)).picks == {"code": "other"}
    assert planned(monkeypatch, BOTH, *known, rate("model", "a", 7)).picks == {"code": "auto"}


def test_what_copies_was_measured_on_the_same_texts_of_every_kind() -> None:
    texts = {
        name: {(each.kind, each.same_texts) for each in kind_rates() if each.strategy == name}
        for name in ("prompt-lookup", "suffix-decoding")
    }
    assert texts["prompt-lookup"] == texts["suffix-decoding"]
    assert {kind for kind, _ in texts["prompt-lookup"]} == {each.kind for each in kind_rates()}
