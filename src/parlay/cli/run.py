"""`parlay run MODEL`: Ollama's name for `parlay chat MODEL`."""

from parlay.cli.chat import add_arguments, run

__all__ = ["add_arguments", "run"]
