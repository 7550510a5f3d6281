"""The page on a model larger than its memory: ratios to the disk and to one row, and texts that differ in capitals."""

from __future__ import annotations

import pytest

from benchmarks.larger_than_memory import Copied, Forwards, main, page


def test_ratios_are_of_medians() -> None:
    found = [Forwards(2e9, (0.5, 0.55, 0.6, 1.0)), Forwards(1e9, (0.5, 0.55, 0.6, 1.0)), Forwards(3e9, (9, 9, 9, 9))]
    copied = [Copied("none", 2.0, True), Copied("auto", 9.0, False)]
    text = "\n".join(page(found, copied, 600_000_000))
    assert "0.60 GB are read in every forward; direct reads alone give 2.00 GB/s." in text
    assert "| 8 | 550 | 1.10 | 1.09 | 0.55 |" in text
    assert "| auto | 9.00 | 4.50 | NO |" in text


def test_a_model_that_is_not_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["larger_than_memory", "--model", "nowhere.gguf"])
    with pytest.raises(SystemExit, match=r"^benchmarks\.larger_than_memory: nowhere\.gguf: No such file or directory$"):
        main()
