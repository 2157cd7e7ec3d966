"""Fusing networks whose classes have the same names in another order."""

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fedbayes.core.targets import Target
from fedbayes.data import Preprocessing
from fedbayes.errors import FedbayesWarning, ModelError
from fedbayes.models import MLP, ModelSettings, build, read_weights
from fedbayes.storage.card import Card
from fedbayes.workflows.serve.export import CARD_FILE
from fedbayes.workflows.serve.model_files import ModelFiles, write_model
from tests.helpers.command_line import command

NAMES, OTHER = ("ant", "bee", "cow"), ("cow", "ant", "bee")
TO_OTHER = [NAMES.index(name) for name in OTHER]


def card_of(names, shape=(6,), model=None, likelihood="auto"):
    one = (0.0,) * shape[0], (1.0,) * shape[0]
    seen = Preprocessing(shape, 1.0, *one, Target("class", names))
    data = {"name": "own"}
    return Card(seen, model or {}, {"name": "local"}, data, 1, task={"likelihood": likelihood})


def write(path, module, names, last, **options):
    """A module whose classes are `NAMES`, outputs and counts in the order of these names."""
    state = module.state_dict()
    for name in (f"{last}.weight", f"{last}.bias"):
        state[name] = state[name][[NAMES.index(one) for one in names]]
    counts = tuple(3 + 5 * NAMES.index(one) for one in names)
    write_model(path, state, replace(card_of(names, **options), counts=counts))


@pytest.fixture
def fuse(capsys):
    def told(*words):
        capsys.readouterr()
        code = command("fuse", *words)
        return code, " ".join("".join(capsys.readouterr()).split())

    return told


def networks(make):
    found = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        found.append(make())
    return found


@pytest.mark.parametrize(
    "method", ["average", "combined", "pfnm", "gpi-fnm", "permute", "function", "match"]
)
def test_every_method_reorders_outputs_by_name(tmp_path, fuse, method):
    """The same as of networks that were in one order before."""
    one, two = networks(lambda: MLP(6, [5], 3))
    write(tmp_path / "a.safetensors", one, NAMES, "3")
    write(tmp_path / "same.safetensors", two, NAMES, "3")
    write(tmp_path / "other.safetensors", two, OTHER, "3")
    more = ["--minutes", "0"] if method == "function" else []
    found = []
    for name in ("same", "other"):
        out = tmp_path / f"{name}-fused.safetensors"
        models = (tmp_path / "a.safetensors", tmp_path / f"{name}.safetensors")
        code, told = fuse(*models, "-o", out, "--method", method, *more)
        assert code == 0, told
        assert ("in another order than" in told) == (name == "other")
        found.append(read_weights(out))
        assert ModelFiles()[out][1].preprocessing.classes == NAMES
    assert found[0].keys() == found[1].keys()
    for name, tensor in found[0].items():
        torch.testing.assert_close(tensor, found[1][name])
    code, told = fuse(models[1], models[0], "-o", out, "--method", method, *more)
    assert code == 0, told
    assert ModelFiles()[out][1].preprocessing.classes == OTHER


def test_a_network_that_its_card_names_is_traced(tmp_path, fuse):
    one, two = networks(lambda: build(ModelSettings(name="lenet5"), (1, 28, 28), 3, seed=0).module)
    options = {"shape": (1, 28, 28), "model": {"name": "lenet5"}}
    last = [name for name, m in one.named_modules() if isinstance(m, nn.Linear)][-1]
    write(tmp_path / "a.safetensors", one, NAMES, last, **options)
    write(tmp_path / "b.safetensors", two, OTHER, last, **options)
    out = tmp_path / "out.safetensors"
    code, told = fuse(
        tmp_path / "a.safetensors", tmp_path / "b.safetensors", "-o", out, "--method", "average"
    )
    assert code == 0, told
    fused = read_weights(out)
    for name, tensor in one.state_dict().items():
        torch.testing.assert_close(fused[name], (tensor + two.state_dict()[name]) / 2)


@pytest.mark.parametrize("method", ["regmean", "fisher", "kfac"])
def test_posteriors_are_reordered_with_their_counts(tmp_path, fuse, method):
    rng = np.random.default_rng(0)
    modules = networks(lambda: MLP(6, [5], 3))
    results = []
    for orders in ((NAMES, NAMES), (NAMES, OTHER)):
        files = []
        for index, (module, names) in enumerate(zip(modules, orders, strict=True)):
            rng = np.random.default_rng(index)
            y = np.array(NAMES)[rng.integers(0, 3, 40)]
            np.savez(tmp_path / "d.npz", x=rng.normal(size=(40, 6)), y=y)
            write(tmp_path / "m.safetensors", module, names, "3")
            files.append(tmp_path / f"{index}.safetensors")
            words = ["posterior", tmp_path / "m.safetensors", "--data", tmp_path / "d.npz"]
            assert command(*words, "-o", files[-1]) == 0
        out = tmp_path / "out.safetensors"
        code, told = fuse(*files, "-o", out, "--method", method)
        assert code == 0, told
        results.append(read_weights(out))
    for name, tensor in results[0].items():
        torch.testing.assert_close(tensor, results[1][name], atol=1e-5, rtol=1e-4)


def test_other_classes_are_an_error(tmp_path, fuse):
    one, two = networks(lambda: MLP(6, [5], 3))
    write(tmp_path / "a.safetensors", one, NAMES, "3")
    write_model(tmp_path / "b.safetensors", two.state_dict(), card_of(("ant", "bee", "dog")))
    for method in ("average", "pfnm", "gpi-fnm", "permute", "function", "match", "combined"):
        out = tmp_path / "out.safetensors"
        files = (tmp_path / "a.safetensors", tmp_path / "b.safetensors")
        code, told = fuse(*files, "-o", out, "--method", method)
        assert code == 2
        assert "predicts the classes ant, bee, dog" in told
        assert not out.exists()


def test_outputs_that_are_not_one_for_each_class_are_not_reordered(tmp_path):
    files = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for path, names in zip(files, (("no", "yes"), ("yes", "no")), strict=True):
        state = MLP(6, [5], 1).state_dict()
        write_model(path, state, card_of(names, likelihood="bernoulli"))
    with pytest.raises(ModelError, match="bernoulli has no output per class"):
        ModelFiles().card(files)


def test_networks_whose_code_is_not_trusted_are_not_run(tmp_path):
    files = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for path, names in zip(files, (NAMES, OTHER), strict=True):
        model = {"name": "tests.absent:network"}
        write_model(path, MLP(6, [5], 3).state_dict(), card_of(names, model=model))
    with pytest.raises(ModelError, match="fedbayes never runs code only because a file lists it"):
        ModelFiles().card(files)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FedbayesWarning)
        assert ModelFiles().card(files[:1]) is not None


def test_programs_in_another_order_are_named_with_the_way_out(tmp_path, capsys):
    files = [tmp_path / "a.pt2", tmp_path / "b.pt2"]
    for path, names in zip(files, (NAMES, OTHER), strict=True):
        program = torch.export.export(MLP(6, [5], 3), (torch.zeros(2, 6),))
        torch.export.save(program, path, extra_files={CARD_FILE: card_of(names).dump()})
    assert command("fuse", *files, "-o", tmp_path / "c.pt2", "--method", "match") == 2
    told = " ".join(capsys.readouterr().err.split())
    assert f"{files[1]} predicts the classes cow, ant, bee; {files[0]} the classes ant" in told
    assert "Give files of weights" in told
