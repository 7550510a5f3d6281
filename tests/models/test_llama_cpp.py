"""llama.cpp as a runner: its rules of sequences and cells by a model of them, and where the package is, by itself."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import pytest
import torch

from parlay import LLM, SamplingParams, models
from parlay.cache import Budget
from parlay.models import UnsupportedModel
from parlay.models.fetch.resolving import resolve
from parlay.models.llama_cpp.context import BatchRow, Context, ContextFacts, Decoded
from parlay.models.llama_cpp.runner import LlamaCppRunner
from parlay.options import LoadOptions, UsageError
from parlay.testing.checkpoints import save_random
from parlay.testing.conformance import KitLength, Stage, check_runner, run_check, runner_stage, subject_of
from parlay.testing.toys import RandomLogits
from parlay.types import OutOfRoom, ParlayError, Segment, Tree
from tests.models import gguf_files

VOCAB = 24
IN_LLAMA_CPP = LoadOptions(runner="llama.cpp", threads=1)
needs_package = pytest.mark.skipif(
    importlib.util.find_spec("llama_cpp") is None,
    reason="llama-cpp-python is not installed: it is compiled from source",
)


@dataclass
class _Cell:
    token: int
    position: int
    sequences: set[int]


@dataclass
class Cells(Context):
    """A context after the rules of llama.cpp: what it refuses is an AssertionError here.

    Logits are those of the text that a row sees: the cells of its first sequence up to its position.
    """

    cells: int = 2048
    sequences: int = 256
    logits_of: RandomLogits = field(default_factory=lambda: RandomLogits(VOCAB))
    held: list[_Cell] = field(default_factory=list)

    @property
    def facts(self) -> ContextFacts:
        return ContextFacts(VOCAB, 4096, 8, 2, (0,), False, self.cells, self.sequences, 64, "a model of llama.cpp")

    def decode(self, rows: Sequence[BatchRow], states: bool) -> Decoded:
        before = {number: self.positions(number) for row in rows for number in row.sequences}
        last = {number: end for number, (_, end) in before.items()}
        sets = {number: set(before) for number in before}
        for row in rows:
            assert len({before[number] for number in row.sequences}) == 1, "coupled sequences have diverged"
            for number in row.sequences:
                assert row.position == last[number] + 1, "positions of a sequence go on where it ends"
                last[number] = row.position
                assert set(row.sequences) <= sets[number], "a sequence belongs to incompatible sets"
                sets[number] = set(row.sequences)
            self.held.append(_Cell(row.token, row.position, set(row.sequences)))
        assert len(self.held) <= self.cells, "no free cell"
        wanted = [self.logits_of(self._text(row)) for row in rows if row.wanted]
        seen = [torch.full((8,), float(sum(self._text(row)))) for row in rows]
        logits_WV = torch.stack(wanted) if wanted else torch.empty(0, VOCAB)
        return Decoded(logits_WV, torch.stack(seen) if states else None)

    def _text(self, row: BatchRow) -> list[int]:
        seen = [cell for cell in self.held if row.sequences[0] in cell.sequences and cell.position <= row.position]
        seen.sort(key=lambda cell: cell.position)
        assert [cell.position for cell in seen] == list(range(row.position + 1)), "a row sees two cells at one place"
        return [cell.token for cell in seen]

    def copy(self, source: int, target: int, end: int, first: int = 0) -> None:
        for cell in self.held:
            if source in cell.sequences and first <= cell.position < end:
                cell.sequences.add(target)

    def remove(self, sequence: int, first: int) -> None:
        for cell in self.held:
            if cell.position >= first:
                cell.sequences.discard(sequence)
        self.held = [cell for cell in self.held if cell.sequences]

    def positions(self, sequence: int) -> tuple[int, int]:
        found = [cell.position for cell in self.held if sequence in cell.sequences]
        return (min(found), max(found)) if found else (-1, -1)


def model_of(capacity: int, sequences: int = 256) -> LlamaCppRunner:
    return LlamaCppRunner(Cells(capacity, sequences), name="cells")


@pytest.mark.parametrize("sequences", [256, 106], ids=["a sequence for each path", "paths one after another"])
def test_rows_see_their_own_path_whatever_is_kept_cut_or_copied(sequences: int) -> None:
    """With 106, `limits` opens 102 sequences and trees of the walk have too few: both ways occur."""
    report = check_runner(lambda capacity: model_of(capacity, sequences), RandomLogits(VOCAB), steps=120)
    assert report.passed, str(report)


def test_too_few_sequences_run_a_tree_by_its_paths_and_keep_what_is_left_of_them() -> None:
    runner = model_of(100, sequences=1)
    runner.open(0, (1,))
    tree = Tree((2, 3, 4, 5), (-1, -1, 0, 1))
    out = runner.forward([Segment(0, (1,), tree)], taps=(2,))
    texts = [(1,), (1, 2), (1, 3), (1, 2, 4), (1, 3, 5)]
    assert torch.equal(out.logits_RV, torch.stack([RandomLogits(VOCAB)(text) for text in texts]))
    assert [int(row[0]) for row in out.taps[2]] == [sum(text) for text in texts]
    assert runner.keep(0, (0, 2)) == 1  # the path that ran first is gone: the engine feeds it again
    runner.forward([Segment(0, (9,), tree)])
    assert runner.keep(0, (1, 3)) == 4
    runner.check()


def test_sequences_beyond_llama_cpps_are_refused() -> None:
    runner = model_of(100, sequences=2)
    runner.open(0, (1,))
    runner.open(1, (1,))
    with pytest.raises(OutOfRoom, match=r"llama.cpp holds 2 sequences"):
        runner.open(2, (1,))
    with pytest.raises(OutOfRoom, match=r"llama.cpp holds 2 sequences"):
        runner.fork(0, 2)
    runner.release(1)
    assert runner.open(2, (1,)) == 0


@pytest.mark.parametrize(
    ("segment", "taps", "words"),
    [
        (Segment(0, (1,), base=-1), (), "run cached tokens again"),
        (Segment(0, (1,)), (1,), r"hidden states of layers \[1\]"),
        (Segment(0, (1, 2), logits_from=1, base=1), (), "left no 1 rows"),
        (Segment(0, (1,), bits=4), (), "round weights"),
    ],
    ids=["cached tokens", "inner layers", "rows that did not run", "bits"],
)
def test_what_llama_cpp_can_not_run_is_said(segment: Segment, taps: Sequence[int], words: str) -> None:
    runner = model_of(100)
    runner.open(0, (1, 2, 3))
    with pytest.raises(ValueError, match=words):
        runner.forward([segment], taps)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"dtype": "float32"}, "dtype float32 is not supported"),
        ({"quantize": "int8"}, "`parlay quantize` makes a smaller file"),
        ({"lora": "folder"}, "merges no adapters"),
        ({"compile": True}, "torch computes nothing there"),
    ],
)
def test_options_that_llama_cpp_can_not_honour_are_refused(changed: dict[str, str], words: str, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(UsageError, match=words):
        models.load(str(file), replace(IN_LLAMA_CPP, **changed))


def test_a_folder_and_a_loaded_model_are_refused() -> None:
    with pytest.raises(UsageError, match="parlay-mini is a folder: name a GGUF file"):
        models.load("parlay-mini", IN_LLAMA_CPP)
    with pytest.raises(ValueError, match="a loaded model runs through transformers"):
        models.load(torch.nn.Module(), IN_LLAMA_CPP)  # type: ignore[arg-type]


def test_a_missing_package_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(ParlayError, match=r"pip install 'parlay\[llama-cpp\]'"):
        models.load(str(file), IN_LLAMA_CPP)


# ------------------------------------------------------------------------------------------------------- llama.cpp

EFFORT = KitLength(tokens=32, draws=0)


@cache
def files(folder: Path) -> tuple[str, str]:
    """Two random models with tokenizers of their own kind, in float32."""
    made = []
    for seed in (0, 1):
        checkpoint = folder / str(seed)
        checkpoint.mkdir()
        save_random("llama", checkpoint, seed=seed)
        keys = {"tokenizer.ggml.model": "none"}
        made.append(str(gguf_files.write(folder / f"{seed}.gguf", checkpoint, keys=keys)))
    return made[0], made[1]


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Stage:
    target, draft = files(tmp_path_factory.mktemp("gguf"))
    load = replace(IN_LLAMA_CPP, kv_cache_dtype="float32")
    return runner_stage(
        "llama.cpp",
        lambda capacity: models.load(target, load, cache_tokens=capacity),
        lambda: models.load(draft, load, cache_tokens=8192),
        1e-4,
    )


@needs_package
def test_llama_cpps_logits_are_those_of_a_fresh_prefill(stage: Stage) -> None:
    report = check_runner(stage.open_runner, stage.logits_of, noise_bound=stage.noise_bound, steps=30)
    assert report.passed, str(report)


@needs_package
@pytest.mark.parametrize("check", ["greedy", "mixed", "forks", "chunks"])
def test_every_text_of_llama_cpp_is_the_one_of_plain_decoding(stage: Stage, check: str) -> None:
    finding = run_check(check, subject_of("union"), stage, EFFORT)
    assert finding.passed, str(finding)


@needs_package
def test_a_damaged_file_and_too_little_memory_are_one_line(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF" + bytes(64))
    with pytest.raises(UnsupportedModel, match=r"llama.cpp can't load .*model.gguf"):
        models.load(str(file), IN_LLAMA_CPP)
    target, _ = files(tmp_path)
    with pytest.raises(ParlayError, match="memory is too small"):
        models.load(target, IN_LLAMA_CPP, budget=Budget(1000))


@needs_package
def test_texts_are_llama_cpps_own() -> None:
    """Greedy, by the package's own loop, and by several ways to draft."""
    import llama_cpp

    path = str(resolve("smollm2-135m-draft"))
    own = llama_cpp.Llama(path, n_ctx=512, n_threads=1, n_threads_batch=1, verbose=False)
    with LLM(path, load=IN_LLAMA_CPP, strategy="none", tokenizer=None) as llm:
        prompt = list(range(100, 140))
        expected = []
        for token in own.generate(prompt, temp=0.0, repeat_penalty=1.0):
            expected.append(token)
            if len(expected) == 48:
                break
        params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
        for strategy in ("none", "prompt-lookup", "lookahead", f"draft-model:model={path},shape=tree,width=2"):
            (output,) = llm.generate([prompt], params, strategy=strategy)
            assert list(output.outputs[0].token_ids) == expected, strategy
