"""`parlay generate` on the built-in model: what it writes, reports, and does when something goes wrong half way."""

from __future__ import annotations

import io
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from parlay import LLM, SamplingParams
from parlay.engine import Engine
from parlay.models.fetch.resolving import resolve
from parlay.types import RunnerLost
from tests.cli.conftest import MINI, NO_MODEL, Cli, Result

PROMPT = "The cat and the dog, the cat and the bird, the cat and the"
JSON_FIELDS = ["text", "token_ids", "finish_reason", "metrics"]
METRICS = [
    "strategy",
    "exactness",
    "prompt_tokens",
    "completion_tokens",
    "steps",
    "tokens_per_step",
    "draft_tokens",
    "accepted_tokens",
    "acceptance_rate",
    "seconds",
    "tokens_per_second",
    "prefill_seconds",
    "draft_seconds",
    "verify_seconds",
    "overhead_seconds",
    "escaped_at",
    "lost_members",
    "router",
    "seed",
]
ANSI = "\x1b["


class Screen(io.StringIO):
    """A terminal; ``react`` is called at every write."""

    def __init__(self, react: Callable[[], object] = bool) -> None:
        super().__init__()
        self.react = react

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.react()
        return super().write(text)


def result_of(cli: Cli, *words: str) -> dict[str, object]:
    """The JSON object of a run that must succeed."""
    result = cli("generate", PROMPT, "--json", *MINI, *words)
    assert result.code == 0, result.err
    value = json.loads(result.out)
    assert isinstance(value, dict)
    return value


def test_what_auto_chose_is_explained(cli: Cli) -> None:
    told = cli("generate", PROMPT, *MINI, "--max-tokens", "48", "--strategy", "auto:of=prompt-lookup", "--explain")
    assert "prompt-lookup: asked in" in told.err
    assert "steps: " in told.err
    assert "taken for a request of the kind: " in told.err
    assert "tokens per step (expected), and where they came from or why nothing was drafted; overlap" in told.err
    assert "%" in told.err.splitlines()[-1], "each part of its life says how much of it goes on with earlier text"
    simple = cli("generate", PROMPT, *MINI, "--max-tokens", "4", "--strategy", "none", "--explain")
    assert "none has one drafter or none: there was nothing to choose" in simple.err
    words = ("--max-tokens", "48", "--strategy", "auto:of=prompt-lookup")
    summary = result_of(cli, *words)["metrics"]
    assert isinstance(summary, dict)
    assert "life" not in summary["router"], "an entry for each step is for those who ask for it"
    metrics = result_of(cli, *words, "--explain")["metrics"]
    assert isinstance(metrics, dict)
    (lookup,) = metrics["router"]["drafters"]
    assert lookup["asked"] >= lookup["verified"]
    assert lookup["accepted"] == metrics["accepted_tokens"]
    life = metrics["router"]["life"]
    assert sum(metrics["router"]["reasons"].values()) == sum(each["steps"] for each in life)  # paused ones too
    assert sum(each["steps"] for each in life) == metrics["steps"]
    assert sum(each["tokens"] for each in life) == metrics["completion_tokens"]
    drafted = sum(each["choices"].get("prompt-lookup", 0) for each in life)
    assert drafted == lookup["verified"]


def test_the_default_strategy_writes_what_plain_decoding_writes(cli: Cli) -> None:
    fast = cli("generate", PROMPT, *MINI, "--max-tokens", "48")
    plain = cli("generate", PROMPT, *MINI, "--max-new-tokens", "48", "--strategy", "none")
    assert fast.code == plain.code == 0
    assert len(fast.out) > 20
    assert fast.out == plain.out
    assert "48 tokens in 48 steps (1.00 a step)" in plain.err


def test_a_model_with_itself_as_ensemble_writes_its_own_text_and_guidance_another(cli: Cli) -> None:
    words = ("--max-tokens", "24", "--ensemble", "parlay-mini", "--ensemble-rule", "product")
    alone, both = result_of(cli, "--max-tokens", "24"), result_of(cli, *words, "--ensemble-weights", "2,1")
    assert both["token_ids"] == alone["token_ids"]
    surest = result_of(cli, *words[:4], "--ensemble-rule", "certainty")
    assert surest["writers"] == ["parlay-mini (1)"] * len(alone["token_ids"])  # type: ignore[arg-type]
    guided = result_of(cli, "--max-tokens", "24", "--guidance-scale", "4", "--negative-prompt", "The cat")
    assert guided["token_ids"] != alone["token_ids"]
    wrong = cli("generate", PROMPT, *MINI, "--ensemble", "parlay-mini", "--ensemble-weights", "1,x")
    assert wrong.code == 2
    assert wrong.err == "parlay: error: --ensemble-weights must be numbers joined by commas, as in 2,1, got '1,x'\n"


@pytest.mark.parametrize(
    ("words", "missing"),
    [
        (("--ensemble-weights", "1,2"), "--ensemble MODEL"),
        (("--ensemble-deadline", "0.5"), "--ensemble MODEL"),
        (("--ensemble", "parlay-mini", "--contrast-beta", "0.7"), "--ensemble-rule contrast"),
        (("--nest-alpha", "0.9"), "--nest FILE"),
        (("--negative-prompt", "no"), "--guidance-scale other than 1"),
    ],
)
def test_a_flag_that_nothing_would_read_is_refused(cli: Cli, words: tuple[str, ...], missing: str) -> None:
    result = cli("generate", PROMPT, *NO_MODEL, *words)
    assert result.code == 2
    assert result.err == f"parlay: error: {words[-2]} has no effect without {missing}: add {missing}, or remove it\n"


def test_an_answer_that_the_context_has_no_room_for_is_said(cli: Cli) -> None:
    result = cli("generate", "Hello" * 400, *MINI, "--max-tokens", "99999999", "--stop", " ", "--stop", "e")
    assert result.code == 0, result.err
    assert "the context has room for" in result.err
    assert "room" not in cli("generate", PROMPT, *MINI, "--max-tokens", "4").err


def test_json_is_one_object_with_these_fields(cli: Cli) -> None:
    """Its text is the text that is streamed without ``--json``."""
    report = result_of(cli, "--max-tokens", "24")
    assert list(report) == JSON_FIELDS
    assert isinstance(report["metrics"], dict)
    assert list(report["metrics"]) == METRICS
    assert report["metrics"]["completion_tokens"] == len(report["token_ids"]) == 24  # type: ignore[arg-type]
    assert report["finish_reason"] == "length"
    assert cli("generate", PROMPT, *MINI, "--max-tokens", "24").out.removesuffix("\n") == str(
        report["text"]
    ).removesuffix("\n")


def test_a_seed_decides_the_text_whatever_the_strategy_and_is_reported(cli: Cli) -> None:
    sampled = ("--temperature", "1", "--max-tokens", "24")
    drawn = result_of(cli, *sampled)
    assert isinstance(drawn["metrics"], dict)
    seed = str(drawn["metrics"]["seed"])
    assert result_of(cli, *sampled, "--seed", seed, "--strategy", "none")["token_ids"] == drawn["token_ids"]
    assert f"seed {seed}" in cli("generate", PROMPT, *MINI, *sampled, "--seed", seed).err


def test_a_prompt_on_stdin_is_read_without_its_line_end(cli: Cli) -> None:
    argument = cli("generate", PROMPT, *MINI, "--max-tokens", "8")
    assert cli("generate", *MINI, "--max-tokens", "8", stdin=PROMPT.encode() + b"\n").out == argument.out


def test_a_prompt_in_a_file_is_read_without_its_line_end(cli: Cli, tmp_path: Path) -> None:
    (file := tmp_path / "prompt.txt").write_text(f"{PROMPT}\n", encoding="utf-8")
    argument = cli("generate", PROMPT, *MINI, "--max-tokens", "8")
    assert cli("generate", "-f", str(file), *MINI, "--max-tokens", "8").out == argument.out


def test_a_system_message_implies_chat(cli: Cli) -> None:
    def prompt_tokens(*words: str) -> int:
        metrics = result_of(cli, "--max-tokens", "1", *words)["metrics"]
        assert isinstance(metrics, dict)
        return int(metrics["prompt_tokens"])

    plain, chat, system = prompt_tokens(), prompt_tokens("--chat"), prompt_tokens("--system", "Be brief.")
    assert plain < chat < system


def test_minus_one_writes_until_the_context_is_full(cli: Cli) -> None:
    """`-n -1` means what it means in llama.cpp."""
    words = ("--max-model-len", "48", "--ignore-eos", "--json")
    found = json.loads(cli("generate", PROMPT, *MINI, "-n", "-1", *words).out)["metrics"]
    assert found["prompt_tokens"] + found["completion_tokens"] == 48


def test_no_tokens_is_an_empty_text_and_no_failure(cli: Cli) -> None:
    result = cli("generate", PROMPT, *MINI, "--max-tokens", "0")
    assert (result.code, result.out) == (0, "")
    assert "0 tokens in 0 steps" in result.err


def test_a_stop_text_ends_the_output_before_it(cli: Cli) -> None:
    text = cli("generate", PROMPT, *MINI, "--max-tokens", "24").out
    stop = text[10:14]
    assert (
        cli("generate", PROMPT, *MINI, "--max-tokens", "24", "--stop", stop).out.rstrip("\n")
        == text[: text.index(stop)]
    )


def test_a_terminal_shows_accepted_tokens_tinted_unless_told_not_to(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("generate", PROMPT, *MINI, "--max-tokens", "48", "--strategy", "prompt-lookup:policy=fixed")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    piped = cli(*words).out

    def shown() -> str:
        screen = Screen()
        with monkeypatch.context() as patch:
            patch.setattr("sys.stdout", screen)
            cli(*words)
        return screen.getvalue()

    tinted = shown()
    assert ANSI in tinted
    assert tinted.replace("\x1b[36m", "").replace("\x1b[39m", "") == piped
    monkeypatch.setenv("NO_COLOR", "1")
    assert shown() == piped


@pytest.mark.usefixtures("signals_as_before")
@pytest.mark.parametrize("json_wanted", [False, True])
def test_ctrl_c_keeps_and_shows_what_was_generated(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, json_wanted: bool
) -> None:
    """The signal comes with the third step; what was streamed before stands, and the summary follows."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background of a shell ignore it
    whole = cli("generate", PROMPT, *MINI, "--max-tokens", "64", "--strategy", "none").out
    steps = iter(range(1000))

    def interrupt_third(*_: object) -> None:
        if next(steps) == 3:
            signal.raise_signal(signal.SIGINT)

    step = Engine.step
    monkeypatch.setattr(Engine, "step", lambda self: (interrupt_third(), step(self))[1])
    extra = ("--json",) if json_wanted else ()
    result = cli("generate", PROMPT, *MINI, "--max-tokens", "64", "--strategy", "none", *extra)
    assert result.code == 130
    assert "interrupted" in result.err
    assert "Traceback" not in result.err
    text = json.loads(result.out)["text"] if json_wanted else result.out.removesuffix("\n")
    assert 0 < len(text) < len(whole)
    assert whole.startswith(text)


def test_an_error_stands_in_a_line_below_the_text(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = iter(range(1000))
    step = Engine.step

    def lose_third(engine: Engine) -> object:
        if next(steps) == 3:
            raise RunnerLost("the other rank has ended")
        return step(engine)

    monkeypatch.setattr(Engine, "step", lose_third)
    result = cli("generate", PROMPT, *MINI, "--max-tokens", "64", "--strategy", "none")
    assert result.code == 1
    assert result.out.strip()
    assert result.out.endswith("\n")
    assert result.err.splitlines()[-1] == "parlay: error: the other rank has ended"


def test_a_reader_that_leaves_early_ends_the_run_quietly() -> None:
    """However late: the pipe holds a third of what is to be written."""
    words = [sys.executable, "-m", "parlay", "generate", PROMPT, *MINI, "--max-tokens", "4000", "--ignore-eos"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(words, text=True, pipesize=4096, **pipes) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read().removeprefix("parlay: loading parlay-mini ...\n") == ""
    assert process.returncode == 1


def test_a_prompt_longer_than_the_context_says_both_lengths(cli: Cli) -> None:
    failed(cli("generate", "word " * 9000, *MINI), 2, "4096")


# ---------------------------------------------------------------------------------------------------- damaged models


def failed(result: Result, code: int, named: str) -> None:
    assert result.code == code
    assert result.err.startswith("parlay: error: "), result.err
    assert result.err.count("\n") == 1
    assert named in result.err


@pytest.fixture
def damaged(tmp_path: Path) -> Callable[[Callable[[dict[str, Tensor]], object]], str]:
    """``damaged(change)`` is a copy of the built-in model whose tensors ``change`` has had its way with."""

    def copy(change: Callable[[dict[str, Tensor]], object]) -> str:
        folder = shutil.copytree(resolve("parlay-mini"), tmp_path / "model")
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return str(folder)

    return copy


Damaged = Callable[[Callable[[dict[str, Tensor]], object]], str]


def test_nan_logits_fail_the_request_in_one_line(cli: Cli, damaged: Damaged) -> None:
    folder = damaged(lambda weights: weights["model.norm.weight"].fill_(torch.nan))
    result = cli("generate", PROMPT, "--model", folder)
    assert result.code == 1
    errors = [line for line in result.err.splitlines() if "error" in line]
    assert len(errors) == 1
    assert "NaN" in errors[0]


def test_missing_tensors_are_named(cli: Cli, damaged: Damaged) -> None:
    failed(cli("generate", "x", "--model", damaged(lambda weights: weights.pop("model.norm.weight"))), 1, "model.norm")


def test_a_file_cut_short_is_named(cli: Cli, damaged: Damaged) -> None:
    folder = Path(damaged(lambda weights: None))
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    failed(cli("generate", "x", "--model", str(folder)), 1, "model.safetensors")


def test_a_draft_model_with_another_vocabulary_is_refused(cli: Cli, damaged: Damaged) -> None:
    def shrink(weights: dict[str, Tensor]) -> None:
        weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"][:1000].clone()

    folder = damaged(shrink)
    config = json.loads((Path(folder) / "config.json").read_text())
    (Path(folder) / "config.json").write_text(json.dumps({**config, "vocab_size": 1000}))
    failed(cli("generate", PROMPT, *MINI, "--strategy", "draft-model", "--draft-model", folder), 2, "vocabulary")


def test_auto_takes_a_draft_model_that_is_named(cli: Cli) -> None:
    words = ("generate", PROMPT, *MINI, "--draft-model", "parlay-mini-draft", "--max-tokens", "8")
    result = cli(*words)
    assert result.code == 0, result.err
    assert "note" not in result.err
    assert result.out == cli(*words[:-4], "--max-tokens", "8", "--strategy", "none").out


def test_a_chat_model_that_ends_at_once_is_noted(cli: Cli) -> None:
    """Chat models often end after a bare question; with --chat they answer."""
    first = LLM("parlay-mini").generate([PROMPT], SamplingParams(max_tokens=1, temperature=0.0))[0].outputs[0]
    words = ("generate", PROMPT, *MINI, "--end-tokens", str(first.token_ids[0]))
    assert "add --chat" in cli(*words).err
    assert "add --chat" not in cli(*words, "--chat").err


def test_a_draft_model_that_no_strategy_would_use_is_refused(cli: Cli) -> None:
    failed(
        cli("generate", PROMPT, *MINI, "--strategy", "none", "--draft-model", "parlay-mini-draft"), 2, "--draft-model"
    )


def test_long_loading_is_said_where_no_bar_shows_it(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parlay.cli.opening.SILENT_SECONDS", 0.0)
    result = cli("generate", PROMPT, *MINI, "--max-tokens", "1")
    assert result.err.startswith("parlay: loading parlay-mini ...\n")


VOTE = ("--vote", "8", "--answer", "[aeiou](?!.*[aeiou])", "--max-tokens", "6", "--seed", "11")


def test_a_vote_prints_the_winner_and_the_outcome(cli: Cli) -> None:
    result = cli("generate", PROMPT, *MINI, *VOTE)
    assert result.code == 0, result.err
    report = result_of(cli, *VOTE)
    vote = report["vote"]
    assert isinstance(vote, dict)
    assert result.out.removesuffix("\n") == str(report["text"]).removesuffix("\n")
    assert f"vote: {vote['answer']} ({vote['answer']} has {vote['votes'][vote['answer']]}" in result.err
    assert list(report) == ["vote", *JSON_FIELDS]


def test_a_vote_of_nobody_says_so(cli: Cli) -> None:
    result = cli("generate", PROMPT, *MINI, "--vote", "3", "--answer", "boxed", "--max-tokens", "4")
    assert result.code == 0
    assert "no vote: none of the 3 chains that ended has an answer (--max-tokens cut 3 of them)" in result.err
    assert result.out.strip()


def test_suggest_prints_drafts_by_number(cli: Cli) -> None:
    """And tells their number and cost apart; a wrong count is one line."""
    result = cli("suggest", "Once upon a time", *MINI, "-n", "2", "--max-tokens", "4")
    assert (result.code, [line[:2] for line in result.out.splitlines()]) == (0, ["1:", "2:"])
    assert "2 drafts in 4 steps" in result.err
    as_data = cli("suggest", "Once upon a time", *MINI, "-n", "2", "--max-tokens", "4", "--json").out
    drafts = json.loads(as_data)["drafts"]
    assert [each["text"] for each in drafts] == [line[3:] for line in result.out.splitlines()]
    wrong = cli("suggest", "x", *MINI, "-n", "99")
    assert (wrong.code, wrong.err.count("\n")) == (2, 1)


STEPS = ("--steps-model", "parlay-mini-draft", "--steps-until", "sentence", "--temperature", "0", "--max-tokens", "12")


def test_steps_ahead_print_the_text_of_plain_decoding(cli: Cli) -> None:
    """And say what the drafted steps were worth."""
    plain = cli("generate", PROMPT, *MINI, "--temperature", "0", "--max-tokens", "12", "--strategy", "none")
    result = cli("generate", PROMPT, *MINI, *STEPS)
    assert (result.code, result.out) == (0, plain.out), result.err
    assert "drafted steps stood" in result.err
    one = cli("generate", PROMPT, *MINI, *STEPS[:-1], "1")
    assert one.err.startswith("1 token in 1 round, "), one.err
    told = json.loads(cli("generate", PROMPT, *MINI, *STEPS, "--steps-ahead", "2", "--json").out)
    assert told["text"].rstrip() == plain.out.rstrip()
    assert told["drafted"] >= told["rounds"] > 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--steps-ahead", "2"), "work only with --steps-model"),
        (("--steps-model", "x", "--vote", "3"), "--steps-model can't be used with --vote"),
        (("--steps-model", "x", "--steps-ahead", "99"), "--steps-ahead must be between 1 and 16, got 99"),
    ],
)
def test_flags_of_steps_that_go_nowhere_are_told_before_a_model_is_loaded(
    cli: Cli, words: tuple[str, ...], said: str
) -> None:
    result = cli("generate", "Hi", *NO_MODEL, *words)
    assert result.code == 2
    assert said in result.err
    assert result.err.count("\n") == 1
