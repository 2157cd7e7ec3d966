"""Files and settings that nobody means to write: a plain message that names them, never more."""

import io
import json
import math
import os
import zipfile

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import fedbayes
from fedbayes.config.config import Config
from fedbayes.core.devices import choose_device
from fedbayes.core.files import json_text
from fedbayes.core.messages import Masked, encode
from fedbayes.errors import ConfigError, DataError, ModelError, RunError, plain
from fedbayes.models import read_model, read_program
from fedbayes.storage.folder import RunFolder
from fedbayes.storage.metrics_file import _line
from fedbayes.workflows.serve.model_files import read_counts, read_models, read_samples
from tests.helpers.command_line import command


def weights():
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)).state_dict()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = " + "[" * 5000 + "]" * 5000, "nested too deeply"),
        ("rounds = " + "9" * 5000, "thousands of digits"),
        ("[training]\nlr = 1e308", r"training.lr is 1e\+308"),
        ("[method]\nname = 'fedprox'\nproximal = 1e300", r"method.proximal is 1e\+300"),
        *((f"[method]\nname = '{name}'", "package.module:name") for name in ("..x:y", ":", ".x:y")),
        *((f"[task]\nlikelihood = '{name}'", "package.module:name") for name in ("..x:y", ":")),
    ],
)
def test_a_malformed_config_is_told(tmp_path, text, words):
    (tmp_path / "c.toml").write_text(text)
    with pytest.raises(ConfigError, match=words):
        Config.load(tmp_path / "c.toml")


@pytest.mark.parametrize("value", ["[" * 5000 + "]" * 5000, "9" * 5000])
def test_a_malformed_override_is_told_by_its_key(value):
    with pytest.raises(ConfigError, match=r"^rounds is not a TOML value"):
        Config.load(None, [f"rounds={value}"])


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"hidden": [1e12]}, "more than this machine has"),
        ({"hidden": [8, 10**12, 8]}, "more than this machine has"),
        *(({"name": name}, "package.module:name") for name in ("..x:y", ":", ".x:y")),
    ],
)
def test_a_network_that_cannot_be_is_told(tmp_path, model, words):
    with pytest.raises(ModelError, match=words):
        fedbayes.run(model=model, rounds=1, folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_device_without_values_is_refused():
    with pytest.raises(ConfigError, match="device 'meta' cannot be used"):
        choose_device("meta")
    assert choose_device("cpu").type == "cpu"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda t: t.to_sparse(), "sparse or nested. Save it as a dense tensor"),
        (lambda t: t.to_sparse_csr(), "sparse or nested"),
        (lambda t: t.to("meta"), "on device 'meta', which has no values"),
        (lambda t: t.to(torch.float8_e4m3fn), "torch.float8_e4m3fn, not a float of 16 bits"),
        (lambda t: t.to(torch.complex64), "torch.complex64, not a float"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_tensors_of_odd_kinds_are_named(tmp_path, make, words):
    path = tmp_path / "odd.pt"
    torch.save({**weights(), "0.weight": make(weights()["0.weight"])}, path)
    with pytest.raises(ModelError, match=rf"odd\.pt: '0\.weight' (has type|is) {words}"):
        read_models([path])


def test_fp8_in_safetensors_is_named_too(tmp_path):
    path = tmp_path / "odd.safetensors"
    save_file({**weights(), "0.weight": weights()["0.weight"].to(torch.float8_e4m3fn)}, path)
    with pytest.raises(ModelError, match=r"odd\.safetensors: '0\.weight'"):
        read_models([path])


def test_pipes_are_not_waited_for(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    for read, kind in (
        (read_model, ModelError),
        (read_program, ModelError),
        (Config.load, ConfigError),
        (lambda p: read_counts(p, []), DataError),
        (read_samples, DataError),
        (fedbayes.data.Partition.load, DataError),
    ):
        with pytest.raises(kind, match=r"pipe.*a pipe or a device, not a file"):
            read(path)
    os.mkfifo(tmp_path / "config.toml")
    with pytest.raises((ConfigError, RunError), match=r"config.toml"):
        RunFolder(tmp_path).config()


def compressed(data):
    """The same archive, its parts compressed."""
    out = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(data)) as source,
        zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as target,
    ):
        for name in source.namelist():
            target.writestr(name, source.read(name))
    return out.getvalue()


def saved(tensors):
    buffer = io.BytesIO()
    torch.save(tensors, buffer)
    return buffer.getvalue()


def test_a_small_file_takes_little_memory(tmp_path, monkeypatch):
    path = tmp_path / "bomb.pt"
    path.write_bytes(compressed(saved({"w": torch.zeros(50_000_000)})))
    loaded = []
    monkeypatch.setattr(torch, "load", lambda *a, **k: loaded.append(a))
    with pytest.raises(ModelError, match=r"bomb\.pt is damaged.*claim to unpack to 2"):
        read_model(path)
    assert not loaded
    monkeypatch.undo()
    path.write_bytes(saved({"w": torch.zeros(1).expand(300_000_000)}))
    with pytest.raises(
        ModelError, match=r"bomb\.pt .*bytes claim to contain tensors of 1,200,000,000"
    ):
        read_model(path)
    rows = Masked(torch.zeros(0), (300_000_000, 1), {(1,): torch.zeros(1, dtype=torch.bool)})
    path = tmp_path / "bomb.safetensors"
    for whole, words in ((False, "its header is compressed"), (True, "'w' is sparse")):
        path.write_bytes(encode({"w": rows}, plain=whole))
        with pytest.raises(ModelError, match=rf"bomb\.safetensors .*not a model: .*{words}"):
            read_model(path)
    path = tmp_path / "good.pt"
    path.write_bytes(compressed(saved(weights())))
    assert read_model(path)[0].keys() == weights().keys()


class Evil:
    def __reduce__(self):
        return os.getcwd, ()


@pytest.mark.parametrize("content", [nn.Linear(2, 2), Evil(), {"a": Evil()}, b""])
def test_nobody_is_told_to_unpickle(tmp_path, content):
    path = tmp_path / "m.pt"
    if content == b"":
        path.write_bytes(b"\x80\x05\x95\x0b\x00\x00\x00\x00\x00\x00\x00\x8c\x02os\x94\x93.")
    else:
        torch.save(content, path)
    with pytest.raises(ModelError) as refused:
        read_model(path)
    words = str(refused.value)
    assert str(path) in words
    for advice in ("weights_only", "trust", "arbitrary", "safe_globals", "do so only"):
        assert advice not in words


def test_an_empty_model_is_told(tmp_path):
    for name in ("m.safetensors", "m.pt"):
        (tmp_path / name).touch()
        with pytest.raises(ModelError, match=rf"{name} is damaged or not a model"):
            read_model(tmp_path / name)


def test_names_of_files_never_steer_the_terminal(tmp_path, capfd):
    odd = tmp_path / "run\x1b[2J\x1b]0;title\x07\u202eevil"
    assert command("resume", odd) == 2
    small = ["--rounds", 1, "--clients", 2, "--set", "model.hidden=[2]"]
    assert command("run", *small, "-o", odd) == 0
    out = tmp_path / "x\x1b[31m.safetensors"
    assert command("export", odd, "-o", out) == 0
    (odd / "model.safetensors").write_bytes(b"")
    assert command("export", odd, "-o", out) == 2
    shown = "".join(capfd.readouterr())
    assert "evil" in shown
    assert not any(sign in shown for sign in ("\x1b[2J", "\x1b]", "\x1b[31m", "\x07", "\u202e"))


def test_plain_text_stays_as_it_is():
    text = "Größe\t1\n—✓ 漢字"
    assert plain(text) == text
    assert plain("a\x1b[0m\x9bz\r") == "a\ufffd[0m\ufffdz\ufffd"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("{}['a']", "KeyError: 'a'"),
        ("raise SystemExit(1)", "SystemExit: 1"),
    ],
)
def test_a_module_that_fails_is_named_with_its_line(tmp_path, monkeypatch, capsys, text, said):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "broken.py").write_text(f'"""Mine."""\n\n{text}\n')
    for setting in ("method.name", "model.name", "data.name", "task.likelihood", "attack.kind"):
        arguments = ["run", "--set", f"{setting}=broken:Mine", "-o", tmp_path / "run"]
        assert command(*arguments) == 2
        words = " ".join(capsys.readouterr().err.split())
        assert f"broken cannot be imported: {said} (broken.py, line 3)" in words
        assert not (tmp_path / "run").exists()


def test_json_has_no_numbers_that_readers_refuse():
    content = {"NaN": [math.nan, math.inf, -math.inf, 1.5, None], 'a "Infinity\\"': "-Infinity NaN"}

    def refused(name):
        raise AssertionError(name)

    found = json.loads(json_text(content, indent=2), parse_constant=refused)
    assert found == {**content, "NaN": [None, math.inf, -math.inf, 1.5, None]}
    assert json_text([1.0]) == "[1.0]"


def test_figures_that_are_not_finite_are_read_again_as_they_were():
    figures = {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 0.5}
    line = {"round": 1, "metrics": {"global": figures}, "reported": figures, "update": figures}
    found = _line(json_text(line).encode(), 1)
    for table in (found["metrics"]["global"], found["reported"], found["update"]):
        assert math.isnan(table["a"])
        assert [table[name] for name in "bcd"] == [math.inf, -math.inf, 0.5]
