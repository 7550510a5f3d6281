"""Runs EleutherAI's lm-eval against `parlay serve`, with plain decoding and the default strategy, and compares the
answers.

    python -m benchmarks.serving.lm_eval_run --lm-eval EXECUTABLE

EXECUTABLE belongs to an environment of its own (`pip install 'lm-eval[api]' transformers`). The tasks in
`benchmarks/serving/lm_eval` are small: likelihoods of given continuations, and texts that the model writes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.commands import RESULTS, one_line_errors
from benchmarks.options import command_parser
from benchmarks.pages import about, table
from benchmarks.serving.served import served
from parlay.bench.provenance import ROOT, provenance
from parlay.models.fetch.resolving import resolve
from parlay.models.loading import load_tokenizer
from parlay.strategies.entry import DEFAULT_STRATEGY

TASKS = ROOT / "benchmarks" / "serving" / "lm_eval"
NAMES = ("parlay_choice", "parlay_copy", "parlay_calls")
MODELS = ("parlay-mini", "smollm2-135m")
LIMIT = 600.0
AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class Verdict:
    """The results of a model and strategy: the score of each task, and the answers to each request, with full
    likelihoods."""

    scores: Mapping[str, float]
    answers: Mapping[str, list[Any]]


def evaluate(executable: Path, model: str, strategy: str) -> Verdict:
    """Ask a server of its own all tasks. Raises ValueError with the end of lm-eval's errors if it fails."""
    with served(model, "--strategy", strategy) as url, tempfile.TemporaryDirectory() as folder:
        found = resolve(model)
        tokenizer = found if found.is_dir() else write_tokenizer(found, Path(folder) / "tokenizer")
        done = subprocess.run(
            (executable, *arguments(url, model, tokenizer, folder)),
            cwd=TASKS,
            capture_output=True,
            text=True,
            timeout=LIMIT,
            env=environment(folder),
            check=False,
        )
        if done.returncode:
            raise ValueError(f"lm-eval failed: {done.stderr.strip()[-600:]}")
        return read(Path(folder))


def write_tokenizer(model: Path, folder: Path) -> Path:
    """Write a GGUF file's tokenizer as a folder that transformers reads."""
    tokenizer = load_tokenizer(model)
    folder.mkdir()
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    told = {"tokenizer_class": "TokenizersBackend", **tokenizer.special_tokens_map}
    (folder / "tokenizer_config.json").write_text(json.dumps(told), encoding="utf-8")
    return folder


def arguments(url: str, model: str, tokenizer: Path, folder: str) -> list[str]:
    """Return the arguments of lm-eval, which sends token ids and several requests at once."""
    asked = {
        "model": model,
        "base_url": f"{url}/v1/completions",
        "tokenizer_backend": "huggingface",
        "tokenizer": tokenizer,
        "add_bos_token": True,  # the models were trained with one before every text
        "num_concurrent": AT_ONCE,
        "max_retries": 1,
    }
    return [
        *("--model", "local-completions", "--model_args", ",".join(f"{name}={value}" for name, value in asked.items())),
        *("--include_path", ".", "--tasks", ",".join(NAMES)),
        *("--output_path", folder, "--log_samples"),
    ]


def environment(folder: str) -> dict[str, str]:
    """Return environment variables without Parlay's packages and without access to the Hub."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return kept | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": folder}


def read(folder: Path) -> Verdict:
    """Read what lm-eval wrote: one file of results, and one of samples for each task."""
    (results,) = folder.rglob("results_*.json")
    told = json.loads(results.read_text(encoding="utf-8"))["results"]
    scores = {name: _score(told[name]) for name in NAMES}
    answers = {}
    for name in NAMES:
        (samples,) = folder.rglob(f"samples_{name}_*.jsonl")
        documents = map(json.loads, samples.read_text(encoding="utf-8").splitlines())
        answers[name] = [one["resps"] for one in sorted(documents, key=lambda one: int(one["doc_id"]))]
    return Verdict(scores, answers)


def _score(told: Mapping[str, Any]) -> float:
    """Return the task's metric. The mapping also has its standard error and the task's name."""
    (score,) = (value for name, value in told.items() if name.endswith(",none") and "stderr" not in name)
    return float(score)


def page(header: dict[str, Any], version: str, found: Mapping[str, tuple[Verdict, Verdict]]) -> str:
    """Write the Markdown page: each model's scores with plain decoding and with the default strategy."""
    told = (
        f"lm-eval {version}, `local-completions`, asks `parlay serve` with `--strategy none` and with the default, "
        f"`{DEFAULT_STRATEGY}`. The tasks are tiny and made for the built-in model; the scores say nothing but that "
        "they are equal. *Same answers* counts documents whose answers (texts, or likelihoods with all their digits) "
        "are equal."
    )
    lines = [
        [model, name, *(f"{verdict.scores[name]:.3f}" for verdict in verdicts), _same(*verdicts, name)]
        for model, verdicts in found.items()
        for name in NAMES
    ]
    head = ("model", "task", "none", DEFAULT_STRATEGY, "same answers")
    return "\n".join(["# lm-eval against the server", "", about(header), "", told, "", *table(head, lines)])


def _same(plain: Verdict, default: Verdict, task: str) -> str:
    pairs = list(zip(plain.answers[task], default.answers[task], strict=True))
    return f"{sum(one == other for one, other in pairs)}/{len(pairs)}"


def version_of(executable: Path) -> str:
    """Return lm-eval's version. Raises ValueError if there is none."""
    python = executable.parent / "python"
    find = "from importlib.metadata import version; print(version('lm_eval'))"
    try:
        done = subprocess.run((python, "-c", find), capture_output=True, text=True, check=False)
    except OSError:
        done = None
    if done is None or done.returncode or not executable.exists():
        raise ValueError(
            f"{executable} is not an lm-eval: make an environment (python3 -m venv DIR; DIR/bin/pip install "
            "'lm-eval[api]' transformers) and give --lm-eval DIR/bin/lm_eval"
        )
    return done.stdout.strip()


@one_line_errors("serving.lm_eval_run")
def main(words: Sequence[str] | None = None) -> int:
    """Run the command. Return 1 if an answer differs, and 2 if lm-eval or the server fails."""
    parser = command_parser("serving.lm_eval_run", __doc__)
    parser.add_argument(
        "--lm-eval", type=Path, required=True, metavar="EXECUTABLE", help="lm_eval in an environment of its own"
    )
    parser.add_argument("--models", nargs="+", default=MODELS, help=f"models to serve (default: {' '.join(MODELS)})")
    parser.add_argument("--out", type=Path, metavar="FILE", default=RESULTS / "lm-eval.md", help="the page")
    options = parser.parse_args(words)
    try:
        version = version_of(options.lm_eval)
        found = {
            model: (evaluate(options.lm_eval, model, "none"), evaluate(options.lm_eval, model, DEFAULT_STRATEGY))
            for model in options.models
        }
    except ValueError as error:
        print(f"benchmarks.serving.lm_eval_run: {error}", file=sys.stderr)
        return 2
    header = provenance("python -m benchmarks.serving.lm_eval_run --lm-eval EXECUTABLE")
    options.out.write_text(page(header, version, found), encoding="utf-8")
    equal = all(plain == default for plain, default in found.values())
    print(f"wrote {options.out}; {'equal' if equal else 'different'}: {[pair[0].scores for pair in found.values()]}")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
