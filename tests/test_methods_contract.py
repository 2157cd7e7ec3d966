"""Every built-in method goes through the contract tests."""

from typing import ClassVar

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


class TestGpiFnm(MethodContract):
    method = "gpi-fnm"
    settings: ClassVar = {"model": {"hidden": [8, 6]}}


class TestGpiFnmAlternating(MethodContract):
    method = "gpi-fnm"
    parameters: ClassVar = {"alternations": 3, "starts": 2, "class_shares": False}
    settings: ClassVar = {"model": {"hidden": [8, 6], "bias": False}}


class TestPfnm(MethodContract):
    method = "pfnm"


class TestLocal(MethodContract):
    method = "local"


class TestGlobal(MethodContract):
    method = "global"


@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_under_contract(name):
    covered = {kind.method for kind in MethodContract.__subclasses__()}
    assert name in covered
