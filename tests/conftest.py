"""For all tests."""

import gc
import os
import shutil
from pathlib import Path

import pytest
import torch

from tests.helpers.command_line import path_restored
from tests.helpers.eyes import Eyes

# Test processes share the cores. PyTorch, a BLAS or workers that took all would wait for others.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("LOKY_MAX_CPU_COUNT", "1")


@pytest.fixture(autouse=True, scope="session")
def secrets_of_tests(tmp_path_factory):
    """Secrets of runs are kept away from the user's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(autouse=True)
def seed():
    """A test draws the same in each run, alone or after others."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def modules_of_tests():
    """A test that calls the command line leaves the path as it was."""
    with path_restored():
        yield


@pytest.fixture
def photos(tmp_path):
    """Files of three networks of `eyes`."""
    paths = []
    for number in range(3):
        torch.manual_seed(number)
        network = Eyes((3, 8, 8), 4)
        network.norm.running_mean.normal_(0, 0.1)
        paths.append(tmp_path / f"c{number}.pt")
        torch.save(network.state_dict(), paths[-1])
    return paths


KIN = {
    *("fedprox", "reptile", "fedavgm", "fedyogi", "fedep", "fedpa", "pfnm", "scaffold-fedsparse"),
    *("fednova", "qfedavg", "moon", "apfl", "pfedme", "perfedavg", "fedper", "fedrep", "fedbn"),
    *("fald", "fedivon", "fens", "fedlpa", "predbayes", "qlsd", "dsvgd", "gaussian-head"),
    *("feddrop", "fedl1", "laplace", "ivon-admm"),
}
"""Methods that share their code with others: the default run tries what their reports declare."""
ENGINES_AGREE = {"fedsparse"}
"""Methods whose engines the default run compares. `test_engines.py` does so with private states."""


def _is_kin(item):
    """Whether the contract or a test of all methods tries it once more of code that is shared."""
    method = getattr(item.cls, "method", None)
    if item.name == "test_engines_agree" and method not in {None, *ENGINES_AGREE}:
        return True
    given = item.callspec.params.values() if hasattr(item, "callspec") else ()
    tried = {method, *(value for value in given if isinstance(value, str))}
    return bool(tried & KIN) and item.name != "test_reports_are_what_is_declared"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Tests of the real data are skipped where these are not; those of kin are among the slow."""
    for item in items:
        if isinstance(item, pytest.Function) and _is_kin(item):
            item.add_marker(pytest.mark.slow)
    place = os.environ.get("FEDBAYES_DATA")
    if place and Path(place).is_dir():
        return
    absent = pytest.mark.skip(reason="FEDBAYES_DATA names no folder with real data")
    for item in items:
        if item.get_closest_marker("data"):
            item.add_marker(absent)


def pytest_collection_finish():
    """What was collected stays to the end, so that no garbage is looked for in it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    """One Chromium for all tests that look at pages; without one they are skipped."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (chromium and driver):
        pytest.skip("there is no chromium with chromedriver here (Debian: chromium-driver)")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (
        "headless=new",
        "no-sandbox",
        "disable-gpu",
        "disable-quic",
        "disable-dev-shm-usage",
        "no-first-run",
        "disable-background-networking",
        "disable-component-update",
        "disable-sync",
        f"user-data-dir={tmp_path_factory.mktemp('profile')}",
        "window-size=1280,900",
    ):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    found = webdriver.Chrome(options=options, service=Service(driver))
    yield found
    found.quit()
