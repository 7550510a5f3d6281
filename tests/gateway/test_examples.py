"""The front ends of the examples name commands and flags that exist, and the guide names the examples."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from parlay.cli import parser_of
from parlay.cli.commands import COMMANDS

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "replicas"
GUIDE = (ROOT / "docs" / "how-to" / "replicas.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    return dict(yaml.safe_load((FOLDER / "compose.yaml").read_text(encoding="utf-8")))


def test_the_commands_of_the_compose_file_are_the_programs(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        command, *words = service["command"]
        assert command in COMMANDS, name
        parser_of(command).parse(words)  # exits for what it does not take


def test_the_compose_file_hangs_together(compose: dict[str, Any]) -> None:
    services = compose["services"]
    words = services["gateway"]["command"]
    replicas = [words[place + 1] for place, word in enumerate(words) if word == "--replica"]
    assert {f"http://{name}:8000" for name in services if name != "gateway"} == set(replicas)
    assert set(services["gateway"]["depends_on"]) == set(services) - {"gateway"}
    for service in services.values():
        assert set(service.get("secrets", ())) <= set(compose["secrets"])
        assert {volume.partition(":")[0] for volume in service.get("volumes", ())} <= set(compose["volumes"])
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    assert all(argument in dockerfile for argument in compose["x-replica"]["build"]["args"])


def test_nginx_passes_streams_on_and_sends_requests_again() -> None:
    text = (FOLDER / "nginx.conf").read_text(encoding="utf-8")
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    statements = [line for line in lines if line]
    assert all(line[-1] in "{};" for line in statements)
    assert text.count("{") == text.count("}")
    settings = {words[0]: words[1:] for line in statements if (words := shlex.split(line.rstrip(";{")))}
    assert settings["proxy_buffering"] == ["off"]
    assert "non_idempotent" in settings["proxy_next_upstream"]
    assert settings["client_max_body_size"] == ["4m"]


def test_the_guide_names_what_there_is() -> None:
    for name in re.findall(r"`(examples/[\w./-]+)`", GUIDE):
        assert (ROOT / name).is_file(), name
    for line in re.findall(r"^parlay (.+)$", GUIDE, re.MULTILINE):
        command, *words = shlex.split(line)
        parser_of(command).parse(words)
