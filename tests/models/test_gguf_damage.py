"""Damaged, hostile and unknown GGUF files: each is refused in one line, in bounded memory, and nothing else happens."""

from __future__ import annotations

import json
import random
import resource
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from parlay import LLM, SamplingParams, models
from parlay.models.fetch.resolving import resolve
from parlay.models.gguf.file import load_weights, read_config
from parlay.models.gguf.packing_ahead import packing_ahead, take
from parlay.models.gguf.reader import BadGguf, read
from parlay.models.gguf.tokenizer import load_tokenizer
from parlay.models.loading import read_config as read_any_config
from parlay.options import LoadOptions
from parlay.testing.checkpoints import save_random
from parlay.testing.diffusion import save_diffusion
from parlay.types import ParlayError
from tests.cli.conftest import Cli, cli
from tests.models import gguf_files

__all__ = ["cli"]

NORMAL, SLOW = 300, 100_000
"""Mutated headers."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def small(tmp_path: Path) -> Path:
    save_random("llama", tmp_path)
    return gguf_files.write(tmp_path / "model.gguf", tmp_path)


def load_all(path: Path) -> None:
    load_weights(path, read_config(path))
    load_tokenizer(path)


def packed_header(*tensors: tuple[str, tuple[int, ...], int, int], keys: int = 0, version: int = 3) -> bytes:
    """A header without keys: of each tensor name, dimensions (fastest first), type, offset."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), keys)
    for name, shape, kind, offset in tensors:
        head += struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", len(shape))
        head += struct.pack(f"<{len(shape)}QIQ", *shape, kind, offset)
    return head


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


HUGE = 1 << 62
BROKEN: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "can't be read as a GGUF file"),
    "other-magic": (b"PK\3\4" + bytes(60), "does not begin with GGUF"),
    "only-magic": (b"GGUF", "cut short"),
    "version-1": (packed_header(version=1), "its version is 1"),
    "version-9": (packed_header(version=9), "its version is 9"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "many-tensors": (b"GGUF" + struct.pack("<IQQ", 3, HUGE, 0), "claims"),
    "many-keys": (b"GGUF" + struct.pack("<IQQ", 3, 0, HUGE), "claims"),
    "long-key": (packed_header(keys=1) + struct.pack("<Q", HUGE), f"claims {HUGE} bytes"),
    "long-array": (packed_header(keys=1) + string(b"a") + struct.pack("<IIQ", 9, 4, HUGE), "claims"),
    "array-beyond": (packed_header(keys=1) + string(b"a") + struct.pack("<IIQ", 9, 4, 1 << 20), "cut short"),
    "strings-beyond": (packed_header(keys=1) + string(b"a") + struct.pack("<IIQ", 9, 8, 1 << 20), "cut short"),
    "string-beyond": (packed_header(keys=1) + string(b"a") + struct.pack("<IIQQ", 9, 8, 1, HUGE), "cut short"),
    "nested-array": (packed_header(keys=1) + string(b"a") + struct.pack("<IIQ", 9, 9, 1), "unknown type 9"),
    "unknown-key-type": (packed_header(keys=1) + string(b"a") + struct.pack("<I", 77), "unknown type 77"),
    "no-utf-8": (packed_header(keys=1) + string(b"\xff\xfe") + struct.pack("<I", 7) + b"\1", "utf-8"),
    "key-twice": (packed_header(keys=2) + 2 * (string(b"a") + struct.pack("<I?", 7, True)), "'a' occurs twice"),
    "alignment": (packed_header(keys=1) + string(b"general.alignment") + struct.pack("<II", 4, 24), "power of two"),
    "alignment-1": (packed_header(keys=1) + string(b"general.alignment") + struct.pack("<II", 4, 1), "power of two"),
    "dimensions": (packed_header(("t", (1,) * 9, 0, 0)), "9 dimensions"),
    "no-dimensions": (packed_header(("t", (), 0, 0)), "0 dimensions"),
    "empty-dimension": (packed_header(("t", (4, 0), 0, 0)), r"shape \[0, 4\]"),
    "vast-dimension": (packed_header(("t", (4, HUGE), 0, 0)), "shape"),
    "vast-product": (packed_header(("t", (1 << 40, 1 << 40, 1 << 40), 0, 0)), "cut short"),
    "unknown-format": (packed_header(("t", (4,), 99, 0)), "unknown type 99"),
    "other-format": (packed_header(("t", (256,), 34, 0)), "stored as TQ1_0"),
    "half-blocks": (packed_header(("t", (48,), 8, 0)), "not a whole number of Q8_0 blocks of 32"),
    "beyond": (packed_header(("t", (64,), 0, 0)), "cut short: the tensor 't' ends"),
    "far-beyond": (packed_header(("t", (1,), 0, HUGE)), "cut short"),
    "unaligned": (packed_header(("t", (1,), 0, 4)) + bytes(99), "multiple of 32"),
    "overlap": (packed_header(("t", (16,), 0, 0), ("u", (1,), 0, 32)) + bytes(999), "'u' lies over another"),
    "tensor-twice": (packed_header(("t", (1,), 0, 0), ("t", (1,), 0, 32)) + bytes(999), "'t' occurs twice"),
    "nameless": (packed_header() + bytes(64), "general.architecture is missing"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    content, message = BROKEN[name]
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    with pytest.raises(ParlayError, match=message) as caught:
        read_any_config(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


KEYS: dict[str, tuple[dict[str, object], tuple[str, ...], str]] = {
    "architecture": ({"general.architecture": "mamba"}, (), "architecture 'mamba'"),
    "adapter": ({"general.type": "adapter"}, (), "holds no model: its general.type is 'adapter'"),
    "unknown-key": ({"llama.attention.scale": 0.5}, (), r"llama\.attention\.scale \(0\.5\) is not supported"),
    "softcapping": ({"llama.final_logit_softcapping": 30.0}, (), "final_logit_softcapping"),
    "experts": ({"llama.expert_count": 1 << 30}, (), "num_experts must be at most 87381 for 3 layers, got 1073741824"),
    "window": ({"llama.attention.sliding_window": 8}, (), "sliding window of 8 tokens"),
    "mixed-heads": ({"llama.attention.head_count_kv": [2, 1, 2]}, (), "layers that differ"),
    "odd-heads": ({"llama.attention.head_count_kv": 3}, (), "4 heads over 3"),
    "missing": ({}, ("llama.embedding_length",), "embedding_length is missing"),
    "text-for-number": ({"llama.embedding_length": "much"}, (), "is 'much'; expected a number"),
    "nan": ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, (), "expected a number above 0"),
    "layers": ({"llama.block_count": 1 << 30}, (), "block_count is"),
    "rope": ({"llama.rope.scaling.type": "longrope"}, (), "rope scaling 'longrope'"),
    "partial-rope": ({"llama.rope.dimension_count": 5}, (), "positions rotate 5 numbers"),
}


@pytest.mark.parametrize("name", KEYS)
def test_keys_that_can_not_be_honoured_are_named(name: str, tmp_path: Path) -> None:
    keys, without, message = KEYS[name]
    save_random("llama", tmp_path)
    written = gguf_files.write(tmp_path / "model.gguf", tmp_path, keys=keys, without=without)
    with pytest.raises(ParlayError, match=message):
        read_config(written)


def test_tensors_that_are_missing_extra_or_of_another_shape_are_named(tmp_path: Path) -> None:
    save_random("llama", tmp_path)
    without = ("blk.1.ffn_up.weight",)
    written = gguf_files.write(tmp_path / "model.gguf", tmp_path, without=without, keys={"llama.vocab_size": 65})
    with pytest.raises(ParlayError, match=r"1 missing: model\.layers\.1\.mlp\.up_proj\.weight; .* of another shape"):
        load_weights(written, read_config(written))


@pytest.mark.parametrize(
    ("name", "shape", "kind", "message"),
    [
        ("blk.0.ffn_gate_up_exps.weight", (8, 32), gguf_files.Kind.F32, "extra: model.layers.0.mlp.experts"),
        ("blk.0.ffn_gate_up_exps.weight", (4,), gguf_files.Kind.F32, "extra: model.layers.0.mlp.experts"),
        ("blk.0.ffn_gate_exps.weight", (1 << 14, 1, 1), gguf_files.Kind.F32, "extra: model.layers.0.mlp.experts"),
        ("blk.0.attn_q.bias", (64, 32), gguf_files.Kind.Q8_0, "is not a matrix and stored as Q8_0"),
        ("rope_freqs.weight", (1 << 15,), gguf_files.Kind.F32, r"rope_freqs.weight has the shape \[32768\]"),
    ],
)
def test_tensors_that_would_be_taken_apart_or_read_whole_are_refused(
    name: str, shape: tuple[int, ...], kind: gguf_files.Kind, message: str, tmp_path: Path
) -> None:
    """Stacks of experts that the model has not, vectors in blocks, more factors of positions than a head has pairs."""
    save_random("llama", tmp_path)
    numbers = np.ones(shape, np.float32)
    written = gguf_files.write(tmp_path / "model.gguf", tmp_path, more={name: (numbers, kind)})
    with pytest.raises(ParlayError, match=message) as caught:
        load_weights(written, read_config(written))
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"dream.rope.freq_base": 1.0, "dream.rope.scaling.type": "yarn"},
            "rope_theta must be a number above 1, got 1.0",
        ),
        (
            {"dream.attention.key_length": 1 << 20, "dream.attention.value_length": 1 << 20},
            "attention.key_length must be at least 1 and at most 16384, got 1048576",
        ),
    ],
)
def test_models_that_fill_canvases_have_sizes_like_others(
    keys: dict[str, object], message: str, tmp_path: Path
) -> None:
    save_diffusion("dream", tmp_path)
    written = gguf_files.write(tmp_path / "model.gguf", tmp_path, keys={"tokenizer.ggml.mask_token_id": 1, **keys})
    with pytest.raises(ParlayError, match=message):
        read_config(written)


def test_small_matrices_are_not_packed_ahead(tmp_path: Path) -> None:
    """A panel would fill each up with zeros, to many times what the file takes."""
    save_random("llama", tmp_path)
    numbers = np.ones((1, 1 << 16), np.float32)
    written = gguf_files.write(tmp_path / "m.gguf", tmp_path, more={"x.weight": (numbers, gguf_files.Kind.Q8_0)})
    with packing_ahead(written):
        ahead = take(written)
    assert ahead is not None
    assert len(ahead.memory) < 2 * written.stat().st_size + (2 << 20)
    for job in ahead.jobs():
        job()


def test_every_truncation_is_refused(small: Path, tmp_path: Path) -> None:
    content, cut = small.read_bytes(), tmp_path / "cut.gguf"
    for length in [*range(0, 1200, 7), len(content) // 2, len(content) - 40]:
        cut.write_bytes(content[:length])
        with pytest.raises(BadGguf):
            read(cut)


def test_numbers_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    """Norms, scales of blocks, and plain numbers alike."""
    for kind, bad in ((gguf_files.Kind.F32, "<f"), (gguf_files.Kind.Q8_0, "<e"), (gguf_files.Kind.F16, "<e")):
        save_random("llama", tmp_path)
        written = gguf_files.write(tmp_path / "model.gguf", tmp_path, kind=kind)
        info = next(info for info in read(written).tensors if info.name == "blk.1.ffn_up.weight")
        content = bytearray(written.read_bytes())
        struct.pack_into(bad, content, info.offset + info.bytes // 2, float("nan"))
        written.write_bytes(content)
        with pytest.raises(ParlayError, match=r"'blk\.1\.ffn_up\.weight' of .* holds numbers that are not finite"):
            models.load(str(written), LoadOptions(device="cpu"))


SCORED: dict[str, object] = {
    "tokenizer.ggml.scores": [0.0, 0.0],
    "tokenizer.ggml.token_type": [2, 1],
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 0,
}
TOKENIZERS: dict[str, tuple[dict[str, object], tuple[str, ...], str]] = {
    "no-merges": ({}, ("tokenizer.ggml.merges",), "merges is missing"),
    "wrong-merges": ({"tokenizer.ggml.merges": ["q x"]}, (), "merges don't fit"),
    "no-tokens": ({}, ("tokenizer.ggml.tokens",), "tokens is missing"),
    "no-kind": ({}, ("tokenizer.ggml.model",), "its tokenizer is none"),
    "other-kind": ({"tokenizer.ggml.model": "bert"}, (), "of the kind 'bert'"),
    "other-words": ({"tokenizer.ggml.pre": "klingon"}, (), "'klingon', which Parlay does not know"),
    "no-words": ({}, ("tokenizer.ggml.pre",), "pre is missing"),
    "no-scores": ({"tokenizer.ggml.model": "llama"}, (), "scores is missing"),
    "no-token": ({"tokenizer.ggml.eos_token_id": 1 << 30}, (), "eos_token_id is 1073741824, which is not a token"),
    "long-token": (
        {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["<unk>", "a" * 5000], **SCORED},
        (),
        "a token in tokenizer.ggml.tokens has 5000 letters",
    ),
    "few-types": ({"tokenizer.ggml.token_type": [1, 1]}, (), "token_type has no number for each"),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_tokenizer_that_can_not_be_made_is_refused_with_the_way_out(name: str, tmp_path: Path) -> None:
    keys, without, message = TOKENIZERS[name]
    written = gguf_files.write(
        tmp_path / "mini.gguf", resolve("parlay-mini"), keys=keys, without=without, tokenizer=True
    )
    with pytest.raises(BadGguf, match=message):
        load_tokenizer(written)


TEMPLATES = {
    "attributes": "{{ messages.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ cycler.__init__.__globals__.os.system('touch broken-out') }}",
    "imports": "{% import 'os' as os %}",
    "endless": "{% for i in range(1000000000) %}x{% endfor %}",
    "syntax": "{% for %}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_that_attacks_the_sandbox_is_an_error(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    keys = {"tokenizer.chat_template": TEMPLATES[name]}
    written = gguf_files.write(tmp_path / "mini.gguf", resolve("parlay-mini"), keys=keys, tokenizer=True)
    llm = LLM(str(written), load=LoadOptions(dtype="float32", device="cpu"))
    with pytest.raises(ParlayError, match="chat template") as caught:
        llm.chat([{"role": "user", "content": "hello"}], SamplingParams(max_tokens=1))
    assert len(str(caught.value).splitlines()) == 1
    assert not (tmp_path / "broken-out").exists()


def test_the_command_line_says_it_in_one_line(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(BROKEN["overlap"][0])
    result = cli("generate", "hello", "--model", str(path))
    assert (result.code, result.out) == (1, "")
    assert result.err == f"parlay: error: {path} can't be read as a GGUF file: the tensor 'u' lies over another\n"
    assert not (tmp_path / "cache").exists()


def test_what_a_file_says_does_not_reach_the_terminal_as_it_is(cli: Cli, tmp_path: Path) -> None:
    save_random("llama", tmp_path)
    said = json.loads((tmp_path / "config.json").read_text()) | {"rms_norm_eps": "\x1b]0;owned\x07\n\x1b[31m"}
    (tmp_path / "config.json").write_text(json.dumps(said))
    result = cli("generate", "hello", "--model", str(tmp_path))
    assert (result.code, result.out) == (1, "")
    assert "rms_norm_eps" in result.err
    assert "\x1b" not in result.err
    assert "rms_norm_eps" in result.err.splitlines()[-1]


def test_a_folder_of_files_asks_for_one_of_them(cli: Cli, tmp_path: Path) -> None:
    for name in ("b.gguf", "a.gguf"):
        (tmp_path / name).touch()
    result = cli("generate", "hello", "--model", str(tmp_path))
    assert (result.code, result.out) == (1, "")
    assert result.err == f"parlay: error: {tmp_path} contains GGUF files: name one of them, as {tmp_path / 'a.gguf'}\n"


def mutated(content: bytes, header: int, draw: random.Random) -> bytes:
    """The file with some bytes, numbers or stretches of its header changed, or cut short."""
    changed = bytearray(content)
    for _ in range(draw.choice((1, 1, 2, 4, 16))):
        at = draw.randrange(header)
        match draw.randrange(6):
            case 0:
                changed[at] ^= 1 << draw.randrange(8)
            case 1:
                changed[at] = draw.choice((0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256)))
            case 2:
                number = draw.choice((0, 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1, draw.randrange(2**24)))
                changed[at : at + 8] = struct.pack("<Q", number)
            case 3:
                other = draw.randrange(header)
                changed[at : at + 24] = changed[other : other + 24]
            case 4:
                del changed[at : at + draw.randrange(1, 40)]
            case _:
                if draw.randrange(8) == 0:
                    del changed[at:]
                    break
                changed[at : at + 4] = struct.pack("<I", draw.randrange(48))
    return bytes(changed)


def fuzz(content: bytes, header: int, count: int, path: Path, load: Callable[[Path], object]) -> int:
    """How many of so many mutated files were refused; anything but a refusal or success is raised."""
    refused = 0
    for seed in range(count):
        path.write_bytes(mutated(content, header, random.Random(seed)))
        try:
            load(path)
        except ParlayError as error:
            refused += 1
            lines = len(str(error).splitlines())
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error
        else:
            lines = 1
        assert lines == 1, f"seed {seed}"
    return refused


@pytest.mark.parametrize("count", [NORMAL, pytest.param(SLOW, marks=pytest.mark.slow)])
def test_mutated_headers_are_refused_or_read_in_bounded_memory(count: int, tmp_path: Path) -> None:
    save_random("llama", tmp_path)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(4)), "▁", "a", "b", "ab", "▁ab"]
    keys = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*tokens, *map(str, range(64 - len(tokens)))],
        "tokenizer.ggml.scores": [-float(number) for number in range(64)],
        "tokenizer.ggml.token_type": [2, 3, 3, 6, 6, 6, 6, *[1] * 57],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": "{{ messages }}",
    }
    written = gguf_files.write(tmp_path / "model.gguf", tmp_path, keys=keys)
    load_all(written)
    header = min(info.offset for info in read(written).tensors)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused = fuzz(written.read_bytes(), header, count, tmp_path / "mutated.gguf", load_all)
    assert refused > count // 3
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 << 10  # KiB


def test_torch_is_not_asked_to_write_to_the_file(small: Path) -> None:
    """Weights are a private mapping: what is written to them stays in memory."""
    content = small.read_bytes()
    for weight in load_weights(small, read_config(small)).values():
        data = weight if isinstance(weight, torch.Tensor) else weight.data
        data.zero_()
    assert small.read_bytes() == content
