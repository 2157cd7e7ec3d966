"""What a run folder knows of its own files: damage is told, and two processes never write one."""

import errno
import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load

import fedbayes
from fedbayes import Result, Simulation
from fedbayes.cli.federate import LinkOptions
from fedbayes.core.files import writable, writable_folder, write_beside
from fedbayes.core.messages import decode, metadata
from fedbayes.core.seals import check_seal, has_seal, sealed
from fedbayes.errors import FedbayesWarning, MessageError, RunError
from fedbayes.reports import gather
from fedbayes.reports.page import differences
from fedbayes.storage import flusher
from fedbayes.storage.folder import RunFolder
from fedbayes.storage.lock import RunLock
from fedbayes.workflows.calibrate.calibration import trust
from fedbayes.workflows.calibrate.conformal import calibrate_conformal
from fedbayes.workflows.experiments.attack_grid import AttackGrid
from fedbayes.workflows.experiments.method_grid import MethodGrid
from fedbayes.workflows.serve.export import export
from fedbayes.workflows.serve.model_files import read_with_card, write_model
from fedbayes_papers import reproduce
from tests.hostile import folders, kills


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return fedbayes.run(folders.config(), tmp_path_factory.mktemp("runs") / "run").folder.path


@pytest.fixture
def copy(run, tmp_path):
    return shutil.copytree(run, tmp_path / "copy")


def edit(folder, before, after):
    file = folder / "config.toml"
    text = file.read_text()
    assert before in text
    file.write_text(text.replace(before, after))


def flip(path, place=0.5):
    data = bytearray(path.read_bytes())
    data[int(len(data) * place)] ^= 1
    path.write_bytes(data)


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def checkpoint(folder):
    return max((folder / "checkpoints").iterdir())


def test_damaged_folders_are_told(tmp_path):
    tried, survived, failures = folders.attack(20, 3, tmp_path)
    assert survived == tried, "\n".join(failures)


def test_kills_at_random_moments_change_nothing(tmp_path):
    tried, survived, failures = kills.attack(5, 4, tmp_path)
    assert survived == tried, "\n".join(failures)


@pytest.mark.slow
def test_many_damaged_folders_and_kills():
    for attack, cases in ((folders.attack, 1000), (kills.attack, 200)):
        tried, survived, failures = attack(cases, 11)
        assert survived == tried, "\n".join(failures)


@settings(deadline=None)
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_seal_finds_every_bit(place, bit):
    tensors = {"a": torch.arange(9.0), "b": torch.ones(2, 3)}
    whole = b"".join(sealed(tensors, {"text": "für\n"}))
    assert has_seal(whole)
    check_seal(whole)
    data = bytearray(whole)
    data[int(place * len(data))] ^= 1 << bit
    damaged = bytes(data)
    if has_seal(damaged):  # else its name is what was changed
        with pytest.raises(MessageError):
            check_seal(damaged)
    else:
        with suppress(MessageError):
            assert folders.same(decode(damaged), decode(whole))


def test_a_sealed_file_is_a_safetensors_file(tmp_path):
    tensors = {"b": torch.arange(7, dtype=torch.bfloat16), "a/x": torch.tensor(3.5)}
    data = b"".join(sealed(tensors, {"text": 'said "so"'}))
    (tmp_path / "x.safetensors").write_bytes(data)
    for found in (load(data), decode(data)):
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert file.metadata()["text"] == metadata(data)["text"] == 'said "so"'


@pytest.mark.parametrize("place", [0.0, 0.02, 0.5, 0.999])
def test_a_flipped_checkpoint_is_refused(copy, place):
    flip(checkpoint(copy), place)
    with pytest.raises(RunError, match=r"round-0000004.safetensors is damaged.*from a copy"):
        fedbayes.resume(copy)


@pytest.mark.parametrize("length", [30, 100])
def test_of_digests_that_are_cut_off_the_way_out_is_told(copy, length):
    sums, summary = copy / "SHA256SUMS", copy / "summary.json"
    whole = sums.read_bytes()
    sums.write_bytes(whole[:length])
    with pytest.raises(RunError, match=rf"remove {summary} and {sums}, and write them again: fedb"):
        RunFolder(copy).summary()
    sums.unlink()
    summary.unlink()
    fedbayes.resume(copy)
    digests = [line for line in whole.splitlines() if b"summary" not in line]
    assert [line for line in sums.read_bytes().splitlines() if b"summary" not in line] == digests


def test_what_was_found_of_a_lost_or_damaged_model_is_not_read(copy):
    """Of all that is said then, it is the model that is to be mended."""
    calibrate_conformal(copy)
    flip(copy / "model.safetensors")
    with pytest.raises(RunError, match=r"model\.safetensors or SHA256SUMS next to it is damaged"):
        fedbayes.load(copy)
    (copy / "model.safetensors").unlink()
    with pytest.raises(
        RunError, match=r"model.safetensors no longer exists\. Write it again: fedbayes res"
    ):
        fedbayes.load(copy)


def test_a_lost_checkpoint_starts_nothing_anew(copy):
    before = {p.name: p.read_bytes() for p in (copy / "clients").iterdir()}
    checkpoint(copy).unlink()
    with pytest.raises(RunError, match="has no checkpoint, but the run had rounds"):
        fedbayes.resume(copy)
    assert {p.name: p.read_bytes() for p in (copy / "clients").iterdir()} == before


@pytest.mark.parametrize(
    "name", ["checkpoints", "partition.npz", "preprocessing.json", "metrics.jsonl", "clients"]
)
def test_a_new_run_takes_nothing_over_from_an_old_one(run, tmp_path, name):
    """It would start from the other's checkpoint, or be evaluated on the other's division."""
    (tmp_path / "run").mkdir()
    take = shutil.copytree if (run / name).is_dir() else shutil.copy
    take(run / name, tmp_path / "run" / name)
    before = contents(tmp_path / "run")
    with pytest.raises(RunError, match=f"has files of another run, {name}.*no config.toml"):
        fedbayes.run(folders.config(), tmp_path / "run")
    assert contents(tmp_path / "run") == before


def test_before_the_first_round_there_is_a_checkpoint_too(tmp_path):
    Simulation(folders.config(), tmp_path / "run").close()
    assert RunFolder(tmp_path / "run").rounds() == [0]
    assert RunFolder(tmp_path / "run").progress() is None
    assert fedbayes.resume(tmp_path / "run").folder.rounds() == [4]


def test_emptied_metrics_are_told(copy):
    (copy / "metrics.jsonl").write_bytes(b"")
    for use in (fedbayes.resume, Result):
        with pytest.raises(RunError, match=r"metrics.jsonl is damaged"):
            use(copy)


@pytest.mark.parametrize("damage", ["flip", "remove", "swap"])
def test_a_private_state_is_what_it_was(copy, damage):
    first, second, *_ = sorted((copy / "clients").iterdir())
    if damage == "flip":
        flip(first)
    elif damage == "remove":
        first.unlink()
    else:
        shutil.copy(second, first)
    with pytest.raises(RunError, match=f"private state of client 0.*{first.name}"):
        fedbayes.resume(copy)


def test_a_state_that_changes_between_rounds_is_refused(tmp_path):
    config = folders.config(rounds=3, cohort=4)
    with Simulation(config, tmp_path / "run") as simulation:
        steps = iter(simulation)
        next(steps)
        flip(next((tmp_path / "run" / "clients").glob("0000002-*")))
        with pytest.raises(RunError, match="private state of client 2"):
            next(steps)


@pytest.mark.parametrize("name", ["model.safetensors", "summary.json"])
def test_what_a_run_left_at_its_end_is_what_is_read(copy, tmp_path, name):
    flip(copy / name)
    with pytest.raises(RunError, match=rf"{name} or SHA256SUMS next to it is damaged"):
        export(copy, tmp_path / "out.safetensors")
    if name == "model.safetensors":
        with pytest.raises(RunError, match=name):
            read_with_card(copy / name)
    whole = RunFolder(shutil.copytree(copy, tmp_path / "again")).path
    (whole / "summary.json").unlink()
    (whole / "SHA256SUMS").unlink()
    fedbayes.resume(whole)  # the way out that is named
    export(whole, tmp_path / "out.safetensors")


def test_a_damaged_model_file_is_found_anywhere(run, tmp_path):
    export(run, tmp_path / "m.safetensors")
    weights, card = read_with_card(tmp_path / "m.safetensors")
    flip(tmp_path / "m.safetensors", 0.9)
    with pytest.raises(fedbayes.errors.ModelError, match=r"m.safetensors is damaged.*digest"):
        read_with_card(tmp_path / "m.safetensors")
    write_model(tmp_path / "m.pt", weights, card)
    data = bytearray((tmp_path / "m.pt").read_bytes())
    place = bytes(data).find(weights[max(weights)].numpy().tobytes()[:8])
    data[place] ^= 1
    (tmp_path / "m.pt").write_bytes(data)
    with pytest.raises(fedbayes.errors.ModelError, match=r"m.pt is damaged"):
        read_with_card(tmp_path / "m.pt")


def test_sums_are_those_of_sha256sum(run):
    lines = (run / "SHA256SUMS").read_text().splitlines()
    sums = {name: value for value, name in (line.split("  ") for line in lines)}
    assert sums.keys() >= {"config.toml", "model.safetensors", "metrics.jsonl", "summary.json"}
    for name, value in sums.items():
        assert hashlib.sha256((run / name).read_bytes()).hexdigest() == value
    if shutil.which("sha256sum"):
        subprocess.run(["sha256sum", "-c", "--quiet", "SHA256SUMS"], cwd=run, check=True)


def test_another_config_is_refused_with_its_keys(copy):
    edit(copy, "lr = 0.1", "lr = 0.2")
    edit(copy, "clients_per_round = 2", "clients_per_round = 3")
    for use in (fedbayes.resume, lambda folder: export(folder, folder / "x.pt")):
        with pytest.raises(
            RunError,
            match=r"clients_per_round was 2, .* 3; training.lr was 0.1, and is now 0.2",
        ):
            use(copy)


def test_a_cohort_of_one_is_not_one_of_all(tmp_path):
    """Though 1 == 1.0."""
    whole = fedbayes.run(folders.config(cohort=1.0, method={}), tmp_path / "run").folder.path
    edit(whole, "client_fraction = 1.0", "clients_per_round = 1")
    with pytest.raises(RunError, match=r"client_fraction was 1\.0, and is now not set"):
        fedbayes.resume(whole)
    single = fedbayes.run(folders.config(cohort=1, method={}), tmp_path / "single").folder.path
    edit(whole, "clients_per_round = 1", "client_fraction = 1.0")
    assert ("client_fraction", ["1.0", "–"]) in differences(gather([whole, single]))


def test_settings_that_change_no_number_may_change_and_it_is_said(copy, run):
    edit(copy, "rounds = 4", "rounds = 5")
    with pytest.warns(FedbayesWarning, match="rounds was 4, and is now 5"):
        longer = fedbayes.resume(copy)
    assert len(longer.metrics) == 5
    assert folders.timeless(copy)[:4] == folders.timeless(run)


def test_two_processes_never_write_one_run(copy):
    with Simulation(None, copy):
        code = f"import fedbayes; fedbayes.resume({str(copy)!r})"
        other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert f"process {os.getpid()} already uses the run in {copy}" in other.stderr
        with pytest.raises(RunError, match="this process itself already uses"):
            Simulation(None, copy)
        Result(copy)  # reading needs no lock
    Simulation(None, copy).close()


def test_a_lock_names_the_other_machine(tmp_path):
    lock = RunLock(tmp_path)
    (tmp_path / ".lock").write_text("17 elsewhere\n")
    with pytest.raises(RunError, match="process 17 on 'elsewhere' already uses"):
        RunLock(tmp_path)
    lock.release()
    RunLock(tmp_path).release()


def test_a_lock_that_is_emptied_by_whoever_looks_still_names_its_holder(tmp_path, monkeypatch):
    """As filelock 3.12 opens it."""
    acquire = FileLock.acquire

    def emptied(self, *given):
        (tmp_path / ".lock").write_text("")
        return acquire(self, *given)

    monkeypatch.setattr(FileLock, "acquire", emptied)
    lock = RunLock(tmp_path)
    for _ in range(2):
        with pytest.raises(RunError, match="this process itself already uses"):
            RunLock(tmp_path)
    lock.release()


def test_a_file_system_without_locks_is_told(tmp_path, monkeypatch):
    def refuse(self, *given):
        raise NotImplementedError

    monkeypatch.setattr(FileLock, "acquire", refuse)
    with pytest.raises(RunError, match="has no file locks"):
        RunLock(tmp_path)


def test_a_second_run_into_one_folder_finds_the_first(tmp_path):
    """Both have seen an empty folder; only one goes on."""
    first = Simulation(folders.config(), tmp_path / "a run")
    way = f"already has a run.*`fedbayes resume '{tmp_path / 'a run'}'`"
    with pytest.raises(RunError, match=way):
        Simulation(folders.config(), tmp_path / "a run")
    first.close()


def test_an_error_gives_the_lock_back(copy):
    whole = checkpoint(copy).read_bytes()
    flip(checkpoint(copy))
    with pytest.raises(RunError) as kept:
        fedbayes.resume(copy)
    checkpoint(copy).write_bytes(whole)
    fedbayes.resume(copy)
    assert kept


def test_private_states_are_closed_to_others(run):
    assert stat.S_IMODE((run / "clients").stat().st_mode) == 0o700
    for state in (run / "clients").iterdir():
        assert stat.S_IMODE(state.stat().st_mode) & 0o077 == 0


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="has no limits of this kind")
def test_a_quota_that_is_used_up_is_told_with_the_file(tmp_path):
    import resource

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))

    command = [sys.executable, "-m", "fedbayes", "run", "--rounds", "1", "--out", "run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, preexec_fn=limit)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "error: run/checkpoints/round-0000000.safetensors: File too large" in done.stderr


def test_a_full_disk_leaves_no_halves(tmp_path, monkeypatch):
    class Full:
        def __init__(self, number, mode):
            os.close(number)

        def __enter__(self):
            return self

        def __exit__(self, *error):
            return None

        def write(self, data):
            raise OSError(errno.ENOSPC, "No space left on device")

    written = tmp_path / "metrics.jsonl"
    written.write_bytes(b"before")
    monkeypatch.setattr(os, "fdopen", Full)
    with pytest.raises(OSError, match="No space left"):
        write_beside(written, b"after")
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    assert written.read_bytes() == b"before"


def test_a_folder_that_is_gone_is_told_by_the_name_of_the_file(tmp_path, monkeypatch):
    """And not by that of its first half, which nobody asked for."""

    def refused(path, *_):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "open", refused)
    with pytest.raises(PermissionError) as told:
        write_beside(tmp_path / "conformal.json", b"{}")
    assert told.value.filename == str(tmp_path / "conformal.json")


def test_halves_of_a_killed_process_are_removed(copy):
    halves = [
        copy / ".metrics.jsonl.4711",
        copy / ".summary.json.4711",
        copy / "checkpoints" / ".round-0000005.safetensors.4711",
        copy / "clients" / ".0000000-0000005.safetensors.4711",
    ]
    for half in halves:
        half.write_bytes(b"half")
    mine = copy / ".notes.txt"
    mine.write_text("not ours")
    fedbayes.resume(copy)
    assert not any(half.exists() for half in halves)
    assert mine.exists()


def test_a_torn_checkpoint_leaves_the_one_before(tmp_path):
    """After a power cut the newest may be there by name alone; what it replaces still is."""
    with Simulation(folders.config(), tmp_path / "run") as simulation:
        steps = iter(simulation)
        for _ in range(3):
            next(steps)
        simulation._keeper._flusher.wait()  # what the newest replaces is on its way out
        shutil.copytree(tmp_path / "run", tmp_path / "cut")
    assert RunFolder(tmp_path / "cut").rounds() == [2, 3]
    checkpoint(tmp_path / "cut").write_bytes(b"")
    with pytest.raises(RunError, match="remove it, to resume from round 2, whose"):
        fedbayes.resume(tmp_path / "cut")
    checkpoint(tmp_path / "cut").unlink()
    fedbayes.resume(tmp_path / "cut")
    whole = fedbayes.run(folders.config(), tmp_path / "whole").folder.path
    assert folders.same(folders.resumed(whole), folders.resumed(tmp_path / "cut"))


def as_before(stored, clients):
    """A checkpoint as it was written with a row for each client, and without digests."""

    def whole(place, column):
        values = stored.get(f"{place}/columns/{column}", torch.empty(0))
        every = torch.zeros(clients, dtype=values.dtype)
        every[stored[f"{place}/clients"]] = values
        return every

    table = "clients/table"
    scores = [n.rpartition("/")[2] for n in stored if n.startswith(f"{table}/columns/")]
    kept = {
        name: values
        for name, values in stored.items()
        if not name.startswith((f"{table}/", "states/", "weights/"))
    }
    return (
        kept
        | {f"clients/sums/{name}": whole(table, name) for name in scores}
        | {"stored": whole("states", "round"), "weights": whole("weights", "weight")}
    )


def test_a_run_of_an_older_version_has_no_digests_and_goes_on(copy, tmp_path):
    from fedbayes.core.messages import dense, encode

    clients = len(RunFolder(copy).client_names())
    for path in (copy / "checkpoints").iterdir():
        path.write_bytes(encode(as_before(dense(decode(path.read_bytes())), clients)))
    (copy / "SHA256SUMS").unlink()
    edit(copy, "rounds = 4", "rounds = 5")
    assert fedbayes.resume(copy).summary["rounds"] == 5


def test_a_report_reads_a_run_that_goes_on(tmp_path):
    with Simulation(folders.config(), tmp_path / "run") as simulation:
        for step in simulation:
            assert len(RunFolder(tmp_path / "run").metrics()) == step.number
            assert RunFolder(tmp_path / "run").progress().round == step.number


def test_lines_that_somebody_else_wrote_are_told(tmp_path):
    with Simulation(folders.config(), tmp_path / "run") as simulation:
        steps = iter(simulation)
        next(steps)
        with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"round": 9}) + "\n")
        with pytest.raises(RunError, match="was changed during the run"):
            next(steps)


@pytest.mark.parametrize("name", ["round-0000004 (copy).safetensors", "round-x", "round-4.bak"])
def test_other_files_beside_checkpoints_and_states_stay_and_do_not_count(copy, name):
    mine = [copy / "checkpoints" / name, copy / "clients" / f"0000000-0000001{name}"]
    for path in mine:
        path.write_bytes(b"of its user")
    (copy / "clients" / ".cache").mkdir()
    assert RunFolder(copy).rounds() == [4]
    edit(copy, "rounds = 4", "rounds = 5")
    assert fedbayes.resume(copy).summary["rounds"] == 5
    assert all(path.exists() for path in mine)


@pytest.mark.parametrize(
    "line", [{}, {"round": "5"}, {"round": 5.0}, {"round": 4}, {"round": 6}, {"round": True}]
)
def test_a_line_of_no_round_or_another_is_damaged(copy, line):
    for name in ("summary.json", "SHA256SUMS"):
        (copy / name).unlink()
    with (copy / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    for use in (fedbayes.resume, lambda folder: RunFolder(folder).metrics()):
        with pytest.raises(RunError, match=r"metrics.jsonl, line 5 is damaged"):
            use(copy)
    assert "line 5 is damaged" in str(gathered(copy))


@pytest.mark.parametrize("metrics", [3, {"global": 0.5}, [1]])
def test_figures_that_are_no_table_are_damaged(copy, metrics):
    lines = (copy / "metrics.jsonl").read_text().splitlines()
    lines[1] = json.dumps({"round": 2, "metrics": metrics})
    (copy / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(RunError, match=r"metrics.jsonl, line 2 is damaged"):
        RunFolder(copy).metrics()


def gathered(folder):
    try:
        return gather([folder])
    except RunError as error:
        return error


def test_a_line_behind_the_end_of_a_run_is_told_and_never_sealed(copy, run):
    whole, sums = (run / "metrics.jsonl").read_bytes(), (copy / "SHA256SUMS").read_bytes()
    last = json.loads(whole.splitlines()[-1])
    with (copy / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({**last, "round": 5, "global_accuracy": 0.99}) + "\n")
    for use in (fedbayes.resume, Result):
        with pytest.raises(RunError, match=r"metrics.jsonl or SHA256SUMS next to it is damaged"):
            use(copy)
    assert "metrics.jsonl or SHA256SUMS next to it is damaged" in str(gathered(copy))
    assert (copy / "SHA256SUMS").read_bytes() == sums
    (copy / "summary.json").unlink()  # the way out that is named
    (copy / "SHA256SUMS").unlink()
    fedbayes.resume(copy)
    assert (copy / "metrics.jsonl").read_bytes() == whole


def test_a_run_that_has_not_ended_is_told_with_the_way_on(copy, tmp_path):
    (copy / "model.safetensors").unlink()
    words = rf"model.safetensors no longer exists. Write it again: fedbayes resume {copy}"
    for use in (trust, lambda folder: export(folder, tmp_path / "x.pt")):
        with pytest.raises(RunError, match=words):
            use(copy)
    fedbayes.resume(copy)
    export(copy, tmp_path / "x.pt")
    for name in ("model.safetensors", "summary.json", "SHA256SUMS"):
        (copy / name).unlink()
    uses = (trust, Result, lambda folder: export(folder, tmp_path / "y.pt"))
    for use in (*uses, lambda folder: RunFolder(folder).model()):
        with pytest.raises(RunError, match=f"has not ended.*: fedbayes resume {copy}$"):
            use(copy)


def test_all_private_states_go_to_the_disk(tmp_path, monkeypatch):
    flushed = []
    monkeypatch.setattr(flusher, "flush", lambda path: flushed.append(path.name))
    config = folders.config(keep_checkpoints="all", cohort=4)
    with Simulation(config, tmp_path / "run") as simulation:
        for _ in simulation:
            assert simulation.states.commit(keep_older=True) == ([], [])
    states = sorted(path.name for path in (tmp_path / "run" / "clients").iterdir())
    assert len(states) == 16
    assert sorted(name for name in flushed if name in states) == states


def test_the_config_is_compared_without_looking_names_up(copy):
    edit(copy, 'name = "scaffold"', 'name = "nowhere:Method"')
    with pytest.raises(RunError, match=r"method.name was 'scaffold', and is now 'nowhere:Method'"):
        fedbayes.resume(copy)


@pytest.mark.parametrize("place", ["a file", "a file/below/it"])
def test_a_folder_that_cannot_be_made_is_told_before_anything_is_done(tmp_path, place):
    """Of a run, and of all runs of a comparison or an attack together."""
    (tmp_path / "a file").write_text("mine")
    told = "the run folder .*a file.*is no folder"
    with pytest.raises(RunError, match=told):
        Simulation(folders.config(), tmp_path / place)
    with pytest.raises(RunError, match=told):
        MethodGrid(tmp_path / place)
    with pytest.raises(RunError, match=told):
        AttackGrid(tmp_path / place, ["huge"])
    with pytest.raises(RunError, match=r"the folder for results .*a file.*is no folder"):
        reproduce("combined-fig2", tmp_path / place, datasets=["digits"])
    assert (tmp_path / "a file").read_text() == "mine"


def test_links_to_nowhere_and_closed_folders_are_told(tmp_path, monkeypatch):
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(RunError, match="link is a link to what is no folder"):
        writable_folder(tmp_path / "link", "the folder")
    monkeypatch.setattr(os, "access", lambda path, how: False)
    with pytest.raises(RunError, match=f"cannot write into {tmp_path}"):
        writable_folder(tmp_path / "new" / "er", "the folder")


def test_no_output_takes_the_place_of_a_file_of_a_run(run):
    with pytest.raises(RunError, match="would replace a file of the run"):
        writable(run / "model.safetensors", "the model")


def test_the_connection_of_a_federation_is_that_of_its_start(tmp_path):
    kept = LinkOptions("hub:9093", Path("keys/ca.crt"), False, Path("keys/superexec.key"))
    options = ["--superlink", "hub:9093", "--root-certificates", "keys/ca.crt"]
    RunFolder(tmp_path).keep_connection([*options, "--superexec-secret", "keys/superexec.key"])
    assert LinkOptions().or_stored(tmp_path) == kept
    other = LinkOptions("127.0.0.1:9093", insecure=True)
    assert other.or_stored(tmp_path) == other
    RunFolder(tmp_path).keep_connection(["--superlink", "127.0.0.1:9093", "--insecure"])
    assert LinkOptions().or_stored(tmp_path) == other
    assert LinkOptions().or_stored(tmp_path / "none") == LinkOptions()
    for damaged in (["--superlink"], ["--port", "1"]):
        RunFolder(tmp_path).keep_connection(damaged)
        with pytest.raises(RunError, match=r"connection.txt is damaged"):
            LinkOptions().or_stored(tmp_path)
