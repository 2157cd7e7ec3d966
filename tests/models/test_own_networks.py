"""Networks of one's own: what they hold beside their state, which batches they can take, and
errors of their code.
"""

import random
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import fedbayes
from fedbayes.config.config import Config
from fedbayes.core import seeds
from fedbayes.core.tensors import Samples
from fedbayes.errors import FedbayesError, FedbayesWarning, ModelError
from fedbayes.inference.settings import LocalTraining
from fedbayes.inference.solve import batches
from fedbayes.models import ModelSettings, Network, build
from fedbayes.models.trials import alone
from fedbayes.runs.rules import _of_secure
from tests.helpers import toy_networks as toys

pytestmark = pytest.mark.filterwarnings("ignore::fedbayes.errors.FedbayesWarning")


def model(kind, **arguments):
    return {"name": f"tests.helpers.toy_networks:make_{kind}", "arguments": arguments}


def settings(kind, **more):
    data = {"name": "tests.helpers.toy_networks:rows"} | more.pop("data", {})
    given = {"rounds": 2, "data": data, "model": model(kind), "calibration": "none"}
    return given | more


def built(kind, **more):
    return build(ModelSettings(**model(kind)), (6,), 3, seed=0, **more)


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        ("InList", r"layers\[0\]\.weight"),
        ("InDict", r"layers\['first'\]\.weight"),
        ("InNested", r"blocks\[0\]\[0\]\[0\]\.weight.*blocks\[0\]\[1\]\['a'\]\[0\]\.weight"),
        ("InObject", r"holder\.tensor"),
        ("InSubmodule", r"body\.0\.matrix"),
        ("NotPersistent", "matrix"),
        ("Unseeded", "matrix"),
        ("Late", "matrix"),
        ("Scaled", "scale"),
        ("Remembers", "center"),
        ("OwnGenerator", "rng"),
        ("Closure", r"turn's closure\[0\]"),
        ("Global", "global variable|number"),
        ("Untrained", r"scales\[0\]"),
    ],
)
def test_state_outside_the_state_dict_is_named(kind, path, tmp_path):
    with pytest.raises(ModelError, match=f"Not registered: .*{path}|{path}"):
        fedbayes.run(None, tmp_path / "run", **settings(kind))
    assert not (tmp_path / "run").exists()


def test_another_architecture_each_time_is_refused():
    own = ModelSettings(name="tests.helpers.toy_networks:other_each_time")
    with pytest.raises(ModelError, match="a different architecture each time"):
        build(own, (6,), 3, seed=1)


@pytest.mark.parametrize("kind", ["Fine", "WithBuffers", "Flagged", "Instances", "Lazy", "Noisy"])
def test_what_follows_from_the_state_passes(kind):
    built(kind)


def test_a_trial_leaves_the_network_and_all_generators_as_they_were():
    np.random.seed(1)  # noqa: NPY002
    random.seed(1)
    torch.manual_seed(1)
    expected = np.random.random(), random.random(), torch.rand(1)  # noqa: NPY002
    np.random.seed(1)  # noqa: NPY002
    random.seed(1)
    torch.manual_seed(1)
    network = built("Flagged")
    assert (np.random.random(), random.random(), torch.rand(1)) == expected  # noqa: NPY002
    assert not network.initial["started"]
    assert network.initial["calls"] == 0
    torch.testing.assert_close(network.initial["center"], torch.zeros(6))


def test_factories_may_draw_from_numpy_and_python(tmp_path):
    name = "tests.helpers.toy_networks:by_numpy"
    one, two, other = (
        build(ModelSettings(name=name), (6,), 3, seed=seed).initial for seed in (0, 0, 1)
    )
    torch.testing.assert_close(one, two, rtol=0, atol=0)
    assert not torch.equal(one["fc.weight"], other["fc.weight"])
    assert one["fc.bias"][0] != other["fc.bias"][0]


def test_what_a_module_draws_when_it_is_imported_changes_no_weights(tmp_path, monkeypatch):
    lines = ["from torch import nn", "spare = nn.Linear(3, 3)", "def make(shape, outputs):"]
    (tmp_path / "drawing.py").write_text("\n".join([*lines, "    return nn.Linear(6, outputs)"]))
    monkeypatch.syspath_prepend(tmp_path)
    own = ModelSettings(name="drawing:make")
    first, again = (build(own, (6,), 3, seed=0).initial for _ in range(2))
    torch.testing.assert_close(first, again, rtol=0, atol=0)


def test_seeds_reach_all_global_generators():
    def drawn(client):
        with seeds.global_rng(3, "layers", client=client):
            return np.random.random(), random.random(), float(torch.rand(1))  # noqa: NPY002

    assert drawn(0) == drawn(0)
    assert all(a != b for a, b in zip(drawn(0), drawn(1), strict=True))


@pytest.mark.slow
def test_layers_that_draw_in_evaluation_too_are_seeded_and_named(tmp_path):
    with pytest.warns(FedbayesWarning, match="uses random numbers in evaluation"):
        first = fedbayes.run(None, tmp_path / "1", **settings("Noisy"))
    torch.rand(7)
    again = fedbayes.run(None, tmp_path / "2", **settings("Noisy"))
    spread = fedbayes.run(None, tmp_path / "3", **settings("Noisy", engine="workers", workers=2))
    assert first.summary["global_nll"] == again.summary["global_nll"]
    assert first.summary["global_nll"] == spread.summary["global_nll"]


BESIDE = [
    {},
    {"compression": {"up": "int8", "down": "bf16"}},
    {"compression": {"up": "top-k", "share": 0.5}},
    {"aggregation": {"rule": "median"}},
    {"aggregation": {"rule": "krum"}, "min_reports": 3},
    {"attack": {"kind": "sign-flip", "clients": 1}},
    {"method": {"name": "scaffold"}},
    {"method": {"name": "pvi"}, "training": {"optimizer": "adam", "lr": 0.003}},
    {"method": {"name": "fedbe"}},
    {
        "privacy": {"noise": 1.0, "repeatable": True},
        "aggregation": {"clip": 1.0},
        "sampling": "uniform",
    },
]


@pytest.mark.parametrize("beside", BESIDE, ids=lambda beside: "-".join(beside) or "plain")
def test_constant_buffers_of_any_kind_change_nothing(beside, tmp_path):
    """Sums are those of the network that has the same tensors as non-persistent buffers."""
    found = {}
    for persistent in (True, False):
        own = settings("WithBuffers", **beside)
        own["model"] = model("WithBuffers", persistent=persistent)
        run = fedbayes.run(None, tmp_path / str(persistent), **own)
        found[persistent] = run.summary["global_nll"], run.metrics[-1]["bytes_up"]
    assert found[True] == found[False]


def test_a_model_with_constant_buffers_is_stored_whole_and_comes_back(tmp_path):
    run = fedbayes.run(None, tmp_path / "run", **settings("WithBuffers"))
    module = toys.WithBuffers(6, 3)
    module.load_state_dict(run.model)
    assert set(run.model) == set(module.state_dict())
    own = settings("WithBuffers", rounds=1)
    own["model"]["weights"] = tmp_path / "run" / "model.safetensors"
    fedbayes.run(None, tmp_path / "more", **own)


def test_secure_sums_are_of_what_trains_alone():
    config = Config.create(engine="flower-simulation", secure={"enabled": True})
    runs = [SimpleNamespace(network=built(name), cohort=3) for name in ("WithBuffers", "Flagged")]
    assert not list(_of_secure(config, runs[0]))
    (found,) = _of_secure(config, runs[1])
    assert "'calls'" in found
    assert "int64" in found


def test_a_flag_that_training_sets_is_sent(tmp_path):
    own = settings("Flagged", training={"epochs": 1, "batch_size": 32})
    run = fedbayes.run(None, tmp_path / "run", **own)
    assert run.model["started"].item() is True
    assert run.model["calls"].item() == 4  # two rounds of two batches, at every client


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("ComplexWeights", "parameter 'spectrum'.* is complex.*view_as_complex"),
        ("ComplexState", "buffer 'mean'.* is complex and changes"),
        ("Extremes", "buffer 'largest' .*changes in training and starts with NaN or infinite"),
    ],
)
def test_tensors_that_cannot_be_averaged_are_named(kind, words):
    with pytest.raises(ModelError, match=words):
        built(kind)


def test_a_buffer_that_changes_later_is_named(tmp_path):
    own = settings("Sometimes", training={"batch_size": 33})
    with pytest.raises(ModelError, match=r"client 0.*buffer 'seen'.*self\.seen\.add_\(0\)"):
        fedbayes.run(None, tmp_path / "run", **own)


@pytest.mark.parametrize("samples", range(1, 14))
@pytest.mark.parametrize("size", [1, 2, 3, 5, 20])
def test_batch_sizes_are_those_of_counting(samples, size):
    keep, drop, merge = (
        LocalTraining(batch_size=size, last_batch=last).batch_sizes(samples)
        for last in ("keep", "drop", "merge")
    )
    assert keep == [len(range(samples)[i : i + size]) for i in range(0, samples, size)]
    whole = [n for n in keep if n == size]
    assert drop == (whole or keep)
    assert sum(merge) == samples
    assert len(merge) == max(len(whole), 1)
    assert merge[:-1] == [size] * (len(merge) - 1)
    assert (
        LocalTraining(batch_size=size, last_batch="drop").batch_sizes(samples, all_samples=True)
        == merge
    )


@pytest.mark.parametrize("last", ["keep", "drop", "merge"])
def test_an_epoch_has_every_sample_once_but_those_dropped(last):
    data = Samples(torch.arange(33.0)[:, None], torch.arange(33))
    training = LocalTraining(batch_size=8, last_batch=last, epochs=3)
    sizes = training.batch_sizes(33)
    rng = torch.Generator().manual_seed(0)
    seen = list(batches(data, sizes, training.step_count(33), rng))
    assert [len(batch.y) for batch in seen] == 3 * sizes
    for epoch in range(3):
        ours = torch.cat([b.y for b in seen[epoch * len(sizes) : (epoch + 1) * len(sizes)]])
        assert len(ours.unique()) == sum(sizes)
    left = {int(y) for y in range(33)} - {int(y) for b in seen for y in b.y}
    assert not left  # who is left out of one epoch is in another


@pytest.mark.parametrize("kind", ["Normalized", "NormalizedMaps", "NeedsTwo"])
def test_a_batch_of_one_is_found_before_the_first_round_or_avoided(kind, tmp_path):
    own = settings(kind, cohort=1, rounds=5, training={"batch_size": 32})
    words = r"site 1 \(33 training samples\).*training\.last_batch to 'drop' or 'merge'"
    with pytest.raises(ModelError, match=words):
        fedbayes.run(None, tmp_path / "run", **own)
    assert not (tmp_path / "run").exists()
    for last in ("drop", "merge"):
        own["training"]["last_batch"] = last
        fedbayes.run(None, tmp_path / last, **own)
    own["training"] = {"batch_size": 32, "steps": 1}  # which never comes to the second batch
    fedbayes.run(None, tmp_path / "steps", **own)


def test_a_client_with_one_sample_alone_is_told_how_to_be_left_out(tmp_path):
    own = settings("Normalized", data={"arguments": {"sizes": [40, 1, 32]}, "min_samples": 1})
    with pytest.raises(ModelError, match=r"site 1 \(1 training sample\).*min_samples = 2"):
        fedbayes.run(None, tmp_path / "run", **own)


def test_what_is_held_out_for_the_temperature_counts(tmp_path):
    own = settings("Normalized", calibration="temperature", training={"batch_size": 29})
    with pytest.raises(ModelError, match=r"site 1 \(30 training samples\)"):  # of 33
        fedbayes.run(None, tmp_path / "run", **own)


def test_what_validation_sets_aside_counts(tmp_path):
    training = {"batch_size": 32, "patience": 1, "validation": 0.1, "epochs": 3}
    own = settings("Normalized", training=training, data={"arguments": {"sizes": [40, 37, 35]}})
    with pytest.raises(ModelError, match=r"site 1 \(33 training samples\)"):  # of 37
        fedbayes.run(None, tmp_path / "run", **own)


def test_a_single_test_sample_is_found_too(tmp_path):
    own = settings("NeedsTwo", data={"arguments": {"test": 1}}, training={"batch_size": 10})
    own["data"]["arguments"]["sizes"] = [40, 20, 30]
    with pytest.raises(ModelError, match="cannot be evaluated on a single test sample"):
        fedbayes.run(None, tmp_path / "run", **own)


def test_normalization_within_a_sample_takes_a_batch_of_one(tmp_path):
    fedbayes.run(None, tmp_path / "run", **settings("Instances", training={"batch_size": 32}))


def test_outputs_that_are_squeezed_are_those_of_one_sample(tmp_path):
    """`squeeze` drops the axis of samples where there is one; the numbers are the same."""
    nll = {
        kind: fedbayes.run(
            None,
            tmp_path / kind,
            **settings(
                kind,
                training={"batch_size": 32},
                data={"arguments": {"test": 1}},
            ),
        ).summary["global_nll"]
        for kind in ("Head", "Squeezed", "SqueezedWithin")
    }
    assert nll["Head"] == nll["Squeezed"] == pytest.approx(nll["SqueezedWithin"], rel=1e-6)
    assert not alone(built("Squeezed"), training=True)
    one = built("Squeezed")
    assert one(one.initial, torch.zeros(1, 6)).shape == (1, 3)


def test_outputs_for_another_number_of_samples_are_refused():
    network = Network(torch.nn.Flatten(0, 1))
    with pytest.raises(ModelError, match=r"batch of 2 samples to outputs of shape \(6,\)"):
        network({}, torch.zeros(2, 3))


@pytest.mark.parametrize("engine", ["sequential", "workers"])
def test_errors_of_a_network_s_code_name_client_batch_and_cause(engine, tmp_path):
    own = settings("Fails", training={"batch_size": 33}, engine=engine)
    words = r"client 0, with 40 training samples: .*training batch of 7 samples: KeyError: 'seven'"
    with pytest.raises(FedbayesError, match=words + r" \(toy_networks\.py, line \d+\)"):
        fedbayes.run(None, tmp_path / "run", **own)


def test_a_loss_without_a_gradient_names_client_and_batch(tmp_path):
    own = settings("InPlace", training={"batch_size": 33})
    with pytest.raises(ModelError, match=r"client 0.*batch of 7 samples has no gradient.*inplace"):
        fedbayes.run(None, tmp_path / "run", **own)


@pytest.mark.slow
def test_the_command_line_shows_no_traceback(tmp_path):
    given = [
        "data.name=tests.helpers.toy_networks:rows",
        "model.name=tests.helpers.toy_networks:make_Fails",
    ]
    given += ["training.batch_size=33", "rounds=1", "calibration=none"]
    words = [word for pair in given for word in ("--set", pair)]
    command = [sys.executable, "-m", "fedbayes", "run", *words, "--out", str(tmp_path / "run")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode
    assert "Traceback" not in ended.stderr
    assert "KeyError: 'seven'" in " ".join(ended.stderr.split())


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("make_Softmaxed", "seems to end in Softmax"),
        ("doubled", "float64, which takes twice"),
        ("halved", "bfloat16, which keeps 3 digits"),
    ],
)
def test_networks_that_do_not_what_they_seem_to_are_noted(name, words, tmp_path):
    own = settings("Head") | {"model": {"name": f"tests.helpers.toy_networks:{name}"}}
    with pytest.warns(FedbayesWarning, match=words):
        fedbayes.run(None, tmp_path / "run", **own)


@pytest.mark.parametrize("name", ["make_Head", "faint"])
def test_a_network_as_it_should_be_has_no_note(name, tmp_path, recwarn):
    own = settings("Head") | {"model": {"name": f"tests.helpers.toy_networks:{name}"}}
    fedbayes.run(None, tmp_path / "run", **own)
    assert not [str(w.message) for w in recwarn if name in str(w.message)]


def test_double_precision_computes_what_single_does(tmp_path):
    one = settings("Head") | {"model": {"name": "tests.helpers.toy_networks:doubled"}}
    nll = [
        fedbayes.run(None, tmp_path / str(number), **own).summary["global_nll"]
        for number, own in enumerate((one, settings("Head")))
    ]
    assert nll[0] == pytest.approx(nll[1], rel=1e-4)


def test_lazy_layers_start_as_those_of_known_sizes():
    torch.testing.assert_close(built("Lazy").initial, built("Head").initial, rtol=0, atol=0)
