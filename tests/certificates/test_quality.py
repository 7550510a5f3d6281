"""From a quality bench to a certificate: which strategies are tested, and what a diffusion model is compared with."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from parlay import LLM, SamplingParams
from parlay.calibration import calibrate
from parlay.certificates.certificate import Binding, write
from parlay.certificates.quality import Kept, Quality, read
from parlay.certificates.requirement import Floor
from parlay.cli import main
from parlay.strategies.spelling import parse
from parlay.testing.diffusion import save_diffusion
from parlay.types import ParlayError
from tests.certificates.conftest import damaged

ONE, SAFE, TWO = "denoise:selector=confidence", "denoise:threshold=1.0", "denoise:selector=margin,k=2"
BINDING = Binding(model="m", weights="a" * 64, settings="", dtype="float32", draft_model="")
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = [[5, 9, 11], [4, 7, 20], [31, 8, 2, 6], [12, 40]]
FOUR = Floor(floor=0.4)
"""Four good answers of four show this much."""


def kept(task: str, strategy: str, speed: float) -> Kept:
    return Kept(task=task, strategy=strategy, tokens_per_forward=speed, right=9, problems=10)


FOUND = Quality(
    BINDING,
    (
        kept("copy", SAFE, 1.5),
        kept("sort", SAFE, 1.1),
        kept("copy", "denoise:threshold=0.5", 6.0),  # on one task alone
        kept("copy", "denoise:selector=margin", 1.0),
        kept("sort", "denoise:selector=margin", 1.0),
        kept("copy", TWO, 2.0),
        kept("sort", TWO, 2.0),
    ),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny") / "llada"
    save_diffusion("llada", directory)
    return directory


@pytest.fixture(scope="module")
def filling(folder: Path) -> Iterator[LLM]:
    """A model whose rows all see each other, so that nothing is decoded exactly."""
    with LLM(str(folder), dtype="float32") as model:
        yield model


def test_candidates_kept_their_quality_on_every_task_and_the_safest_comes_first(tmp_path: Path) -> None:
    write(FOUND, tmp_path / "quality.json")
    assert read(tmp_path / "quality.json") == FOUND
    assert FOUND.candidates() == [SAFE, TWO]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: data.update(kept=3), "not a list"),
        (lambda data: data["kept"][0].pop("task"), "is damaged"),
        (lambda data: data["kept"][0].update(tokens_per_forward=-1.0), "is damaged"),
        (lambda data: data.update(more=1), "is damaged"),
        (lambda data: data.update(parlay_certificate=9), "version 9"),
    ],
)
def test_a_damaged_file_is_one_line(tmp_path: Path, change: object, said: str) -> None:
    path = tmp_path / "quality.json"
    write(FOUND, path)
    with pytest.raises(ParlayError, match=said) as error:
        read(damaged(path, change))  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


def test_other_weights_are_refused(tmp_path: Path) -> None:
    FOUND.check(BINDING, tmp_path)
    with pytest.raises(ParlayError, match="run parlay bench --quality for this model"):
        FOUND.check(replace(BINDING, weights="b" * 64), tmp_path)


def test_a_diffusion_model_is_compared_with_one_place_per_forward(filling: LLM) -> None:
    """So careful a strategy is certified, and one that writes another text is not."""
    prompts = [tuple(ids) for ids in PROMPTS]
    result = calibrate(filling, prompts, [parse(SAFE), parse(TWO)], FOUR, GREEDY, progress=False)
    assert [(one.good, one.certified) for one in result.shown] == [(4, True), (result.shown[1].good, False)]
    assert result.certificate is not None
    assert [one.strategy for one in result.certificate.strategies] == [SAFE]


def test_a_certificate_opens_a_diffusion_model_and_audits_agree(folder: Path, filling: LLM, tmp_path: Path) -> None:
    """Without one a floor means one place per forward."""
    prompts = [tuple(ids) for ids in PROMPTS]
    certificate = calibrate(filling, prompts, [parse(SAFE)], FOUR, GREEDY, progress=False).certificate
    assert certificate is not None
    careful = filling.generate(PROMPTS[0], GREEDY, exactness="lossy:floor=0.4")[0].outputs[0]
    assert careful.strategy == ONE
    assert careful.metrics.tokens_per_step == 1
    path = tmp_path / "certificate.json"
    write(certificate, path)
    with LLM(str(folder), dtype="float32", certificates=[path], audit_share=1) as llm:
        found = llm.generate(PROMPTS[0], GREEDY, exactness="lossy:floor=0.4", strategy=SAFE)[0].outputs[0]
        assert (found.strategy, found.token_ids) == (SAFE, careful.token_ids)
        assert llm.generate(PROMPTS[0], GREEDY, exactness="lossy:floor=0.4", strategy=ONE)[0].outputs[0].strategy == ONE
        with pytest.raises(ValueError, match="needs a certificate"):
            llm.generate(PROMPTS[0], GREEDY, exactness="lossy:floor=0.4", strategy=TWO)
    kept_file = json.loads(path.read_text())["strategies"][0]
    assert (kept_file["audited"], kept_file["bad"]) == (1, 0)


def test_the_command_tests_what_the_bench_kept(
    folder: Path, filling: LLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, found, out = (tmp_path / name for name in ("prompts.txt", "quality.json", "certificate.json"))
    assert filling.tokenizer is not None
    prompts.write_text("\n".join(filling.tokenizer.decode(ids) for ids in PROMPTS))
    words = ["calibrate", str(prompts), "--quality", str(found), "--model", str(folder), "--dtype", "float32"]
    words += ["--floor", "0.4", "--max-tokens", "8", "--temperature", "0", "-o", str(out)]
    write(replace(FOUND, binding=filling.gate.binding(), kept=(kept("copy", SAFE, 1.0), kept("copy", ONE, 1.0))), found)
    assert main(words) == 0, capsys.readouterr().err
    assert f"{SAFE}: certified; 4 of 4" in capsys.readouterr().out
    write(replace(FOUND, kept=()), found)
    assert main(words) == 2
    assert "no strategy in" in capsys.readouterr().err
    write(FOUND, found)
    assert main(words) == 1
    assert "run parlay bench --quality for this model" in capsys.readouterr().err
    assert main([*words, "--strategy", SAFE]) == 2
    assert "--quality with a file" in capsys.readouterr().err
