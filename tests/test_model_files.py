import io
from zipfile import ZipFile

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

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
    with pytest.raises(ModelError, match=r"is a program.* take a file of weights") as caught:
        read_weights(path)
    assert "a .pt2" not in str(caught.value)
    torch.save(MLP(2, [3], 2).state_dict(), path)
    with pytest.raises(ModelError, match="holds no program"):
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
        (Named([4, 4, 4, 4]).state_dict() | {"hidden.weight": torch.zeros(4, 5)}, "do not chain"),
        (state(conv=torch.zeros(2, 2, 2)), "'conv' of shape .2, 2, 2. belongs to no linear"),
        ({"w": torch.zeros(2, 2)}, "1 linear layers"),
        (state(**{"1.weight": torch.full((5, 4), torch.nan)}), "'1.weight' holds NaN"),
        (state(**{"1.bias": torch.zeros(4)}), "'1.bias' has shape .4,., which does not fit"),
    ],
)
def test_what_cannot_be_matched_is_told(weights, words):
    with pytest.raises(ModelError, match=f"the source.*{words}"):
        dense_layers(weights, "the source")


def test_files_that_are_no_models(tmp_path):
    with pytest.raises(ModelError, match="cannot read"):
        read_weights(tmp_path / "absent.safetensors")
    for name in ("bad.safetensors", "bad.pt"):
        (tmp_path / name).write_bytes(b"nonsense")
        with pytest.raises(ModelError, match=f"{name} is damaged or no model"):
            read_weights(tmp_path / name)
    (tmp_path / "trash.pt").write_bytes(b"hello")
    with pytest.raises(ModelError, match="no model: it does not begin as PyTorch's files do"):
        read_weights(tmp_path / "trash.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(ModelError, match="holds no tensors"):
        read_weights(tmp_path / "list.pt")
    torch.save({"a": 3}, tmp_path / "numbers.pt")
    with pytest.raises(ModelError, match="'a' is no tensor"):
        read_weights(tmp_path / "numbers.pt")
    torch.save(MLP(2, [3], 2), tmp_path / "whole.pt")
    with pytest.raises(ModelError, match=r"whole.pt holds a pickled .*MLP .*save its weights"):
        read_weights(tmp_path / "whole.pt")


def test_of_a_folder_its_models_are_named(tmp_path):
    with pytest.raises(ModelError, match=r"is a folder; name .*none ends in .safetensors"):
        read_weights(tmp_path)
    save_file(MLP(4, [6], 3).state_dict(), tmp_path / "model.safetensors")
    for read in (read_weights, read_program):
        with pytest.raises(ModelError, match=r"is a folder; name .*/model\.safetensors\)"):
            read(tmp_path)


def test_what_is_unlike_a_network_is_told_with_names_and_shapes():
    wanted = MLP(4, [5], 3).state_dict()
    foreign = {f"fc{name}": tensor for name, tensor in wanted.items()}
    told = unlike(foreign, wanted)
    assert "it has fc1.weight (5 x 4), fc1.bias (5), fc3.weight (3 x 5) and 1 more" in told
    assert "where 1.weight (5 x 4), 1.bias (5), 3.weight (3 x 5) and 1 more are wanted" in told
    assert "save the state_dict" in told
    assert "it has 4.bias (2) besides" in unlike({**wanted, "4.bias": torch.zeros(2)}, wanted)
    wider = MLP(4, [5], 2).state_dict()
    assert "it has 3.weight (2 x 5), 3.bias (2), where 3.weight (3 x 5)" in unlike(wider, wanted)
    few = {name: tensor for name, tensor in wanted.items() if name != "3.bias"}
    assert "and lacks 3.bias (3)" in unlike(few, wanted)
