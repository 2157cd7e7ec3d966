"""For all tests."""

import os
from pathlib import Path

import pytest

# Two test processes share two cores: a BLAS that took both for itself would wait for the other.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


@pytest.fixture(autouse=True, scope="session")
def secrets_of_tests(tmp_path_factory):
    """Secrets of runs are kept away from the user's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


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
