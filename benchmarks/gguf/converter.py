"""Runs llama.cpp's converter on random checkpoints, whose tokenizer of single letters it does not know.

It runs in a process of its own. The arguments are the folder of llama.cpp's sources, then those of the converter.
"""

from __future__ import annotations

import importlib
import runpy
import sys
from typing import Any


def main() -> None:
    """Make every model class use byte-level BPE as Qwen2 does, then run the converter."""
    sources = sys.argv.pop(1)
    sys.path[:0] = [sources, f"{sources}/gguf-py"]
    conversion: Any = importlib.import_module("conversion")
    text = importlib.import_module("conversion.base").TextModel
    text.get_vocab_base_pre = lambda self, tokenizer: "qwen2"
    find = conversion.get_model_class

    def found(name: str, mmproj: bool = False) -> Any:
        model = find(name, mmproj)
        model.set_vocab = text._set_vocab_gpt2
        return model

    conversion.get_model_class = found
    runpy.run_path(f"{sources}/convert_hf_to_gguf.py", run_name="__main__")


if __name__ == "__main__":
    main()
