"""Adapters over HTTP: requests name them as models, and load and unload those below one folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from parlay.aio import AsyncLLM
from parlay.models.fetch.resolving import resolve
from parlay.models.loading import read_config
from parlay.testing.adapters import save_adapter

PROMPT = {"prompt": "The fox", "max_tokens": 6, "temperature": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    save_adapter(folder / "inside" / "one", read_config(resolve("parlay-mini")), alpha=40)
    save_adapter(folder / "outside", read_config(resolve("parlay-mini")))
    (folder / "inside" / "link").symlink_to(folder / "outside")
    return folder / "inside"


@pytest.fixture
def client(make_app: Callable[..., FastAPI], folder: Path) -> TestClient:
    return TestClient(make_app(lora_folder=folder), raise_server_exceptions=False)


def test_an_adapter_is_loaded_named_as_a_model_listed_and_unloaded(client: TestClient, engine: AsyncLLM) -> None:
    """In vLLM's shapes; the base goes on under its own name, and later requests for the adapter get 404."""
    loaded = client.post("/v1/load_lora_adapter", json={"lora_name": "sql", "lora_path": "one"})
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'sql' added successfully.")
    plain = client.post("/v1/completions", json={"model": "parlay-mini", **PROMPT}).json()
    changed = client.post("/v1/completions", json={"model": "sql", **PROMPT}).json()
    assert changed["model"] == "sql"
    assert changed["choices"][0]["text"] != plain["choices"][0]["text"]
    models = {model["id"]: model for model in client.get("/v1/models").json()["data"]}
    assert models["sql"]["parent"] == "parlay-mini"
    assert client.get("/v1/models/sql").json() == models["sql"]
    again = client.post("/v1/load_lora_adapter", json={"lora_name": "sql", "lora_path": "one"})
    assert again.status_code == 400
    assert "is already loaded" in again.json()["error"]["message"]
    unloaded = client.post("/v1/unload_lora_adapter", json={"lora_name": "sql"})
    assert (unloaded.status_code, unloaded.text) == (200, "Success: LoRA adapter 'sql' removed successfully.")
    assert client.post("/v1/completions", json={"model": "sql", **PROMPT}).status_code == 404
    assert client.post("/v1/unload_lora_adapter", json={"lora_name": "sql"}).status_code == 404
    assert not len(engine.llm.adapters)


@pytest.mark.parametrize("path", ["../outside", "link", "/etc", ".", "one/../../outside", "\x00", "a" * 4000])
def test_paths_outside_the_folder_are_refused(client: TestClient, path: str) -> None:
    """Links are followed before the path is judged, and nothing is said of what lies outside."""
    response = client.post("/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": path})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "lora_path"


def test_a_folder_without_an_adapter_and_a_models_name_are_refused(client: TestClient, folder: Path) -> None:
    """One line each, and the server goes on."""
    (folder / "empty").mkdir(exist_ok=True)
    taken = [(name, "one", "is the name of a model") for name in ("parlay-mini", "parlay-mini:latest")]
    for name, path, words in (("x", "empty", "no adapter_config.json"), *taken):
        response = client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path})
        assert response.status_code == 400
        assert words in response.json()["error"]["message"]
    assert client.post("/v1/completions", json=PROMPT).status_code == 200


def test_no_salt_names_what_an_adapter_has_cached(client: TestClient, engine: AsyncLLM, folder: Path) -> None:
    """Keys and values under an adapter are no use to the base, and its text must not depend on who came before."""
    client.post("/v1/load_lora_adapter", json={"lora_name": "sql", "lora_path": "one"})
    body = {**PROMPT, "prompt": "The way to the sea is long, and the ferry leaves at ten past seven. " * 4}
    client.post("/v1/completions", json={"model": "sql", **body, "cache_salt": "a"})
    forged = f"a {engine.llm.adapters.load('sql', folder / 'one').salt}"
    answer = client.post("/v1/completions", json={"model": "parlay-mini", **body, "cache_salt": forged}).json()
    client.post("/v1/unload_lora_adapter", json={"lora_name": "sql"})
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_ollamas_clients_name_adapters_too(client: TestClient) -> None:
    client.post("/v1/load_lora_adapter", json={"lora_name": "sql", "lora_path": "one"})
    asked = {"prompt": "The fox", "raw": True, "stream": False, "options": {"num_predict": 6, "temperature": 0}}
    changed = client.post("/v1/completions", json={"model": "sql", **PROMPT}).json()
    answer = client.post("/api/generate", json={"model": "sql", **asked}).json()
    client.post("/v1/unload_lora_adapter", json={"lora_name": "sql"})
    assert (answer["model"], answer["response"]) == ("sql", changed["choices"][0]["text"])


def test_messages_name_folders_as_clients_do(client: TestClient, folder: Path) -> None:
    """Where the server keeps them is nobody's business."""
    (folder / "empty" / "inner").mkdir(parents=True, exist_ok=True)
    reply = client.post("/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": "empty/inner"})
    message = reply.json()["error"]["message"]
    assert (reply.status_code, message.startswith("no adapter_config.json in empty/inner")) == (400, True)
    assert str(folder) not in message


def test_without_a_folder_nothing_can_be_loaded(make_app: Callable[..., FastAPI]) -> None:
    """The addresses are not there unless the operator names a folder."""
    client = TestClient(make_app())
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        assert client.post(path, json={"lora_name": "x", "lora_path": "one"}).status_code == 404
