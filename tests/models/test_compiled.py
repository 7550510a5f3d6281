"""The compiled decoder: it says what torch's operators say, and where it can't run those take its place."""

from __future__ import annotations

import os
import platform
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from parlay.compiled import build as compiled_build
from parlay.compiled import library
from parlay.compiled.build import LIBRARY, NAMES, CannotBuild, build, digest, is_current
from parlay.compiled.library import SWITCH, NotLoaded
from parlay.models import choosing
from parlay.models.config import DecoderConfig
from parlay.models.native import NativeRunner, Quantize
from parlay.models.weights.quantize import Int8Weight
from parlay.types import Segment, Tree

CPU = torch.device("cpu")
TEXT = tuple(range(40, 140))
TREE = Tree((7, 8, 9, 10, 11), (-1, 0, 0, 2, -1))

pytestmark = pytest.mark.skipif(not LIBRARY.exists(), reason="the package was installed without a C compiler")


def make(
    checkpoint: tuple[DecoderConfig, dict[str, Tensor]],
    dtype: torch.dtype = torch.float32,
    quantize: Quantize | None = None,
) -> NativeRunner:
    config, weights = checkpoint
    return NativeRunner(config, weights, dtype=dtype, device=CPU, max_tokens_cached=4096, quantize=quantize)


def logits(runner: NativeRunner) -> Tensor:
    """Logits of a text, then of a tree behind it."""
    runner.open(0, TEXT)
    assert runner.reserve(0, len(TEXT) + 1 + len(TREE))
    first = runner.forward([Segment(0, TEXT)]).logits_RV
    runner.keep(0, ())
    return torch.cat((first, runner.forward([Segment(0, (5,), TREE)]).logits_RV))


def greedy(runner: NativeRunner, count: int) -> list[int]:
    runner.open(1, TEXT)
    assert runner.reserve(1, len(TEXT) + count)
    fed, tokens = TEXT, []
    for _ in range(count):
        row = runner.forward([Segment(1, fed, logits_from=len(fed) - 1)]).logits_RV[0]
        runner.keep(1, ())
        tokens.append(int(row.argmax()))
        fed = (tokens[-1],)
    return tokens


@pytest.mark.parametrize("kernels", NAMES)
def test_logits_are_those_of_torch(
    checkpoint: tuple[DecoderConfig, dict[str, Tensor]], kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SWITCH, kernels)
    compiled = make(checkpoint)
    monkeypatch.setenv(SWITCH, "0")
    eager = make(checkpoint)
    assert compiled.spec.kernels != eager.spec.kernels
    torch.testing.assert_close(logits(compiled), logits(eager), atol=2e-4, rtol=1e-4)


def test_greedy_text_in_float32_is_that_of_torch(
    checkpoint: tuple[DecoderConfig, dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = greedy(make(checkpoint), 100)
    monkeypatch.setenv(SWITCH, "0")
    assert greedy(make(checkpoint), 100) == compiled


def test_bfloat16_stays_near_float32(checkpoint: tuple[DecoderConfig, dict[str, Tensor]]) -> None:
    exact, close = logits(make(checkpoint)), logits(make(checkpoint, torch.bfloat16))
    assert (exact - close).abs().mean() < 0.05 * exact.std()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernels", NAMES)
def test_int8_stays_near_the_weights_that_it_stores(
    checkpoint: tuple[DecoderConfig, dict[str, Tensor]],
    dtype: torch.dtype,
    kernels: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch's operators on weights that were rounded to eight bits say nearly the same: inputs are rounded besides."""
    monkeypatch.setenv(SWITCH, kernels)
    runner = make(checkpoint, dtype, quantize="int8")
    assert "int8 weights" in runner.spec.kernels
    stored = logits(runner)
    monkeypatch.setenv(SWITCH, "0")
    expected, full = logits(make(checkpoint, quantize="int8")), logits(make(checkpoint))
    assert (full - expected).abs().mean() > 0
    assert (stored - expected).abs().mean() < 0.05 * expected.std()


def test_eight_bits_hold_a_weight_to_half_a_step() -> None:
    weight = torch.randn(16, 40, generator=torch.Generator().manual_seed(0))
    weight[3] = 0
    rounded = Int8Weight(weight)
    numbers, steps = rounded.quantized()
    assert numbers.dtype == torch.int8
    assert int(numbers.abs().max()) == 127
    assert bool(((weight - rounded.dense(torch.float32)).abs() <= steps[:, None] / 2 + 1e-6).all())


def test_without_the_library_torch_runs_the_same_model(
    checkpoint: tuple[DecoderConfig, dict[str, Tensor]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And a warning says so once, since an installation with a compiler mends it."""
    monkeypatch.setattr(library, "LIBRARY", Path("nowhere.so"))
    choosing._warn_once.cache_clear()
    _, runner = make(checkpoint), make(checkpoint)
    assert [record.levelname for record in caplog.records if "no compiled decoder" in record.message] == ["WARNING"]
    why = "it was not built: run python -m parlay.compiled.build, which needs a C compiler"
    assert runner.spec.kernels.endswith(f"no compiled decoder: {why}")
    assert logits(runner).isfinite().all()


def test_a_library_of_other_sources_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "digest", lambda: f"{digest()[:-1]}?")
    library._load.cache_clear()
    with pytest.raises(NotLoaded, match="it was built of other sources: run python -m"):
        library.load()
    library._load.cache_clear()


def test_an_installation_keeps_a_library_that_fits_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made, built_by = tmp_path / "core.so", os.stat(compiled_build.__file__).st_mtime
    assert not is_current(made)
    made.write_bytes(LIBRARY.read_bytes())
    assert is_current(made)
    os.utime(made, (built_by - 1, built_by - 1))
    assert not is_current(made), "by other flags, perhaps"
    os.utime(made)
    monkeypatch.setattr(compiled_build, "digest", lambda: "of others")
    assert not is_current(made)
    (tmp_path / "other.so").write_bytes(b"for another machine")
    assert not is_current(tmp_path / "other.so")


def test_a_model_that_it_can_not_run_is_named(
    checkpoint: tuple[DecoderConfig, dict[str, Tensor]], caplog: pytest.LogCaptureFixture
) -> None:
    config, weights = checkpoint
    runner = NativeRunner(config, weights, dtype=torch.float64, device=CPU, max_tokens_cached=512)
    assert not caplog.records  # nobody did anything wrong
    assert runner.spec.kernels.endswith("it computes in float32 and bfloat16, not float64")


def test_a_bad_switch_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "fast")
    with pytest.raises(ValueError, match="PARLAY_COMPILED=fast is neither 0 nor one of plain"):
        library.load()


@pytest.mark.parametrize(
    ("compiler", "words"),
    [("/nowhere/cc", "can't be run"), ("false", "failed"), (None, "there is no C compiler")],
)
def test_without_a_compiler_the_reason_is_one_line(
    compiler: str | None, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CC", raising=False)
    if compiler is None:
        monkeypatch.setenv("PATH", str(tmp_path))
    else:
        monkeypatch.setenv("CC", compiler)
    with pytest.raises(CannotBuild, match=words) as error:
        build(tmp_path / "core.so")
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("said", "words"), [("env cc -O1", ["env", "cc", "-O1"]), ("'a b/cc' -m64", ["a b/cc", "-m64"]), ("{0}", ["{0}"])]
)
def test_a_compiler_may_be_several_words(
    said: str, words: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As of ccache, and its path may have spaces."""
    own = tmp_path / "a compiler" / "cc"
    own.parent.mkdir()
    own.write_text("#!/bin/sh\n")
    own.chmod(0o755)
    monkeypatch.setenv("CC", said.format(own))
    assert compiled_build.compiler_command() == [word.format(own) for word in words]


def test_a_folder_that_can_not_be_written_to_is_named_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CC", "false")
    with pytest.raises(CannotBuild, match=r"can't write .*nowhere.*No such file"):
        build(tmp_path / "nowhere" / "core.so")


NAMES_ALONE = """
#include "core.h"
#define TEXT(NAME) #NAME
#define QUOTED(NAME) TEXT(NAME)
const Core CORE = {QUOTED(LABEL)};
"""
OLD_COMPILER = """#!/bin/sh
for word in "$@"; do
    case "$word" in -mavxvnni | -mavx512*) echo "error: unrecognized command line option '$word'" >&2; exit 1 ;; esac
done
exec cc "$@" -O0
"""


@pytest.mark.skipif("avx2" not in NAMES or platform.machine() != "x86_64", reason="only x86 has several sets")
def test_instruction_sets_that_the_compiler_does_not_know_are_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And the widest of the others runs, whatever the processor could do beyond it.

    Each set's table has its name and nothing else here: to compile what it does takes eight seconds.
    """
    sources = tmp_path / "core"
    shutil.copytree(compiled_build.SOURCES, sources)
    (sources / "kernels.c").write_text(NAMES_ALONE)
    (sources / "formats.c").write_text("")
    monkeypatch.setattr(compiled_build, "SOURCES", sources)
    compiler = tmp_path / "old-cc"
    compiler.write_text(OLD_COMPILER)
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    made = build(tmp_path / "core.so")
    monkeypatch.setattr(library, "LIBRARY", made)
    monkeypatch.delenv(SWITCH, raising=False)
    assert library.load().name == b"avx2"
    for name in NAMES:
        monkeypatch.setenv(SWITCH, name)
        assert library.load().name == (b"plain" if name == "plain" else b"avx2")
