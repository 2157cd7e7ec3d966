"""Data of a function of the user's own: `data.name = "package.module:factory"`."""

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

import fedbayes
from fedbayes.data import DataSettings, FederatedData, load_dataset, partition
from fedbayes.errors import ConfigError, DataError, RunError
from fedbayes.reports import gather

HERE = "tests.data.test_factories"


def one(seed, n=12):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 4)).astype(np.float32)
    return x, np.arange(n) % 3


def arrays(clients=3, shift=0.0):
    return {
        f"site-{seed}": (one(seed)[0] + np.float32(shift), one(seed)[1]) for seed in range(clients)
    }


class Pairs(Dataset):
    def __init__(self, seed):
        self.x, self.y = one(seed)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, row):
        return torch.from_numpy(self.x[row]), torch.tensor(self.y[row])


def torch_sets():
    return {f"site-{seed}": Pairs(seed) for seed in range(3)}


def hugging_face():
    import datasets

    features = datasets.Features(
        {
            "x": datasets.Sequence(datasets.Value("float32")),
            "label": datasets.ClassLabel(names=["0", "1", "2"]),
        }
    )
    return {
        f"site-{seed}": datasets.Dataset.from_dict(
            {"x": one(seed)[0].tolist(), "label": one(seed)[1].tolist()}, features=features
        )
        for seed in range(3)
    }


def lazy():
    for seed in range(3):
        yield f"site-{seed}", lambda seed=seed: one(seed)


def with_tests():
    return {f"site-{s}": {"train": one(s), "test": one(s + 10, 5)} for s in range(3)}


def with_common_test():
    return {"train": arrays(), "test": one(10, 9)}


def pictures():
    rng = np.random.default_rng(0)
    return [(rng.integers(0, 256, (9, 5, 4, 3), dtype=np.uint8), np.arange(9) % 3) for _ in "ab"]


def waves():
    time = np.arange(200) / 8000
    tones = np.stack([np.sin(2 * np.pi * (300 + 400 * (k % 2)) * time)[None] for k in range(12)])
    return {"one": (tones.astype(np.float32), np.arange(12) % 2)}


def load(factory, **settings):
    return load_dataset(DataSettings(name=f"{HERE}:{factory}", **settings))


@pytest.mark.parametrize("factory", ["torch_sets", "hugging_face", "lazy"])
def test_every_kind_of_data_is_the_same_data(factory):
    found, wanted = load(factory), load("arrays")
    assert np.array_equal(found.x, wanted.x)
    assert np.array_equal(found.y, wanted.y)
    assert found.digest == wanted.digest
    assert found.group_names == wanted.group_names
    assert np.array_equal(found.x, np.concatenate([one(seed)[0] for seed in range(3)]))
    assert found.groups.tolist() == [0] * 12 + [1] * 12 + [2] * 12


def divided(factory):
    settings = DataSettings(name=f"{HERE}:{factory}")
    found = load_dataset(settings)
    return FederatedData(found, partition(found, settings, 0), 0)


def test_clients_have_their_own_tests_or_share_them():
    data = divided("with_tests")
    for client in range(3):
        assert np.array_equal(data.raw_test(5 * client, 5 * client + 5), one(client + 10, 5)[0])
    assert data.train_sizes().tolist() == [12] * 3
    shared = divided("with_common_test")
    assert shared.test_total == 9
    assert shared.test_sizes().tolist() == [3, 3, 3]


def test_pictures_and_sounds():
    found = load("pictures")
    assert found.shape == (3, 5, 4)
    assert found.scale == 255
    assert found.x.dtype == np.uint8
    assert np.array_equal(found.x[0], pictures()[0][0][0].transpose(2, 0, 1))
    assert load("waves").shape == (1, 200)


def test_arguments_reach_the_factory_and_are_part_of_the_data():
    assert load("arrays", arguments={"clients": 2}).group_names == ("site-0", "site-1")
    assert load("arrays", arguments={"shift": 1.0}).digest != load("arrays").digest


def test_a_run_goes_on_with_the_same_data_alone(tmp_path, monkeypatch):
    settings = {"data": {"name": f"{HERE}:arrays"}, "rounds": 2, "model": {"hidden": [4]}}
    whole = fedbayes.run(**settings)
    with fedbayes.Simulation(fedbayes.Config.create(**settings), tmp_path) as simulation:
        next(iter(simulation))
    resumed = fedbayes.resume(tmp_path)
    assert all(torch.equal(resumed.model[n], t) for n, t in whole.model.items())
    monkeypatch.setattr(f"{HERE}.arrays", lambda: {k: (x[:, :3], y) for k, (x, y) in lists()})
    with pytest.raises(RunError, match="the data have changed"):
        fedbayes.Simulation(None, tmp_path)


def test_a_report_calls_no_factory(tmp_path, monkeypatch):
    settings = {"data": {"name": f"{HERE}:arrays"}, "rounds": 1, "model": {"hidden": [4]}}
    fedbayes.run(**settings, folder=tmp_path / "run")
    monkeypatch.setattr(f"{HERE}.arrays", lambda: pytest.fail("it was called"))
    (record,) = gather([tmp_path / "run"])
    assert any("a report does not import. Use" in note for note in record.notes)


def lists():
    return [(f"site-{seed}", one(seed)) for seed in range(3)]


def raises():
    raise KeyError("no such file")


def number():
    return 7


def other_shapes():
    return {"a": one(0), "b": (one(1)[0][:, :2], one(1)[1])}


def infinite():
    x, y = one(1)
    x[3, 1] = np.inf
    return {"a": one(0), "b": (x, y)}


def lengths():
    return {"a": (one(0)[0], one(0)[1][:5])}


def words():
    return {"a": (["some", "texts"] * 6, np.arange(12) % 2)}


def broken():
    class Broken(Pairs):
        def __getitem__(self, row):
            raise OSError("lost")

    return {"a": Broken(0)}


@pytest.mark.parametrize(
    ("factory", "reason"),
    [
        ("raises", "KeyError.*no such file"),
        ("number", "returned a int. Return a dict"),
        ("nothing", "cannot find the data"),
        ("other_shapes", "client 'b': samples are 2 of float32, and those of .*client 'a' 4"),
        ("infinite", "client 'b': the samples have values that are infinite"),
        ("lengths", "12 samples and 5 labels"),
        ("words", "data.processor"),
        ("broken", "client 'a'.*OSError: lost"),
    ],
)
def test_what_a_factory_does_wrong_is_told(factory, reason):
    with pytest.raises(DataError, match=reason):
        load(factory)


def test_settings_of_tables_are_refused():
    with pytest.raises(ConfigError, match="group has no effect on tests"):
        fedbayes.Config.create(data={"name": f"{HERE}:arrays", "group": "x"})
    with pytest.raises(ConfigError, match="arguments has no effect on digits"):
        fedbayes.Config.create(data={"arguments": {"a": 1}})
