import pytest
import torch

from fedbayes.contracts import Report
from fedbayes.errors import MessageError
from fedbayes.federation.checks import decode_report, encode_report
from fedbayes.messages import Masked, encode

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
    monkeypatch.setattr("fedbayes.messages.load", lambda _: pytest.fail("it was unpacked"))
    with pytest.raises(MessageError, match=r"header is .*too long"):
        decode_report(encode(bomb, plain=plain), expected)


@pytest.mark.parametrize("weight", [1.0, 0.5, 600.0])
def test_a_good_report_passes(weight):
    report = decode_report(encode_report(Report(good(), weight)), EXPECTED)
    assert report.weight == weight
    assert torch.equal(report.tensors["weight"], torch.ones(4))
    assert list(report.tensors) == list(EXPECTED)


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
        (encode({"a": torch.ones(2, 3)}), "missing=.'weight'."),
        (encode(good(b=torch.ones(1))), "surplus=.'b'."),
        (encode(good(a=torch.ones(3, 2))), "'a' has shape"),
        (encode(good(a=torch.ones(2, 3).double())), "'a' has type"),
        (encode(good(a=torch.full((2, 3), torch.nan))), "'a' holds NaN"),
        (encode(good(a=torch.full((2, 3), torch.inf))), "'a' holds NaN or inf"),
        (encode_report(Report(good(), -3.0)), "weight is -3"),
        (encode_report(Report(good(), 0.0)), "weight is 0"),
        (encode_report(Report(good(), float("inf"))), "weight is inf"),
        (encode_report(Report(good(), 1e300)), "weight is 1e\\+300"),
        (encode(good() | {"c": torch.zeros(10_000)}), "40,... bytes; at most"),
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
            "'a' holds NaN",
        ),
    ],
)
def test_a_bad_report_is_refused_by_name(data, words):
    with pytest.raises(MessageError, match=words):
        decode_report(data, EXPECTED)
