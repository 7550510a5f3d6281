"""Opens a folder in MLX with `LoadOptions`, and reports options that MLX can't honour in one line."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from parlay.models.reserving import TokenRoom, refuse_options
from parlay.options import LoadOptions
from parlay.types import FieldError, ParlayError

if TYPE_CHECKING:
    from parlay.models.mlx.runner import MlxRunner

_REFUSED = {
    "dtype": "weights stay as the folder has them",
    "quantize": "weights stay as the folder has them; `mlx_lm.convert -q` makes a smaller folder",
    "kv_cache_dtype": "keys and values have the weights' type",
    "lora": "it merges no adapters in PEFT's layout; `mlx_lm.fuse` does",
    "compile": "torch computes nothing there",
    "ngram_states": "it looks no layers up",
}
_NO_PACKAGE = "the runner mlx needs the package mlx-lm: pip install 'parlay[mlx]'"


def open_mlx(found: Path, options: LoadOptions, room: TokenRoom) -> MlxRunner:
    """Open an mlx-lm runner for the folder ``found``. Nothing is downloaded, and no code of the folder is run.

    Raises UsageError for options that MLX can't honour, ParlayError without its package, UnsupportedModel for a model
    that it does not run, and ValueError for a memory budget that is too small.
    """
    if not found.is_dir():
        raise FieldError("runner", f"mlx: {room.name} is a GGUF file: name a folder of safetensors, or a Hub id")
    refuse_options("mlx", options, _REFUSED)
    _import()
    from parlay.models.mlx.model import MlxModel, chosen_device
    from parlay.models.mlx.runner import MlxRunner

    device = chosen_device(options.device)
    if device is None:
        raise FieldError(
            "runner",
            f"mlx: device {options.device}: this build of MLX computes on CPUs alone: remove it, or install "
            "MLX for your device (it computes on Apple's GPUs as it is; pip install 'mlx[cuda13]' is for NVIDIA's)",
        )
    model = MlxModel(found, room.name, device)
    context = model.facts.max_context
    runner = MlxRunner(model, most=room.tokens(model.facts.token_bytes, context), longest=room.longest)
    if room.budget is not None:
        room.budget.join(runner, runner.nbytes, runner.nbytes)
    return runner


def _import() -> None:
    """Import mlx-lm. Raises ParlayError if it is missing or can't load its library."""
    with _limits_kept():
        try:
            import mlx_lm  # noqa: F401  # here, where its errors are caught
        except ImportError as error:
            missing = (error.name or "").split(".")[0] in ("mlx", "mlx_lm")
            line = _NO_PACKAGE if missing else f"mlx-lm can't be imported ({error}): install it again"
            raise ParlayError(line) from None
        except (OSError, ValueError) as error:
            raise ParlayError(f"mlx-lm can't be imported ({error}): install it again") from None


@contextlib.contextmanager
def _limits_kept() -> Iterator[None]:
    """Undo the change that importing mlx-lm makes to the limit of open files."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        yield
    finally:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        for limits in (before, (min(before[0], hard), hard)):  # only root may raise the hard limit again
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
                break
