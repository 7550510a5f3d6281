"""Reads options from a YAML file, which has one key for each."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parlay.options.declare import Option, nearest, options_of
from parlay.types import ParlayError, UsageError

_MOST_BYTES = 1 << 20


def read_config(path: Path, declared: type[Any]) -> dict[str, object]:
    """Return the options of a class that a file sets, by name. Keys are names of options or flags (``batch-tokens``).

    Raises UsageError for a file that can't be read, an unknown or repeated key, and a value that the option does not
    allow. Each error names the file.
    """
    options = options_of(declared)
    found: dict[str, object] = {}
    for key, value in _pairs(path):
        name = str(key).replace("-", "_")
        if name not in options:
            raise UsageError(f"{path}: no option is called {key}: {nearest(name, options, '--help')}")
        if name in found:
            raise UsageError(f"{path}: {key} is given twice: remove one of them")
        found[name] = _value(options[name], f"{path}: {key}", value)
    return found


def _pairs(path: Path) -> list[tuple[object, object]]:
    """Return keys and values as they are written: a mapping would hide repeated keys."""
    try:
        import yaml  # here, because only a config needs it
    except ModuleNotFoundError as error:
        raise ParlayError("reading a config needs pyyaml: run pip install 'parlay[train]'") from error

    try:
        if path.stat().st_size > _MOST_BYTES:
            raise UsageError(f"{path} is larger than {_MOST_BYTES:,} bytes, the limit of a config file")
        loader = yaml.SafeLoader(path.read_text(encoding="utf-8"))
        node = loader.get_single_node()
        if node is None:
            return []
        if not isinstance(node, yaml.MappingNode):
            raise UsageError(f"{path} must contain lines of KEY: VALUE")
        return [
            (loader.construct_object(key, deep=True), loader.construct_object(value, deep=True))
            for key, value in node.value
        ]
    except UsageError:
        raise
    except OSError as error:
        raise UsageError(f"can't read {path}: {error.strerror}") from None
    except (ValueError, OverflowError, yaml.YAMLError, RecursionError) as error:
        raise UsageError(f"can't read {path} as YAML: {' '.join(str(error).split())}") from None
    except (LookupError, AttributeError):  # so the reader's own parts fail
        raise UsageError(f"can't read {path} as YAML: a value does not fit its tag (!!int, !!bool, ...)") from None


def _value(option: Option, label: str, value: object) -> object:
    """Convert a value to the option's type: numbers that YAML reads as texts (1e-3), paths and names."""
    if isinstance(value, list) and option.type is tuple and all(isinstance(part, str) for part in value):
        value = tuple(value)
    elif isinstance(value, str) and option.type is Path:
        value = Path(value)
    elif isinstance(value, str) and option.type is not str:
        value = option.read(label, value)
    elif isinstance(value, Mapping | list):
        raise UsageError(f"{label} must have one value")
    option.check(label, value)
    return value
