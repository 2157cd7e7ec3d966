"""For all tests."""

import os
from pathlib import Path

import pytest

# Two test processes share two cores: a BLAS that took both for itself would wait for the other.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def pytest_collection_modifyitems(items):
    """Tests of the real data are skipped where these are not."""
    place = os.environ.get("FEDBAYES_DATA")
    if place and Path(place).is_dir():
        return
    absent = pytest.mark.skip(reason="FEDBAYES_DATA names no folder with real data")
    for item in items:
        if item.get_closest_marker("data"):
            item.add_marker(absent)
