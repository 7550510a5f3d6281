"""Settings of the whole suite.

torch uses one thread, because the tests' models are tiny, and threads that wait for each other cost more than the
models.

Routers keep what they learn in a folder of the test, so neither the user nor another test sees it.

Modules and tests live until the end. So the garbage collector is off while they are loaded, skips them later, and runs
less often.

If Triton is installed and there is no GPU, Triton is loaded with its interpreter, before any other code loads it.

A test draws the same random numbers whichever tests ran before it: from torch, from `random`, and for default seeds.
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
    """Load Triton with its interpreter (see above). The variable is unset again, so that decoders in later tests do not
    use Triton's kernels."""
    import torch  # here, for threads are counted when it is loaded

    if find_spec("triton") is not None and not torch.cuda.is_available():
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            importlib.import_module("parlay.models.triton_ops.kernels")
            importlib.import_module("parlay.sampling.walk_kernels")


interpret_triton()


@dataclass
class RouterMemory:
    """The folder in which routers keep what they learn, one for each test. It is made on first use."""

    cache: Path
    test: int = 0

    def folder(self) -> Path | None:
        """Return the folder; None if the test has moved the cache."""
        ours = os.environ.get(_CACHE) == str(self.cache)
        return self.cache / f"router-memory-{self.test}" if ours else None


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(5_000)
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()


def draw_as(name: str) -> None:
    """Seed the random numbers of torch and `random` by a name."""
    import torch  # here, for threads are counted when it is loaded

    seed = zlib.crc32(name.encode())
    if torch.cuda.is_available():
        torch.manual_seed(seed)
    else:  # `torch.manual_seed` would also record a call stack for each of three missing kinds of device
        torch.default_generator.manual_seed(seed)
    random.seed(seed)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    draw_as(item.nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object]) -> Generator[None, object, object]:
    """Give fixtures that several tests share random numbers of their own, so that they take none from the first
    test."""
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
    """Seeds for an LLM without a seed. They come from the test's random numbers, although other tests may have used the
    LLM before."""

    def getrandbits(self, k: int, /) -> int:
        return random.getrandbits(k)


@pytest.fixture(scope="session", autouse=True)
def seeds_of_tests() -> Iterator[None]:
    """Make LLMs without a seed use `DrawnInTests`."""

    def drawn(seed: int | None) -> random.Random:
        return DrawnInTests() if seed is None else random.Random(seed)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("parlay.llm.input_processor.secrets", SimpleNamespace(randbits=lambda bits: None))
        patch.setattr("parlay.llm.input_processor.random", SimpleNamespace(Random=drawn))
        yield


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a cache folder that shares the user's models and nothing else of Parlay's. Processes that tests start use
    it, too."""
    from parlay.system.user_cache import user_cache  # here, for threads are counted when torch is loaded

    users, own = user_cache(), tmp_path_factory.mktemp("cache")
    (own / users.name).mkdir()
    for kept in (*users.parent.glob("*"), users / "models"):
        if kept != users and kept.exists():
            (own / kept.relative_to(users.parent)).symlink_to(kept)
    os.environ[_CACHE] = str(own)  # not undone: what the process writes at its end stays out of the user's cache, too
    return own


@pytest.fixture(scope="session", autouse=True)
def patience() -> None:
    """Let child processes and servers answer late, because the machine may be busy. Limits of CPU time stay."""
    from parlay.system import bounded_process

    bounded_process._WALL_SECONDS = bounded_process._LAST_SECONDS = 600.0
    usual = inspect.signature(httpx.get).parameters["timeout"].default  # of calls that name no timeout
    usual.connect = usual.read = usual.write = usual.pool = 600.0


@pytest.fixture(scope="session", autouse=True)
def brief_calibration() -> None:
    """Shorten the timing of forwards when a model is opened, from a fifth of a second to a tenth of that. Tests open
    models hundreds of times, and no text depends on the measured costs. Each row count is timed as often as usual."""
    from parlay.cost import timing

    timing._ENOUGH = timing._AGAIN = 0.01


@pytest.fixture(scope="session", autouse=True)
def one_commit() -> Iterator[None]:
    """Cache the commit that results name, so that a test can resume its results although somebody commits or edits
    meanwhile."""
    from parlay.bench import provenance

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(provenance, "commit", cache(provenance.commit))
        yield


@pytest.fixture(scope="session")
def router_memory(own_cache: Path) -> Iterator[RouterMemory]:
    """Make tests' routers use the folder of `RouterMemory`. A test that moves the cache uses the cache's own folder."""
    from parlay.system.user_cache import user_cache

    memory = RouterMemory(own_cache)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("parlay.llm.router_file.user_cache", lambda: memory.folder() or user_cache())
        yield memory


@pytest.fixture(autouse=True)
def own_router_memory(router_memory: RouterMemory) -> None:
    """Give each test a new folder for what routers learn."""
    router_memory.test += 1


@pytest.fixture(autouse=True)
def switches_read_again() -> None:
    """Let each test set the variables that choose the sampler's kernels; a process reads them once."""
    from parlay.compiled import triton_here
    from parlay.sampling import noise

    triton_here.interpreted.cache_clear()
    noise.compiled.cache_clear()


@pytest.fixture
def signals_as_before() -> Iterator[None]:
    """Restore the signal handlers after a test that changes them."""
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for each, handler in before.items():
        signal.signal(each, handler)
