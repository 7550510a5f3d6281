"""Lossy strategies run where a request allows it, under a floor by a certificate, which audits can take back."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from parlay import LLM, ParlayError, SamplingParams
from parlay.aio import AsyncLLM
from parlay.certificates.gate import CertificateFile
from parlay.certificates.ways import FEW
from parlay.llm.request_options import RequestOptions
from parlay.models.fetch.resolving import resolve
from parlay.options import LoadOptions
from parlay.strategies.entry import DEFAULT_STRATEGY
from parlay.strategies.spelling import parse
from parlay.testing.diffusion import save_diffusion
from parlay.types import Exactness, Metrics
from tests.certificates.conftest import GREEDY, PROMPTS, Certify, damaged
from tests.certificates.wrong import EXACT, WRONG

FLOOR = "lossy:floor=0.9"


def text(llm: LLM, **asked: object) -> tuple[tuple[int, ...], str]:
    (output,) = llm.generate(PROMPTS[0], GREEDY, **asked)[0].outputs  # type: ignore[arg-type]
    return output.token_ids, output.strategy


@pytest.mark.parametrize("level", ["bits", "seed", "distribution"])
def test_a_lossy_strategy_that_is_named_where_lossy_is_forbidden_is_an_error(llm: LLM, level: str) -> None:
    with pytest.raises(ValueError, match=f"exactness {level} forbids strategy .* lossy") as error:
        llm.generate(PROMPTS[0], GREEDY, strategy=WRONG, exactness=level)
    assert "\n" not in str(error.value)


def test_a_strategy_that_keeps_the_distribution_is_no_answer_to_bits(llm: LLM) -> None:
    drawn = "draft-model:rule=rejection"
    with pytest.raises(ValueError, match="exactness bits forbids"):
        llm.generate(PROMPTS[0], GREEDY, strategy=drawn, exactness="bits")
    assert text(llm, strategy=drawn, exactness="distribution")[1] == drawn


def test_without_a_word_of_it_named_strategies_run_as_they_are(llm: LLM) -> None:
    assert text(llm, strategy=WRONG)[1] == WRONG
    assert text(llm, strategy=WRONG, exactness="lossy")[1] == WRONG


def test_a_model_with_a_lossy_default_gives_its_exact_form_to_those_who_want_it() -> None:
    with LLM("parlay-mini", strategy=WRONG) as llm:
        plain, _ = text(llm, strategy="none")
        assert text(llm)[0] != plain
        assert text(llm, exactness="seed") == (plain, EXACT)
        assert text(llm, exactness=FLOOR) == (plain, EXACT)


def test_a_floor_without_a_certificate_decodes_exactly_and_refuses_what_is_named(llm: LLM) -> None:
    assert text(llm, exactness=FLOOR) == text(llm)
    with pytest.raises(ValueError, match=r"exactness lossy:floor=0\.9.* needs a certificate"):
        text(llm, strategy=WRONG, exactness=FLOOR)


def test_a_certificate_opens_its_strategy_to_its_floor_and_to_no_other_request(certify: Certify) -> None:
    with LLM("parlay-mini", certificates=[certify(WRONG)], audit_share=0) as llm:
        usual = text(llm)[1]
        assert text(llm, exactness=FLOOR)[1] == WRONG
        assert text(llm, exactness="lossy:floor=0.5")[1] == WRONG
        assert text(llm, exactness=FLOOR, strategy=WRONG)[1] == WRONG
        assert text(llm, exactness=FLOOR, strategy="none")[1] == "none"
        for other in (None, "bits", "lossy", "lossy:floor=0.91", "lossy:floor=0.9,confidence=0.99"):
            assert text(llm, exactness=other)[1] == usual
        with pytest.raises(ValueError, match=r"floor=0\.95.* is stricter than the certificate"):
            text(llm, exactness="lossy:floor=0.95", strategy=WRONG)


def test_a_model_of_both_modes_fills_canvases_only_for_requests_with_a_floor(certify: Certify, tmp_path: Path) -> None:
    denoise = "denoise:k=4,selector=confidence"
    save_diffusion("nemotron", tmp_path / "both")
    with LLM(str(tmp_path / "both")) as llm:
        path = certify(denoise, binding=llm.gate.binding())
    with LLM(str(tmp_path / "both"), certificates=[path], audit_share=0) as llm:
        chosen = {
            level: llm.generate([[5, 9, 11]], GREEDY, exactness=level)[0].outputs[0].strategy
            for level in (FLOOR, None, "bits", "lossy:floor=0.95")
        }
    assert chosen == {FLOOR: denoise, None: "auto", "bits": "auto", "lossy:floor=0.95": "auto"}


def test_a_floor_takes_the_exact_way_while_that_is_cheaper(certify: Certify, tmp_path: Path) -> None:
    """Answers that are over tell what each way takes for such requests; calibration's speed counts before."""
    denoise = "denoise:k=4,selector=confidence"
    save_diffusion("nemotron", tmp_path / "both")
    with LLM(str(tmp_path / "both")) as llm:
        path = certify(denoise, binding=llm.gate.binding())
    with LLM(str(tmp_path / "both"), certificates=[path], audit_share=0) as llm:

        def chosen() -> str:
            return llm.generate([[5, 9, 11]], GREEDY, exactness=FLOOR)[0].outputs[0].strategy

        (exact,) = llm.generate([[5, 9, 11]], GREEDY, exactness="bits")[0].outputs
        assert exact.metrics.router is not None
        assert chosen() == denoise
        for strategy, steps in ((exact.strategy, 2), (denoise, 200)):
            took = Metrics(strategy, Exactness.BITS, completion_tokens=16, steps=steps, rows=steps)
            for _ in range(FEW):
                llm.gate.ways.learn(exact.metrics.router.kind, took)
        assert chosen() == exact.strategy


@pytest.mark.parametrize(
    "params",
    [
        replace(GREEDY, temperature=1.0),
        replace(GREEDY, max_tokens=17),
        replace(GREEDY, repetition_penalty=1.1),
        replace(GREEDY, logit_bias={5: 1.0}),
        replace(GREEDY, bad_words=["king"]),
        replace(GREEDY, min_tokens=2),
    ],
)
def test_a_request_that_samples_otherwise_is_not_covered(certify: Certify, params: SamplingParams) -> None:
    with LLM("parlay-mini", certificates=[certify(WRONG)], audit_share=0) as llm:
        (output,) = llm.generate(PROMPTS[0], params, exactness=FLOOR)[0].outputs
        assert output.exactness is Exactness.BITS
        with pytest.raises(ValueError, match=r"the certificate of .* covers only requests"):
            llm.generate(PROMPTS[0], params, exactness=FLOOR, strategy=WRONG)


def test_a_router_that_is_named_may_take_what_is_certified(certify: Certify) -> None:
    with LLM("parlay-mini", certificates=[certify(WRONG)], audit_share=0) as llm:
        assert text(llm, strategy="auto:of=prompt-lookup", exactness=FLOOR)[1] == WRONG
        assert text(llm, strategy="auto:of=prompt-lookup")[1].startswith("auto")


def test_audits_revoke_a_certificate_that_is_wrong_and_the_file_remembers_it(certify: Certify) -> None:
    path = certify(WRONG)
    with LLM("parlay-mini", certificates=[path], audit_share=1) as llm:
        plain = llm.generate(PROMPTS, GREEDY, strategy="none")
        assert llm.generate(PROMPTS, GREEDY, exactness=FLOOR)[0].outputs[0].strategy == WRONG
        after = llm.generate(PROMPTS, GREEDY, exactness=FLOOR)
        assert [one.outputs[0].token_ids for one in after] == [one.outputs[0].token_ids for one in plain]
    kept = json.loads(path.read_text())["strategies"][0]
    assert (kept["audited"], kept["bad"], kept["revoked"]) == (4, 4, True)
    with LLM("parlay-mini", certificates=[path]) as llm, pytest.raises(ValueError, match="revoked"):
        text(llm, strategy=WRONG, exactness=FLOOR)


def test_processes_that_share_a_file_count_and_revoke_together(certify: Certify) -> None:
    path, spec = certify(WRONG), parse(WRONG)
    replicas = [CertificateFile(path, share=1) for _ in range(3)]
    for held in (*replicas[:2], *replicas[:2]):
        held.audit(spec, (1,), (2,))
    kept = json.loads(path.read_text())["strategies"][0]
    assert (kept["audited"], kept["bad"], kept["revoked"]) == (4, 4, True)
    replicas[1].audit(spec, (1,), (1,))
    facts = [held.find(spec) for held in replicas]
    assert [(one.audited, one.revoked) for one in facts if one is not None] == [(5, True)] * 3


def test_audits_leave_the_certificate_of_a_later_calibration_as_it_is(
    certify: Certify, caplog: pytest.LogCaptureFixture
) -> None:
    path, spec = certify(WRONG), parse(WRONG)
    held = CertificateFile(path, share=1)
    certify(WRONG, answers=200, good=199).replace(path)
    later = path.read_text()
    held.audit(spec, (1,), (2,))
    assert path.read_text() == later
    assert "now holds another certificate" in caplog.text
    assert held.certificate.claim.answers == 100


def test_audits_leave_a_certificate_that_is_right(certify: Certify) -> None:
    right = "prompt-lookup:rule=typical"  # greedy requests: exact match
    path = certify(right)
    with LLM("parlay-mini", certificates=[path], audit_share=1) as llm:
        assert llm.generate(PROMPTS, GREEDY, exactness=FLOOR)[0].outputs[0].strategy == right
        list(llm.stream(PROMPTS[0], GREEDY, exactness=FLOOR))
    kept = json.loads(path.read_text())["strategies"][0]
    assert (kept["audited"], kept["bad"], kept["revoked"]) == (5, 0, False)


def test_a_service_audits_beside_its_requests(certify: Certify) -> None:
    path = certify(WRONG)

    async def ask() -> str:
        async with AsyncLLM(LLM("parlay-mini", certificates=[path], audit_share=1)) as service:
            for _ in range(40):
                asked = RequestOptions(exactness=FLOOR)
                output = await service.generate(PROMPTS[0], GREEDY, asked)
                await asyncio.sleep(0)
                if output.outputs[0].exactness is Exactness.BITS:
                    return output.outputs[0].strategy
        return "never revoked"

    assert asyncio.run(ask()) == DEFAULT_STRATEGY
    assert json.loads(path.read_text())["strategies"][0]["revoked"]


def test_a_certificate_of_another_model_is_refused(certify: Certify) -> None:
    def other(data: dict[str, object]) -> None:
        data["binding"]["weights"] = "0" * 64  # type: ignore[index]

    with pytest.raises(ParlayError, match="certifies weights 000000000000, and parlay-mini has"):
        LLM("parlay-mini", certificates=[damaged(certify(WRONG), other)])
    usual = LLM("parlay-mini").runner.spec.dtype
    with pytest.raises(ParlayError, match="data type"):
        LLM("parlay-mini", certificates=[certify(WRONG)], dtype="bfloat16" if usual == "float32" else "float32")
    with pytest.raises(ParlayError, match="draft model"):
        LLM("parlay-mini", certificates=[certify(WRONG)], draft_model="parlay-mini")
    for load, said in (
        (LoadOptions(quantize="int8"), "data type"),
        (LoadOptions(kv_cache_dtype="q8_0"), "data type"),
        (LoadOptions(draft_quantize="int8"), "draft model"),
        (LoadOptions(end_tokens="5"), "end tokens"),
    ):
        with pytest.raises(ParlayError, match=said):
            LLM("parlay-mini", certificates=[certify(WRONG)], load=load)


def test_a_certificate_of_another_template_or_config_is_refused(certify: Certify, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(resolve("parlay-mini"), folder)
    with LLM(str(folder)) as llm:
        path = certify(WRONG, binding=llm.gate.binding())
        tokenizer = llm.get_tokenizer()
    with LLM(str(folder), certificates=[path]) as llm:
        assert llm.gate.certifies
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    with pytest.raises(ParlayError, match="config, tokenizer, template and end tokens"):
        LLM(str(folder), tokenizer=tokenizer, certificates=[path])
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    with pytest.raises(ParlayError, match="config, tokenizer, template and end tokens"):
        LLM(str(folder), certificates=[path])


def test_two_certificates_for_the_same_requests_are_refused(certify: Certify) -> None:
    with pytest.raises(ParlayError, match="covers the same sampling"):
        LLM("parlay-mini", certificates=[certify(WRONG), certify("prompt-lookup:rule=typical")])


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[]", "is not a certificate"),
        (b"{}", "is not a certificate"),
        (b'{"parlay_certificate": 1}', "version 1"),
        (b'{"parlay_certificate": 2}', "is damaged"),
        (b" " * (1 << 21), "larger than"),
    ],
)
def test_a_file_that_is_no_certificate_is_refused_in_one_line(tmp_path: Path, content: bytes, told: str) -> None:
    path = tmp_path / "certificate.json"
    path.write_bytes(content)
    with pytest.raises(ParlayError, match=told) as error:
        LLM("parlay-mini", certificates=[path])
    assert "\n" not in str(error.value)


def test_a_certificate_whose_counts_do_not_show_its_floor_is_refused(certify: Certify) -> None:
    for path in (certify(WRONG, good=90), certify(WRONG, good=101), certify("prompt-lookup")):
        with pytest.raises(ParlayError, match="is damaged"):
            LLM("parlay-mini", certificates=[path])
    for part in ("claim", "sampling", "binding", "strategies"):
        with pytest.raises(ParlayError, match="is damaged"):
            LLM("parlay-mini", certificates=[damaged(certify(WRONG), lambda data, part=part: data.pop(part))])  # type: ignore[misc]
    with pytest.raises(ParlayError, match="can't read the certificate"):
        LLM("parlay-mini", certificates=["nowhere.json"])


def test_the_file_may_be_where_nobody_can_write(certify: Certify, caplog: pytest.LogCaptureFixture) -> None:
    path = certify(WRONG)
    with LLM("parlay-mini", certificates=[path], audit_share=1) as llm:
        path.unlink()
        path.parent.joinpath(path.name).mkdir()  # a folder stands where the file was
        llm.generate(PROMPTS, GREEDY, exactness=FLOOR)
        assert "can't be saved" in caplog.text
        assert llm.generate(PROMPTS[0], GREEDY, exactness=FLOOR)[0].outputs[0].exactness is Exactness.BITS
