"""Texts as inputs of a fusion: what a network draws itself, and texts of a file."""

import io
import json
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from rich.console import Console

from fedbayes.core import pretrained
from fedbayes.errors import ConfigError, DataError, ModelError
from fedbayes.inputs.texts import SHORTEST, TextPrior, by_frequency, text_inputs
from fedbayes.models.others import language_model
from tests.helpers.command_line import command
from tests.helpers.others import WORDS, available, write_text_network

if not (available("transformers") and available("peft")):
    pytest.skip("the extra hf is not installed", allow_module_level=True)
SPECIALS = 5
"""Tokens that are no words, before them in the vocabulary."""


def write_masked(folder):
    """A masked language model whose prediction is the same everywhere: its bias alone."""
    from transformers import BertConfig, BertForMaskedLM

    write_text_network(folder)
    config = BertConfig.from_pretrained(folder)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = BertForMaskedLM(config)
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        net.cls.predictions.transform.LayerNorm.weight.zero_()
        net.cls.predictions.bias.copy_(torch.randn(config.vocab_size, generator=rng))
    net.save_pretrained(folder)
    return folder


def write_causal(folder, end=0.0):
    """A causal language model, whose tokenizer puts nothing around a text."""
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    write_text_network(folder)
    words = PreTrainedTokenizerFast.from_pretrained(folder)
    backend = words.backend_tokenizer
    backend.post_processor = __import__("tokenizers").processors.TemplateProcessing(
        single="$A", special_tokens=[]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", bos_token="[CLS]", eos_token="[SEP]",
        unk_token="[UNK]",
    ).save_pretrained(folder)  # fmt: skip
    config = GPT2Config(
        vocab_size=len(words), n_positions=24, n_embd=16, n_layer=2, n_head=2,
        bos_token_id=2, eos_token_id=3, pad_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = GPT2LMHeadModel(config)
    with torch.no_grad():
        net.lm_head.weight.mul_(20)
    net.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def masked(tmp_path_factory):
    return write_masked(tmp_path_factory.mktemp("masked"))


@pytest.fixture(scope="module")
def causal(tmp_path_factory):
    return write_causal(tmp_path_factory.mktemp("causal"))


def frequencies(tokens, chances):
    """See that drawn tokens have these probabilities, within five standard errors."""
    counts = torch.bincount(tokens.long(), minlength=len(chances)).double()
    spread = (chances * (1 - chances) / len(tokens)).sqrt()
    assert ((counts / len(tokens) - chances).abs() <= 5 * spread + 1e-9).all()


def test_a_masked_model_fills_texts(masked):
    prior = text_inputs(None, str(masked), 12)
    assert "masked" in prior.assumes
    x = prior.draw(600, np.random.default_rng(0))
    again = prior.draw(600, np.random.default_rng(0))
    torch.testing.assert_close(x, again)
    given = x >= 0
    lengths = given.sum(1)
    assert set((lengths - 2).tolist()) == set(range(SHORTEST, 11))
    assert (given.int().diff(dim=1) <= 0).all()  # padding is behind
    assert (x[:, 0] == 2).all()
    assert (x[torch.arange(600), lengths - 1] == 3).all()
    inner = given.clone()
    inner[:, 0] = False
    inner[torch.arange(600), lengths - 1] = False
    assert (x[inner] >= SPECIALS).all()
    found = language_model(str(masked), ModelError)
    bias = found[0].network.cls.predictions.bias.detach().double()
    bias[:SPECIALS] = -torch.inf
    frequencies(x[inner], bias.softmax(0))


def test_drawing_many_texts_shows_how_far_it_is(masked, monkeypatch):
    console = Console(stderr=True, file=io.StringIO())
    monkeypatch.setattr("rich.get_console", lambda: console)
    monkeypatch.setattr("fedbayes.data.progress.FIRST", 0)
    TextPrior(str(masked), 12).draw(64, np.random.default_rng(0))
    assert not console.file.getvalue()  # the caller says how far it is after each
    TextPrior(str(masked), 12).draw(128, np.random.default_rng(0))
    assert console.file.getvalue().startswith("drawing texts: 1 of 2, ")


def test_a_causal_model_draws_texts(causal):
    prior = TextPrior(str(causal), 10)
    assert "causal" in prior.assumes
    x = prior.draw(3000, np.random.default_rng(0))
    given = x >= 0
    assert given.sum(1).min() == SHORTEST
    assert given.sum(1).max() == 10
    assert (x[given] >= 4).all()  # this tokenizer has no mask
    net = language_model(str(causal), ModelError)[0].network
    with torch.no_grad():
        first = net(input_ids=torch.tensor([[2]])).logits[0, -1].double()
        begun = [2, int(x[:, 0].mode().values)]
        second = net(input_ids=torch.tensor([begun])).logits[0, -1].double()
    first[:4] = second[:4] = -torch.inf
    frequencies(x[:, 0], first.softmax(0))
    frequencies(x[x[:, 0] == begun[1], 1], second.softmax(0))


def test_without_a_language_model_tokens_are_by_frequency(tmp_path):
    prior = TextPrior(str(write_text_network(tmp_path / "bert")), 12)
    assert "has no language model" in prior.notes[0]
    x = prior.draw(800, np.random.default_rng(0))
    tokens = x[x >= SPECIALS]
    chances = torch.zeros(SPECIALS + len(WORDS), dtype=torch.float64)
    chances[SPECIALS:] = 1 / (torch.arange(len(WORDS), dtype=torch.float64) + 3)
    frequencies(tokens, chances / chances.sum())


def test_words_come_before_single_characters_and_unused_places():
    tokens = ["[PAD]", "[unused1]", "!", ".", "a", "中", "the", "##s", "##ing", "Ġof", "▁und"]
    words = MagicMock(all_special_ids=[0])
    words.__len__.return_value = len(tokens)
    words.convert_ids_to_tokens = lambda ids: [tokens[k] for k in ids]
    found = [tokens[k] for k in by_frequency(words).tolist()]
    assert found == [".", "the", "##ing", "Ġof", "▁und", "[unused1]", "!", "a", "中", "##s"]


def test_texts_of_a_file(masked, tmp_path):
    lines = ["the pain\u2028was good", "", "fever", "not very mild"]
    file = tmp_path / "texts.txt"
    file.write_text("\n".join(lines))
    prior = text_inputs(str(file), str(masked), 6)
    wanted = pretrained.tokenizer(str(masked), DataError)([line for line in lines if line])
    rows = {tuple(ids + [-1] * (6 - len(ids))) for ids in wanted["input_ids"]}
    x = prior.draw(30, np.random.default_rng(0)).long()
    assert {tuple(row) for row in x.tolist()} == rows
    table = tmp_path / "notes.csv"
    table.write_text("note,kind\nthe pain was good,a\nnot very mild,b\n")
    own = text_inputs(str(table), str(masked), 6).draw(8, np.random.default_rng(0)).long()
    named = text_inputs(f"{table}:kind", str(masked), 6)
    assert {tuple(row) for row in own.tolist()} < rows
    assert named.draw(2, np.random.default_rng(0)).shape == (2, 6)
    with pytest.raises(DataError, match="no column 'nothing'"):
        text_inputs(f"{table}:nothing", str(masked), 6)
    both = tmp_path / "both.csv"
    both.write_text("note,more\nthe pain,a fever\n")
    with pytest.raises(DataError, match=r"2 columns of texts \(note, more\).*both.csv:note"):
        text_inputs(str(both), str(masked), 6)
    with pytest.raises(ConfigError, match="the network takes texts"):
        text_inputs("strokes", str(masked), 6)
    with pytest.raises(ConfigError, match="no room"):
        TextPrior(str(masked), 4)


def test_adapters_of_a_language_model(causal, tmp_path, capsys):
    """Conv1D layers [in, out], answers for every token, and what PEFT loads of it."""
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import GPT2LMHeadModel

    folders = []
    for seed in (1, 2):
        settings = LoraConfig(
            task_type="CAUSAL_LM", r=2, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True
        )
        net = get_peft_model(GPT2LMHeadModel.from_pretrained(causal), settings)
        rng = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in net.named_parameters():
                if "lora_" in name:
                    parameter.copy_(0.1 * torch.randn(parameter.shape, generator=rng))
        net.save_pretrained(tmp_path / str(seed))
        folders.append(tmp_path / str(seed))
    out = tmp_path / "out"
    assert command("fuse", *folders, "-o", out, "--rank", "4", "--draws", "64", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    mine = PeftModel.from_pretrained(GPT2LMHeadModel.from_pretrained(causal), out).eval()
    each = [
        PeftModel.from_pretrained(GPT2LMHeadModel.from_pretrained(causal), folder).eval()
        for folder in folders
    ]
    x = TextPrior(str(causal), 24).draw(200, np.random.default_rng(5)).long()
    keep = x >= 0
    with torch.no_grad():
        said = [
            net(input_ids=x.clamp_min(0), attention_mask=keep.long()).logits[keep]
            for net in (*each, mine)
        ]
    pooled = (said[0].softmax(1) + said[1].softmax(1)) / 2
    gaps = [float((pooled * (pooled.log() - one.log_softmax(1))).sum(1).mean()) for one in said]
    assert found["divergence"]["fused, least squares"] == pytest.approx(gaps[2], rel=0.15)
    assert gaps[2] < min(gaps[:2])
