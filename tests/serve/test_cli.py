"""`parlay serve`: mistakes are told before a model loads, and the door is shut unless it is opened by name."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from parlay import LLM, SamplingParams
from parlay.aio import AsyncLLM
from parlay.cli.listening import KEY_VARIABLE
from parlay.cli.serve import add_arguments, settings
from parlay.cli.serve_models import chosen_models, loading, named_models, read_ahead
from parlay.llm.vocabulary import Vocabularies
from parlay.models.facts import stamps
from parlay.models.fetch.resolving import resolve
from parlay.serve.server import Server
from parlay.serve.settings import Settings
from parlay.testing.checkpoints import save_random
from parlay.types import Tokenizer
from tests.cli.conftest import Cli, cli

__all__ = ["cli"]

NO_MODEL = "/nowhere/at/all"
"""Naming it proves that a mistake was found before any model was looked for."""

MISTAKES = {
    "reachable without a key": (["--host", "0.0.0.0"], "--no-auth"),
    "no host": (["--host", ""], "--host is empty: name an address"),
    "IPv6 without a key": (["--host", "::"], "--no-auth"),
    "keys and no keys": (["--api-key", "sesame", "--no-auth"], "remove one of them"),
    "a key that is none": (["--api-key", "two words"], "API key"),
    "no file of keys": (["--api-key-file", "/nowhere/keys"], "/nowhere/keys"),
    "port out of range": (["--port", "65536"], "--port"),
    "unknown strategy": (["--strategy", "prompt-lokup"], "did you mean prompt-lookup"),
    "limit out of range": (["--max-n", "0"], "--max-n must be at least 1"),
    "twice the same name": ([NO_MODEL], "two models"),
    "half a name": (["=parlay-mini"], "NAME=MODEL"),
    "the same name by flag": (["--model", NO_MODEL], "two models"),
    "no folder of models": (["--model-dir", "/nowhere"], "/nowhere"),
    "prefixes of two models": (["parlay-mini-draft", "--prefix-cache", "kept"], "works with one model"),
    "prefixes of two processes": (["--replicas", "2", "--prefix-cache", "kept"], "one process"),
    "records of whom": (["--record", "kept", "--api-key", "sesame"], "record=1"),
    "records of anybody": (["--record", "kept", "--no-auth"], "users have not agreed"),
    "a mask that is none": (["--record", "kept", "--record-mask", "("], "not a regular expression"),
    "a mask of nothing": (["--record", "kept", "--record-mask", r"\d*"], "matches a text without letters"),
    "a mask for nothing": (["--record-mask", "x"], "--record FOLDER"),
    "records of no size": (["--record", "kept", "--record-megabytes", "0"], "at least 1"),
    "room of no size": (["--memory", "much"], "memory 'much'"),
    "no context": (["--max-model-len", "1"], "--max-model-len must be at least 2"),
    "no place in a step": (["--max-num-seqs", "0"], "--max-num-seqs must be at least 1"),
    "nobody may wait": (["--max-waiting", "-1"], "--max-waiting must be at least 0"),
    "more audits than answers": (["--audit-share", "2"], "--audit-share must be between 0 and 1"),
    "no thread": (["--threads", "0"], "threads"),
    "no certificate": (["--certificate", "/nowhere"], "can't read the certificate /nowhere"),
    "no cascade": (["--cascade", "/nowhere"], "can't read the cascade /nowhere"),
    "one tokenizer for two models": (["a=parlay-mini", "--tokenizer", "x"], "--tokenizer works with one model"),
    "an ensemble for two models": (["a=parlay-mini", "--ensemble", "x"], "--ensemble works with one model"),
    "an ensemble of weight 0": (["--ensemble", "x", "--ensemble-weights", "1,0"], "weights must be above 0"),
    "no model at once": (["--max-loaded", "0"], "--max-loaded must be at least 1"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_wrong_usage_is_one_line_and_exit_code_2(cli: Cli, case: str) -> None:
    words, named = MISTAKES[case]
    result = cli("serve", NO_MODEL, *words)
    assert (result.code, result.out) == (2, "")
    assert result.err.count("\n") == 1
    assert named in result.err


def test_a_port_that_is_taken_is_told_before_a_model_loads(cli: Cli) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        result = cli("serve", NO_MODEL, "--port", str(port))
    assert (result.code, result.out) == (1, "")
    assert (
        result.err == f"parlay: error: port {port} of 127.0.0.1 is in use: stop the program that uses it, or choose "
        "another with --port\n"
    )


def test_nothing_is_fetched_for_a_port_that_is_taken(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a model the default one would be fetched."""
    monkeypatch.setattr("parlay.cli.serve_models.default_model", lambda: pytest.fail("fetched"))
    with socket.create_server(("127.0.0.1", 0)) as other:
        assert "is in use" in cli("serve", "--port", str(other.getsockname()[1])).err


@pytest.mark.parametrize("host", ["no.such.host.invalid", "no..host.invalid"])
def test_a_host_that_is_not_there_is_one_line(cli: Cli, host: str) -> None:
    result = cli("serve", NO_MODEL, "--host", host)
    assert result.code == 1
    assert result.err.count("\n") == 1
    assert f"can't listen on {host}" in result.err


def test_a_model_that_is_not_there_is_one_line(cli: Cli) -> None:
    result = cli("serve", NO_MODEL, "--port", "0")
    assert (result.code, result.err.count("\n")) == (1, 1)
    assert NO_MODEL in result.err


def test_what_is_not_installed_is_named_with_the_way_to_get_it(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parlay.cli.listening.PACKAGES", ("pytest", "no_such_package"))
    result = cli("serve", NO_MODEL)
    assert result.err == "parlay: error: parlay serve needs no_such_package: run pip install 'parlay[serve]'\n"


@pytest.mark.parametrize("content", ["", " \n\n", "caf\xe9\n"])
def test_a_file_without_a_usable_key_is_refused(cli: Cli, tmp_path: Path, content: str) -> None:
    file = tmp_path / "keys"
    file.write_text(content, encoding="utf-8")
    result = cli("serve", NO_MODEL, "--api-key-file", str(file))
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert "API key" in result.err


def test_models_are_named_by_id_or_folder_or_as_told(tmp_path: Path) -> None:
    folder = tmp_path / "a=b"
    folder.mkdir()
    words = ["parlay-mini", "org/model", "mine=/some/folder", "other=org/model", str(folder), "./x/last/"]
    assert named_models(words) == {
        "parlay-mini": "parlay-mini",
        "org/model": "org/model",
        "mine": "/some/folder",
        "other": "org/model",
        "a=b": str(folder),
        "last": "./x/last/",
    }
    files = ["some/small-Q4_K_M.gguf", "/abs/large-00001-of-00003.gguf", "mine=x.gguf"]
    assert list(named_models(files)) == ["small-Q4_K_M", "large", "mine"]


def chosen(*words: str) -> dict[str, str]:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return chosen_models(parser.parse_args(words))


def test_a_folder_gives_its_models_beside_those_that_are_named(tmp_path: Path) -> None:
    for folder in ("whole", "files", "nothing"):
        (tmp_path / folder).mkdir()
    for file in ("whole/config.json", "files/small.gguf", "large-00001-of-00002.gguf", "large-00002-of-00002.gguf"):
        (tmp_path / file).touch()
    found = {
        "large": str(tmp_path / "large-00001-of-00002.gguf"),
        "small": str(tmp_path / "files" / "small.gguf"),
        "whole": str(tmp_path / "whole"),
    }
    assert chosen("--model-dir", str(tmp_path)) == found
    assert list(chosen("one=a", "--model", "b", "--model", "three=c", "--model-dir", str(tmp_path)))[:3] == [
        "one",
        "b",
        "three",
    ]
    with pytest.raises(ValueError, match="two models are called 'small'"):
        chosen("small=a", "--model-dir", str(tmp_path))
    with pytest.raises(ValueError, match="no models in"):
        chosen("--model-dir", str(tmp_path / "nothing"))
    (tmp_path / "small.gguf").touch()
    with pytest.raises(ValueError, match="rename one"):
        chosen("--model-dir", str(tmp_path))


def test_pipes_and_links_to_nothing_are_no_models(tmp_path: Path) -> None:
    """To open a pipe waits for whoever writes to it."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "real.gguf").touch()
    for name in ("pipe.gguf", "folder/config.json", "folder/pipe.gguf"):
        os.mkfifo(tmp_path / name)
    for name in ("link.gguf", "folder/link.gguf"):
        (tmp_path / name).symlink_to(tmp_path / "nothing.gguf")
    assert chosen("--model-dir", str(tmp_path)) == {"real": str(tmp_path / "real.gguf")}


# ------------------------------------------------------------------------------------------------------------ access


def settings_of(*words: str) -> Settings:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return settings(parser.parse_args(words))


def test_keys_come_from_file_environment_and_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text("first\n\nsecond\n", encoding="utf-8")
    monkeypatch.setenv(KEY_VARIABLE, "third")
    found = settings_of("--host", "0.0.0.0", "--api-key-file", str(file), "--api-key", "fourth")
    assert set(found.keys) == {"first", "second", "third", "fourth"}
    assert found.hosts == ()


def test_an_empty_variable_opens_no_door(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "")
    with pytest.raises(ValueError, match="API key"):
        settings_of()


def test_without_keys_only_this_machine_gets_in() -> None:
    assert settings_of().keys == ()
    assert {"localhost", "127.0.0.1", "[::1]"} <= set(settings_of().hosts)
    assert settings_of("--host", "0.0.0.0", "--no-auth").hosts == ()


def test_each_flag_sets_its_field_and_has_its_default() -> None:
    assert settings_of("--no-auth") == Settings()
    words = "--max-concurrency 7 --timeout 9 --default-max-tokens 0 --strict --infill-order spm --score-by yes-no"
    found = settings_of("--no-auth", *words.split())
    limits = Settings(concurrency=7, request_timeout=9.0, default_max_tokens=None)
    assert found == replace(limits, strict=True, infill_order="spm", score_by="yes-no")
    with pytest.raises(ValueError, match="request_timeout must be above 0"):
        settings_of("--timeout", "0")


# ------------------------------------------------------------------------------------------------------ a real server


@contextmanager
def serving(*words: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process, and the address from the line that it prints when it is ready."""
    process = subprocess.Popen(
        [sys.executable, "-m", "parlay", "serve", "--port", "0", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.stderr and process.stderr.read()
        yield process, line.rpartition(" ")[2].strip()
    finally:
        process.kill()
        process.communicate()


def test_it_serves_until_it_is_told_to_stop(tmp_path: Path) -> None:
    """Its store is damaged: it is set aside, and the server starts all the same. Each line of its log is JSON."""
    store = tmp_path / "store"
    with LLM("parlay-mini", strategy=f"suffix-decoding:store={store}") as llm:
        llm.generate("Once upon a time", SamplingParams(temperature=0.0, max_tokens=24))
    store.write_bytes(store.read_bytes()[:-3])
    words = ("--max-model-len", "512", "--strategy", f"suffix-decoding:store={store}")
    logged = ("--log-level", "info", "--log-format", "json")
    with serving("mini=parlay-mini", *words, *logged) as (process, url):
        (model,) = httpx.get(f"{url}/v1/models").json()["data"]
        assert (model["id"], model["max_model_len"]) == ("mini", 512)
        assert httpx.post(f"{url}/tokenize", json={"prompt": "a secret"}).json()["count"] > 0
        assert httpx.get(f"{url}/v1/models", headers={"Host": "evil.example"}).status_code == 403
        reply = httpx.post(f"{url}/v1/completions", json={"prompt": "Once", "max_tokens": 4}, timeout=600)
        assert reply.status_code == 200
        process.send_signal(signal.SIGTERM)
        out, log = process.communicate(timeout=600)
        assert (process.returncode, out) == (0, "")
        assert "POST /tokenize" in log
        assert "secret" not in log
        assert "Traceback" not in log
    assert f"store={store} is damaged; it is now {store}.damaged" in log
    entries = [json.loads(line) for line in log.splitlines()]
    assert {"time", "level", "logger", "message"} <= set.intersection(*map(set, entries))
    assert sum("request" in entry for entry in entries) == 1
    assert (tmp_path / "store.damaged").is_file()


@pytest.mark.parametrize("signals", [2, 3])
def test_further_signals_end_a_stream_before_its_time_and_write_no_traceback(signals: int) -> None:
    """The second one has it end now, with an error as its last event; the third waits for nobody.

    One of two clients does not read. A user who presses Ctrl-C until it is over sees no traceback, and a supervisor an
    orderly end.
    """
    body = {"prompt": "Once", "n": 8, "ignore_eos": True, "max_tokens": 4000, "strategy": "none", "stream": True}
    with (
        serving("parlay-mini") as (process, url),
        httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=600) as reply,
        httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=600) as unread,
    ):
        lines = reply.iter_lines()
        assert next(lines).startswith("data: ")
        assert unread.status_code == 200
        process.send_signal(signal.SIGINT)
        while httpx.get(f"{url}/ready", timeout=600).status_code == 200:
            time.sleep(0.01)
        for _ in range(signals - 1):
            process.send_signal(signal.SIGINT)
            time.sleep(0.2)
        with suppress(httpx.RemoteProtocolError):  # how an answer looks for which nobody waits
            assert "this server is shutting down" in "".join(lines)
        deadline = time.monotonic() + 600
        while signals > 2 and process.poll() is None and time.monotonic() < deadline:
            process.send_signal(signal.SIGINT)
            time.sleep(0.001)
        _, log = process.communicate(timeout=600)
    assert process.returncode == 0
    assert "Traceback" not in log
    assert "CancelledError" not in log


def test_an_answer_that_is_cut_off_for_a_client_that_does_not_read_is_no_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """uvicorn cancels it five seconds after all else has ended."""
    Server(FastAPI(), lambda: None, access_log=False)
    log = logging.getLogger("uvicorn.error")
    for error in (asyncio.CancelledError("timeout"), ValueError("a fault")):
        log.error("Exception in ASGI application", exc_info=error)
    assert [record.exc_info and str(record.exc_info[1]) for record in caplog.records] == ["a fault"]


@pytest.fixture(scope="module")
def five(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server with one model twice, loaded and not, and three of a folder, two of which are broken.

    One model is loaded at a time.
    """
    folder = tmp_path_factory.mktemp("models")
    save_random("qwen3", folder / "random")
    (folder / "random" / "tokenizer_config.json").write_text('{"chat_template": "{{ tools }}<think></think>"}')
    (folder / "deep").mkdir()
    (folder / "deep" / "config.json").write_text("[" * 100_000)
    weights = shutil.copytree(resolve("parlay-mini"), folder / "short") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    words = ("--model", "two=parlay-mini", "--model-dir", str(folder), "--max-loaded", "1")
    with serving("one=parlay-mini", *words) as (_, url):
        yield url


def load(url: str, name: str) -> None:
    """Have the model loaded, if it is not."""
    assert httpx.post(f"{url}/tokenize", json={"prompt": "a", "model": name}, timeout=600).json()["count"] > 0


def test_the_first_model_is_there_at_the_start_and_others_come_when_asked_for(five: str) -> None:
    """The first of those that are named."""
    assert told(five) | {"deep": "", "short": "", "random": ""} == {
        "one": "loaded", "two": "unloaded", "deep": "", "short": "", "random": "",
    }  # fmt: skip
    load(five, "two")
    assert (told(five)["one"], told(five)["two"]) == ("unloaded", "loaded")
    load(five, "one")


def test_ollama_is_told_of_files_whether_loaded_or_not(five: str) -> None:
    models = {model["name"]: model for model in httpx.get(f"{five}/api/tags", timeout=600).json()["models"]}
    one, two = models["one:latest"], models["two:latest"]
    shown = httpx.post(f"{five}/api/show", json={"model": "one"}).json()
    assert (one["size"], one["digest"], one["details"]) == (two["size"], two["digest"], two["details"])
    assert one["size"] > 10_000_000
    assert len(one["digest"]) == 64
    assert one["details"] == shown["details"]
    assert (one["details"]["parameter_size"], one["details"]["quantization_level"]) == ("6.95M", "BF16")
    assert shown["model_info"]["general.parameter_count"] == 6_950_912


def test_what_is_told_of_a_model_is_read_from_its_files_without_loading_it(five: str) -> None:
    one, two, other = (show(five, name) for name in ("one", "two", "random"))
    statuses = told(five)
    assert [statuses[name] for name in ("one", "two", "random")] == ["loaded", "unloaded", "unloaded"]
    assert one["model_info"] == two["model_info"]
    assert (one["template"], one["capabilities"]) == (two["template"], two["capabilities"])
    sizes = {key.removeprefix("parlay."): value for key, value in other["model_info"].items()}
    assert (sizes["context_length"], sizes["embedding_length"], sizes["block_count"]) == (256, 32, 3)
    assert other["capabilities"] == ["completion", "tools", "thinking"]


def show(url: str, name: str) -> dict[str, Any]:
    told: dict[str, Any] = httpx.post(f"{url}/api/show", json={"model": name}, timeout=600).json()
    return told


def test_vocabularies_of_named_models_are_read_before_there_are_requests(tmp_path: Path) -> None:
    """To read one stops every thread of the server for a while."""
    good = str(shutil.copytree(resolve("parlay-mini"), tmp_path / "good"))
    bad = tmp_path / "bad"
    bad.mkdir()
    (bad / "config.json").write_text("{")
    vocabularies = Vocabularies(8)
    read_ahead(["no/such/model", str(bad), "/nowhere", good], vocabularies)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    kept = vocabularies.get(stamps(resolve(good)))
    assert kept is not None
    assert tokenizer_of(loading(parser.parse_args([good]), vocabularies)(good)) is kept.tokenizer


def test_a_model_that_can_not_be_read_hides_no_other(five: str) -> None:
    models = {model["name"]: model["size"] for model in httpx.get(f"{five}/api/tags", timeout=600).json()["models"]}
    for name, status in (("deep", 503), ("short", 503), ("one", 200)):
        asked = {"prompt": "a", "model": name, "max_tokens": 1}
        assert httpx.post(f"{five}/v1/completions", json=asked, timeout=600).status_code == status
    assert (models["deep:latest"], models["short:latest"]) == (0, 0)
    assert models["one:latest"] > 10_000_000


def told(url: str) -> dict[str, str]:
    return {model["id"]: model["status"] for model in httpx.get(f"{url}/v1/models").json()["data"]}


def test_a_model_that_is_loaded_again_reads_its_tokenizer_again_only_if_its_files_have_changed(tmp_path: Path) -> None:
    """To read one stops every thread of the server for a while."""
    folder = shutil.copytree(resolve("parlay-mini"), tmp_path / "model")
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    loader = loading(parser.parse_args([str(folder)]), Vocabularies(8))(str(folder))
    first, again = tokenizer_of(loader), tokenizer_of(loader)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}", encoding="utf-8")
    changed = tokenizer_of(loader)
    assert again is first
    assert changed.chat_template == "{{ messages[0].content }}"


def tokenizer_of(loader: Callable[[], AsyncLLM]) -> Tokenizer:
    """Loads the model, and unloads it."""
    engine = loader()
    tokenizer = engine.llm.tokenizer
    asyncio.run(engine.close(0))
    assert tokenizer is not None
    return tokenizer
