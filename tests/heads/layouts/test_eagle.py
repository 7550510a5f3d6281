"""EAGLE and EAGLE-3 as they are published open as they are, and compute what the published code says."""

from __future__ import annotations

from pathlib import Path

import pytest

from parlay.drafters.heads.proving import ProvedHeads
from parlay.heads.layouts.layout import LAYOUT
from parlay.models.config import DecoderConfig
from tests.heads.layouts import published
from tests.heads.layouts.conftest import Drafts


@pytest.mark.parametrize("layer", ["midlayer.", "layers.0."])
def test_eagle3_drafts(layer: str, config: DecoderConfig, drafts: Drafts, tmp_path: Path) -> None:
    drafts("eagle3", published.write(tmp_path, *published.eagle3(config, layer)))


@pytest.mark.parametrize("strategy", ["eagle", "eagle2"])
def test_eagle_drafts(strategy: str, config: DecoderConfig, drafts: Drafts, tmp_path: Path) -> None:
    drafts(strategy, published.write(tmp_path, *published.eagle(config)))


def test_a_head_says_in_which_layout_it_was(config: DecoderConfig, find: ProvedHeads, tmp_path: Path) -> None:
    found = find("eagle3", str(published.write(tmp_path, *published.eagle3(config))))
    assert found is not None
    assert found.artefact.settings[LAYOUT] == "EAGLE-3"
