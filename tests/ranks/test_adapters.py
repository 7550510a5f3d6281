"""Adapters of single rows on several ranks: what one process computes with them, and nothing of what others have."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from starlette.testclient import TestClient

from parlay import LLM, SamplingParams
from parlay.aio import AsyncLLM
from parlay.models.fetch.resolving import resolve
from parlay.models.loading import read_config
from parlay.models.lora import MASKS
from parlay.models.lora_layout import EXPERT_PRODUCTS, PRODUCTS, WEIGHTS, BadAdapter
from parlay.models.native import NativeRunner
from parlay.options import LoadOptions, RankOptions
from parlay.ranks.adapters import AdapterBook
from parlay.ranks.calls import Call, CallLog, Replay
from parlay.ranks.layout import AdapterOrder
from parlay.ranks.leader import Leader
from parlay.ranks.starting import lead, open_target
from parlay.serve.app import create_app
from parlay.serve.settings import Settings
from parlay.testing.adapters import save_adapter
from parlay.testing.checkpoints import save_random
from parlay.testing.toys import RandomLogits, ToyRunner
from parlay.types import Adapter, RunnerLost, Segment
from tests.models import test_lora
from tests.ranks.conftest import Crew

IDS = (5, 9, 3, 17, 5, 9, 3, 40, 8, 1, 30, 2, 9, 3, 17, 6, 12, 7, 25, 4, 9, 3, 19, 11)
"""Three times as many rows are divided among ranks that share texts, and fewer are not."""
ALONE = RankOptions()
logits_of = partial(test_lora.logits_of, ids=IDS)


def saved(folder: Path, family: str = "qwen2", products: Sequence[str] = PRODUCTS) -> Path:
    """A model with two adapters of other ranks and products."""
    save_random(family, folder / "base")
    config = read_config(folder / "base")
    save_adapter(folder / "one", config, rank=5, products=products)
    save_adapter(folder / "two", config, rank=20, seed=1, products=products[::3])
    return folder


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 with biases of queries, keys and values."""
    return saved(tmp_path_factory.mktemp("toy"))


def lead_ranks(crew: Crew, model: Path, dtype: str, *, tensor: int, stages: int = 1, context: int = 1) -> Leader:
    options = RankOptions(tensor_parallel=tensor, pipeline_parallel=stages, context_parallel=context)
    load = LoadOptions(dtype=dtype, device="cpu", threads=1)
    return lead(str(model), load, options, cache_tokens=512, start=crew.start)


def alone(model: Path, dtype: str) -> NativeRunner:
    load = LoadOptions(dtype=dtype, device="cpu", threads=1)
    runner = open_target(str(model), load, ALONE, None, lambda *_: None)
    assert isinstance(runner, NativeRunner)
    return runner


@pytest.mark.parametrize(
    ("family", "split", "dtype"),
    [
        ("qwen2", {"tensor": 2}, "float32"),
        ("qwen2", {"tensor": 2}, "float64"),
        ("qwen2", {"tensor": 1, "stages": 2}, "float32"),
        ("qwen2", {"tensor": 2, "context": 2}, "float32"),
        ("qwen2-moe", {"tensor": 2}, "float32"),
        ("qwen2-moe", {"tensor": 2}, "float64"),
    ],
    ids=["shares", "shares by torch", "stages", "shares and texts", "experts", "experts by torch"],
)
def test_rows_have_adapters_of_their_own_on_all_ranks(
    crew: Crew, tmp_path: Path, family: str, split: dict[str, int], dtype: str
) -> None:
    """As in one process, but for how sums of shares round; the base and each row keep their bits in any company."""
    products = PRODUCTS if family == "qwen2" else (*PRODUCTS, *EXPERT_PRODUCTS)
    toy = saved(tmp_path, family, products)
    single, ranks = alone(toy / "base", dtype), lead_ranks(crew, toy / "base", dtype, **split)
    found, wanted = (
        logits_of(runner, None, *(runner.read_adapter(toy / name, name) for name in ("one", "two")))
        for runner in (ranks, single)
    )
    for own, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(own, expected, rtol=0, atol=0 if "stages" in split else 1e-4)
    assert all((own - found[0]).abs().max() > 0.05 for own in found[1:])
    one, two = (ranks.read_adapter(toy / name, name) for name in ("one", "two"))
    assert logits_of(ranks, None)[0].equal(found[0])
    for company in ((one,), (two, one, None), (one, one, two), (None, None, None, one)):
        assert logits_of(ranks, *company)[company.index(one)].equal(found[1])
    ranks.open(0, (), salt="single")
    ranks.reserve(0, len(IDS))
    for row, token in enumerate(IDS):
        assert ranks.forward([Segment(0, (token,), adapter=one)]).logits_RV[0].equal(found[1][row])
        ranks.keep(0, ())


def test_an_adapter_that_a_rank_lacks_is_refused_and_the_ranks_go_on(crew: Crew, toy: Path, tmp_path: Path) -> None:
    """With one line that names the rank: another adapter at its path, or none, or one that is damaged."""
    ranks = lead_ranks(crew, toy / "base", "float32", tensor=2)
    one = ranks.read_adapter(toy / "one", "one")
    expected = logits_of(ranks, one)[0]
    (tmp_path / WEIGHTS).write_bytes(b"cut")
    (tmp_path / "adapter_config.json").write_bytes((toy / "one" / "adapter_config.json").read_bytes())
    for folder, words in ((toy / "two", "has another adapter there than on rank 0"), (tmp_path, "is damaged")):
        with pytest.raises(BadAdapter, match=f"^rank 1: .*{words}"):
            ranks.followers.read_adapter(AdapterOrder(number=9, name="one", folder=str(folder), salt=one.salt))
    with pytest.raises(BadAdapter, match=r"no adapter_config\.json"):
        ranks.read_adapter(toy / "nothing", "nothing")
    stranger = alone(toy / "base", "float32").read_adapter(toy / "one", "one")
    with pytest.raises(ValueError, match="'one' was not read by all of its processes"):
        logits_of(ranks, stranger)
    ranks.release(0)
    assert logits_of(ranks, one)[0].equal(expected)


def test_a_rank_that_is_lost_while_others_read_is_told(crew: Crew, toy: Path) -> None:
    ranks = lead_ranks(crew, toy / "base", "float32", tensor=2)
    ranks.followers.lose("rank 1 has ended")
    with pytest.raises(RunnerLost, match="rank 1 has ended"):
        ranks.read_adapter(toy / "one", "one")


class _Ready:
    """Others that have read whatever they are told to."""

    def read_adapter(self, order: AdapterOrder) -> None:
        assert order.number > 0


def test_what_rank_0_has_forgotten_all_forget(tmp_path: Path) -> None:
    """A number is no other adapter's afterwards, and a rank that lacks one ends."""
    book, adapter, other = AdapterBook("toy", _Ready()), Adapter("one", "salt"), Adapter("two", "salt")
    book.share(tmp_path, adapter)
    book.share(tmp_path, other)
    held, log = {number: Adapter(name, "salt") for number, name in ((1, "one"), (2, "two"))}, CallLog()
    replay = Replay(ToyRunner(RandomLogits(8), 8), held)
    log.forward([Segment(0, (1,), adapter=other)], (), frozenset(), book.number)
    kept = log.take()
    assert list(book.forgotten()) == []
    del adapter
    gc.collect()
    (number,) = book.forgotten()
    log.add(Call.FORGET, number)
    replay.run(log.take())
    assert (number, set(held)) == (1, {2})
    del held[2]
    with pytest.raises(RunnerLost, match="rank 0 names an adapter that was not read here"):
        replay.run(kept)


@pytest.fixture
def llm(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    monkeypatch.setattr("parlay.ranks.starting.start_here", crew.start)
    with LLM("parlay-mini", tensor_parallel_size=2, dtype="float32", threads=1) as llm:
        yield llm


def test_requests_load_name_and_unload_adapters_over_http(llm: LLM, tmp_path: Path) -> None:
    """On two ranks as in one process. Strategies give the adapter's own text, beside requests of the base."""
    save_adapter(tmp_path / "one", read_config(resolve("parlay-mini")), alpha=40)
    app = create_app({"parlay-mini": AsyncLLM(llm)}, Settings(lora_folder=tmp_path))
    prompt = {"prompt": "The fox", "max_tokens": 6, "temperature": 0}
    with TestClient(app, raise_server_exceptions=False) as client:
        assert client.post("/v1/load_lora_adapter", json={"lora_name": "sql", "lora_path": "one"}).status_code == 200
        texts = [
            client.post("/v1/completions", json={"model": name, **prompt}).json()["choices"][0]["text"]
            for name in ("sql", "parlay-mini")
        ]
        assert texts[0] != texts[1]
        params, prompts = SamplingParams(temperature=0, max_tokens=6), ["The fox"] * 3
        for strategy in ("none", "prompt-lookup"):
            outputs = llm.generate(prompts, params, strategy=strategy, lora_request=["sql", None, "sql"])
            assert [output.outputs[0].text for output in outputs] == [texts[0], texts[1], texts[0]]
        (save_adapter(tmp_path / "masks", read_config(resolve("parlay-mini"))) / MASKS).write_text(
            '{"mask_token_id": 0, "set_block_size": 4}'
        )
        drafted = llm.generate("The fox", params, strategy=f"set-block:adapter={tmp_path / 'masks'},policy=fixed")
        assert drafted[0].outputs[0].text == texts[1], "rows of masks run with an adapter of their own"
        assert client.post("/v1/unload_lora_adapter", json={"lora_name": "sql"}).status_code == 200
        assert client.post("/v1/completions", json={"model": "sql", **prompt}).status_code == 404
        assert client.post("/v1/completions", json={"model": "parlay-mini", **prompt}).status_code == 200
