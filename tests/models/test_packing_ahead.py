"""Matrices that are packed while torch is imported: the same numbers as otherwise, and the same refusals."""

from __future__ import annotations

import os
import subprocess
import sys
import weakref
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from parlay import models
from parlay.compiled.library import NotLoaded, load
from parlay.models.gguf.packing_ahead import PackingAhead, packing_ahead, take
from parlay.models.gguf.reader import read
from parlay.options import LoadOptions
from parlay.testing.checkpoints import VOCAB_SIZE, save_random
from parlay.types import ParlayError, Segment
from tests.models import gguf_files

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="nothing is packed ahead elsewhere")


@pytest.fixture(autouse=True)
def library() -> None:
    try:
        load()
    except NotLoaded as reason:
        pytest.skip(str(reason))


def logits(model: Path) -> Tensor:
    runner = models.load(str(model), LoadOptions(device="cpu"), cache_tokens=256)
    tokens = torch.randint(VOCAB_SIZE, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    runner.open(0, tokens)
    assert runner.reserve(0, len(tokens))
    return runner.forward([Segment(0, tuple(tokens))]).logits_RV


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_logits_are_the_same_bits(name: str, tmp_path: Path) -> None:
    """Also where rows of queries and keys change places, as in llama's files: these are packed later."""
    save_random(name, tmp_path)
    written = gguf_files.write(tmp_path / "model.gguf", tmp_path, kind=Kind.Q8_0)
    expected = logits(written)
    with packing_ahead(written):
        assert torch.equal(logits(written), expected)
        assert take(written) is None  # the model has taken it
    assert torch.equal(logits(written), expected)


def test_keys_that_nobody_reads_are_not_packed(tmp_path: Path) -> None:
    """The last layers of Gemma 4 may see earlier ones' keys. A file may have matrices of their own, too."""
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "gemma4")
    writer.add_block_count(3)
    writer.add_uint32("gemma4.attention.shared_kv_layers", 1)
    rows = gguf.quantize(np.ones((32, 64), np.float32), Kind.Q8_0)
    for name in ("blk.1.attn_k", "blk.2.attn_k", "blk.2.attn_v", "blk.2.attn_q"):
        writer.add_tensor(f"{name}.weight", rows, raw_dtype=Kind.Q8_0)
    gguf_files.finish(writer)
    header = read(tmp_path / "model.gguf")
    ahead = PackingAhead(header, load())
    packed = [info.name for info in header.tensors if ahead.panels(info.offset) is not None]
    assert packed == ["blk.1.attn_k.weight", "blk.2.attn_q.weight"]
    ahead.cancel()


def test_what_was_taken_is_freed_though_packing_goes_on_for_others(tmp_path: Path) -> None:
    """A server packs its first model so, and may unload that before it ends."""
    save_random("qwen2", tmp_path)
    written = gguf_files.write(tmp_path / "model.gguf", tmp_path, kind=Kind.Q8_0)
    with packing_ahead(written):
        taken = take(written)
        assert taken is not None
        for job in taken.jobs():
            job()
        freed = weakref.ref(taken)
        del taken, job
        assert freed() is None


def test_a_file_that_has_changed_meanwhile_is_packed_anew(tmp_path: Path) -> None:
    save_random("qwen2", tmp_path)
    written = gguf_files.write(tmp_path / "model.gguf", tmp_path, kind=Kind.Q8_0)
    with packing_ahead(written):
        other = gguf_files.write(tmp_path / "other.gguf", tmp_path, kind=Kind.Q4_0)
        expected = logits(other)
        os.replace(other, written)
        assert torch.equal(logits(written), expected)


def test_scales_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    save_random("qwen2", tmp_path)
    written = gguf_files.write(tmp_path / "model.gguf", tmp_path, kind=Kind.Q8_0)
    info = next(info for info in read(written).tensors if info.name == "blk.1.ffn_up.weight")
    content = bytearray(written.read_bytes())
    content[info.offset : info.offset + 2] = b"\x00\x7e"
    written.write_bytes(content)
    with packing_ahead(written), pytest.raises(ParlayError, match=r"'blk\.1\.ffn_up\.weight' of .* not finite"):
        logits(written)


def test_what_can_not_be_packed_is_left_to_loading(tmp_path: Path) -> None:
    """A damaged file raises nothing here, so that loading says what is wrong."""
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with packing_ahead(tmp_path / "model.gguf"):
        assert take(tmp_path / "model.gguf") is None


def test_packing_ahead_needs_no_torch() -> None:
    """Importing it would wait for what it is there to overlap."""
    code = "import sys, parlay.models.gguf.packing_ahead; assert not {'torch', 'numpy'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], check=True)
