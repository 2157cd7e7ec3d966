"""Small files that unpack to much, failing disks, signals, and formulas in a CSV."""

import errno
import gzip
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyarrow import parquet

import fedbayes
from fedbayes.core.files import open_npz
from fedbayes.core.signals import ENDS, ended_by, interrupt
from fedbayes.data import load_dataset
from fedbayes.data.settings import DataSettings
from fedbayes.data.sources import unpacking
from fedbayes.data.sources.unpacking import check_texts, check_unpacked
from fedbayes.errors import DataError
from fedbayes.workflows.serve.prediction import predict_file
from tests.helpers.command_line import command, process
from tests.helpers.deployment import wait_for
from tests.hostile.files import attack


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    """A hundredth of the room, so that bombs are small."""
    monkeypatch.setattr(unpacking, "AT_LEAST", 1 << 20)


def packed(path, line, times):
    with gzip.open(path, "wb") as file:
        file.write(b"a,label\n")
        for _ in range(times):
            file.write(line)
    return path


def bombs(folder):
    """Small files that unpack to tens of MB, in every format."""
    found = [
        packed(folder / "rows.csv.gz", b"1,yes\n" * 10_000, 600),
        packed(folder / "line.csv.gz", b"1" * 10**6, 40),
        folder / "rows.parquet",
        folder / "texts.parquet",
        folder / "sheet.xlsx",
    ]
    rows = 2_000_000
    parquet.write_table(pa.table({f"x{k}": np.zeros(rows) for k in range(3)}), found[2])
    parquet.write_table(pa.table({"x": ["x" * 50_000] * 600, "label": np.arange(600)}), found[3])
    with zipfile.ZipFile(found[4], "w", zipfile.ZIP_DEFLATED) as parts:
        parts.writestr("xl/worksheets/sheet1.xml", b"0" * 10**8)
    return found


def test_bombs_are_refused_by_name_before_they_are_read(tmp_path, capsys):
    for file in bombs(tmp_path):
        assert file.stat().st_size < 200_000
        with pytest.raises(DataError, match="unpacks to more than") as told:
            load_dataset(DataSettings(path=file))
        assert file.name in str(told.value)
    assert command("data", "check", tmp_path / "rows.csv.gz") == 2
    said = capsys.readouterr().err
    assert "gunzip" in said
    assert "Traceback" not in said


def test_honest_files_are_read(tmp_path):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"a": rng.normal(size=2000), "label": rng.choice(["yes", "no"], 2000)})
    frame.to_csv(tmp_path / "t.csv.gz", index=False)
    frame.to_parquet(tmp_path / "t.parquet")
    frame.to_csv(tmp_path / "t.csv", index=False)
    texts = pd.DataFrame({"a": ["a text that many rows have"] * 30_000, "label": [1, 2] * 15_000})
    texts.to_parquet(tmp_path / "texts.parquet")
    for name in ("t.csv.gz", "t.parquet", "t.csv", "texts.parquet"):
        check_unpacked(tmp_path / name)
    check_texts(tmp_path / "texts.parquet")
    assert load_dataset(DataSettings(path=tmp_path / "t.csv.gz")).samples == 2000


def test_an_npz_of_zeros_that_fills_the_memory_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("fedbayes.core.files.AT_LEAST", 1 << 20)
    monkeypatch.setattr("fedbayes.core.files.MOST_TIMES", 100)
    np.savez_compressed(tmp_path / "z.npz", x=np.zeros((1000, 5000)))
    with pytest.raises(ValueError, match="unpacks to 40,000,"):
        open_npz(tmp_path / "z.npz")
    np.savez(tmp_path / "y.npz", x=np.zeros((1000, 500)))
    with open_npz(tmp_path / "y.npz") as arrays:
        assert arrays["x"].shape == (1000, 500)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A run on a table, and rows to predict whose ids are formulas."""
    folder = tmp_path_factory.mktemp("model")
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"a": rng.normal(size=80), "label": rng.choice(["yes", "=no"], 80)})
    frame.to_csv(folder / "t.csv", index=False)
    data = {"path": folder / "t.csv", "clients": 2, "partition": "iid"}
    fedbayes.run(folder=folder / "run", rounds=1, data=data, progress=False)
    ids = ["=cmd|' /C calc'!A0", "+1+1", "-5", "@SUM(A1)", "\tx", " =1", "plain", "-a,b", "1"]
    new = pd.DataFrame({"id": ids, "a": np.arange(len(ids)) / 3})
    new.to_csv(folder / "new.csv", index=False)
    return folder


def test_formulas_are_quoted_where_that_is_asked_for(model, tmp_path):
    out = tmp_path / "p.csv"
    assert command("predict", model / "run", model / "new.csv", "-o", out, "--safe-csv") == 0
    safe = pd.read_csv(out, dtype=str)
    assert safe["id"].tolist() == [
        *("'=cmd|' /C calc'!A0", "'+1+1", "-5", "'@SUM(A1)", "'\tx", "' =1"),
        *("plain", "'-a,b", "1"),
    ]
    assert set(safe.predicted) <= {"'=no", "yes"}
    assert not [name for name in safe if name.startswith("=")]
    predict_file(model / "run", model / "new.csv", tmp_path / "plain.csv")
    plain = pd.read_csv(tmp_path / "plain.csv", dtype=str)
    assert plain["id"].tolist()[0] == "=cmd|' /C calc'!A0"
    assert safe.iloc[:, 1].tolist() == plain.iloc[:, 1].tolist()  # numbers are as they were
    odd = ("-o", tmp_path / "p.parquet", "--safe-csv")
    assert command("predict", model / "run", model / "new.csv", *odd) == 2


@pytest.mark.slow
@pytest.mark.parametrize("number", [*ENDS, signal.SIGINT])
def test_a_signal_leaves_no_rows_behind(number, model, tmp_path):
    """`predict` reads a pipe of rows that go on; it is told to end while its output is open."""
    ends = tmp_path / "pipe.csv"
    rows = model / "new.csv"
    code = (
        "import sys, time, fedbayes.workflows.serve.prediction as p\n"
        "honest = p._encode\n"
        "def slow(*a):\n"
        "    print('begun', flush=True); time.sleep(60); return honest(*a)\n"
        "p._encode = slow\n"
        "from fedbayes.cli import main; main()"
    )
    started = subprocess.Popen(
        [sys.executable, "-c", code, "predict", model / "run", rows, "-o", ends],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert "begun" in started.stdout.readline()
    assert [p.name for p in tmp_path.iterdir()] == [f".pipe.csv.{started.pid}"]
    started.send_signal(number)
    _, said = started.communicate(timeout=60)
    assert started.returncode == 130
    assert "Traceback" not in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [pytest.param(n, marks=pytest.mark.slow) for n in ENDS])
def test_a_signal_ends_a_run_after_its_round(number, tmp_path):
    run = tmp_path / "run"
    started = subprocess.Popen(
        process("run", "--rounds", "100000", "--clients", "2", "-o", run),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_for(lambda: (run / "metrics.jsonl").exists(), 120, "round")
    started.send_signal(number)
    _, said = started.communicate(timeout=120)
    assert started.returncode == 130
    assert "Traceback" not in said
    assert fedbayes.Result(run).summary["stopped_reason"] == "interrupted"


def test_an_ignored_signal_stays_so():
    """As under `nohup`."""
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with ended_by(interrupt, [signal.SIGTERM]):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)
    finally:
        signal.signal(signal.SIGTERM, before)
    with pytest.raises(KeyboardInterrupt), ended_by(interrupt, [signal.SIGTERM]):
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_disk_that_fails_is_named(tmp_path, monkeypatch, capsys):
    def fails(number):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fails)
    arguments = ("run", "--rounds", "2", "--clients", "2", "-o", tmp_path / "run")
    assert command(*arguments) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "Traceback" not in said
    assert "Input/output error" in said
    assert str(tmp_path / "run" / "") in said.replace(" ", "")
    assert Path(tmp_path / "run").exists()


def test_files_of_strangers_are_read_or_refused_within_bounds():
    """A few of those of `make hostile`; other seeds than there."""
    tried, survived, failures, _ = attack(7, 10**6)
    assert not failures
    assert tried == survived == 7
