"""`parlay plan`: tables and JSON of one structure, no weights needed, and one line for every mistake."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Kind

from parlay import LLM, SamplingParams
from parlay.bench.loops import first_loop
from parlay.bench.plan import machine
from parlay.bench.plan.acceptance import decoded
from parlay.bench.plan.strategies import Models
from parlay.bench.plan.streaming import measure_disk, sizes_of
from parlay.bench.workloads import Item
from parlay.cli import parser_of
from parlay.cli.plan_machine import check_flags, ground_of, models_of
from parlay.cost.calibrate import MachineCalibration
from parlay.cost.devices import machine as known_machine
from parlay.cost.fitting import TimedForward
from parlay.strategies.spelling import parse
from parlay.testing.checkpoints import save_random
from parlay.types import ParlayError
from tests.bench.plan.conftest import TINY, WORKS, config_only
from tests.cli.conftest import MINI, Cli
from tests.models import gguf_files

__all__ = ["config_only"]  # the fixture

TABLE = """\
MODEL: 0 million parameters in bfloat16 (16 bits). Modelled for device h200 by its maker's figures, taken to reach 75% \
of its bandwidth and 60% of its arithmetic, without CUDA graphs; nothing was measured.

context 64, batch 2: prefill N s, plain decoding N tokens/s
weights 0.0 GB and cache 0.0 GB fit into 141 GB of memory
  rows  milliseconds  times one row
  1     N             N
  4     N             N

  strategy       nodes  tokens a step  step ms  tokens/s  times plain  pays below batch
  none           N      N              N        N         N
  prompt-lookup  N      N              N        N         N            all tried
pick: prompt-lookup

Chance that a drafted token is right, as --acceptance says: prompt-lookup 0.70. Pays below batch: at so many sequences \
whole drafts are no faster than none; all tried: up to 256 they are.
"""


def structure(text: str, model: Path) -> str:
    """The page with every number of the tables as N, and runs of blanks as one."""
    lines = text.replace(str(model), "MODEL").splitlines()
    words = [line.split() for line in lines]
    return "\n".join(
        " ".join("N" if word[0].isdigit() and number else word for number, word in enumerate(line))
        if lines[place].startswith(("  ", "context"))
        else lines[place]
        for place, line in enumerate(words)
    )


def test_the_page_has_one_structure(cli: Cli, config_only: Path) -> None:
    result = cli(
        *("plan", "--model", str(config_only), "--device", "h200", "--rows", "1,4", "--context", "64", "--batch", "2"),
        *("--acceptance", "prompt-lookup=0.7"),
    )
    expected = structure(TABLE, config_only)
    assert result.code == 0
    assert structure(result.out, config_only) == expected


def test_a_draft_model_that_is_named_takes_memory_too(cli: Cli) -> None:
    words = ("plan", "qwen2.5-14b", "--device", "l40s", "--rows", "1", "--acceptance", "0.5", "--strategy", "none")
    alone, beside = (cli(*words, *more).out for more in ((), ("--draft-model", "qwen2.5-7b")))
    assert "weights 29.5 GB and cache 0.2 GB fit into 48 GB" in alone
    assert "weights 29.5 GB, draft model 15.3 GB and cache 0.2 GB DO NOT FIT into 48 GB" in beside
    assert "--quantize int8 would fit" in beside


def test_the_json_has_one_structure(cli: Cli, config_only: Path) -> None:
    words = ("--model", str(config_only), "--device", "L4", "--context", "0,64", "--strategy", "none")
    words = (*words, "--json", "--acceptance", "0.5")
    document = json.loads(cli("plan", *words, "--rows", "1,2").out)
    assert set(document) == {"model", "parameters", "weights", "machine", "modelled", "cases", "acceptance"}
    assert document["modelled"] is True
    assert "nothing was measured" in document["machine"]["source"]
    assert [(case["context"], case["batch"], case["pick"]) for case in document["cases"]] == [
        (0, 1, "none"),
        (64, 1, "none"),
    ]
    case = document["cases"][0]
    assert {"context", "batch", "memory", "fits", "prefill_seconds", "verifies", "offers", "pick", "kinds"} < set(case)
    assert [set(verify) for verify in case["verifies"]] == [
        {"rows", "seconds", "ratio", "flops", "bytes", "fetched"}
    ] * 2
    (offer,) = case["offers"]
    assert set(offer) == {"speed", "gain", "pays_below"}
    assert set(offer["speed"]) == {
        "name",
        "nodes",
        "tokens_per_step",
        "draft_seconds",
        "verify_seconds",
        "step_seconds",
        "tokens_per_second",
    }


def test_nothing_right_means_that_nothing_is_drafted(cli: Cli) -> None:
    """Plain decoding is among the choices, also where it is not named."""
    for words in ((), ("--strategy", "prompt-lookup:policy=fixed")):
        result = cli("plan", *MINI, "--device", "h200", "--acceptance", "0", *words)
        assert "\npick: none\n" in result.out


def test_the_default_draft_model_and_a_named_one_are_compared(cli: Cli, config_only: Path) -> None:
    assert "  draft-model  " in cli("plan", "--model", "parlay-mini", "--device", "l4").out
    assert "  draft-model  " not in cli("plan", "--device", "l4", "--model", str(config_only)).out
    words = ("--model", str(config_only), "--draft-model", str(config_only))
    assert "  draft-model  " in cli("plan", "--device", "l4", *words).out
    assert "sequoia: not measured; drafts " in cli("plan", "--device", "l4", *words, "--strategy", "sequoia").out


def test_without_any_chance_it_shows_ranges_by_kind_of_work_and_promises_open_chat_little(cli: Cli) -> None:
    """A head that nobody trained is shown, and is no pick. What copies is measured on answers of a 7 B."""
    result = cli("plan", "--model", "meta-llama/Llama-3.1-8B-Instruct", "--device", "h100", "--json")
    (case,) = json.loads(result.out)["cases"]
    speeds = {(each["kind"], each["strategy"]): each for each in case["kinds"]}
    chat = speeds["open chat", "prompt-lookup"]
    assert chat["texts"]["answers of Mistral 7B"] == 1.173
    assert 1 < chat["low"] < 1.1 < chat["high"] < 1.5
    assert speeds["edits of code", "prompt-lookup"]["low"] > 2
    assert ("maths", "eagle3") in speeds
    assert "eagle3" not in case["picks"].values()
    assert case["picks"]["open chat"] == "auto"
    named = cli("plan", "--model", "llama-3.1-8b", "--device", "h100", "--strategy", "eagle3").out
    assert re.search(r"maths +\d\.\d\d-\d\.\d\d +eagle3\n", named)
    assert "For eagle3 a head must be trained first" in named
    assert "()" not in named, "no texts were recorded for a head"


@pytest.mark.parametrize("model", ["smollm2-135m", "Qwen/Qwen2.5-Coder-1.5B-Instruct"])
def test_a_head_that_is_part_of_the_package_is_named_and_counted_with(cli: Cli, model: str) -> None:
    """A model whose shape is known by name needs no file here: its head is found by the name, too."""
    page = cli("plan", model, "--device", "h100").out
    assert f"eagle3 counts with the head {model.rpartition('/')[2].lower()}-eagle3-general" in page
    assert "must be trained" not in page
    (case,) = json.loads(cli("plan", model, "--device", "h100", "--json").out)["cases"]
    speeds = {(each["kind"], each["strategy"]): each["high"] for each in case["kinds"]}
    assert speeds["maths", "auto"] >= speeds["maths", "eagle3"]


def test_it_says_whether_weights_and_cache_fit_and_what_would(cli: Cli) -> None:
    words = ("plan", "--model", "llama-3.1-8b", "--device", "t4")
    assert "weights 16.1 GB and cache 0.1 GB DO NOT FIT into 16 GB" in cli(*words).out
    assert "--quantize int8 would fit" in cli(*words).out
    assert "weights 4.9 GB and cache 0.1 GB fit into 16 GB" in cli(*words, "--quantize", "Q4_K_M").out
    assert "take a smaller model, context or batch" in cli(*words, "--context", "130000", "--batch", "64").out


def test_a_machine_is_calibrated_once_and_then_remembered(
    cli: Cli, config_only: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(machine, "measure_links", dict)  # starts a process; the tests of calibrations have it
    monkeypatch.setattr(machine, "calibrate_here", partial(machine.calibrate_here, shapes=(TINY,), works=WORKS))
    words = ("plan", "--model", str(config_only), "--dtype", "float32")
    first = cli(*words)
    assert "not calibrated for float32 yet: measuring it" in first.err
    path = tmp_path / "parlay" / "calibration-float32.json"
    assert f"calibration kept in {path}" in first.err
    again = cli(*words)
    assert (again.code, again.err) == (0, "")
    assert again.out == first.out
    assert "calibrated 20" in again.out
    assert " fit into " in again.out
    elsewhere = tmp_path / "new" / "mine.json"
    assert f"calibration kept in {elsewhere}" in cli(*words, "--calibration", str(elsewhere)).err
    assert cli("plan", "--model", str(config_only), "--calibration", str(elsewhere)).err == ""
    wrong = cli("plan", *MINI, "--calibration", str(path), "--dtype", "bfloat16")
    assert wrong.code == 2
    assert "measured for float32 weights, not bfloat16" in wrong.err
    assert cli(*words, "--quantize", "int8", "--calibrate").code == 0
    assert "in int8 (8 bits). Modelled" in cli(*words, "--quantize", "int8").out
    assert "in float32 (32 bits). Modelled" in cli("plan", "--model", str(config_only), "--calibration", str(path)).out


@pytest.mark.parametrize("own", [True, False], ids=["kept calibration", "named file"])
def test_memory_that_is_slower_now_slows_this_machine(
    cli: Cli, config_only: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: bool
) -> None:
    """A file that the user names may be another machine's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(machine, "memory_reader", lambda device: lambda: 2e10)
    path = machine.calibration_path("float32")
    known = replace(known_machine("l4", "float32"), read_bandwidth=4e10)
    origin = dict.fromkeys(("device", "processor", "date"), "x") | {"weights": "float32", "threads": 2}
    sample = TimedForward(TINY, WORKS[0], 1.0)
    MachineCalibration(known, origin | {"weight_bytes": 4, "kv_bytes": 4}, (sample,)).save(path)
    words = ("plan", "--model", str(config_only), "--dtype", "float32", "--json")
    told = json.loads(cli(*words, *(() if own else ("--calibration", str(path)))).out)["machine"]
    assert told["bandwidth"] == known.bandwidth * (0.5 if own else 1)
    assert told["attention_bandwidth"] == known.attention_bandwidth
    assert ("memory now at 0.50 of its speed then" in told["source"]) == own


def test_prompts_measure_how_often_drafts_are_right(cli: Cli, tmp_path: Path) -> None:
    words = ("plan", "--model", "parlay-mini", "--device", "l4", "--strategy", "prompt-lookup:k=4")
    assert "as --acceptance says: all 0.50" in cli(*words, "--acceptance", "0.5").out
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Say: one two three, one two three, one two"}\n{"prompt": "Tell me a story."}\n')
    result = cli(*words, "--prompts", str(prompts))
    assert "measuring acceptance on 2 prompts" in result.err
    (rate,) = re.findall(rf"measured on {re.escape(str(prompts))}: prompt-lookup:k=4 (\d\.\d\d)", result.out)
    assert 0 <= float(rate) < 0.7
    assert f"can't read {tmp_path / 'none'}" in cli(*words, "--prompts", str(tmp_path / "none")).err


def test_another_model_stands_in_where_there_is_only_a_config(
    cli: Cli, config_only: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("parlay.cli.plan.default_model", lambda: "parlay-mini")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # where nothing was pulled
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Say: one two three, one two three, one two\n")
    words = ("plan", "--model", str(config_only), "--device", "l4", "--prompts", str(prompts))
    found = cli(*words)
    assert f"{config_only} has no weights here: parlay-mini stands in for it." in found.out
    assert "prompt-lookup 0." in found.out
    refused = cli(*words, "--strategy", "draft-model", "--draft-model", "parlay-mini-draft")
    assert refused.code == 2
    assert "which are not on this machine: use --acceptance instead" in refused.err


def test_copies_from_an_answer_that_repeats_itself_do_not_count() -> None:
    prompt = "It was late in the autumn when"
    with LLM("parlay-mini", dtype="float32") as llm:
        assert llm.tokenizer is not None
        llm.tokenizer.chat_template = None  # text to go on with, which soon repeats itself
        ((rate,),) = decoded([parse("prompt-lookup")], [Item(id="0", prompt=prompt)], llm).values()
        (output,) = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=128), strategy="prompt-lookup")
    assert first_loop(output.outputs[0].token_ids) < 64
    assert rate < 0.3


TRAFFIC = """\
{"prompt": "Repeat: one two three four five six seven", "answer": "one two three four five six seven"}
{"prompt": "Say it again: red green blue red green blue", "answer": "red green blue red green blue red green blue"}
"""


def test_recorded_traffic_is_replayed_where_the_drafter_permits(cli: Cli, tmp_path: Path) -> None:
    """A replay runs no model, so the answers count as they were recorded; what asks the target decodes the prompts."""
    traffic = tmp_path / "traffic.jsonl"
    traffic.write_text(TRAFFIC)
    words = (
        "plan",
        "--model",
        "parlay-mini",
        "--device",
        "l4",
        "--prompts",
        str(traffic),
        "--strategy",
        "prompt-lookup:k=4",
    )
    result = cli(*words)
    assert (result.code, result.err) == (0, "replaying 2 recorded answers\n")
    (rate,) = re.findall(
        rf"measured on {re.escape(str(traffic))}: prompt-lookup:k=4 (\d\.\d\d)\. Recorded .*: 2\. ", result.out
    )
    assert float(rate) > 0.3, "these answers repeat their prompts"
    both = cli(*words, "--strategy", "draft-model", "--json")
    known = json.loads(both.out)["acceptance"]
    assert known["note"].endswith("parlay-mini decoded 2 prompts with draft-model.")
    assert set(known["by_strategy"]) == {"prompt-lookup:k=4", "draft-model"}


def test_traffic_that_cannot_be_used_is_one_line(cli: Cli, tmp_path: Path) -> None:
    traffic = tmp_path / "traffic.jsonl"
    for content, named in {
        "": "holds no prompts",
        '{"prompt": "Hi", "answer": "Ho"}\n{"prompt": "Hi"}\n': "line 2: not a recorded answer",
        '{"question": "Hi"}\n': "line 1: no known shape",
        "Hello\n": "line 1: not JSON",
    }.items():
        traffic.write_text(content)
        result = cli("plan", "--model", "parlay-mini", "--device", "l4", "--prompts", str(traffic))
        assert (result.code, result.out) == (2, "")
        assert named in result.err
        assert result.err.count("\n") == 1


MISTAKES = {
    "unknown device": (["--device", "h300"], "name one of b200"),
    "two machines": (["--device", "h200", "--calibrate"], "--device can't be used with --calibrate"),
    "weights of no type": (["--device", "h200", "--quantize", "q4_q"], "are not known: use one of"),
    "weights that do not run here": (["--quantize", "q2_k"], "can't run here"),
    "rows that are no numbers": (["--device", "h200", "--rows", "1,many"], "joined by commas, got 1,many"),
    "no rows": (["--device", "h200", "--rows", "0"], "between 1 and 1048576, joined by commas, got 0"),
    "more than the model holds": (
        ["--device", "h200", "--context", "64,5000"],
        "--context must be at most 4096, the context of parlay-mini, got 5000",
    ),
    "empty batch": (["--device", "h200", "--batch", ""], "--batch"),
    "a calibration below a file": (
        ["--calibration", f"{__file__}/c"],
        f"can't write {__file__}/c: {__file__} is not a",
    ),
    "acceptance": (["--device", "h200", "--acceptance", "2"], "--acceptance 2"),
    "unknown strategy": (["--calibrate", "--strategy", "prompt-lokup"], "did you mean prompt-lookup"),
    "dtype": (["--device", "h200", "--dtype", "int3"], "int3"),
    "threads": (["--threads", "0"], "threads"),
    "more threads than processors": (["--threads", "100000"], "--threads 100000: this process may use"),
}


def test_the_model_is_named_as_in_other_commands(cli: Cli, config_only: Path) -> None:
    words = ("--device", "h200", "--rows", "1", "--json")
    (by_place, by_flag) = (cli("plan", *named, *words) for named in ([str(config_only)], ["--model", str(config_only)]))
    assert by_place.out == by_flag.out
    assert by_place.code == 0
    both = cli("plan", "one-model", "--model", "another", *words)
    assert (both.code, "the model is given twice, as one-model and as --model another" in both.err) == (2, True)


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_one_line_and_exit_code_2(cli: Cli, case: str) -> None:
    words, named = MISTAKES[case]
    result = cli("plan", *MINI, *words)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("parlay: error: ")
    assert result.err.count("\n") == 1
    assert named in result.err


def test_models_known_by_name_hold_what_their_makers_say(cli: Cli) -> None:
    words = ("--device", "h100", "--rows", "1", "--strategy", "none")
    assert (
        "must be at most 4096, the context of llama-2-7b" in cli("plan", "llama-2-7b", *words, "--context", "5000").err
    )
    assert "context 5,000" in cli("plan", "Qwen/Qwen3-8B", *words, "--context", "5000").out
    assert "context 1,024" in cli("plan", "llama-2-7b", *words).out


def planned(*words: str) -> Models:
    options = parser_of("plan").parse([*words, "--device", "h100"])
    check_flags(options)
    return models_of(options, ground_of(options))


def test_a_draft_model_has_its_own_bits(tmp_path: Path) -> None:
    """It is not quantised with its target, and a GGUF file's weights stay as they are."""
    save_random("llama-tied", tmp_path)
    file = gguf_files.write(tmp_path / "draft.gguf", tmp_path, kind=Kind.Q8_0)
    plain = planned("qwen2.5-7b", "--quantize", "q4_k_m", "--draft-model", "qwen2.5-0.5b").draft
    stored = planned("qwen2.5-7b", "--draft-model", str(file)).draft
    assert plain is not None
    assert stored is not None
    assert plain.weight_bytes == 2
    assert 1 < stored.weight_bytes < 1.3


def test_an_embedding_that_a_file_stores_twice_is_one_matrix_and_takes_twice_the_memory(tmp_path: Path) -> None:
    matrix = save_random("llama-tied", tmp_path).get_input_embeddings().weight.detach().numpy()
    once = gguf_files.write(tmp_path / "once.gguf", tmp_path, kind=Kind.Q8_0)
    more = {"output.weight": (matrix, Kind.Q8_0)}
    twice = gguf_files.write(tmp_path / "twice.gguf", tmp_path, kind=Kind.Q8_0, more=more)
    one, two = (planned(str(file)).target for file in (once, twice))
    assert one.parameters == two.parameters
    assert two.stored_bytes - one.stored_bytes == pytest.approx(matrix.size * one.weight_bytes)
    assert sizes_of(two).around == pytest.approx(2 * sizes_of(one).around, abs=1)


def test_a_calibration_that_is_no_file_is_a_failure(cli: Cli, tmp_path: Path) -> None:
    result = cli("plan", *MINI, "--calibration", str(tmp_path))
    assert result.code == 1
    assert "can't read the calibration" in result.err


def test_a_calibration_of_unknown_origin_is_a_failure(cli: Cli, tmp_path: Path) -> None:
    sample = TimedForward(TINY, WORKS[0], 1.0)
    MachineCalibration(known_machine("l4", "float32"), {"device": "cpu"}, (sample,)).save(tmp_path / "found.json")
    result = cli("plan", *MINI, "--calibration", str(tmp_path / "found.json"))
    assert result.code == 1
    assert "lacks processor, threads" in result.err


def test_layers_on_disk_take_the_time_of_reading_them_whatever_the_rows(cli: Cli) -> None:
    words = ("plan", *MINI, "--rows", "1,8", "--context", "64", "--device", "h200", "--acceptance", "0.9")
    whole, streamed = (
        json.loads(cli(*words, *more, "--json").out)
        for more in ((), ("--memory", "weights=9MB", "--disk", "0.01", "--strategy", "prompt-lookup"))
    )
    (before,), (after,) = whole["cases"], streamed["cases"]
    assert before["memory"]["streamed"] == 0 < after["memory"]["streamed"]
    assert after["memory"]["weights"] <= 9_000_000 < before["memory"]["weights"]
    assert [verify["seconds"] for verify in after["verifies"]] == pytest.approx([after["memory"]["streamed"] / 1e7] * 2)
    assert after["pick"] == "prompt-lookup"
    assert "direct reads of the disk give 0.01 GB/s, as --disk says" in streamed["machine"]["source"]
    page = cli(*words, "--memory", "weights=9MB", "--disk", "0.01").out
    assert re.search(r"weights 0.0 GB \(and 0.0 GB read from disk in a forward of one row\) and cache", page)


@pytest.mark.parametrize(("link", "bandwidth"), [((), 0.75 * 64e9), (("--link", "0.01"), 1e7)])
def test_layers_of_a_device_come_over_its_link(cli: Cli, link: tuple[str, ...], bandwidth: float) -> None:
    words = ("plan", *MINI, "--rows", "1,8", "--context", "64", "--device", "h200", "--acceptance", "0.9", *link)
    told = json.loads(cli(*words, "--memory", "weights=9MB", "--strategy", "prompt-lookup", "--json").out)
    (case,) = told["cases"]
    assert told["machine"]["disk_bandwidth"] == bandwidth
    assert [verify["fetched"] for verify in case["verifies"]] == [case["memory"]["streamed"]] * 2
    copied = case["memory"]["streamed"] / bandwidth
    assert all(verify["seconds"] >= copied for verify in case["verifies"])
    if link:
        assert case["verifies"][0]["seconds"] == pytest.approx(copied)
    page = cli(*words, "--memory", "weights=9MB").out
    assert "copies from the host's memory take" in page
    assert "copied from the host's memory in a forward of one row" in page


def test_experts_elsewhere_take_longer_the_more_rows_choose(cli: Cli, tmp_path: Path) -> None:
    """Two of six for a row; ever more of them for more rows, and never more than all."""
    save_random("mixtral", tmp_path)
    words = ("plan", str(tmp_path), "--device", "h200", "--context", "0", "--rows", "1,4,64", "--dtype", "bfloat16")
    whole, away = (
        json.loads(cli(*words, *more, "--acceptance", "0.5", "--json").out)["cases"][0]
        for more in ((), ("--memory", "weights=60KB", "--disk", "0.001"))
    )
    assert [verify["fetched"] for verify in whole["verifies"]] == [0, 0, 0]
    one, four, all_of_them = (verify["fetched"] for verify in away["verifies"])
    assert 0 < one < four < all_of_them <= 2 * 6 * 3 * 32 * 64 * 2
    assert all_of_them == pytest.approx(3 * one, rel=1e-3)
    seconds = [verify["seconds"] for verify in away["verifies"]]
    assert seconds[2] - seconds[0] == pytest.approx((all_of_them - one) / 1e6, rel=0.01)
    assert away["memory"]["weights"] <= 60_000 < whole["memory"]["weights"]


def test_the_disk_is_measured_on_the_model_s_file() -> None:
    bandwidth, path = measure_disk("parlay-mini")
    assert bandwidth > 1e6
    assert path.name == "model.safetensors"
    with pytest.raises(ParlayError, match=r"no weights of llama-3\.1-8b are here to measure the disk with: give"):
        measure_disk("llama-3.1-8b")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--memory", "weights=1MB", "--disk", "1"), "must be in memory"),
        (("--memory", "weights=9MB", "--disk", "1", "--link", "9"), "and not with --disk: remove it"),
        (("--link", "9"), "--link works only with --devices, or with --device NAME and --memory"),
        (
            ("--memory", "weights=9MB", "--link", "fast"),
            "--link must be gigabytes per second and microseconds, as in 64:10, got fast",
        ),
        (("--memory", "2GiB"), "--memory must be weights=SIZE here"),
        (("--memory", "weights=9MB", "--disk", "0"), "--disk must be above 0"),
        (("--memory", "weights=9MB", "--devices", "2"), "--memory and --disk can't be used with --devices"),
    ],
)
def test_what_can_not_be_streamed_is_one_line(cli: Cli, words: tuple[str, ...], said: str) -> None:
    result = cli("plan", *MINI, "--device", "h200", *words)
    assert result.code in (1, 2)
    assert said in result.err
    assert result.err.count("\n") == 1
