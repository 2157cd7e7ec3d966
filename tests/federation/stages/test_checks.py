import math

import pytest
import torch

from fedbayes.contracts import Report
from fedbayes.core.messages import Masked, encode
from fedbayes.core.targets import Target
from fedbayes.core.tensors import Samples
from fedbayes.errors import MessageError
from fedbayes.federation.stages.checks import check_scores, decode_report, encode_report, figures
from fedbayes.likelihoods import (
    LIKELIHOODS,
    build_likelihood,
    evaluate,
    find_likelihood,
    total,
)

EXPECTED = {"a": torch.zeros(2, 3), "weight": torch.zeros(4)}


def good(**changes):
    return {"a": torch.ones(2, 3), "weight": torch.ones(4), **changes}


@pytest.mark.parametrize(
    "bomb",
    [
        {"a": torch.zeros((1,) * 100_000 + (0,))},
        {f"name number {i}": torch.zeros(0) for i in range(20_000)},
    ],
)
@pytest.mark.parametrize("plain", [True, False])
def test_a_header_is_not_unpacked_beyond_what_a_report_can_have(bomb, plain, monkeypatch):
    expected = {"a": torch.zeros(1_000_000)}  # so that the whole is not too long
    monkeypatch.setattr("fedbayes.core.messages.parts", lambda *_: pytest.fail("it was unpacked"))
    with pytest.raises(MessageError, match=r"header is .*too long"):
        decode_report(encode(bomb, plain=plain), expected)


@pytest.mark.parametrize("weight", [1.0, 0.5, 600.0])
def test_a_good_report_passes(weight):
    report = decode_report(encode_report(Report(good(), weight)), EXPECTED)
    assert report.weight == weight
    assert torch.equal(report.tensors["weight"], torch.ones(4))
    assert list(report.tensors) == list(EXPECTED)


def test_of_many_missing_tensors_three_are_named():
    with pytest.raises(MessageError, match="missing 'b', 'c', 'd' and 2 more; extra none"):
        decode_report(encode({"a": torch.ones(1)}), dict.fromkeys("abcdef", torch.ones(1)))


def test_a_weight_of_one_costs_nothing():
    assert encode_report(Report(good(), 1.0)) == encode(good())
    assert encode_report(Report({}, 1.0)) == b""


def test_a_sparse_report_passes():
    sparse = Masked.keep(torch.ones(2, 3), {(0,): torch.tensor([True, False])})
    report = decode_report(encode_report(Report(good(a=sparse))), EXPECTED)
    assert report.tensors["a"].dense().tolist() == [[1, 1, 1], [0, 0, 0]]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"nonsense", "not a message"),
        (encode({"a": torch.ones(2, 3)}), "missing 'weight'; extra none"),
        (encode(good(b=torch.ones(1))), "missing none; extra 'b'"),
        (encode(good(a=torch.ones(3, 2))), "'a' has shape"),
        (encode(good(a=torch.ones(2, 3).double())), "'a' has type"),
        (encode(good(a=torch.full((2, 3), torch.nan))), "'a' contains NaN"),
        (encode(good(a=torch.full((2, 3), torch.inf))), "'a' contains NaN or infinite"),
        (encode_report(Report(good(), -3.0)), "weight is -3"),
        (encode_report(Report(good(), 0.0)), "weight is 0"),
        (encode_report(Report(good(), float("inf"))), "weight is inf"),
        (encode_report(Report(good(), 1e300)), "weight is 1e\\+300"),
        (encode(good() | {"c": torch.zeros(10_000)}), "40,... bytes; the limit is"),
        (encode(good() | {"/weight": torch.ones(2)}), "not a float64 scalar"),
        (
            encode(
                good(a=Masked(torch.zeros(0), (64, 2**30), {(0,): torch.zeros(64, dtype=bool)}))
            ),
            "'a' has shape",
        ),
        (
            encode(
                good(
                    a=Masked.keep(torch.full((2, 3), torch.nan), {(0,): torch.ones(2, dtype=bool)})
                )
            ),
            "'a' contains NaN",
        ),
    ],
)
def test_a_bad_report_is_refused_by_name(data, words):
    with pytest.raises(MessageError, match=words):
        decode_report(data, EXPECTED)


@pytest.mark.parametrize("weight", [0.0, -1.0, 5e-324, 1e-20, 1e17, math.nan, math.inf])
def test_a_weight_that_nothing_can_be_divided_by_is_refused(weight):
    report = encode_report(Report(good(), weight))
    with pytest.raises(MessageError, match=r"its weight is .* between 2\*\*-53 and 2\*\*53"):
        decode_report(report, EXPECTED)


CLASSES = build_likelihood("categorical", Target("class", ("ant", "bee")))
REAL = build_likelihood("gaussian", Target("real", ("age",), (40.0,), (9.0,)))
LABELS = build_likelihood("multilabel", Target("labels", ("ant", "bee")))


def scores(likelihood, **changes):
    """Honest scores of five samples, changed."""
    rng = torch.Generator().manual_seed(0)
    f = torch.randn(5, likelihood.outputs, generator=rng)
    head = likelihood.head()
    f = f if head is None else head(f).detach()
    columns = (5,) if likelihood.target.classes else (5, likelihood.target.columns)
    y = torch.randint(0, 2, columns, generator=rng)
    y = y if likelihood.target.classes else y.float()
    honest = total(evaluate(likelihood, lambda x: x[None], Samples(f, y)))
    return honest | {name.replace("__", "/"): value for name, value in changes.items()}


@pytest.mark.parametrize("likelihood", [CLASSES, REAL, LABELS])
def test_honest_scores_pass_and_so_do_those_of_a_model_that_diverged(likelihood):
    check_scores({}, likelihood)  # of a client without test samples
    check_scores(scores(likelihood), likelihood)
    check_scores(scores(likelihood, nll=math.inf), likelihood)


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, kind) for name in LIKELIHOODS for kind in find_likelihood(name).kinds],
)
def test_scores_that_cannot_be_negative_are_not(name, kind):
    """Of a perfect prediction by many draws and of random ones."""
    names = ("ant", "bee")
    numbers = {"real": ((40.0, 1.0), (9.0, 1.0)), "count": ((3.0, 1e6),)}.get(kind, ())
    likelihood = build_likelihood(name, Target(kind, names, *numbers))
    stream = torch.Generator().manual_seed(0)
    for scale in (0.0, 1.0, 60.0):
        f = scale * torch.randn(7, 200, likelihood.outputs, generator=stream)
        head = likelihood.head()
        f = f if head is None else head(f.flatten(0, 1)).detach().unflatten(0, (7, 200))
        if kind == "survival":
            y = torch.rand(200, 2, generator=stream).mul(torch.tensor([9.0, 1.0])).round()
        elif kind in ("real", "count"):
            y = likelihood.mean(f.double()).float().clamp_min(0).round()
        else:
            y = likelihood.mean(f).round() if kind == "labels" else likelihood.mean(f).argmax(1)
        check_scores(total(evaluate(likelihood, lambda x, f=f: f, Samples(f[0], y))), likelihood)


def test_a_model_that_is_sure_is_no_liar():
    sure = torch.full((1000, 2), -60.0).index_fill_(1, torch.tensor(0), 60.0)
    right = Samples(sure, torch.zeros(1000, dtype=torch.int64))
    check_scores(total(evaluate(CLASSES, lambda x: x[None], right)), CLASSES)


@pytest.mark.parametrize(
    ("likelihood", "made_up", "words"),
    [
        (CLASSES, {"count": 1.0, "nll": 1.0}, "missing confidence, correct; extra none"),
        (CLASSES, scores(CLASSES, x=1.0), "missing none; extra 'x'"),
        (CLASSES, scores(CLASSES, **{str(i) * 99: 1.0 for i in range(64)}), "and 61 more"),
        (CLASSES, scores(CLASSES, count=0.0), "have 0.0 samples"),
        (CLASSES, scores(CLASSES, count=-3.0), "have -3.0 samples"),
        (CLASSES, scores(CLASSES, count=2.5), "have 2.5 samples"),
        (CLASSES, scores(CLASSES, count=math.nan), "have nan samples"),
        (CLASSES, scores(CLASSES, count=math.inf), "have inf samples"),
        (CLASSES, scores(CLASSES, nll=math.nan), "'nll' is nan"),
        (CLASSES, scores(CLASSES, nll=-math.inf), "'nll' is -inf"),
        (CLASSES, scores(CLASSES, correct=6.0), "'correct' is 6 for 5 samples"),
        (CLASSES, scores(CLASSES, correct=-1.0), "'correct' is -1 for 5 samples"),
        (CLASSES, scores(CLASSES, confidence=math.inf), "'confidence' is inf for 5 samples"),
        (LABELS, scores(LABELS, exact_match=7.0), "'exact_match' is 7 for 5 samples"),
        (CLASSES, scores(CLASSES, nll=-1e30), "'nll' is -1e\\+30; it cannot be negative"),
        (LABELS, scores(LABELS, true_positives=-1.0), "'true_positives' is -1"),
        (REAL, scores(REAL, absolute_error__age=-1.0), "'absolute_error/age' is -1"),
        (REAL, scores(REAL, squared_error__age=-1.0), "'squared_error/age' is -1"),
        (REAL, scores(REAL, offset__age=1e300), "beyond float32"),
    ],
)
def test_scores_that_a_client_made_up_are_refused(likelihood, made_up, words):
    with pytest.raises(MessageError, match=words) as told:
        check_scores(made_up, likelihood)
    assert len(str(told.value)) < 300


def test_names_that_a_client_made_up_are_shown_as_they_are_and_cut():
    with pytest.raises(MessageError) as told:
        check_scores(scores(CLASSES, **{"\x1b[2J" + "x" * 99: 1.0}), CLASSES)
    assert str(told.value).isprintable()
    assert len(str(told.value)) < 200


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({str(number): 1.0 for number in range(65)}, "it has too many metrics: 65, at most 64"),
        ({"x" * 101: 1.0}, "is not a name"),
        ({"\x1b[2J": 1.0}, r"'\\x1b\[2J' is not a name"),
        ({"loss": "low"}, "'loss' is not a number"),
        ({"loss": [1.0]}, "'loss' is not a number"),
        ({"loss": 10**400}, "'loss' is not a 64-bit number"),
    ],
)
def test_figures_of_a_client_are_few_numbers_of_short_names(said, words):
    with pytest.raises(MessageError, match=words) as error:
        figures(said, "metrics")
    assert len(str(error.value)) < 200
    assert figures({"loss": 1, "x" * 100: math.inf}, "metrics") == {
        "loss": 1.0,
        "x" * 100: math.inf,
    }
