"""From a model's name to where its files are: a folder with config.json, or a GGUF file. Fetched if need be."""

from __future__ import annotations

from pathlib import Path

from parlay.models.gguf.file import SUFFIX
from parlay.types import ParlayError

BUILT_IN = ("parlay-mini", "parlay-mini-draft")
_CHECKPOINTS = Path(__file__).parents[1] / "checkpoints"
_WANTED_FILES = ("*.safetensors", "*.json", "*.txt", "*.jinja", "tokenizer.model")
_CONFIG_FILES = ("config.json", "generation_config.json")
_MERGE = "merge it into its base model (peft: merge_and_unload, then save_pretrained), and name that folder"


def resolve(model: str) -> Path:
    """The folder or GGUF file of a built-in name, a local path, or a Hugging Face Hub id (downloaded if need be).

    Only safetensors, JSON and tokenizer files are ever fetched. Raises ParlayError with one line otherwise.
    """
    found = _find(model, _WANTED_FILES)
    return _check_weights(found) if found.is_dir() else found


def resolve_config(model: str) -> Path:
    """The same for who needs config.json alone: no weights are looked for, or fetched."""
    return _find(model, _CONFIG_FILES)


def _find(model: str, wanted: tuple[str, ...]) -> Path:
    if model in BUILT_IN:
        return _check_config(_CHECKPOINTS / model)
    path = Path(model).expanduser()
    if path.is_dir():
        return _check_config(path)
    if path.is_file() and path.suffix == SUFFIX:
        return path
    if path.exists():
        raise ParlayError(
            f"{model} is a file, but no *{SUFFIX}: name the folder that holds config.json and *.safetensors"
        )
    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise ParlayError(f"no folder {model}: name a local folder, a Hub id, or one of {', '.join(BUILT_IN)}")
    return _check_config(_download(model, wanted))


def _download(model: str, wanted: tuple[str, ...]) -> Path:
    import huggingface_hub  # here, because a local folder needs no network code

    try:
        return Path(huggingface_hub.snapshot_download(model, allow_patterns=list(wanted)))
    except (OSError, ValueError, huggingface_hub.errors.RevisionResolutionError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ParlayError(
            f"can't get {model!r} from the Hugging Face Hub ({reason}): "
            f"name a local folder instead, or one of {', '.join(BUILT_IN)}"
        ) from error


def _check_config(directory: Path) -> Path:
    """Refuses a folder that holds no model."""
    if (directory / "config.json").is_file():
        return directory
    if (directory / "adapter_config.json").is_file():
        raise ParlayError(f"{directory} holds an adapter and no model: {_MERGE}")
    raise ParlayError(f"no config.json in {directory}: is this a model's folder?")


def _check_weights(directory: Path) -> Path:
    """Refuses a folder without weights, or whose weights are pickles, which may run code when they load."""
    names = {path.name for path in directory.glob("*.safetensors")}
    if names == {"adapter_model.safetensors"}:
        raise ParlayError(f"{directory} holds the weights of an adapter alone: {_MERGE}")
    if names:
        return directory
    if any(directory.glob("*.bin")) or any(directory.glob("*.pt")):
        raise ParlayError(f"{directory} holds pickled weights only, which are never loaded: save them as *.safetensors")
    raise ParlayError(f"no *.safetensors in {directory}")
