"""What every test shares: few threads, seeded hypothesis, and no GPU but for the tests that are about it.

Without it, `auto` means the CPU and Triton's interpreter runs the kernels, on every machine as on that of the CI.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(int(os.environ.get("SAB_TEST_THREADS", "1")))  # one on every machine, unless it is asked for
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell leaves it for what it starts in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
if os.environ.get("SAB_TEST_GPU") != "1":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # read when CUDA is first used
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is first imported

os.environ.pop("COLUMNS", None)  # pytest-xdist gives its workers the width of the terminal: output is that of a pipe

settings.register_profile(
    "ci",
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.register_profile("search", settings.get_profile("ci"), derandomize=False, max_examples=500)
settings.register_profile("fuzz", settings.get_profile("search"), max_examples=2500)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--shuffle", type=int, metavar="SEED", help="run the files, and the tests in each, in a random order"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seed = config.getoption("--shuffle")
    if seed is not None:
        order = random.Random(seed)
        files = {path: order.random() for path in sorted({item.path for item in items})}
        order.shuffle(items)
        items.sort(key=lambda item: files[item.path])
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu") is not None:
                item.add_marker(pytest.mark.skip(reason="no CUDA device, or no SAB_TEST_GPU=1 to let tests see it"))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all data sets, a few kilobytes each."""
    from tests.lab import tiny  # not above, since sab may import triton

    folder = tmp_path_factory.mktemp("data")
    tiny.write(folder)
    return folder


@pytest.fixture
def tiny_data(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """These data sets are the ones that the tasks read."""
    from sab.lab.data import DATASETS, store
    from sab.lab.tasks import stored
    from tests.lab import tiny

    for name, dataset in tiny.datasets().items():
        monkeypatch.setitem(DATASETS, name, dataset)
    monkeypatch.setenv(store.VARIABLE, str(tiny_folder))
    stored.forget_examples()
    yield tiny_folder
    stored.forget_examples()
