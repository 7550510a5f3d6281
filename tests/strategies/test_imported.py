"""Accept rules and budget policies from elsewhere: named by path, checked at once, and judged by the kit."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from parlay import LLM, SamplingParams
from parlay.certificates.gate import exact_form, rule_level
from parlay.llm.outputs import CompletionOutput, RequestFailed
from parlay.options import UsageError
from parlay.serve.errors import ApiError
from parlay.serve.protocol.sampling_from_body import read_strategy
from parlay.strategies.spelling import parse
from parlay.testing.conformance import DISTRIBUTION_STAGE, check_strategy, default_stages
from parlay.types import Exactness

EXAMPLE = Path(__file__).parents[2] / "examples" / "rules" / "my_rules.py"
OTHERS = """
from dataclasses import dataclass
from parlay.sampling.rules import DistributionRule, descend
from parlay.sampling.rules.rejection import Rejection, one_by_one
from parlay.types import Exactness, Needs

class Own(DistributionRule):
    "Accepts as rejection does."
    kinds = frozenset({"iid"})
    def verdict(self, inputs):
        return descend(inputs, one_by_one)

class Biased(Own):
    def verdict(self, inputs):
        def choose(target, candidates, rng):
            for token, drafted in candidates:
                if rng.coin(min(1, 1.2 * target[token] / drafted[token])):
                    return token
            return rng.draw(target)
        return descend(inputs, choose)

class Many(Own):
    kinds = frozenset({"iid", "point"})

@dataclass(frozen=True)
class Wanting(Own):
    least: float

class Nothing: ...

class Broken(Own):
    kinds = frozenset({"point"})
    def verdict(self, inputs):
        raise RuntimeError("a bug")

class Silent(Own):
    kinds = frozenset({"point"})
    def accept(self, views, drafts, logits_RV, roots): ...

class Failing(Own):
    def __init__(self):
        raise RuntimeError("no table")

OBJECT = Wanting(0.5)

class Drafter:
    needs = Needs()
    def __init__(self, resources): ...
    def propose(self, views, budgets): ...
    def observe(self, observations): ...
    def release(self, sequence): ...

class Bare(Drafter):
    __init__ = object.__init__

class Unready(Drafter):
    def __init__(self, resources):
        raise RuntimeError("two\\nlines")

class Needy(Drafter):
    needs = 5

class Long(Drafter):
    def propose(self, views, budgets):
        return [*views, None]
"""
WORDS = "one of the men saw the house, and one of the dogs saw the men,"
DRAWN = "draft-model:rule=other_rules:{},shape=chain,width=1"


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The guide's module, and one with faults, in the current folder."""
    shutil.copy(EXAMPLE, tmp_path)
    (tmp_path / "other_rules.py").write_text(OTHERS)
    monkeypatch.chdir(tmp_path)
    yield
    for name in ("my_rules", "other_rules"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("strategy", "stage", "sound"),
    [
        ("prompt-lookup:rule=my_rules:Nucleus", "toy", True),
        (DRAWN.format("Own"), DISTRIBUTION_STAGE, True),
        (DRAWN.format("Biased"), DISTRIBUTION_STAGE, False),
    ],
)
def test_the_kit_tells_rules_from_elsewhere_that_keep_their_promise(strategy: str, stage: str, sound: bool) -> None:
    report = check_strategy(strategy, stages=[default_stages()[stage]])
    assert report.passed is sound, str(report)


def test_a_policy_sets_budgets_and_changes_no_text() -> None:
    """Over texts of several seeds: instruction sets draw other ones, and in a short text a second draft may be none."""
    params = [SamplingParams(temperature=1.5, max_tokens=60, seed=seed) for seed in range(4)]
    with LLM("parlay-mini", router_memory="off") as llm:
        plain, halved, fixed = (
            [
                output.outputs[0]
                for output in llm.generate([f"{WORDS} {WORDS} one"] * 4, params, False, strategy=strategy)
            ]
            for strategy in (
                "none",
                "prompt-lookup:policy=my_rules:Halving,k=8",
                "prompt-lookup:policy=fixed,k=8",
            )
        )
    texts = [[text.token_ids for text in each] for each in (plain, halved, fixed)]
    assert texts[0] == texts[1] == texts[2]
    assert 0 < _drafted(halved) < _drafted(fixed)


def _drafted(texts: Sequence[CompletionOutput]) -> int:
    return sum(text.metrics.draft_tokens for text in texts if text.metrics is not None)


def test_a_rule_decides_what_is_accepted() -> None:
    params = SamplingParams(temperature=1.0, max_tokens=60, seed=3)
    with LLM("parlay-mini", router_memory="off") as llm:
        accepted = [
            llm.generate(["one two one two"], params, False, strategy=f"prompt-lookup:policy=fixed,k=4{rule}")[0]
            .outputs[0]
            .metrics.accepted_tokens
            for rule in ("", ",rule=my_rules:Nucleus")
        ]
    assert accepted[1] > accepted[0]


def test_a_rule_says_what_it_promises() -> None:
    assert rule_level(parse(DRAWN.format("Own"))) is Exactness.DISTRIBUTION
    assert rule_level(parse("prompt-lookup:rule=my_rules:Nucleus")) is Exactness.LOSSY
    assert str(exact_form(parse("prompt-lookup:rule=my_rules:Nucleus,k=4"))) == "prompt-lookup:k=4"
    assert rule_level(parse(DRAWN.format("OBJECT"))) is Exactness.DISTRIBUTION


def test_a_rule_with_a_bug_ends_its_request_alone() -> None:
    params = SamplingParams(temperature=1.0, max_tokens=8, seed=3)
    with LLM("parlay-mini", router_memory="off") as llm:
        with pytest.raises(RequestFailed, match="RuntimeError: a bug"):
            llm.generate(["a"], params, False, strategy="prompt-lookup:rule=other_rules:Broken")
        (well,) = llm.generate(["a"], params, False, strategy="prompt-lookup")
        assert well.outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("prompt-lookup:rule=no_such_module:Rule", "can't import 'no_such_module'"),
        ("prompt-lookup:rule=../my_rules:Nucleus", "is not the name of a module; write package.module:Class"),
        ("prompt-lookup:policy=:", "is not the name of a module; write package.module:Class"),
        ("prompt-lookup:rule=my_rules:Nucleos", "did you mean Nucleus"),
        ("prompt-lookup:rule=other_rules:Nothing", "no accept rule: it lacks exactness, kinds, matches, accept"),
        ("prompt-lookup:rule=other_rules:Many", "must name one in its attribute kinds"),
        ("prompt-lookup:rule=other_rules:Own", "judges drafts of kind 'iid', which prompt-lookup does not draw"),
        ("draft-model:rule=other_rules:Wanting", "its constructor is called with no arguments"),
        ("prompt-lookup:policy=other_rules:Nothing", "no budget policy: it lacks plan, next_budgets, trim"),
        ("prompt-lookup:policy=other_rules:Own", "no budget policy: it lacks plan, next_budgets, trim"),
        ("prompt-lookup:rule=other_rules:Failing", "its constructor failed at line "),
        ("other_rules:Bare", "its constructor takes nothing; it must take the resources"),
        ("other_rules:Unready", "of other_rules.py (RuntimeError: two lines)"),
        ("other_rules:Needy", "its needs must be a parlay.types.Needs, got 5"),
        ("other_rules:Drafter,k=4", "its parameters follow a colon: write other_rules:Drafter:k=4"),
    ],
)
def test_what_is_no_rule_policy_or_drafter_is_one_clear_line(strategy: str, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)) as caught, LLM("parlay-mini", router_memory="off") as llm:
        llm.generate(["a"], SamplingParams(max_tokens=1), False, strategy=strategy)
    assert "\n" not in str(caught.value)


def test_a_rule_without_verdicts_is_named() -> None:
    with LLM("parlay-mini", router_memory="off") as llm, pytest.raises(RequestFailed) as caught:
        llm.generate(["a"], SamplingParams(max_tokens=2), False, strategy="prompt-lookup:rule=other_rules:Silent")
    assert "accept of rule Silent must return one Verdict for each sequence, got None" in str(caught.value)


@pytest.mark.parametrize("name", ["Drafter", "Long"])
def test_a_drafter_that_proposes_something_else_is_told_what_to_return(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """And its request goes on without it."""
    params = SamplingParams(temperature=0, max_tokens=6)
    with LLM("parlay-mini", router_memory="off") as llm:
        plain, drafted = (
            llm.generate("a", params, False, strategy=strategy)[0].outputs[0].token_ids
            for strategy in ("none", f"other_rules:{name}:policy=fixed,k=2")
        )
    assert plain == drafted
    assert "failed (propose must return one Draft for each sequence, got" in caplog.text


@pytest.mark.parametrize("named", ["rule", "policy"])
def test_a_request_to_a_server_imports_nothing(named: str) -> None:
    for text in (f"prompt-lookup:{named}=my_rules:Nucleus", f"prompt-lookup({named}=my_rules:Nucleus)"):
        with pytest.raises(ApiError, match=f"strategy prompt-lookup: {named}=my_rules:Nucleus: choose one of"):
            read_strategy(text)
    for text in ("my_rules:Nucleus", "my_rules:Nucleus:k=1", "union:of=prompt-lookup+my_rules:Nucleus:k=1"):
        with pytest.raises(ApiError, match="unknown strategy 'my_rules:Nucleus'"):
            read_strategy(text)
    assert "my_rules" not in sys.modules
