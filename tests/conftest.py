"""Property tests use the same examples on every run, so that a red test can be run again, and have
no time limit.

Tables are as wide as they need to be, whatever runs the tests. Ctrl-C reaches the processes that
tests start, also where the tests themselves run in the background, in which it is ignored.
"""

import os
import signal
import time
from collections.abc import Generator, Iterator

import pytest
from hypothesis import settings

from disttrain_cli.calls import Reader, read_by

settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
settings.load_profile("repeatable")
os.environ.pop("COLUMNS", None)
signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ["HF_HUB_OFFLINE"] = "1"  # read where huggingface_hub is imported: tests fetch nothing

STARTED_S = time.monotonic()
#: They take minutes, and begin first: a long file among the last would leave the other core idle.
LONGEST = {
    "test_benchmarks.py",
    "test_chain.py",
    "test_demo.py",
    "test_equivalence_matrix.py",
    "test_executed.py",
    "test_gpu_benchmark.py",
    "test_layouts.py",
    "test_restarts.py",
    "test_modality.py",
    "test_module_tp.py",
    "test_tiny_families.py",
    "test_whole_chain.py",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--share", help="run share K of N of the files (K/N), as `make test-slow SHARE=2/4`"
    )
    parser.addoption(
        "--minutes", type=float, help="start no test after these minutes; skip those that are left"
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    minutes = item.config.getoption("--minutes")
    if minutes is not None and time.monotonic() - STARTED_S > 60.0 * minutes:
        pytest.skip(f"not started within {minutes:g} minutes")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONGEST)
    if share := config.getoption("--share"):
        number, shares = map(int, share.split("/"))
        files = list(dict.fromkeys(item.path for item in items))  # dealt like cards
        chosen = set(files[number - 1 :: shares])
        config.hook.pytest_deselected(items=[item for item in items if item.path not in chosen])
        items[:] = [item for item in items if item.path in chosen]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """With ATEN_CPU_CAPABILITY=default on a processor with AVX-512, torch's attention in bf16
    chooses a kernel that was not built."""
    try:
        return (yield)
    except RuntimeError as error:
        if "only supported when avx512 is supported" not in str(error):
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What tests read is not kept in the user's cache folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def _nobody_has_named_a_run() -> None:
    """Messages of a test name no run file that an earlier test of the process opened."""
    read_by(Reader())
