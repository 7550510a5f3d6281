"""`parlay train lm`: trains a small language model on text files, in a given time, on the CPU."""

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

CLIP = 1.0
CHECK_ROWS, CHECK_LENGTH = 16, 512


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions(Options):
    """Options of a run. The run ends when ``hours`` are used up, with the learning rate decayed to zero."""

    data: Path = option(help="folder of text files and .jsonl files with texts under text, output or content")
    out: Path = option(Path("checkpoint"), "where the checkpoint is written")
    work: Path = option(Path("train-work"), "where token files and the state to resume from are kept")
    hours: float = option(1.5, "length of the run; pauses do not count", low=0)
    tokens: int = option(0, "length of the run in tokens, the same on every machine; 0: by hours", low=0)
    shape: str = option("mini", "size of the model", choices=sorted(SHAPES))
    teacher: Path | None = option(None, "checkpoint to distil from")
    vocab_size: int = option(4096, "tokens in the vocabulary", low=257, high=65_536)
    batch_tokens: int = option(4096, "tokens per update", low=1)
    context: int = option(2048, "longest row trained on", low=64, high=CONTEXT)
    seed: int = option(0, "seed of weights and batches", low=0)
    threads: int = option(0, "CPU threads; 0 leaves torch's choice", low=0)
    compile: bool = option(True, "compile the loss where a C++ compiler is at hand")
    resume: bool = option(False, "go on from the state in the work directory")
    check_minutes: float = option(10.0, "time between checks on held-out text", low=0)
    export_minutes: float = option(20.0, "time between intermediate checkpoints", low=0)

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        if self.hours == 0:
            raise ValueError("hours=0: must be more than 0")


@dataclass(slots=True)
class TrainState:
    """Progress of a run so far."""

    step: int = 0
    tokens: int = 0
    losses: list[float] = field(default_factory=list)
    history: list[dict[str, Any]] = field(default_factory=list)


class Trainer:
    """A run under way: model, optimizers, data, clock and progress."""

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
        """The models whose states are alike, as a part of a file's name."""
        return self.options.shape

    def make_model(self, config: Qwen3Config) -> Qwen3ForCausalLM:
        """The model with new weights."""
        return Qwen3ForCausalLM(config)

    def load_teacher(self) -> Qwen3ForCausalLM | None:
        """The teacher, frozen, if one is named; its vocabulary must be this run's."""
        if self.options.teacher is None:
            return None
        teacher = Qwen3ForCausalLM.from_pretrained(self.options.teacher, dtype=torch.float32)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(self.options.teacher)
        if tokenizer.get_vocab() != self.tokenizer.get_vocab():
            raise ValueError(f"teacher {self.options.teacher} has another vocabulary; name its own work directory")
        return teacher.eval().requires_grad_(False)

    def compiled(self, loss: Loss) -> Loss:
        """The loss compiled by inductor, or uncompiled if there is no C++ compiler."""
        if self.options.compile and any(shutil.which(name) for name in ("g++", "c++", "clang++")):
            return torch.compile(loss, dynamic=False)
        return loss

    def restore(self) -> float:
        """Loads the saved state; returns the training seconds already used.

        Raises ValueError for one that is damaged, or of a run with other options.
        """
        try:
            state = torch.load(self.state_path, weights_only=True)
            self.model.load_state_dict(state["model"])
            self.optimizers.load_state_dict(state["optimizers"])
            self.progress = TrainState(**state["progress"])
            return float(state["elapsed"])
        except (OSError, EOFError, LookupError, TypeError, ValueError, RuntimeError, UnpicklingError) as error:
            raise ValueError(
                f"{self.state_path} is no state of a run with these options, or is damaged: leave out --resume to "
                "begin anew, or name another folder by --work"
            ) from error

    def save(self) -> None:
        """Writes the state to resume from."""
        parts = {"model": self.model.state_dict(), "optimizers": self.optimizers.state_dict()}
        save_state(self.state_path, {**parts, "progress": asdict(self.progress), "elapsed": self.clock.elapsed})

    @property
    def share(self) -> float:
        """Share of the time that is used up, or of the tokens."""
        if self.options.tokens:
            return self.progress.tokens / self.options.tokens
        return self.clock.elapsed / (3600 * self.options.hours)

    def update(self, length: int) -> float:
        """One optimizer step on rows of ``length`` tokens; returns the loss. Raises ValueError if that is no number."""
        rows = max(1, self.options.batch_tokens // length)
        ids, labels = self.batches.draw(self.progress.step, rows, length)
        loss = self.loss(torch.from_numpy(ids), torch.from_numpy(labels))
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        value = float(loss.detach())
        if not (math.isfinite(value) and bool(norm.isfinite())):  # before an update, so that no weight becomes so
            raise ValueError(
                f"the loss became {value} at step {self.progress.step}: go on with --resume from the last state in "
                f"{self.options.work}, or begin anew with another --seed"
            )
        with undivided():
            self.optimizers.step(learning_rate(self.share))
            self.progress.step += 1
            self.progress.tokens += ids.size
        return value

    def check(self) -> None:
        """Measures the model on held-out text and logs it."""
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
        """Writes the checkpoint as it is now."""
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
        """Writes the checkpoint's files."""
        export(self.model, self.tokenizer, self.options.out, record)


SAVE_MINUTES = 3.0
LOG_SECONDS = 20.0


def train(options: TrainOptions, trainer: Callable[[TrainOptions], Trainer] = Trainer) -> Path:
    """Trains a model and returns the directory of its checkpoint.

    Raises:
        ValueError: for options or a data directory that can't be used.
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
        log(f"stopped; `resume` goes on from {run.state_path}")
        raise
    with run.clock.uncapped():
        run.save()
        run.check()
        run.export()
    return options.out


def loop(run: Trainer, watch: Watch) -> None:
    """Updates until the time is used up, with logs, states, checks and exports in between."""
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
        else:  # the first step of a new length compiles
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
    """One line: share of time, tokens, loss, rate, time left."""
    seconds = max(run.clock.elapsed, 1e-9)
    left = seconds / 60 * (1 / max(run.share, 1e-9) - 1)
    recent = statistics.fmean(run.progress.losses[-20:])
    rate = run.progress.tokens / seconds
    log(
        f"{run.share:6.1%}  step {run.progress.step:5d}  {run.progress.tokens / 1e6:6.2f} M tokens  loss {recent:.3f}"
        f"  rate x{learning_rate(run.share):.2f}  {rate:,.0f} tokens/s  {left:.1f} min left"
    )


def rounded(value: Any) -> Any:
    """The same nested value with four decimals."""
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list | tuple) else value


def anonymous(record: dict[str, Any]) -> dict[str, Any]:
    """The record with paths cut to their last part, so that a checkpoint holds no paths of the machine."""

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
    """A line of progress, on standard error."""
    above_bars(line)
