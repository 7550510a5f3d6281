"""Flags of llama.cpp and vLLM work, or a line says why not."""

from __future__ import annotations

import pytest

from parlay.cli import parser_of
from parlay.cli.commands import COMMANDS
from parlay.cli.other_programs import LLAMA_CPP, VLLM, translated
from parlay.options import UsageError
from tests.cli.conftest import Cli

GENERATE = {"--model", "--threads", "--temperature", "--max-tokens", "--json-schema"}


def test_flags_of_the_same_meaning_are_renamed(cli: Cli) -> None:
    known = ("generate", "Hello", "--model", "parlay-mini", "--max-tokens", "4", "--max-model-len", "64")
    foreign = ("generate", "-p", "Hello", "-m", "parlay-mini", "-n", "4", "-c", "64", "-t", "1", "--temp=0", "--stream")
    result = cli(*foreign)
    assert result.code == 0, result.err
    assert result.out == cli(*known).out
    assert result.err.startswith("parlay: note: --stream has no effect: text is always printed as it is decoded\n")


@pytest.mark.parametrize(
    ("words", "left"),
    [
        (["-ngl", "99", "x"], ["x"]),
        (["--gpu-memory-utilization=0.9", "x"], ["x"]),
        (["--gpu-memory-utilization", "0.9", "x"], ["x"]),
        (["--async-scheduling", "x"], ["x"]),
        (["--data-parallel-size", "1", "-dp=1", "x"], ["x"]),
        (["-m=a", "--", "-ngl"], ["--model", "a", "--", "-ngl"]),
        (["--temperature", "1", "-x"], ["--temperature", "1", "-x"]),
    ],
)
def test_flags_without_effect_leave_with_their_values(words: list[str], left: list[str]) -> None:
    assert translated(words, GENERATE, "parlay generate") == left


@pytest.mark.parametrize("word", ["--lora-scaled", "-np", "--speculative-config", "--ssl-keyfile"])
def test_what_cannot_be_honoured_is_refused(word: str) -> None:
    with pytest.raises(UsageError, match=word):
        translated([word, "x"], GENERATE, "parlay generate")


@pytest.mark.parametrize(
    ("word", "instead"),
    [
        ("--mirostat", "write --top-p P or --min-p P"),
        ("--dry-multiplier", "write --repetition-penalty X"),
        ("--xtc-probability=0.5", "write --top-p P or --min-p P"),
        ("--prompt-cache", "write --prefix-cache FILE"),
        ("-cnv", "parlay chat talks"),
    ],
)
def test_what_the_page_for_users_of_llama_cpp_calls_missing_is_refused_with_what_to_write_instead(
    word: str, instead: str
) -> None:
    with pytest.raises(UsageError, match=instead):
        translated([word, "2"], GENERATE, "parlay generate")


@pytest.mark.parametrize("word", ["--embedding", "--reranking"])
def test_embeddings_need_no_flag(word: str) -> None:
    with pytest.raises(UsageError, match="leave it out: /v1/embeddings"):
        translated([word], {"--model"}, "parlay serve")


def test_the_types_of_keys_and_of_values_are_one_flag_here() -> None:
    words = ["-ctk", "q8_0", "--cache-type-v", "q8_0", "x"]
    made = translated(words, GENERATE | {"--kv-cache-dtype"}, "parlay generate")
    assert made == ["--kv-cache-dtype", "q8_0", "--kv-cache-dtype", "q8_0", "x"]


def test_every_name_that_a_flag_is_translated_to_exists() -> None:
    own = {flag for name in COMMANDS for flag in parser_of(name)._option_string_actions}
    assert {flag.to for flag in (*LLAMA_CPP.values(), *VLLM.values())} <= own | {"", "PROMPT"}


@pytest.mark.parametrize("flag", ["--ctx-sizes", "--gpu-memory", "--tensors", "--zzz"])
def test_no_flag_is_proposed_that_shares_no_word(cli: Cli, flag: str) -> None:
    line = cli("generate", "x", flag, "1").err
    assert "--quantize" not in line
    assert len(line) < 150
