"""What is uploaded: its metadata, its page on an index, the image, and what builds them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import parlay

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def test_one_version_everywhere() -> None:
    assert PROJECT["project"]["version"] == parlay.__version__
    assert f"version: {parlay.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def test_the_page_on_an_index_has_no_link_that_only_works_in_the_repository() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    links = len(re.findall(r"\]\(", text))
    for each in PROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        text = re.sub(each["pattern"], each["replacement"], text)
    found = re.findall(r"\]\(([^)\s]+)", text)
    assert len(found) == links
    assert not [link for link in found if not link.startswith("https://")]
    assert "https://raw.githubusercontent.com/parlay-decoding/parlay/main/docs/pictures/race.svg" in found


def test_every_address_is_in_the_one_repository() -> None:
    home = PROJECT["project"]["urls"]["Source"]
    assert f"repo_url: {home}\n" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert {"Documentation", "Issues", "Changelog"} <= set(PROJECT["project"]["urls"])


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_run_what_the_repository_has(path: Path) -> None:
    jobs = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for command in commands:
        if command.startswith("make "):
            assert command.split()[1] in targets
        if command.startswith("."):
            assert (ROOT / command).is_file()


def test_the_workflows_check_and_build() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in WORKFLOWS)
    assert ".ci/run" in text
    assert "make release" in text
    assert "pypa/cibuildwheel" in text


def test_the_image_runs_as_nobody_in_particular_and_asks_a_page_that_exists() -> None:
    last = (ROOT / "Dockerfile").read_text(encoding="utf-8").rpartition("\nFROM ")[2]
    assert re.search(r"^USER parlay$", last, re.MULTILINE)
    asked = re.search(r"HEALTHCHECK.*?127\.0\.0\.1:8000(/\w+)", last, re.DOTALL)
    assert asked is not None
    routes = (ROOT / "src" / "parlay" / "serve" / "routes" / "health.py").read_text(encoding="utf-8")
    assert f'routes.get("{asked[1]}"' in routes
    copied = re.findall(r"^COPY (?!--)(.+) \S+$", (ROOT / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)
    assert all((ROOT / name).exists() for line in copied for name in line.split())
