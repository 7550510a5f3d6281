"""One thread for the whole suite: its models are tiny, and threads that wait for each other cost more than they do.

What routers learn in tests is no habit of the user's, and no test begins with what another one learned.

Modules and tests live to the end: the garbage collector rests while they are loaded, does not walk them later, and
looks less often for what else has gone.

Triton, where it is installed and there is no GPU, is loaded with its interpreter, before anything else loads it.

A test draws the same numbers whichever tests came before it: those of torch, of `random`, and seeds that nobody gave.
"""

import gc
import importlib
import inspect
import os
import random
import signal
import zlib
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from hypothesis import HealthCheck, settings

_CACHE = "XDG_CACHE_HOME"
os.environ.setdefault("OMP_NUM_THREADS", "1")
gc.disable()  # until everything is collected
settings.register_profile("parlay", deadline=None, suppress_health_check=[HealthCheck.too_slow])  # on busy machines
settings.load_profile("parlay")


def interpret_triton() -> None:
    """See above. Its variable is not left behind: decoders that later tests make attend as they always do."""
    import torch  # here, for threads are counted when it is loaded

    if find_spec("triton") is not None and not torch.cuda.is_available():
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            importlib.import_module("parlay.models.triton_ops.kernels")
            importlib.import_module("parlay.sampling.walk_kernels")


interpret_triton()


@dataclass
class RouterMemory:
    """Where routers remember, a folder for each test; it is made when the first one does."""

    cache: Path
    test: int = 0

    def folder(self) -> Path | None:
        """None where a test has moved the cache."""
        ours = os.environ.get(_CACHE) == str(self.cache)
        return self.cache / f"router-memory-{self.test}" if ours else None


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(5_000)
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()


def draw_as(name: str) -> None:
    """Have whoever draws without a seed of his own draw what goes with a name."""
    import torch  # here, for threads are counted when it is loaded

    seed = zlib.crc32(name.encode())
    if torch.cuda.is_available():
        torch.manual_seed(seed)
    else:  # that would note for three kinds of device, with the whole call stack, what to seed when they come
        torch.default_generator.manual_seed(seed)
    random.seed(seed)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    draw_as(item.nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object]) -> Generator[None, object, object]:
    """What several tests share takes no numbers from the one that happens to come first."""
    if fixturedef.scope == "function":
        return (yield)
    import torch

    before = torch.random.get_rng_state(), random.getstate()
    draw_as(fixturedef.argname)
    try:
        return (yield)
    finally:
        torch.random.set_rng_state(before[0])
        random.setstate(before[1])


class DrawnInTests(random.Random):
    """Seeds of an LLM that has none: the test's numbers, though other tests may have used the LLM before."""

    def getrandbits(self, k: int, /) -> int:
        return random.getrandbits(k)


@pytest.fixture(scope="session", autouse=True)
def seeds_of_tests() -> Iterator[None]:
    """See `DrawnInTests`."""

    def drawn(seed: int | None) -> random.Random:
        return DrawnInTests() if seed is None else random.Random(seed)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("parlay.llm.input_processor.secrets", SimpleNamespace(randbits=lambda bits: None))
        patch.setattr("parlay.llm.input_processor.random", SimpleNamespace(Random=drawn))
        yield


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache in which models are the user's, and nothing else of Parlay is: for processes that tests start, too."""
    from parlay.system.user_cache import user_cache  # here, for threads are counted when torch is loaded

    users, own = user_cache(), tmp_path_factory.mktemp("cache")
    (own / users.name).mkdir()
    for kept in (*users.parent.glob("*"), users / "models"):
        if kept != users and kept.exists():
            (own / kept.relative_to(users.parent)).symlink_to(kept)
    os.environ[_CACHE] = str(own)  # for good: what is kept when the process ends is none of the user's either
    return own


@pytest.fixture(scope="session", autouse=True)
def patience() -> None:
    """Processes that compile, and servers, may answer late: the machine may be busy. Computing stays bounded."""
    from parlay.system import bounded_process

    bounded_process._WALL_SECONDS = bounded_process._LAST_SECONDS = 600.0
    usual = inspect.signature(httpx.get).parameters["timeout"].default  # of all that name none
    usual.connect = usual.read = usual.write = usual.pool = 600.0


@pytest.fixture(scope="session", autouse=True)
def brief_calibration() -> None:
    """A model that is opened times its forwards for a fifth of a second, however small it is: a tenth of that will do
    where it is opened hundreds of times, and no text hangs on prices. Each row count is timed as often as always."""
    from parlay.cost import timing

    timing._ENOUGH = timing._AGAIN = 0.01


@pytest.fixture(scope="session", autouse=True)
def one_commit() -> Iterator[None]:
    """Results that a test goes on with are of its own commit, though somebody commits or edits meanwhile."""
    from parlay.bench import provenance

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(provenance, "commit", cache(provenance.commit))
        yield


@pytest.fixture(scope="session")
def router_memory(own_cache: Path) -> Iterator[RouterMemory]:
    """Has routers of tests remember in its folder; whoever changes where the cache is gets what is there."""
    from parlay.system.user_cache import user_cache

    memory = RouterMemory(own_cache)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("parlay.llm.router_file.user_cache", lambda: memory.folder() or user_cache())
        yield memory


@pytest.fixture(autouse=True)
def own_router_memory(router_memory: RouterMemory) -> None:
    """What routers learn in one test is not known in the next."""
    router_memory.test += 1


@pytest.fixture
def signals_as_before() -> Iterator[None]:
    """A test may have signals handled in another way."""
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for each, handler in before.items():
        signal.signal(each, handler)
