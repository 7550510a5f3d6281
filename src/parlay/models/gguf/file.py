"""A model in GGUF, in one file or split over several: its config and weights."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from parlay.models.config import DecoderConfig, UnsupportedModel
from parlay.models.gguf import SUFFIX, weights
from parlay.models.gguf.config import decoder_config, family_of, original_context
from parlay.models.gguf.reader import BadGguf, Header, read
from parlay.models.weights.shapes import Weight

_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_MOST_PARTS = 1 << 10


def read_config(path: Path, longest: int = 0) -> DecoderConfig:
    """Read the decoder's config from the GGUF file at ``path``, or from all parts of a split model; see
    `loading.read_config`.

    Raises BadGguf for a damaged file, and UnsupportedModel for a model that the native decoder does not run.
    """
    parts = read_parts(path)
    with _naming(path):
        tensors = {info.name: info for part in parts for info in part.tensors}
        long = 0 < original_context(parts[0].keys) < longest
        return decoder_config(parts[0].keys, tensors, weights.rope_factors(parts, long=long))


def load_weights(path: Path, config: DecoderConfig) -> dict[str, Weight]:
    """All weights of the decoder by Hugging Face name: vectors as float32, matrices in the file's own blocks.

    Raises BadGguf for numbers that are not finite, and BadCheckpoint that names missing, extra or mis-shaped tensors.
    """
    parts = read_parts(path)
    with _naming(path):
        return weights.load(parts, family_of(parts[0].keys), config)


def read_parts(path: Path) -> list[Header]:
    """Read the headers of all files of a model; the first one has the keys. Raises BadGguf for a damaged file or a
    missing part."""
    header = read(path)
    count = header.keys.get("split.count", 1)
    if count == 1:
        return [header]
    match = _PART.fullmatch(path.name)
    if not isinstance(count, int) or not 1 < count <= _MOST_PARTS or not match or int(match["count"]) != count:
        raise BadGguf(f"{path}: it is one of {count} parts, and its name does not end in -00001-of-N{SUFFIX}")
    paths = [path.with_name(f"{match['stem']}-{number:05}-of-{count:05}{SUFFIX}") for number in range(1, count + 1)]
    absent = [part.name for part in paths if not part.is_file()]
    if absent:
        raise BadGguf(f"{path}: {len(absent)} of {count} parts are not beside it; the first: {absent[0]}")
    parts = [read(part) for part in paths]
    _check_parts(parts)
    return parts


def _check_parts(parts: list[Header]) -> None:
    for number, part in enumerate(parts):
        if part.keys.get("split.no") != number or part.keys.get("split.count") != len(parts):
            raise BadGguf(f"{part.path}: its keys don't say that it is part {number + 1} of {len(parts)}")
    names = [info.name for part in parts for info in part.tensors]
    if len(set(names)) < len(names):
        raise BadGguf(f"{parts[0].path}: a tensor occurs in two parts")
    expected = parts[0].keys.get("split.tensors.count", len(names))
    if expected != len(names):
        raise BadGguf(f"{parts[0].path}: its parts hold {len(names)} tensors instead of {expected}")


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Prefix errors with the file's name."""
    try:
        yield
    except (BadGguf, UnsupportedModel) as error:
        raise type(error)(f"{path}: {error}") from None
