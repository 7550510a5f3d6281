"""The five promises of Parlay, and for each the tests that keep it: none may go away unnoticed."""

from __future__ import annotations

import ast
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
ENGINE = TESTS.parent / "src" / "parlay" / "engine"

KEPT_BY = {
    "Same seed, same text: at any batch composition and draft budget": {
        "conformance/test_catalogue.py": ["test_short_form"],
        "conformance/test_builtin.py": [
            "test_no_token_differs_alone",
            "test_no_token_differs_in_a_mixed_batch_of_eight",
        ],
        "llm/test_llm.py": ["test_every_strategy_alone_and_in_a_mixed_batch_gives_one_text"],
        "models/test_bits.py": ["test_rows_do_not_depend_on_how_many_there_are", "test_batch_mates_do_not_show"],
    },
    "Never slower: drafting nothing is among the choices, and a drafter that does not pay is paused": {
        "conformance/test_toys.py": ["test_an_adversary_gives_exactly_one_token_per_step"],
        "router/test_adaptive.py": [
            "test_a_drafter_that_is_always_wrong_costs_less_than_two_percent",
            "test_nothing_is_drafted_when_each_row_costs_a_forward",
            "test_a_drafter_without_matches_costs_nothing",
        ],
    },
    "One loop: one place commits tokens": {
        "conformance/test_promises.py": ["test_tokens_join_a_text_in_one_place", "test_one_forward_commits"],
        "engine/test_step.py": [
            "test_the_step_reads_on_half_a_screen",
            "test_tokens_per_step_of_plain_decoding_is_one",
        ],
    },
    "Nothing ignored silently: what can't be honoured is an error that names it": {
        "llm/test_llm.py": [
            "test_what_cannot_be_done_is_refused_by_name",
            "test_parameters_out_of_range_are_refused_by_name",
        ],
        "models/test_parity.py": ["test_arguments_that_cannot_be_honoured_are_errors_that_name_them"],
        "drafters/test_catalogue.py": ["test_what_is_wrong_is_said_in_one_line"],
        "llm/test_transformers.py": ["test_what_cannot_be_honoured_is_named"],
    },
    "One counter: the engine counts tokens, steps and seconds, the same way for every strategy": {
        "conformance/test_catalogue.py": ["test_short_form"],
        "engine/test_step.py": ["test_accepted_and_drafted_nodes_are_counted_by_source_and_depth"],
    },
}


@cache
def names_in(file: str) -> frozenset[str]:
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize("promise", KEPT_BY)
def test_every_promise_is_kept_by_tests_that_exist(promise: str) -> None:
    missing = [
        f"{file}::{name}" for file, names in KEPT_BY[promise].items() for name in names if name not in names_in(file)
    ]
    assert KEPT_BY[promise]
    assert not missing


def calls(attribute: str) -> list[str]:
    """Files of the engine that call a method of that name, one entry per call."""
    return [
        path.name
        for path in sorted(ENGINE.glob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(attribute)
    ]


def test_tokens_join_a_text_in_one_place() -> None:
    assert calls(".tokens.extend") == ["commit.py"]
    assert calls(".tokens.append") == calls(".tokens.insert") == []


def test_one_forward_commits() -> None:
    of_runners = Counter(calls(".forward")) - Counter(calls("cost.forward"))  # a cost's forward is a number
    assert set(of_runners) == {"target_layers.py", "verify.py"}
    assert calls(".keep") == ["engine.py"], "what the target's layers wrote for a drafter is never kept"
