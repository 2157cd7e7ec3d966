import io
import json
from zipfile import ZipFile

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from typer.testing import CliRunner

from fedbayes.cli import app
from fedbayes.core.seals import sealed
from fedbayes.errors import ModelError
from fedbayes.models import (
    MLP,
    dense_layers,
    named_as,
    read_program,
    read_weights,
    relu_network,
    unlike,
)
from fedbayes.models.files import single
from fedbayes.workflows.serve.model_files import write_model


class Named(nn.Module):
    """Layers whose names sort from last to first."""

    def __init__(self, widths):
        super().__init__()
        self.input = nn.Linear(widths[0], widths[1])
        self.hidden = nn.Linear(widths[1], widths[2])
        self.classifier = nn.Linear(widths[2], widths[3])


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
@pytest.mark.parametrize("bias", [True, False])
def test_layers_of_an_mlp(tmp_path, suffix, bias):
    module = MLP(4, [6] * 11, 3, bias=bias)
    path = tmp_path / f"model.{suffix}"
    save = save_file if suffix == "safetensors" else torch.save
    save(module.state_dict(), path)
    layers = dense_layers(read_weights(path), str(path))
    linear = [m for m in module if isinstance(m, nn.Linear)]
    assert len(layers) == 12
    for layer, expected in zip(layers, linear, strict=True):
        assert torch.equal(layer.weight, expected.weight)
        assert (layer.bias is None) == (not bias)
        if bias:
            assert torch.equal(layer.bias, expected.bias)


def test_the_layers_are_the_network():
    module, x = MLP(8, [6, 5], 3), torch.randn(7, 2, 4)
    layers = dense_layers(module.state_dict(), "m")
    torch.testing.assert_close(relu_network(layers, x), module(x))


def test_names_that_do_not_sort_are_ordered_by_size(tmp_path):
    module = Named([4, 6, 5, 3])
    path = tmp_path / "m.safetensors"
    save_file(module.state_dict(), path)
    names = [layer.name for layer in dense_layers(read_weights(path), "m")]
    assert names == ["input.weight", "hidden.weight", "classifier.weight"]


class Layered(nn.Module):
    """Linear layers of these names and sizes, in this order."""

    def __init__(self, **sizes):
        super().__init__()
        for name, (inputs, outputs) in sizes.items():
            self.add_module(name, nn.Linear(inputs, outputs))


@pytest.mark.parametrize(
    ("sizes", "several"),
    [
        ({"inp": (8, 8), "hid": (8, 8), "out": (8, 3)}, True),
        ({"inp": (4, 8), "hid": (8, 8), "mid": (8, 8), "out": (8, 3)}, True),
        ({"inp": (4, 8), "hid": (8, 8), "out": (8, 3)}, False),
        ({"fc1": (8, 8), "fc2": (8, 8), "head": (8, 3)}, False),
        ({"fc2": (8, 8), "fc10": (8, 8), "fc11": (8, 8)}, False),
        ({"stem": (8, 8), "fc1": (8, 8), "fc2": (8, 8), "head": (8, 3)}, True),
        ({"zeta": (2, 3), "alpha": (3, 2), "mid": (2, 3), "out": (3, 5)}, True),
        ({f"l{chr(122 - k)}": (4, 4) for k in range(12)}, True),
        ({f"l{chr(122 - k)}": (k + 4, k + 5) for k in range(12)}, False),
    ],
)
def test_safetensors_do_not_keep_the_order_of_layers(tmp_path, sizes, several):
    """The order is that of numbers, or of sizes; where neither says it, it is asked for."""
    module = Layered(**sizes)
    wanted = [f"{name}.weight" for name in sizes]
    torch.save(module.state_dict(), tmp_path / "m.pt")
    found = dense_layers(single(read_weights(tmp_path / "m.pt")), "m")
    assert [layer.name for layer in found] == wanted
    save_file(module.state_dict(), tmp_path / "m.safetensors")
    weights = single(read_weights(tmp_path / "m.safetensors"))
    if several:
        with pytest.raises(ModelError, match=r"more than one order fits.*--model"):
            dense_layers(weights, "m")
    else:
        assert [layer.name for layer in dense_layers(weights, "m")] == wanted
    # A file that this package wrote keeps it.
    write_model(tmp_path / "own.safetensors", module.state_dict())
    found = dense_layers(read_weights(tmp_path / "own.safetensors"), "m")
    assert [layer.name for layer in found] == wanted
    # One that was read without it does not pretend to have one.
    write_model(tmp_path / "again.safetensors", weights)
    assert list(read_weights(tmp_path / "again.safetensors")) == list(weights)
    if several:
        with pytest.raises(ModelError, match="more than one order fits"):
            dense_layers(read_weights(tmp_path / "again.safetensors"), "m")


def test_a_kept_order_of_other_names_is_none(tmp_path):
    weights = Layered(b=(2, 2), a=(2, 2)).state_dict()
    for text in ("[", "3", '["a.weight"]', '["a.weight", 1]'):
        (tmp_path / "m.safetensors").write_bytes(
            b"".join(sealed(weights, {"fedbayes-order": text}))
        )
        assert list(read_weights(tmp_path / "m.safetensors")) == sorted(weights)


def test_fused_layers_keep_their_order(tmp_path):
    """From networks whose order is known, through files of safetensors, to the right one."""
    models = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        models.append(Layered(first=(8, 8), second=(8, 8), third=(8, 3)))
    paths = [tmp_path / f"{seed}.pt" for seed in (0, 1)]
    for path, module in zip(paths, models, strict=True):
        torch.save(module.state_dict(), path)
    for method in ("average", "pfnm", "function"):
        out = tmp_path / f"{method}.safetensors"
        more = ["--shape", "8", "--minutes", "0"] if method == "function" else []
        words = ["fuse", *map(str, paths), "-o", str(out), "--method", method, *more]
        told = CliRunner().invoke(app, words)
        assert told.exit_code == 0, told.output
        names = [layer.name for layer in dense_layers(read_weights(out), "m")]
        assert names == ["first.weight", "second.weight", "third.weight"]


def test_checkpoints_with_a_state_dict_inside(tmp_path):
    torch.save({"state_dict": MLP(2, [3], 2).state_dict()}, tmp_path / "c.pt")
    assert len(dense_layers(read_weights(tmp_path / "c.pt"), "c")) == 2


@pytest.mark.parametrize("name", ["c.ckpt", "c.pt", "c"])
@pytest.mark.parametrize("key", ["state_dict", "model_state_dict", "model"])
def test_checkpoints_of_trainers(tmp_path, key, name):
    """As Lightning and others write them: optimizer and metrics beside, names with prefixes."""
    module = MLP(2, [3], 2)
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    prefixed = {f"module.{n}": t for n, t in module.state_dict().items()}
    content = {"epoch": 3, key: prefixed, "optimizer": optimizer.state_dict(), "loss": 0.5}
    torch.save(content, tmp_path / name)
    weights = read_weights(tmp_path / name)
    assert list(weights) == list(module.state_dict())
    for name, tensor in module.state_dict().items():
        assert torch.equal(weights[name], tensor)


def test_weights_behind_an_attribute_are_found():
    module = MLP(2, [3], 2)
    inner = {f"net.{n}": t for n, t in module.state_dict().items()}
    assert named_as(inner, module).keys() == module.state_dict().keys()
    assert named_as(inner | {"loss.weight": torch.ones(2)}, module) is None


class Evil:
    def __reduce__(self):
        return print, ("code from a file was run",)


def test_nothing_is_unpickled(tmp_path, capsys):
    torch.save({"state_dict": MLP(2, [3], 2).state_dict(), "extra": Evil()}, tmp_path / "e.ckpt")
    with pytest.raises(ModelError, match=r"pickled .*print.* would run code from the file"):
        read_weights(tmp_path / "e.ckpt")
    program = torch.export.export(MLP(2, [3], 2), (torch.ones(2, 2),))
    path = tmp_path / "m.pt2"
    torch.export.save(program, path)
    module, card = read_program(path)
    assert card == ""
    assert torch.equal(module(torch.ones(2, 2)), program.module()(torch.ones(2, 2)))
    folder = ZipFile(path).namelist()[0].split("/")[0]
    buffer = io.BytesIO()
    torch.save(Evil(), buffer)
    with ZipFile(path, "a") as archive:
        archive.writestr(f"{folder}/data/constants/model.pt", buffer.getvalue())
    with pytest.raises(ModelError, match="would run code"):
        read_program(path)
    assert "code from a file was run" not in capsys.readouterr().out
    with pytest.raises(
        ModelError, match=r"is a program, whose weights cannot be read\. Give a file of weights"
    ) as caught:
        read_weights(path)
    assert "a .pt2" not in str(caught.value)
    torch.save(MLP(2, [3], 2).state_dict(), path)
    with pytest.raises(ModelError, match="has no program"):
        read_program(path)
    torch.jit.script(MLP(2, [3], 2)).save(tmp_path / "script.pt")
    with pytest.raises(ModelError, match="TorchScript archive"):
        read_weights(tmp_path / "script.pt")


def state(**changes):
    tensors = {n: t.clone() for n, t in MLP(4, [5], 3).state_dict().items()}
    return {**tensors, **changes}


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        (
            Named([4, 4, 4, 4]).state_dict() | {"hidden.weight": torch.zeros(4, 5)},
            "do not fit together",
        ),
        (state(conv=torch.zeros(2, 2, 2)), "'conv' of shape .2, 2, 2. belongs to no linear"),
        ({"w": torch.zeros(2, 2)}, "1 linear layers"),
        (state(**{"1.weight": torch.full((5, 4), torch.nan)}), "'1.weight' has NaN"),
        (state(**{"1.bias": torch.zeros(4)}), "'1.bias' has shape .4,., which does not fit"),
    ],
)
def test_what_cannot_be_matched_is_told(weights, words):
    with pytest.raises(ModelError, match=f"the source.*{words}"):
        dense_layers(weights, "the source")


def test_files_that_are_no_models(tmp_path):
    with pytest.raises(ModelError, match=r"file .*not found"):
        read_weights(tmp_path / "absent.safetensors")
    for name in ("bad.safetensors", "bad.pt"):
        (tmp_path / name).write_bytes(b"nonsense")
        with pytest.raises(ModelError, match=f"{name} is damaged or not a model"):
            read_weights(tmp_path / name)
    (tmp_path / "trash.pt").write_bytes(b"hello")
    with pytest.raises(ModelError, match="not a model: it does not begin like a PyTorch file"):
        read_weights(tmp_path / "trash.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(ModelError, match="has no tensors"):
        read_weights(tmp_path / "list.pt")
    torch.save({"a": 3}, tmp_path / "numbers.pt")
    with pytest.raises(ModelError, match="'a' is not a tensor"):
        read_weights(tmp_path / "numbers.pt")
    torch.save(MLP(2, [3], 2), tmp_path / "whole.pt")
    with pytest.raises(
        ModelError,
        match=r"whole.pt contains a pickled .*MLP.* Save only its weights",
    ):
        read_weights(tmp_path / "whole.pt")


def test_of_a_folder_its_models_are_named(tmp_path):
    with pytest.raises(
        ModelError, match=r"is a folder\. Give a model file in it \(.*none ends in .safetensors"
    ):
        read_weights(tmp_path)
    save_file(MLP(4, [6], 3).state_dict(), tmp_path / "model.safetensors")
    for read in (read_weights, read_program):
        with pytest.raises(
            ModelError, match=r"is a folder\. Give a model file in it \(.*/model.safetensors\)"
        ):
            read(tmp_path)


def test_what_is_unlike_a_network_is_told_with_names_and_shapes():
    wanted = MLP(4, [5], 3).state_dict()
    foreign = {f"fc{name}": tensor for name, tensor in wanted.items()}
    told = unlike(foreign, wanted)
    assert "it has fc1.weight (5 x 4), fc1.bias (5), fc3.weight (3 x 5) and 1 more" in told
    assert "but 1.weight (5 x 4), 1.bias (5), 3.weight (3 x 5) and 1 more are expected" in told
    assert "save the state_dict" in told
    assert "it also has 4.bias (2)" in unlike({**wanted, "4.bias": torch.zeros(2)}, wanted)
    wider = MLP(4, [5], 2).state_dict()
    assert "it has 3.weight (2 x 5), 3.bias (2), but 3.weight (3 x 5)" in unlike(wider, wanted)
    few = {name: tensor for name, tensor in wanted.items() if name != "3.bias"}
    assert "and lacks 3.bias (3)" in unlike(few, wanted)


def test_a_model_in_parts_is_joined_by_its_index(tmp_path):
    weights = {f"{name}.weight": torch.randn(3, 2) for name in ("b", "a", "c10", "c9")}
    places = {}
    for number, name in enumerate(weights, 1):
        places[name] = f"model-0000{number}-of-00004.safetensors"
        save_file({name: weights[name]}, tmp_path / places[name])
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    for path in (tmp_path, index):
        found = read_weights(path)
        assert list(found) == ["a.weight", "b.weight", "c9.weight", "c10.weight"]
        assert all(torch.equal(found[name], weights[name]) for name in weights)
    for odd, words in (
        ({"x.weight": places["b.weight"]}, "has no tensor 'x.weight'"),
        ({"x.weight": "../other.safetensors"}, "which is not a file next to it"),
        ({"x.weight": "absent.safetensors"}, "absent.safetensors"),
        ([], "it has no weight_map"),
    ):
        index.write_text(json.dumps({"weight_map": odd}))
        with pytest.raises(ModelError, match=words):
            read_weights(tmp_path)
