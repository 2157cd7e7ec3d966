"""Runs that are watched as they go."""

import time
from contextlib import contextmanager

from fedbayes import Config
from fedbayes.reports.follow import Follower
from fedbayes.reports.serve import PageServer

SMALL = {"data": {"clients": 4, "partition": "iid", "limit": 200}, "model": {"hidden": [4]}}


def small(**changes):
    return Config.create(**{"rounds": 3, **SMALL} | changes)


def until(true, seconds=60):
    """Wait for it; things take longer than they should."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := true():
            return found
        time.sleep(0.02)
    raise AssertionError("it does not come true")


@contextmanager
def followed(*folders):
    follower = Follower(folders)
    try:
        yield follower
    finally:
        follower.close()


@contextmanager
def served(*folders, **how):
    with followed(*folders) as follower:
        server = PageServer(follower, **how)
        server.start()
        try:
            yield server
        finally:
            server.close()
