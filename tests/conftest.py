"""For all tests."""

import os
import shutil
import sys
from pathlib import Path

import pytest

from fedbayes.core import here

# Two test processes share two cores: a BLAS that took both for itself would wait for the other.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


@pytest.fixture(autouse=True, scope="session")
def secrets_of_tests(tmp_path_factory):
    """Secrets of runs are kept away from the user's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(autouse=True)
def modules_of_tests(monkeypatch):
    """The command line takes its folder off the path, for a process of its own: not for the next
    test.
    """
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(here._finder, "folder", here._finder.folder)


ENGINES_AGREE = {
    *("TestFedAvg", "TestScaffold", "TestFedSparse", "TestFedFuse", "TestPfnm", "TestVirtual"),
    "TestPvi",
}
"""Methods of each kind of message, state and server step, whose engines are compared by default;
those of the others are, like all that is long, among the slow tests."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Tests of the real data are skipped where these are not; engines of some methods are slow."""
    for item in items:
        kind = getattr(item.cls, "__name__", None)
        if item.name == "test_engines_agree" and kind and kind not in ENGINES_AGREE:
            item.add_marker(pytest.mark.slow)
    place = os.environ.get("FEDBAYES_DATA")
    if place and Path(place).is_dir():
        return
    absent = pytest.mark.skip(reason="FEDBAYES_DATA names no folder with real data")
    for item in items:
        if item.get_closest_marker("data"):
            item.add_marker(absent)


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
