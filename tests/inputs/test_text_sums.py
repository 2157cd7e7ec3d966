"""Texts by counts of tokens and pairs: counts by hand, the chain's frequencies, noise, files."""

import json
from collections import Counter

import numpy as np
import pytest
import torch

import fedbayes
from fedbayes.errors import DataError
from fedbayes.inputs.text_sums import (
    EDGE,
    SumsPrior,
    TextSums,
    add_text_sums,
    delta,
    read_text_sums,
    text_sums_of,
    write_text_sums,
)
from tests.helpers.cases import cases
from tests.helpers.command_line import command
from tests.helpers.others import available, write_text_network, write_texts

TEXTS = np.array([[5, 7, 5, 9], [5, 7, -1, -1], [7, 5, 7, -1], [9, -1, -1, -1]])


def test_counts_are_of_texts_and_add():
    found = text_sums_of(TEXTS, "t")
    assert found.tokens == {5: 3, 7: 3, 9: 2}
    assert found.pairs == {
        (EDGE, 5): 2, (5, 7): 3, (7, 5): 2, (5, 9): 1, (9, EDGE): 2, (7, EDGE): 2, (EDGE, 7): 1,
        (EDGE, 9): 1,
    }  # fmt: skip
    halves = text_sums_of(TEXTS[:2], "t") + text_sums_of(TEXTS[2:], "t")
    assert (halves.texts, dict(halves.tokens), dict(halves.pairs)) == (
        4, found.tokens, found.pairs
    )  # fmt: skip
    few = text_sums_of(TEXTS, "t", least=3)
    assert (few.tokens, few.pairs) == ({5: 3, 7: 3}, {(5, 7): 3})


def test_drawn_texts_have_the_frequencies_of_the_chain():
    """Of tokens behind a, n_ab / n_a, and what is left by n_b alone."""
    sums = TextSums(
        100, "t", {4: 60, 5: 30, 6: 10}, {(EDGE, 4): 90, (4, 5): 30, (5, EDGE): 15, (5, 4): 15}
    )
    prior = SumsPrior(30, sums, before=[1], after=[2])
    x = prior.draw(4000, np.random.default_rng(0)).long().tolist()
    behind = Counter()
    for row in x:
        own = [token for token in row if token >= 0]
        assert own[0] == 1
        assert own[-1] == 2
        behind.update(zip([EDGE, *own[1:-1]], [*own[1:-1], EDGE], strict=True))
    plain = {4: 0.6, 5: 0.3, 6: 0.1}
    for one, chances, left in (
        (EDGE, {4: 0.9}, 0.1), (4, {5: 0.5}, 0.5), (5, {EDGE: 0.5, 4: 0.5}, 0.0), (6, {}, 1.0),
    ):  # fmt: skip
        count = sum(n for (a, _), n in behind.items() if a == one)
        for two in (EDGE, 4, 5, 6):
            wanted = chances.get(two, 0) + left * plain.get(two, 0)
            spread = (wanted * (1 - wanted) / count) ** 0.5
            # Texts that are cut end elsewhere too.
            assert abs(behind[one, two] / count - wanted) <= 5 * spread + 0.01 * (two == EDGE)


@pytest.mark.slow
def test_noise_is_two_sided_geometric_and_small_counts_go():
    ids = np.tile(np.arange(10, 14), (500, 1))
    rng, share = np.random.default_rng(0), np.exp(-2.0 / 9)
    found = [text_sums_of(ids, "t", 1, 2.0, rng) for _ in range(1000)]
    noise = np.array([one.tokens[k] - 500 for one in found for k in range(10, 14)])
    assert abs(noise.mean()) < 0.4
    assert noise.var() == pytest.approx(2 * share / (1 - share) ** 2, rel=0.1)
    zero = (1 - share) / (1 + share)
    assert (noise == 0).mean() == pytest.approx(zero, abs=0.02)
    # A pair of one text alone is told as often as δ says.
    alone = np.array([[50, 51]] + [[60, 61]] * 40)
    told = [(50, 51) in text_sums_of(alone, "t", 4, 2.0, rng).pairs for _ in range(3000)]
    assert np.mean(told) == pytest.approx(delta(2.0, 2, 4) / 5, rel=0.15)


def test_files_keep_sums_and_damaged_ones_are_told(tmp_path):
    sums, path = text_sums_of(TEXTS, "t"), tmp_path / "a.json"
    write_text_sums(sums, path)
    assert read_text_sums(path) == sums
    with pytest.raises(DataError, match="given twice"):
        add_text_sums([path, path], "t", 10)
    with pytest.raises(DataError, match="another tokenizer"):
        add_text_sums([path], "other", 10)
    with pytest.raises(DataError, match="another tokenizer"):
        add_text_sums([path], "t", 9)
    content = json.loads(path.read_text())
    for odd in (
        {"format": "other"}, {"texts": -1}, {"tokens": [[1]]}, {"tokens": 7}, {"pairs": None},
        {"pairs": [[1, 2, "3"]]}, {"more": 1}, {"pairs": [[1, -2, 3]]},
    ):  # fmt: skip
        path.write_text(json.dumps(content | odd))
        with pytest.raises(DataError, match="does not contain sums of texts"):
            read_text_sums(path)
    for odd in ({"tokens": [[5, 1], [5, 2]]}, {"tokens": [[EDGE, 4]]}):
        path.write_text(json.dumps(content | odd))
        with pytest.raises(DataError, match="twice"):
            read_text_sums(path)
    path.write_text("[1, 2")
    with pytest.raises(DataError, match="does not contain sums of texts"):
        read_text_sums(path)


def test_a_chain_without_counts_is_told():
    with pytest.raises(DataError, match="have no count of a token"):
        SumsPrior(9, TextSums(40, "t", {}, {}))
    one = SumsPrior(4, TextSums(3, "t", {7: 3}, {}))
    assert torch.equal(one.draw(2, np.random.default_rng(0)), torch.full((2, 4), 7.0))


@pytest.mark.skipif(not available("transformers"), reason="the extra hf is not installed")
@pytest.mark.parametrize("trains", cases(["head", "lora"], slow=["lora"]))
def test_from_the_clients_texts_to_the_fused_network(trains, tmp_path, capsys):
    if trains == "lora" and not available("peft"):
        pytest.skip("the extra hf is not installed")
    base, texts = write_text_network(tmp_path / "bert"), write_texts(tmp_path / "notes.csv")
    shape = {"name": "transformers", "pretrained": str(base), "trains": trains}
    data = {"path": texts, "label": "outcome", "group": "site", "tokens": "note", "max_tokens": 12}
    run = tmp_path / "run"
    fedbayes.run(method="local", rounds=1, data=data, model=shape, training={"epochs": 1}, out=run)
    clients = sorted((run / "clients").glob("*.safetensors"))
    capsys.readouterr()
    paths = []
    for number, client in enumerate(clients):
        paths += ["--sums", tmp_path / f"{number}.json"]
        out = ("-o", paths[-1], "--min-rows", 3)
        noise = ("--epsilon", 500) if number else ()
        assert command("sums", client, "--data", texts, *out, *noise, "--json") == 0
        told = json.loads(capsys.readouterr().out)
        assert told["tokens"] > 1
        assert ("delta" in told) == bool(number)
        sums = read_text_sums(paths[-1])
        assert min(sums.tokens) > 4, "none is special"
        assert min(*sums.tokens.values(), *sums.pairs.values()) >= 3
    more = ("--minutes", 0, "--json")
    draws = ("--draws", 64) if trains == "lora" else ("--set", "function.draws=512")
    out = ("-o", tmp_path / "fused.safetensors")
    assert command("fuse", *clients, *out, *paths, *draws, *more) == 0
    capsys.readouterr()
    assert command("fuse", *clients, *out, *paths, *draws, "--inputs", texts) == 2
    assert "--sums has no effect on --inputs" in " ".join(capsys.readouterr().err.split())
    few = ("-o", tmp_path / "few.json", "--min-rows", 10_000)
    assert command("sums", clients[0], "--data", texts, *few) == 2
    assert "texts; the minimum is 10000" in " ".join(capsys.readouterr().err.split())
    assert command("sums", clients[0], "--data", texts, *few[:2], "--category", "a") == 2
    assert command("sums", clients[0], "--data", texts, *few[:2], "--epsilon", -1) == 2
    assert not (tmp_path / "few.json").exists()
