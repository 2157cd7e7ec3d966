"""Every built-in method goes through the contract tests."""

import pytest

from fedbayes.methods import METHODS
from fedbayes.testing import MethodContract


class TestFedAvg(MethodContract):
    method = "fedavg"


class TestFedProx(MethodContract):
    method = "fedprox"


class TestReptile(MethodContract):
    method = "reptile"


class TestFedAvgM(MethodContract):
    method = "fedavgm"


class TestFedAdam(MethodContract):
    method = "fedadam"


class TestFedYogi(MethodContract):
    method = "fedyogi"


class TestLocal(MethodContract):
    method = "local"


class TestGlobal(MethodContract):
    method = "global"


@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_under_contract(name):
    covered = {kind.method for kind in MethodContract.__subclasses__()}
    assert name in covered
