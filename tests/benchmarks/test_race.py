"""The README's picture is drawn from the recording beside it, shows one text twice, and asks nothing of its reader."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.race.picture import picture
from benchmarks.race.record import read

ROOT = Path(__file__).parents[2]
RECORDING, HEADER = read(ROOT / "benchmarks" / "results" / "race.json")
PICTURE = (ROOT / "docs" / "pictures" / "race.svg").read_text(encoding="utf-8")
SVG = "{http://www.w3.org/2000/svg}"


def test_the_picture_is_that_of_the_recording() -> None:
    assert picture(RECORDING, HEADER) == PICTURE


def test_both_lanes_show_the_whole_text() -> None:
    assert RECORDING.plain.text == RECORDING.fast.text
    lanes = [
        "".join(line.itertext())
        for line in ElementTree.fromstring(PICTURE).iter(f"{SVG}text")
        if "{http://www.w3.org/XML/1998/namespace}space" in line.attrib
    ]
    half = len(lanes) // 2
    assert "".join(lanes[:half]) == "".join(lanes[half:]) == RECORDING.plain.text


def test_it_runs_nothing_loads_nothing_and_stands_still_on_request() -> None:
    assert not re.search(r"<script|href|url\(|@import", PICTURE)
    before, asked, _ = PICTURE.partition("@media(prefers-reduced-motion:no-preference){")
    assert asked
    assert "animation" not in before
