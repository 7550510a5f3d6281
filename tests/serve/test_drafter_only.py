"""`parlay serve --drafter-only`: drafts over HTTP, for engines that then write the same texts."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from parlay import LLM, SamplingParams
from parlay.cli import serve_drafter
from parlay.cli.serve import add_arguments
from parlay.drafters.remote.service import DraftService
from parlay.options import UsageError
from parlay.serve.app import create_app
from parlay.serve.drafter.app import create_drafter_app
from parlay.serve.drafter.hosted import DrafterInfo, HostedDrafter
from parlay.serve.settings import Settings
from parlay.types import NO_DRAFT, Draft, Needs, Observation, SequenceView
from tests.cli.conftest import Cli, cli
from tests.serve.conftest import Shared

__all__ = ["cli"]

TEXT = {"id": 1, "start": 0, "tokens": [1, 2, 3, 1, 2], "most": 4, "prompt_length": 5}
PROMPTS = ["Once upon a time there was a dog. Once upon", "The cat sat on the mat. The cat"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(["--drafter-only", *words])


def hosted(*words: str) -> HostedDrafter:
    read = options(*words)
    return serve_drafter.open_drafter(*serve_drafter.check(read), read)


@pytest.fixture(scope="module")
def copying() -> HostedDrafter:
    return hosted("parlay-mini", "--strategy", "prompt-lookup")


def test_what_it_drafts_with_is_told(copying: HostedDrafter) -> None:
    said = TestClient(create_drafter_app(copying)).get("/v1/drafter").json()
    assert said["version"] == 1
    assert said["strategy"] == "prompt-lookup"
    assert len(said["tokenizer"]) == 32


def test_a_text_is_drafted_for_and_then_only_grows(copying: HostedDrafter) -> None:
    client = TestClient(create_drafter_app(copying))
    first = client.post("/v1/drafts", json={"client": "a", "texts": [TEXT]}).json()["drafts"][0]
    assert first["tokens"][0] == 3
    assert first["parents"] == list(range(-1, len(first["tokens"]) - 1))
    news = TEXT | {"start": 5, "tokens": [3]}
    assert client.post("/v1/drafts", json={"client": "a", "texts": [news]}).json()["drafts"][0]["tokens"][0] == 1
    other = client.post("/v1/drafts", json={"client": "b", "texts": [news]}).json()["drafts"][0]
    assert other["held"] == 0
    assert client.get("/stats").json()["held"] == 1


def test_a_request_beside_the_owners_url_is_told_to_leave_its_strategy_out() -> None:
    llm = LLM("parlay-mini", strategy="remote:url=http://127.0.0.1:9,retry_s=3600", router_memory="off")
    shared = Shared(llm)
    client = TestClient(create_app({"parlay-mini": shared}, Settings()))
    body = {"prompt": "a", "max_tokens": 2, "strategy": "remote:k=3"}
    error = client.post("/v1/completions", json=body).json()["error"]
    assert error["message"] == (
        "strategy remote: url is set by the server's owner, not by a request: remove strategy, and remote drafts as "
        "the owner has set it"
    )
    assert (error["param"], error["code"]) == ("strategy", "invalid_strategy")
    assert client.post("/v1/completions", json={**body, "strategy": None}).status_code == 200
    other = client.post("/v1/completions", json={**body, "strategy": "datastore"}).json()["error"]
    assert (other["code"], "needs file=PATH" in other["message"]) == ("invalid_strategy", True)
    asyncio.run(shared.end())


def test_stores_write_their_file_when_the_service_ends(tmp_path: Path) -> None:
    store = tmp_path / "outputs.store"
    own = hosted("parlay-mini", "--strategy", f"suffix-decoding:store={store},save_every=1000")
    with TestClient(create_drafter_app(own)) as client:
        client.post("/v1/drafts", json={"client": "a", "texts": [TEXT]})
        client.post("/v1/drafts", json={"client": "a", "texts": [TEXT | {"start": 5, "tokens": [7, 8, 9]}]})
        client.post("/v1/drafts", json={"client": "a", "texts": [], "over": [1]})
        assert client.get("/stats").json()["held"] == 0
    assert store.exists()


def test_no_client_gets_longer_drafts_than_the_owner_allows() -> None:
    client = TestClient(create_drafter_app(hosted("parlay-mini", "--strategy", "prompt-lookup:k=2")))
    text = TEXT | {"tokens": [1, 2, 3, 4, 5, 6, 1], "most": 100}
    (draft,) = client.post("/v1/drafts", json={"client": "a", "texts": [text]}).json()["drafts"]
    assert draft["tokens"] == [2, 3]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": [1 << 20]}, "must be ids from 0 to"),
        ({"tokens": [-1]}, "tokens"),
        ({"tokens": []}, "at least one id"),
        ({"start": 1 << 30}, "must have at most 4096 ids"),
        ({"most": -1}, "most"),
        ({"most": 1 << 20}, "most"),
        ({"temperature": -1.0}, "temperature"),
        ({"spare": 1}, "spare"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(copying: HostedDrafter, change: dict[str, Any], message: str) -> None:
    client = TestClient(create_drafter_app(copying), raise_server_exceptions=False)
    answer = client.post("/v1/drafts", json={"client": "a", "texts": [TEXT | change]})
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


def test_a_number_beyond_all_is_refused_before_others_suffer(copying: HostedDrafter) -> None:
    client = TestClient(create_drafter_app(copying), raise_server_exceptions=False)
    body = json.dumps({"client": "a", "texts": [TEXT]}).replace("}]}", ', "temperature": 1e999}]}')
    answer = client.post("/v1/drafts", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert "temperature" in answer.json()["error"]["message"]


def test_ids_of_another_tokenizer_are_refused(copying: HostedDrafter) -> None:
    client = TestClient(create_drafter_app(copying))
    answer = client.post("/v1/drafts", json={"client": "a", "tokenizer": "another", "texts": [TEXT]})
    assert answer.status_code == 400


def test_keys_are_asked_for_as_by_a_server(copying: HostedDrafter) -> None:
    client = TestClient(create_drafter_app(copying, Settings(keys=("sesame",))))
    body = {"client": "a", "texts": [TEXT]}
    assert client.post("/v1/drafts", json=body).status_code == 401
    assert client.get("/v1/drafter").status_code == 401
    assert client.get("/health").status_code == 200
    assert client.post("/v1/drafts", json=body, headers={"Authorization": "Bearer sesame"}).status_code == 200


def test_a_drafter_that_fails_is_an_error_and_the_next_request_is_served() -> None:
    class Broken:
        needs = Needs(outcomes=False)
        fails = True

        def propose(self, views: list[SequenceView], budgets: list[int]) -> list[Draft]:
            if self.fails:
                raise RuntimeError("out of order")
            return [NO_DRAFT] * len(views)

        def observe(self, observations: list[Observation]) -> None: ...

        def release(self, sequence: int) -> None: ...

    drafter = Broken()
    own = HostedDrafter(DrafterInfo("broken", 30, ""), DraftService(drafter, 30, 100), ExitStack())
    client = TestClient(create_drafter_app(own), raise_server_exceptions=False)
    body = {"client": "a", "texts": [TEXT]}
    assert "out of order" in client.post("/v1/drafts", json=body).json()["error"]["message"]
    drafter.fails = False
    assert client.post("/v1/drafts", json=body).status_code == 200


def test_texts_are_those_of_plain_decoding(serve: Callable[[FastAPI], AbstractContextManager[str]]) -> None:
    """A draft model behind HTTP, greedy and sampled, several requests at once."""
    sampled = SamplingParams(temperature=0.8, seed=3, max_tokens=24, ignore_eos=True)
    drafter = hosted("parlay-mini-draft")
    llm = LLM("parlay-mini")
    with serve(create_drafter_app(drafter)) as url:
        named = f"remote:url={url},deadline_ms=20000,policy=fixed,k=4"
        for params in (GREEDY, sampled):
            plain = llm.generate(PROMPTS, params, strategy="none")
            drafted = llm.generate(PROMPTS, params, strategy=named)
            assert [each.outputs[0].token_ids for each in drafted] == [each.outputs[0].token_ids for each in plain]
    assert drafter.counts.drafted_tokens > 0
    assert drafter.counts.failures == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a", "b"], "one model"),
        (["--model-dir", "models"], "--model-dir"),
        (["--strategy", "auto"], "auto is not a drafter"),
        (["--strategy", "none"], "none is not a drafter"),
    ],
)
def test_mistakes_are_told_before_a_model_loads(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        serve_drafter.check(options(*words))


def test_a_drafter_that_needs_more_than_tokens_is_refused() -> None:
    with pytest.raises(UsageError, match="committed tokens only"):
        hosted("parlay-mini", "--strategy", "token-recycling")


def test_only_this_machine_is_served_without_keys(cli: Cli) -> None:
    answer = cli("serve", "--drafter-only", "parlay-mini", "--host", "0.0.0.0")
    assert answer.code == 2
    assert "--no-auth" in answer.err
