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


def pytest_collection_modifyitems(items):
    """Tests of the real data are skipped where these are not."""
    place = os.environ.get("FEDBAYES_DATA")
    if place and Path(place).is_dir():
        return
    absent = pytest.mark.skip(reason="FEDBAYES_DATA names no folder with real data")
    for item in items:
        if item.get_closest_marker("data"):
            item.add_marker(absent)
