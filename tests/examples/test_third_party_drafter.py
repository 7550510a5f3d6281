"""A drafter from another package is installed, found by its entry point or its path, and passes the conformance kit."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from parlay.options import UsageError
from parlay.strategies.spelling import parse
from parlay.testing.conformance import CHECKS, check_strategy, default_stages, subject_of, toy_stage
from parlay.testing.conformance.stage import StageRequest, decode
from parlay.types import SamplingParams

PACKAGE = Path(__file__).parents[2] / "examples" / "third_party_drafter"
BY_ENTRY_POINT = "follower"
BY_PATH = "parlay_follower:Follower"


@pytest.fixture(scope="module", autouse=True)
def _installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The package, installed as any other, offline, into a folder of its own."""
    target = tmp_path_factory.mktemp("site")
    source = shutil.copytree(PACKAGE, tmp_path_factory.mktemp("source") / PACKAGE.name)
    options = ["--quiet", "--disable-pip-version-check", "--no-index", "--no-deps", "--no-build-isolation"]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(target), str(source)]
    subprocess.run(command, check=True)
    sys.path.insert(0, str(target))
    yield
    sys.path.remove(str(target))
    sys.modules.pop("parlay_follower", None)


def test_its_options_are_the_parameters_of_the_strategy() -> None:
    spec = parse(f"{BY_ENTRY_POINT}:least=1,k=4")
    assert dict(spec.parameters) == {"least": 1, "k": 4}
    with pytest.raises(UsageError, match="least must be a whole number, got x"):
        parse(f"{BY_PATH}:least=x")


def test_it_passes_the_kit_by_its_entry_point() -> None:
    """All checks on a toy, as entries of the catalogue do, and a mixed batch on a decoder."""
    for stage, checks in (("toy", [*CHECKS]), ("native bfloat16", ["mixed"])):
        report = check_strategy(f"{BY_ENTRY_POINT}:least=1", stages=[default_stages()[stage]], checks=checks)
        assert report.passed, str(report)
        assert len(report.findings) == max(1, len(checks) - 1)


def test_a_file_in_the_current_folder_is_found_by_the_command(tmp_path: Path) -> None:
    """An installed command does not look there by itself, as a module run by Python does."""
    shutil.copy(PACKAGE / "src" / "parlay_follower" / "__init__.py", tmp_path / "my_follower.py")
    code = "import sys; sys.path.remove(''); from parlay.cli import main; sys.exit(main())"
    words = ["strategies", "my_follower:Follower"]
    done = subprocess.run(
        [sys.executable, "-c", code, *words], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "least" in done.stdout


def test_it_passes_the_kit_by_its_path() -> None:
    report = check_strategy(BY_PATH, stages=[default_stages()["toy"]])
    assert report.passed, str(report)


def test_it_drafts_what_is_accepted() -> None:
    """On a target that repeats itself, its guesses shorten the run: it is not just harmless."""
    stage = toy_stage("toy", vocab_size=6)
    ask = StageRequest((1, 2, 3), SamplingParams(temperature=0.0, max_tokens=120))
    strategy = subject_of(f"{BY_ENTRY_POINT}:least=1").strategy(stage, 4)
    (sample,) = decode(stage.open_runner(1000), [(ask, strategy)])
    assert set(sample.metrics.accepted_by_source) == {"follower"}
    assert sample.metrics.tokens_per_step > 1.1
