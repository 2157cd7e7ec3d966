"""Run folders of older versions: `older_run` is one as the version without `[privacy]` left it."""

import shutil
from pathlib import Path

import pytest

import fedbayes
from fedbayes import Config, Result
from fedbayes.errors import ConfigError
from fedbayes.reports import gather
from fedbayes.storage.folder import RunFolder
from fedbayes.workflows.calibrate.calibration import trust
from fedbayes.workflows.serve.evaluation_set import find_tests
from fedbayes.workflows.serve.export import export
from fedbayes.workflows.serve.model_evaluation import compare, open_model

OLDER = Path(__file__).parent / "older_run"


@pytest.fixture
def older(tmp_path):
    return shutil.copytree(OLDER, tmp_path / "run")


def edit(folder, before, after):
    text = (folder / "config.toml").read_text()
    assert before in text
    (folder / "config.toml").write_text(text.replace(before, after))


def test_a_run_without_digests_and_privacy_is_read_and_gone_on_with(older, tmp_path):
    before, accuracy = Result(older).metrics, Result(older).summary["global_accuracy"]
    (record,) = gather([older])
    assert record.metrics[-1]["global_accuracy"] == accuracy
    assert record.confusion is not None
    assert trust(older).metrics["accuracy"] == pytest.approx(accuracy, abs=1e-6)
    tests = find_tests(older / "model.safetensors", older, [f"data.dir={older}"])
    (score,) = compare({"m": open_model(older / "model.safetensors", tests)}, tests)
    assert score.metrics["accuracy"] == pytest.approx(accuracy, abs=1e-6)
    export(older, tmp_path / "model.safetensors")
    edit(older, "rounds = 2", "rounds = 3")
    longer = fedbayes.resume(older)
    assert longer.metrics[:2] == before
    assert [line["round"] for line in longer.metrics] == [1, 2, 3]
    fedbayes.resume(older)  # it has digests now


def test_noise_has_moved_and_means_the_same(older):
    edit(older, "# clip = ...", "clip = 2.0 #")
    edit(older, "noise = 0.0\ndelta = 1e-05", "noise = 1.5\ndelta = 1e-06")
    config = RunFolder(older).config()
    assert (config.privacy.noise, config.privacy.delta) == (1.5, 1e-6)
    assert config == Config.create(
        **{
            **config.model_dump(),
            "aggregation": {"clip": 2.0},
            "privacy": {"noise": 1.5, "delta": 1e-6},
        }
    )


def test_only_what_a_run_left_may_have_the_older_names(older):
    with pytest.raises(ConfigError, match=r"aggregation.noise is not a setting"):
        Config.load(older / "config.toml")
    edit(older, "[secure]", "[privacy]\nnoise = 0.0\n[secure]")
    with pytest.raises(ConfigError, match=r"aggregation.noise is not a setting"):
        RunFolder(older).config()
