"""The store of past outputs: who may learn and see what, how much is kept, and what outlives the process."""

from __future__ import annotations

import logging
import os
from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parlay.drafters.step_budget import STEP_TOKENS
from parlay.drafters.stores.output_store import OutputStore, OutputStores, StoreOptions
from parlay.drafters.stores.suffixes import Suffixes
from parlay.options import UsageError
from parlay.types import NO_DRAFT, Observation, Request, Verdict
from tests.drafters.sight import GREEDY, Sight, wait_for_store_files

OPTIONS = StoreOptions(max_tokens=1000, save_every=1)
VOCAB = 50


def stores(path: Path | str = "", max_tokens: int = 1000, save_every: int = 1) -> OutputStores:
    return OutputStores(8, StoreOptions(store=str(path), max_tokens=max_tokens, save_every=save_every), VOCAB, "made")


def run(stores: OutputStores, output: Sequence[int], request: Request = GREEDY) -> None:
    """A request with that output, from its first step to its end."""
    view = Sight(7, [0], request)
    for token in output:
        view.tokens.append(token)
        stores.observe([Observation(view, NO_DRAFT, Verdict((), (token,)))])
    stores.release(7)
    wait_for_store_files()


def times(stores: OutputStores, wanted: Sequence[int], request: Request = GREEDY) -> int:
    suffixes = stores.of(request)
    return 0 if suffixes is None else occurrences(suffixes, wanted)


def occurrences(suffixes: Suffixes, wanted: Sequence[int]) -> int:
    state, length = suffixes.match(wanted)
    return suffixes.counts[state] if length == len(wanted) else 0


def test_an_output_joins_when_its_request_ends_and_its_prompt_never_does() -> None:
    kept = stores()
    view = Sight(3, [0, 1, 2])
    kept.observe([Observation(view, NO_DRAFT, Verdict((), (1,)))])
    assert kept.of(GREEDY) is None
    kept.release(3)
    assert times(kept, [1, 2]) == 1
    assert times(kept, [0]) == 0
    kept.release(3)
    kept.release(99)
    assert times(kept, [1, 2]) == 1


def test_a_request_that_was_never_observed_is_not_learned() -> None:
    kept = stores()
    kept.release(3)
    assert kept.of(GREEDY) is None


def test_tenants_do_not_share_and_requests_may_opt_out() -> None:
    kept = stores()
    run(kept, [1, 2], replace(GREEDY, salt="a"))
    run(kept, [3, 4], replace(GREEDY, salt="a", store=False))
    assert times(kept, [1, 2], replace(GREEDY, salt="a", store=False)) == 1
    assert times(kept, [3, 4], replace(GREEDY, salt="a")) == 0
    assert kept.of(GREEDY) is None
    assert kept.of(replace(GREEDY, salt="b")) is None


def test_an_output_ends_with_its_first_stop_token() -> None:
    kept = stores()
    run(kept, [1, 2, 9, 3], replace(GREEDY, stop_ids=frozenset({9})))
    assert times(kept, [1, 2, 9]) == 1
    assert times(kept, [3]) == 0


def test_the_oldest_outputs_of_the_tenant_with_most_go_first() -> None:
    kept, other = stores(max_tokens=6), replace(GREEDY, salt="a")
    run(kept, [1, 1], other)
    for token in (2, 3, 4):
        run(kept, [token, token])
    assert times(kept, [1, 1], other) == 1  # another's outputs push nothing out where there are fewer
    assert [times(kept, [token, token]) for token in (2, 3, 4)] == [0, 1, 1]
    run(kept, [5] * 3, other)
    assert times(kept, [5] * 3, other) == 1
    assert sum(times(kept, [token, token]) for token in (3, 4)) + times(kept, [1, 1], other) == 1
    run(kept, list(range(10, 20)))
    assert times(kept, [13]) == 0
    assert times(kept, [14, 15, 16, 17, 18, 19]) == 1


def test_a_long_output_joins_in_the_course_of_several_steps() -> None:
    kept = stores(max_tokens=10 * STEP_TOKENS)
    run(kept, [1] * (3 * STEP_TOKENS) + [7, 8])
    for _ in range(3):
        assert times(kept, [7, 8]) == 0
        kept.advance()
    assert times(kept, [7, 8]) == 1


@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=40),
    bound=st.integers(1, 25),
    seed=st.integers(0, 2),
)
def test_counts_are_those_of_what_is_kept_and_states_are_bounded(lengths: list[int], bound: int, seed: int) -> None:
    kept = stores(max_tokens=bound)
    outputs: list[list[int]] = []
    for number, length in enumerate(lengths):
        output = [(seed + number * place) % 5 for place in range(length)]
        run(kept, output)
        outputs += [output[-bound:]] if output else []
        while sum(map(len, outputs)) > bound:
            outputs.pop(0)
    suffixes = kept.of(GREEDY)
    if suffixes is None:
        assert not outputs
        return
    assert len(suffixes.counts) <= 2 * 2 * (2 * bound + 9)
    for wanted in {tuple(output[start : start + 3]) for output in outputs for start in range(len(output))}:
        brute = sum(tuple(output[at : at + len(wanted)]) == wanted for output in outputs for at in range(len(output)))
        assert occurrences(suffixes, wanted) == brute


def test_a_store_that_turns_over_for_ever_does_not_grow() -> None:
    store = OutputStore(8)
    sizes = []
    for number in range(300):
        list(store.add(array("i", [number % 40, (number * 7) % 40, 3, 4])))
        if len(store.texts) > 20:
            list(store.drop_oldest())
        sizes.append(len(store.suffixes.counts))
    assert max(sizes[150:]) <= max(sizes[:150])


def test_what_is_learned_outlives_the_process(tmp_path: Path) -> None:
    path = tmp_path / "past.store"
    first = stores(path)
    run(first, [1, 2, 3])
    run(first, [4, 5], replace(GREEDY, salt="a"))
    second = stores(path)
    assert times(second, [1, 2, 3]) == 1
    assert times(second, [4, 5], replace(GREEDY, salt="a")) == 1
    assert times(second, [4, 5]) == 0
    run(second, [1, 2])
    assert times(stores(path), [1, 2]) == 2


def test_a_file_with_more_than_is_kept_gives_its_latest_outputs(tmp_path: Path) -> None:
    path = tmp_path / "past.store"
    first = stores(path)
    for token in range(1, 9):
        run(first, [token, token])
    small = stores(path, max_tokens=5)
    assert [times(small, [token, token]) for token in (6, 7, 8)] == [0, 1, 1]


def test_the_file_is_written_every_so_many_requests_and_on_demand(tmp_path: Path) -> None:
    path = tmp_path / "past.store"
    kept = stores(path, save_every=3)
    run(kept, [1])
    run(kept, [2])
    assert not path.exists()
    run(kept, [3])
    assert times(stores(path), [3]) == 1
    run(kept, [4])
    assert times(stores(path), [4]) == 0
    kept.save()
    assert times(stores(path), [4]) == 1


def test_a_write_that_fails_costs_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kept = stores(tmp_path / "past.store")

    def fail(source: str, target: Path) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with caplog.at_level(logging.WARNING):
        run(kept, [1, 2])
    assert "disk full" in caplog.text
    assert times(kept, [1, 2]) == 1


def test_a_damaged_file_is_refused_when_the_store_is_made(tmp_path: Path) -> None:
    path = tmp_path / "past.store"
    path.write_bytes(b"not a store")
    with pytest.raises(UsageError, match=r"^strategy made: store=.*it is not a store; name another file$"):
        stores(path)


def test_a_file_with_an_output_longer_than_all_that_is_kept_gives_its_end(tmp_path: Path) -> None:
    path = tmp_path / "outputs.store"
    first = stores(path, max_tokens=100)
    run(first, [1, 2, 3, 4, 5, 6])
    first.save()
    second = stores(path, max_tokens=4)
    assert times(second, [3, 4, 5, 6]) == 1
    assert times(second, [2]) == 0
