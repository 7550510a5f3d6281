"""Prefixes in a file: a later process finds them and writes the same text; a file that can't be used does no harm."""

from __future__ import annotations

import logging
import os
import random
from pathlib import Path

import pytest
import torch

from parlay import LLM, LoRARequest, SamplingParams
from parlay.cache import Store
from parlay.cache.prefix_file import BadPrefixFile, read_prefixes
from parlay.compiled.library import SWITCH
from parlay.llm.prefix_cache import PrefixCacheFile, open_prefix_cache
from parlay.models.compiled.limits import runs_here
from parlay.models.config import DecoderConfig, UnsupportedModel
from parlay.models.loading import read_config
from parlay.models.random_decoder import save_decoder
from parlay.options import LoadOptions, RankOptions
from parlay.testing.adapters import save_adapter
from parlay.testing.toys import RandomLogits, ToyRunner
from parlay.types import ParlayError

CONFIG = DecoderConfig(
    architecture="llama", vocab_size=4096, num_layers=2, rms_norm_eps=1e-6, max_context=512, qk_norm=False,
    hidden_size=64, intermediate_size=96, num_heads=2, num_kv_heads=1, head_dim=32,
)  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPT = [5, 9, 3, 17] * 10


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy")
    save_decoder(CONFIG, folder / "base")
    save_decoder(CONFIG, folder / "other", seed=1)
    save_adapter(folder / "one", read_config(folder / "base"), rank=4)
    return folder


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "prefixes.kv"


def open_llm(model: Path, file: Path | None, **options: str) -> LLM:
    return LLM(str(model), prefix_cache=file, tokenizer="parlay-mini", router_memory="off", dtype="float32", **options)


def answer(llm: LLM, prompt: list[int], adapter: LoRARequest | None = None) -> tuple[list[int], int]:
    """The tokens of an answer, and how many of its prompt were cached."""
    output = llm.generate(prompt, GREEDY, strategy="none", lora_request=adapter)[0]
    return list(output.outputs[0].token_ids), output.num_cached_tokens


def written(model: Path, file: Path, **options: str) -> list[int]:
    """Write a file that holds the prompt, and return the prompt's answer."""
    with open_llm(model, file, **options) as llm:
        return answer(llm, PROMPT)[0]


@pytest.mark.parametrize(("kernels", "cached"), [("", "auto"), ("", "q8_0"), ("0", "auto")])
def test_the_first_request_after_a_restart_finds_its_prefix(
    toy: Path, file: Path, kernels: str, cached: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what was read is written again. Nobody else may read the file."""
    if kernels:
        monkeypatch.setenv(SWITCH, kernels)
    if cached == "q8_0" and not runs_here(CONFIG, torch.float32):
        pytest.skip("only the compiled decoder caches in eight bits")
    expected = written(toy / "base", file, kv_cache_dtype=cached)
    for _ in range(2):
        with open_llm(toy / "base", file, kv_cache_dtype=cached) as llm:
            assert answer(llm, PROMPT) == (expected, len(PROMPT) - 1)
            answer(llm, [*PROMPT[:20], 1, 2, 3])  # writes behind a page that is mapped
            assert answer(llm, PROMPT)[0] == expected
            llm.runner.check()  # type: ignore[attr-defined]
    assert file.stat().st_mode & 0o077 == 0


def test_a_link_stays_and_what_it_names_is_written(toy: Path, file: Path, tmp_path: Path) -> None:
    place = tmp_path / "elsewhere" / "kept.kv"
    place.parent.mkdir()
    file.symlink_to(place)
    expected = written(toy / "base", file)
    assert file.is_symlink()
    assert place.is_file()
    with open_llm(toy / "base", file) as llm:
        assert answer(llm, PROMPT) == (expected, len(PROMPT) - 1)


def test_several_processes_keep_no_prefixes_and_say_so_before_they_load(file: Path) -> None:
    ranks = RankOptions(context_parallel=2)
    with pytest.raises(UnsupportedModel, match="prefixes are kept by one process: remove context_parallel=2"):
        LLM("parlay-mini", prefix_cache=file, ranks=ranks)


def test_adapters_and_tenants_keep_their_own_prefixes(toy: Path, file: Path) -> None:
    adapter = LoRARequest("one", 1, str(toy / "one"))
    with open_llm(toy / "base", file) as llm:
        expected = answer(llm, PROMPT, adapter)
    with open_llm(toy / "base", file) as llm:
        assert answer(llm, PROMPT)[1] == 0
        assert answer(llm, PROMPT, adapter) == (expected[0], len(PROMPT) - 1)


def test_the_prefixes_used_last_are_kept_where_not_all_fit(toy: Path, file: Path) -> None:
    draw = random.Random(0)
    prompts = [[draw.randrange(4096) for _ in range(40)] for _ in range(60)]
    with open_llm(toy / "base", file) as llm:
        for prompt in prompts:
            answer(llm, prompt)
        llm.prefix_cache._most_bytes = 1 << 20  # type: ignore[union-attr]
    assert file.stat().st_size <= 1 << 20
    with open_llm(toy / "base", file) as llm:
        assert [answer(llm, prompt)[1] > 0 for prompt in (prompts[-1], prompts[0])] == [True, False]


def test_a_cache_that_is_smaller_than_the_file_takes_what_fits(toy: Path, file: Path) -> None:
    expected = written(toy / "base", file)
    with LLM(
        str(toy / "base"),
        prefix_cache=file,
        tokenizer="parlay-mini",
        router_memory="off",
        dtype="float32",
        memory="48KiB",
    ) as llm:
        assert answer(llm, PROMPT)[0] == expected
        llm.runner.check()  # type: ignore[attr-defined]


def cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def flipped(content: bytes, place: int) -> bytes:
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


def test_a_file_that_lies_is_told_from_a_sound_one(toy: Path, file: Path) -> None:
    """Cut short, longer, changed in any part, of another format: nothing of it is used."""
    with open_llm(toy / "base", file) as llm:
        answer(llm, PROMPT)
        assert llm.prefix_cache is not None
        llm.prefix_cache.save()
        key, shape = llm.prefix_cache._key, llm.runner.store.shape  # type: ignore[attr-defined]
    whole = file.read_bytes()
    cases: list[tuple[bytes, str]] = [
        (cut(whole), "it was cut short"),
        (whole[:30], "it was cut short"),
        (whole + bytes(8), "it was cut short"),
        (flipped(whole, 100), "it is damaged"),
        (flipped(whole, 70_000), "it is damaged"),
        (flipped(whole, 8), "it has format 0"),
        (whole[:16] + b"\xff" * 8 + whole[24:], "it was cut short"),
        (whole[:10], "it is damaged"),
        (b"", "it is damaged"),
    ]
    for content, why in cases:
        file.write_bytes(content)
        store = Store(shape, 512)
        with file.open("rb") as opened, pytest.raises(BadPrefixFile, match=why):
            read_prefixes(store, opened, key)
        assert not store.nbytes
    file.write_bytes(whole)
    with file.open("rb") as opened:
        assert read_prefixes(store, opened, key) >= len(PROMPT)
    store.check()


def test_a_damaged_file_costs_a_line_and_is_replaced(toy: Path, file: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = written(toy / "base", file)
    file.write_bytes(cut(file.read_bytes()))
    with caplog.at_level(logging.WARNING), open_llm(toy / "base", file) as llm:
        assert answer(llm, PROMPT) == (expected, 0)
    assert ["it was cut short" in record.message for record in caplog.records] == [True]
    assert "\n" not in caplog.records[0].message
    with open_llm(toy / "base", file) as llm:
        assert answer(llm, PROMPT)[1] > 0


@pytest.mark.parametrize("what", ["model", "adapter"])
def test_a_file_of_another_model_is_not_used(
    toy: Path, file: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    written(toy / "base", file)
    load = LoadOptions(dtype="float32", lora=str(toy / "one") if what == "adapter" else None)
    model = toy / ("other" if what == "model" else "base")
    with (
        caplog.at_level(logging.WARNING),
        LLM(str(model), load=load, tokenizer="parlay-mini", prefix_cache=file) as llm,
    ):
        assert answer(llm, PROMPT)[1] == 0
    assert f"another {what}" in caplog.text


def test_a_file_that_is_something_else_stays_as_it_is(toy: Path, file: Path, caplog: pytest.LogCaptureFixture) -> None:
    file.write_text("once upon a time")
    with open_llm(toy / "base", file) as llm:
        answer(llm, PROMPT)
        with pytest.raises(ParlayError, match="something else"):
            llm.prefix_cache.save()  # type: ignore[union-attr]
        assert file.read_text() == "once upon a time"
        file.unlink()
        assert llm.prefix_cache.save().tokens > 0, "what stands there now counts"  # type: ignore[union-attr]
    assert "holds no prefixes" in caplog.text


def test_a_crash_while_it_is_written_leaves_the_old_file(
    toy: Path, file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    written(toy / "base", file)
    before = file.read_bytes()

    def fail(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    with open_llm(toy / "base", file) as llm:
        answer(llm, [1, 2, 3] * 10)
        monkeypatch.setattr("parlay.cache.prefix_file._rows", fail)
    assert "No space left" in caplog.text
    assert file.read_bytes() == before
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_what_can_keep_no_file_says_so_before_a_request(toy: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="in a folder that can be written to"):
        open_llm(toy / "base", tmp_path / "missing" / "prefixes.kv")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="it must be a file"):
        open_llm(toy / "base", tmp_path / "pipe")
    with pytest.raises(ParlayError, match="runs in one process"):
        open_prefix_cache(tmp_path / "prefixes.kv", "1GiB", "toy", ToyRunner(RandomLogits(7), 7), LoadOptions())
    with pytest.raises(ValueError, match="prefix_cache_size 1000: prefixes of this model take at least"):
        open_llm(toy / "base", tmp_path / "prefixes.kv", prefix_cache_size=1000)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="prefix_cache_size 'much'"):
        LLM(str(toy / "base"), prefix_cache_size="much", tokenizer="parlay-mini")


def test_the_file_is_written_by_its_own_object(toy: Path, file: Path) -> None:
    """As servers do between requests; it is in use meanwhile and afterwards."""
    with open_llm(toy / "base", file) as llm:
        assert isinstance(llm.prefix_cache, PrefixCacheFile)
        assert llm.prefix_cache.save() == (0, 0)
        assert not file.exists()
        expected = answer(llm, PROMPT)
        saved = llm.prefix_cache.save()
        assert saved.bytes == file.stat().st_size
        assert saved.tokens >= len(PROMPT)
        assert answer(llm, PROMPT)[0] == expected[0]
