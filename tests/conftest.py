"""One thread for the whole suite: its models are tiny, and threads that wait for each other cost more than they do.

What routers learn in tests is no habit of the user's, and no test begins with what another one learned.

Modules and tests live to the end: the garbage collector rests while they are loaded, does not walk them later, and
looks less often for what else has gone.
"""

import gc
import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
gc.disable()  # until everything is collected


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(5_000)
    gc.enable()


@pytest.fixture(autouse=True)
def own_router_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from parlay.models.user_cache import user_cache  # here, for threads are counted when torch is loaded

    chosen = "XDG_CACHE_HOME"
    monkeypatch.setattr(
        "parlay.remembered.user_cache", lambda: user_cache() if chosen in os.environ else tmp_path / "router-memory"
    )
