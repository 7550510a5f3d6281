"""`parlay train lm`: trains a small language model on text files, for a given time, on the CPU."""

from __future__ import annotations

import json
import math
import shutil
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from parlay.options import Options, option
from parlay.system.progress import above_bars
from parlay.system.terminal import undivided
from parlay.train.lm_data import HELDOUT, READY, TRAINING, Batches, load_stream, prepare, wrap_tokenizer
from parlay.train.lm_model import CONTEXT, SHAPES, Loss, export, machine_record, make_loss, save_state, text_loss
from parlay.train.optimizers import Optimizers, TrainingClock, learning_rate, row_length
from parlay.train.saving import make_folder
from parlay.train.watching import Watch
from parlay.types import FieldError

CLIP = 1.0
CHECK_ROWS, CHECK_LENGTH = 16, 512


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions(Options):
    """Options of a run. After ``hours`` (or ``tokens``) the run ends; by then the learning rate has decayed to zero."""

    data: Path = option(help="folder of text files and .jsonl files with texts under text, output or content")
    out: Path = option(Path("checkpoint"), "folder of the checkpoint")
    work: Path = option(Path("train-work"), "folder of token files and of the state to resume from")
    hours: float = option(1.5, "length of the run, without pauses", low=0)
    tokens: int = option(0, "length of the run in tokens, so that it is the same on every machine; 0: --hours", low=0)
    shape: str = option("mini", "size of the model", choices=sorted(SHAPES))
    teacher: Path | None = option(None, "checkpoint to distil from")
    vocab_size: int = option(4096, "tokens in the vocabulary", low=257, high=65_536)
    batch_tokens: int = option(4096, "tokens per update", low=1)
    context: int = option(2048, "longest row to train on, in tokens", low=64, high=CONTEXT)
    seed: int = option(0, "seed of weights and batches", low=0)
    threads: int = option(0, "CPU threads; 0: torch chooses", low=0)
    compile: bool = option(True, "compile the loss if there is a C++ compiler")
    resume: bool = option(False, "resume from the state in the work folder")
    check_minutes: float = option(10.0, "minutes between checks on held-out text", low=0)
    export_minutes: float = option(20.0, "minutes between intermediate checkpoints", low=0)

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        if self.hours == 0:
            raise FieldError("hours", "must be more than 0, got 0")


@dataclass(slots=True)
class TrainState:
    """Progress of a run: updates, tokens, the training losses, and one row per check on held-out text."""

    step: int = 0
    tokens: int = 0
    losses: list[float] = field(default_factory=list)
    history: list[dict[str, Any]] = field(default_factory=list)


class Trainer:
    """One training run: model, optimizers, data, clock and progress."""

    def __init__(self, options: TrainOptions) -> None:
        self.options = options
        if options.threads:
            torch.set_num_threads(options.threads)
        torch.manual_seed(options.seed)
        core = Tokenizer.from_file(str(options.work / "tokenizer.json"))
        self.tokenizer: PreTrainedTokenizerFast = wrap_tokenizer(core, CONTEXT)
        config = SHAPES[options.shape].config(
            len(self.tokenizer), self.tokenizer.eos_token_id, self.tokenizer.bos_token_id
        )
        self.model = self.make_model(config)
        self.optimizers = Optimizers(self.model)
        self.batches = Batches(load_stream(options.work, TRAINING, options.context), options.seed)
        self.check_length = min(CHECK_LENGTH, options.context)
        self.heldout = Batches(load_stream(options.work, HELDOUT, self.check_length), options.seed)
        self.progress = TrainState()
        self.state_path = options.work / f"state-{self.kind}.pt"
        elapsed = self.restore() if options.resume and self.state_path.exists() else 0.0
        self.loss = self.compiled(make_loss(self.model, self.load_teacher()))
        self.clock = TrainingClock(elapsed)

    @property
    def kind(self) -> str:
        """Return the part of the state file's name that differs between architectures."""
        return self.options.shape

    def make_model(self, config: Qwen3Config) -> Qwen3ForCausalLM:
        """Make the model with random weights."""
        return Qwen3ForCausalLM(config)

    def load_teacher(self) -> Qwen3ForCausalLM | None:
        """Load the teacher, frozen; None if the options name none.

        Raises ValueError if its vocabulary differs from this run's.
        """
        if self.options.teacher is None:
            return None
        teacher = Qwen3ForCausalLM.from_pretrained(self.options.teacher, dtype=torch.float32)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(self.options.teacher)
        if tokenizer.get_vocab() != self.tokenizer.get_vocab():
            raise FieldError(
                "teacher", f"{self.options.teacher} has another vocabulary: give --work as in the teacher's run"
            )
        return teacher.eval().requires_grad_(False)

    def compiled(self, loss: Loss) -> Loss:
        """Compile the loss with inductor if a C++ compiler is there and ``compile`` is set; else return it as it is."""
        if self.options.compile and any(shutil.which(name) for name in ("g++", "c++", "clang++")):
            return torch.compile(loss, dynamic=False)
        return loss

    def restore(self) -> float:
        """Load the saved state, and return the training seconds that the run had used.

        Raises ValueError if the file is damaged or comes from a run with another model.
        """
        try:
            state = torch.load(self.state_path, weights_only=True)
            self.model.load_state_dict(state["model"])
            self.optimizers.load_state_dict(state["optimizers"])
            self.progress = TrainState(**state["progress"])
            return float(state["elapsed"])
        except (OSError, EOFError, LookupError, TypeError, ValueError, RuntimeError, UnpicklingError) as error:
            raise ValueError(
                f"{self.state_path} is damaged, or from a run with other options: remove --resume to start again, "
                "or name another folder by --work"
            ) from error

    def save(self) -> None:
        """Write the state that a run resumes from."""
        parts = {"model": self.model.state_dict(), "optimizers": self.optimizers.state_dict()}
        save_state(self.state_path, {**parts, "progress": asdict(self.progress), "elapsed": self.clock.elapsed})

    @property
    def share(self) -> float:
        """How much of the run is done, from 0 to 1: of its tokens if ``tokens`` is set, else of its time."""
        if self.options.tokens:
            return self.progress.tokens / self.options.tokens
        return self.clock.elapsed / (3600 * self.options.hours)

    def update(self, length: int) -> float:
        """Take one optimizer step on rows of ``length`` tokens; return the loss in nats per token.

        Raises ValueError if the loss or the gradient is infinite or NaN.
        """
        rows = max(1, self.options.batch_tokens // length)
        ids, labels = self.batches.draw(self.progress.step, rows, length)
        loss = self.loss(torch.from_numpy(ids), torch.from_numpy(labels))
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        value = float(loss.detach())
        if not (math.isfinite(value) and bool(norm.isfinite())):  # no update then, so weights stay finite
            raise ValueError(
                f"the loss became {value} at step {self.progress.step}: resume from the last state in "
                f"{self.options.work} by --resume, or start again with another --seed"
            )
        with undivided():
            self.optimizers.step(learning_rate(self.share))
            self.progress.step += 1
            self.progress.tokens += ids.size
        return value

    def check(self) -> None:
        """Measure the loss on held-out text and log it."""
        ids, labels = map(torch.from_numpy, self.heldout.draw(0, CHECK_ROWS, self.check_length))
        self.model.eval()
        row = {
            "step": self.progress.step,
            "tokens": self.progress.tokens,
            "loss": text_loss(self.model, ids, labels),
        }
        self.model.train()
        self.progress.history.append(row)
        log("check " + json.dumps(rounded(row)))

    def export(self) -> None:
        """Write a checkpoint of the current weights, with its provenance."""
        record = {
            **machine_record(),
            "options": asdict(self.options),
            "parameters": self.model.num_parameters(),
            "tokens": self.progress.tokens,
            "steps": self.progress.step,
            "hours": self.clock.elapsed / 3600,
            "train_loss": statistics.fmean(self.progress.losses[-50:] or [0.0]),
            "checks": rounded(self.progress.history),
            "data": json.loads((self.options.work / READY).read_text()),
        }
        self.write(anonymous(record))
        log(f"exported to {self.options.out}")

    def write(self, record: dict[str, Any]) -> None:
        """Write the checkpoint's files; ``record`` becomes ``provenance.json``."""
        export(self.model, self.tokenizer, self.options.out, record)


SAVE_MINUTES = 3.0
LOG_SECONDS = 20.0


def train(options: TrainOptions, trainer: Callable[[TrainOptions], Trainer] = Trainer) -> Path:
    """Train a model, and return the folder of its checkpoint.

    ``trainer`` makes the run from the options. An interrupt saves the state, then raises KeyboardInterrupt again.

    Raises:
        ValueError: for options or a data folder that can't be used.
    """
    for folder in (options.work, options.out):
        make_folder(folder)
    prepare(options.data, options.work, vocab_size=options.vocab_size, resume=options.resume)
    run = trainer(options)
    length = f"{options.tokens:,} tokens" if options.tokens else f"{options.hours} hours"
    log(f"{run.model.num_parameters():,} parameters, {length}, step {run.progress.step}")
    try:
        with Watch(f"Training {options.shape}") as watch:
            loop(run, watch)
    except KeyboardInterrupt:
        run.save()
        log(f"stopped; --resume goes on from {run.state_path}")
        raise
    with run.clock.uncapped():
        run.save()
        run.check()
        run.export()
    return options.out


def loop(run: Trainer, watch: Watch) -> None:
    """Update until the run is over. In between: log, save the state, check held-out text and export, each at its
    interval."""
    due = {"log": 0.0, "save": SAVE_MINUTES * 60, "check": run.options.check_minutes * 60, "export": 60.0}
    every = {"log": LOG_SECONDS, "save": due["save"], "check": due["check"], "export": run.options.export_minutes * 60}
    due = {name: at + run.clock.elapsed for name, at in due.items() if name != "log" or not watch.shown}
    actions = {"log": lambda: log_progress(run), "save": run.save, "check": run.check, "export": run.export}
    seen: set[int] = set()
    while run.share < 1:
        length = row_length(run.share, run.options.context)
        if length in seen:
            run.progress.losses.append(run.update(length))
            run.clock.lap()
        else:  # the first step of a new length compiles the loss
            seen.add(length)
            with run.clock.uncapped():
                run.progress.losses.append(run.update(length))
        recent = statistics.fmean(run.progress.losses[-20:])
        watch.step(run.share, run.clock.elapsed, run.progress.tokens, recent)
        for name in [name for name, at in due.items() if run.clock.elapsed >= at]:
            with run.clock.uncapped():
                actions[name]()
            due[name] = run.clock.elapsed + every[name]


def log_progress(run: Trainer) -> None:
    """Log one line: share done, steps, tokens, loss, learning rate factor, speed and minutes left."""
    seconds = max(run.clock.elapsed, 1e-9)
    share = min(run.share, 1.0)  # the last step may pass the end
    left = seconds / 60 * (1 / max(share, 1e-9) - 1)
    recent = statistics.fmean(run.progress.losses[-20:])
    rate = run.progress.tokens / seconds
    log(
        f"{share:6.1%}  step {run.progress.step:5d}  {run.progress.tokens / 1e6:6.2f} M tokens  loss {recent:.3f}"
        f"  rate x{learning_rate(run.share):.2f}  {rate:,.0f} tokens/s  {left:.1f} min left"
    )


def rounded(value: Any) -> Any:
    """Return the nested value with its floats rounded to four decimals."""
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list | tuple) else value


def anonymous(record: dict[str, Any]) -> dict[str, Any]:
    """Return the record with each path cut to its last part, so that a checkpoint reveals no folders of the machine."""

    def cut(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: cut(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [cut(item) for item in value]
        leads_away = isinstance(value, Path) or (isinstance(value, str) and value.startswith(("/", "../", "~")))
        return Path(value).name if leads_away else value

    result: dict[str, Any] = cut(record)
    return result


def log(line: str) -> None:
    """Print a line of progress on standard error, above any progress bar."""
    above_bars(line)
