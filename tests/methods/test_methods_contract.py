"""Every built-in method goes through the contract tests."""

from typing import ClassVar

import pytest

import fedbayes
from fedbayes.errors import ConfigError
from fedbayes.methods import METHODS
from fedbayes.testing import MethodContract
from tests.helpers.cases import cases


class TestFedAvg(MethodContract):
    method = "fedavg"


class TestFedProx(MethodContract):
    method = "fedprox"


class TestReptile(MethodContract):
    method = "reptile"


@pytest.mark.slow
class TestFedAvgM(MethodContract):
    method = "fedavgm"


@pytest.mark.slow
class TestFedAdam(MethodContract):
    method = "fedadam"


@pytest.mark.slow
class TestFedYogi(MethodContract):
    method = "fedyogi"


class TestScaffold(MethodContract):
    method = "scaffold"


@pytest.mark.slow
class TestScaffoldAtTheServersWeights(MethodContract):
    method = "scaffold"
    parameters: ClassVar = {"control": "gradient", "server_lr": 0.5, "damping": 0.5}
    settings: ClassVar = {"training": {"optimizer": "adam", "lr": 0.01}}


class TestLaplace(MethodContract):
    method = "laplace"
    parameters: ClassVar = {"scale": 1e-2}


@pytest.mark.slow
class TestLaplaceVotes(MethodContract):
    method = "laplace"
    parameters: ClassVar = {"weighting": "samples", "class_rows": True, "server_optimizer": "adam"}
    settings: ClassVar = {"training": {"lr": 0.05}}


@pytest.mark.slow
class TestScaffoldBound(MethodContract):
    method = "scaffold"
    parameters: ClassVar = {"variate_bound": 0.8}


@pytest.mark.slow
class TestMixtureAdam(MethodContract):
    method = "mixture"
    parameters: ClassVar = {"server_optimizer": "adam"}


@pytest.mark.slow
class TestLaplaceSign(MethodContract):
    method = "laplace"
    parameters: ClassVar = {"m_step": "sign"}


class TestMixture(MethodContract):
    method = "mixture"
    parameters: ClassVar = {"components": 3, "begin": "best"}


class TestFedSparse(MethodContract):
    method = "fedsparse"
    parameters: ClassVar = {"l0": 1e-3, "gate_lr": 3e-2, "server_gate_lr": 3e-2}

    @pytest.mark.slow  # of the same kind, scaffold-fedsparse is tried each time
    def test_engines_agree(self, tmp_path):
        super().test_engines_agree(tmp_path)


@pytest.mark.slow
class TestFedSparseConvolutional(MethodContract):
    method = "fedsparse"
    parameters: ClassVar = {"update_rule": "average", "drift": 0.1, "output_gates": False}
    settings: ClassVar = {"model": {"name": "tests.helpers.toy_models:residual"}}


class TestScaffoldFedSparse(MethodContract):
    method = "scaffold-fedsparse"
    parameters: ClassVar = {"l0": 1e-3, "gate_lr": 3e-2, "damping": 0.5}


@pytest.mark.slow
class TestScaffoldFedSparseBound(MethodContract):
    method = "scaffold-fedsparse"
    parameters: ClassVar = {"l0": 1e-3, "variate_bound": 0.8}


@pytest.mark.slow
class TestFedSparseLogits(MethodContract):
    method = "fedsparse"
    parameters: ClassVar = {"l0": 1e-2, "scale": "logits", "drift": 0.1}


@pytest.mark.slow
class TestFedSparseWeights(MethodContract):
    method = "fedsparse"
    parameters: ClassVar = {"gates": "weights", "output_gates": True, "scale": "logits", "l0": 0.3}


@pytest.mark.slow
class TestScaffoldFedSparseWeights(MethodContract):
    method = "scaffold-fedsparse"
    parameters: ClassVar = {"gates": "weights", "l0": 1e-3, "gate_lr": 3e-2, "damping": 0.5}
    settings: ClassVar = {"model": {"name": "tests.helpers.toy_models:residual"}}


class TestFedDrop(MethodContract):
    method = "feddrop"


@pytest.mark.slow
class TestFedDropConvolutional(MethodContract):
    method = "feddrop"
    parameters: ClassVar = {"conv_rate": 0.5, "server_optimizer": "adam"}
    settings: ClassVar = {"model": {"name": "tests.helpers.toy_models:residual"}}


class TestFedL1(MethodContract):
    method = "fedl1"
    parameters: ClassVar = {"l1": 0.3}


class TestCombined(MethodContract):
    method = "combined"
    parameters: ClassVar = {"alpha": "linear", "c": 0.1}


class TestVirtual(MethodContract):
    method = "virtual"
    parameters: ClassVar = {"samples": 3, "predictions": 4}
    settings: ClassVar = {"cohort": 1, "sampling": "cyclic", "training": {"optimizer": "adam"}}


@pytest.mark.slow
class TestVirtualSideBySide(MethodContract):
    method = "virtual"
    parameters: ClassVar = {"samples": 2, "damping": 0.5, "estimator": "reparametrization"}
    settings: ClassVar = {
        "model": {"name": "tests.helpers.toy_models:stack"},
        "training": {"optimizer": "adam", "lr": 0.01},
    }


@pytest.mark.slow
class TestVirtualWithoutClientNetworks(MethodContract):
    method = "virtual"
    parameters: ClassVar = {"samples": 2, "lateral": False}


class TestPvi(MethodContract):
    method = "pvi"
    parameters: ClassVar = {"samples": 2, "predictions": 4}
    settings: ClassVar = {"training": {"optimizer": "adam", "lr": 0.01}}


@pytest.mark.slow
class TestPviOneByOne(MethodContract):
    method = "pvi"
    parameters: ClassVar = {"predictions": 3}
    settings: ClassVar = {"cohort": 1, "sampling": "cyclic"}


class TestFedLap(MethodContract):
    method = "fedlap"
    parameters: ClassVar = {"predictions": 4}


@pytest.mark.slow
class TestFedLapWithoutCovariances(MethodContract):
    method = "fedlap"
    parameters: ClassVar = {"covariance": "none"}
    settings: ClassVar = {"training": {"optimizer": "adam", "lr": 0.01}}


@pytest.mark.slow
class TestFedLapOfKroneckerProducts(MethodContract):
    method = "fedlap"
    parameters: ClassVar = {"covariance": "kronecker", "predictions": 4, "largest": 64}


class TestFedLapInFunctionSpace(MethodContract):
    method = "fedlap"
    parameters: ClassVar = {"covariance": "none", "inputs": "auto", "points": 12}


@pytest.mark.slow
class TestFedLapFunctionSpaceRegression(MethodContract):
    method = "fedlap"
    parameters: ClassVar = {"inputs": "auto", "points": 12, "predictions": 4}
    data: ClassVar = {"name": "diabetes"}


class TestFedEP(MethodContract):
    method = "fedep"
    parameters: ClassVar = {"inference": "sgld", "predictions": 4}
    settings: ClassVar = {"training": {"steps": 12}}


@pytest.mark.slow
class TestFedGvi(MethodContract):
    method = "fedgvi"
    parameters: ClassVar = {"predictions": 3, "divergence": "renyi"}
    data: ClassVar = {"name": "digits", "partition": "iid", "limit": 400, "label_noise": 0.2}
    settings: ClassVar = {"training": {"optimizer": "adam", "lr": 0.01}}


@pytest.mark.slow
class TestFedGviBeta(MethodContract):
    method = "fedgvi"
    parameters: ClassVar = {"predictions": 3, "data_loss": "beta", "alpha": 0.5}
    settings: ClassVar = {"cohort": 1, "sampling": "cyclic"}


class TestIvonAdmm(MethodContract):
    method = "ivon-admm"
    parameters: ClassVar = {"predictions": 3}


@pytest.mark.slow
class TestIvonAdmmOfMeans(MethodContract):
    method = "ivon-admm"
    parameters: ClassVar = {"predictions": 3, "rate": 0.0, "prior_std": 0.03}


class TestGpiFnm(MethodContract):
    method = "gpi-fnm"
    settings: ClassVar = {"model": {"hidden": [8, 6]}}


@pytest.mark.slow
class TestGpiFnmAlternating(MethodContract):
    method = "gpi-fnm"
    parameters: ClassVar = {"alternations": 3, "starts": 2, "class_shares": False}
    settings: ClassVar = {"model": {"hidden": [8, 6], "bias": False}}


class TestPfnm(MethodContract):
    method = "pfnm"


class TestFedFuse(MethodContract):
    method = "fedfuse"
    parameters: ClassVar = {"steps": 4, "drawn": 64}


@pytest.mark.slow
class TestFedFuseOfRates(MethodContract):
    method = "fedfuse"
    parameters: ClassVar = {"steps": 4, "drawn": 64, "class_shares": False, "keep": 0.25}
    settings: ClassVar = {"model": {"name": "tests.helpers.toy_models:residual"}}


class TestFedPa(MethodContract):
    method = "fedpa"
    parameters: ClassVar = {"burn_in_rounds": 0, "samples": 3, "burn_in": 0.2}


@pytest.mark.slow
class TestFedPaLangevin(MethodContract):
    method = "fedpa"
    parameters: ClassVar = {"burn_in_rounds": 1, "sampler": "langevin", "server_optimizer": "adam"}


class TestPFedBayes(MethodContract):
    method = "pfedbayes"
    parameters: ClassVar = {"samples": 2, "predictions": 4, "beta": 0.7}
    settings: ClassVar = {"training": {"optimizer": "adam", "lr": 0.01}}


@pytest.mark.slow
class TestFedBe(MethodContract):
    method = "fedbe"
    parameters: ClassVar = {"members": 3}


@pytest.mark.slow
class TestFedBeDistilled(MethodContract):
    method = "fedbe"
    parameters: ClassVar = {
        "members": 2,
        "distribution": "dirichlet",
        "inputs": "auto",
        "steps": 4,
        "drawn": 64,
        "cycles": 2,
    }


@pytest.mark.slow
class TestFedBeSums(MethodContract):
    method = "fedbe-sums"
    parameters: ClassVar = {"members": 3}
    settings: ClassVar = {"model": {"name": "tests.helpers.toy_models:residual"}}


class TestFedDyn(MethodContract):
    method = "feddyn"


class TestFedNova(MethodContract):
    method = "fednova"
    settings: ClassVar = {
        "training": {"momentum": 0.5},
        "model": {"name": "tests.helpers.toy_models:normalized"},
    }


class TestQFedAvg(MethodContract):
    method = "qfedavg"
    parameters: ClassVar = {"q": 1.0}


class TestMoon(MethodContract):
    method = "moon"


class TestDitto(MethodContract):
    method = "ditto"


class TestApfl(MethodContract):
    method = "apfl"
    parameters: ClassVar = {"alpha_lr": 0.1}


class TestPFedMe(MethodContract):
    method = "pfedme"
    parameters: ClassVar = {"inner": 2, "beta": 0.5}


class TestPerFedAvg(MethodContract):
    method = "perfedavg"


class TestFedPer(MethodContract):
    method = "fedper"
    settings: ClassVar = {"model": {"name": "tests.helpers.toy_models:normalized"}}


class TestFedRep(MethodContract):
    method = "fedrep"
    settings: ClassVar = {"model": {"name": "tests.helpers.toy_models:normalized"}}


class TestFedBN(MethodContract):
    method = "fedbn"
    settings: ClassVar = {"model": {"hidden": [8], "norm": "batch"}}


class TestHierarchical(MethodContract):
    method = "hierarchical"
    parameters: ClassVar = {"covariance": "low-rank", "rank": 2, "predictions": 4}


@pytest.mark.slow
class TestHierarchicalFull(MethodContract):
    method = "hierarchical"
    parameters: ClassVar = {"covariance": "full"}
    settings: ClassVar = {"model": {"name": "tests.helpers.toy_models:normalized"}}


class TestFedPm(MethodContract):
    method = "fedpm"
    parameters: ClassVar = {"predictions": 3}


class TestFald(MethodContract):
    method = "fald"
    parameters: ClassVar = {"burn_in": 0.0}


class TestFedIvon(MethodContract):
    method = "fedivon"
    parameters: ClassVar = {"predictions": 3}


class TestFens(MethodContract):
    method = "fens"
    settings: ClassVar = {"cohort": 4}


@pytest.mark.slow
class TestFedLpa(MethodContract):
    method = "fedlpa"
    parameters: ClassVar = {"largest": 12}


@pytest.mark.slow
class TestPredBayes(MethodContract):
    method = "predbayes"
    parameters: ClassVar = {"samples": 2}
    settings: ClassVar = {"cohort": 4}


@pytest.mark.slow
class TestPredBayesDistilled(MethodContract):
    method = "predbayes"
    parameters: ClassVar = {"samples": 2, "inputs": "auto", "steps": 4, "drawn": 64}


@pytest.mark.slow
class TestQlsd(MethodContract):
    method = "qlsd"
    parameters: ClassVar = {"burn_in": 0.0}


@pytest.mark.slow
class TestDsvgd(MethodContract):
    method = "dsvgd"
    parameters: ClassVar = {"particles": 3}


@pytest.mark.slow
class TestDsvgdOfFewWeights(MethodContract):
    method = "dsvgd"
    parameters: ClassVar = {"particles": 16}
    data: ClassVar = {"name": "diabetes"}
    task: ClassVar = {"likelihood": "gaussian", "noise": 60.0}
    settings: ClassVar = {"model": {"hidden": []}}


class TestGaussianHead(MethodContract):
    method = "gaussian-head"


@pytest.mark.slow
class TestGaussianHeadLinear(MethodContract):
    method = "gaussian-head"
    parameters: ClassVar = {"head": "lda", "prior_rows": 20.0}
    settings: ClassVar = {"cohort": 3, "model": {"name": "tests.helpers.toy_models:residual"}}


@pytest.mark.slow
class TestGaussianHeadQuadratic(MethodContract):
    method = "gaussian-head"
    parameters: ClassVar = {"head": "qda"}


class TestLocal(MethodContract):
    method = "local"


class TestGlobal(MethodContract):
    method = "global"


PARAMETERS = {
    "virtual": {"samples": 3, "predictions": 4},
    "fedfuse": {"steps": 4, "drawn": 64},
    "fedpa": {"burn_in_rounds": 0, "burn_in": 0.0},
    "fedgvi": {"data_loss": "beta"},
}
"""What methods need where there are no classes."""
NOISE = {"gpi-fnm": "each", "pfnm": 0.5}
"""Deviations that are no parameters behind the network, for methods that have no place for them."""


@pytest.mark.parametrize(
    "name",
    cases(
        [name for name in METHODS if name != "gaussian-head"],
        slow=("fedfuse", "combined", "fedgvi", "fedbe", "fedl1"),
    ),
)
def test_every_method_keeps_its_promises_on_a_regression(name, tmp_path):
    """On diabetes with Gaussian noise, whose deviation is learnt where it can be."""
    contract = MethodContract()
    contract.method, contract.parameters = name, PARAMETERS.get(name, {})
    contract.data = {"name": "diabetes"}
    contract.task = {"likelihood": "gaussian", "noise": NOISE.get(name, "learnt")}
    for promise in (
        contract.test_functions_are_pure,
        contract.test_the_loss_is_pure,
        contract.test_losses_of_clients_can_be_mapped,
        contract.test_predictions_are_distributions,
    ):
        promise(tmp_path / promise.__name__)


@pytest.mark.parametrize("name", ["gpi-fnm", "pfnm"])
@pytest.mark.parametrize(
    ("noise", "class_shares", "words"),
    [
        ("learnt", False, r"task\.noise to 'each' or a number"),
        (0.5, True, r"Set method\.class_shares = false"),
    ],
)
def test_matching_says_what_a_regression_must_do_without(
    name, noise, class_shares, words, tmp_path
):
    task = {"likelihood": "gaussian", "noise": noise}
    method = {"name": name, "class_shares": class_shares}
    with pytest.raises(ConfigError, match=words):
        fedbayes.run(data={"name": "diabetes"}, task=task, method=method, folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_under_contract(name):
    covered = {kind.method for kind in MethodContract.__subclasses__()}
    assert name in covered


@pytest.mark.parametrize("method", ["pvi", "fedgvi", "virtual", "pfedbayes", "fedlap", "fedep"])
def test_methods_with_a_prior_of_their_own_take_no_weight_decay(method):
    """It would pull logarithms of stds and precisions to 0."""
    training = {"weight_decay": 1e-4}
    with pytest.raises(ConfigError, match="has its own"):
        fedbayes.Simulation(fedbayes.Config.create(method={"name": method}, training=training))
