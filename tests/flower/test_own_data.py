"""Clients that bring their own data: the federation's classes, shapes and scales."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from sqlalchemy import create_engine

pytest.importorskip("flwr")

from fedbayes import Config, Simulation
from fedbayes.data import FederatedData
from fedbayes.errors import ConfigError, DataError, FedbayesWarning, RunError
from fedbayes.federation.broadcast import ServerMessages
from fedbayes.federation.engines.sequential import Sequential
from fedbayes.flower import apps, superlink_at
from fedbayes.flower.apps import _same, find_node, on_grid
from fedbayes.flower.keys import make_keys, read_public_key
from fedbayes.flower.own_data import own_data
from fedbayes.flower.project import app_files, read_schema, write_project
from fedbayes.runs.build import build_data, build_runtime


@pytest.fixture
def table(tmp_path):
    """A reference table at the server, of three classes and two features."""
    rng = np.random.default_rng(0)
    path = tmp_path / "server.csv"
    rows = [f"{a:.6f},{b:.6f},{label}" for a, b, label in samples(rng, 60, ("ant", "bee", "cat"))]
    path.write_text("width,height,label\n" + "\n".join(rows) + "\n")
    return Config.create(data={"path": str(path), "clients": 3, "partition": "iid"})


def samples(rng, count, classes):
    for _ in range(count):
        yield rng.normal(5, 2), rng.normal(-1, 3), classes[rng.integers(len(classes))]


def test_own_samples_are_put_in_the_federations_terms(table, tmp_path):
    server = build_data(table)
    schema = server.preprocessing.public()
    path = tmp_path / "mine.csv"
    rows = list(samples(np.random.default_rng(1), 40, ("cat", "bee")))
    path.write_text("width,height,label\n" + "".join(f"{a},{b},{c}\n" for a, b, c in rows))
    mine = own_data(table, path, schema)
    train, test = mine.train(2), mine.test(2)
    assert (len(train.y), len(test.y)) == (30, 10)
    got = {
        (round(float(x[0]), 4), round(float(x[1]), 4), int(y))
        for x, y in zip(torch.cat([train.x, test.x]), torch.cat([train.y, test.y]), strict=True)
    }
    wanted = {
        (
            round((a - float(server.mean[0])) / float(server.std[0]), 4),
            round((b - float(server.mean[1])) / float(server.std[1]), 4),
            ("ant", "bee", "cat").index(c),
        )
        for a, b, c in rows
    }
    # What the network sees is the federation's, and so is what is stored of it.
    assert mine.preprocessing.same_inputs(server.preprocessing)
    assert mine.preprocessing.classes == server.preprocessing.classes
    close = sum(any(np.allclose(one, other, atol=2e-4) for other in wanted) for one in got)
    assert close == len(got) == 40


def test_a_silo_needs_no_group_and_its_columns_have_names(tmp_path):
    """The server's table says which hospital a row is of; a hospital's own need not."""
    rows = list(samples(np.random.default_rng(2), 60, ("ant", "bee")))
    text = "".join(f"{'xyz'[i % 3]},{a},{b},n{i},{c}\n" for i, (a, b, c) in enumerate(rows))
    (tmp_path / "server.csv").write_text(f"ward,width,height,name,label\n{text}")
    data = {"path": tmp_path / "server.csv", "group": "ward", "drop": "name"}
    config = Config.create(data=data)
    server = build_data(config)
    mine = tmp_path / "mine.csv"
    mine.write_text("label,height,width\n" + "".join(f"{c},{b},{a}\n" for a, b, c in rows[::3]))
    found = own_data(config, mine, server.preprocessing.public())
    left, right = (
        sorted(map(tuple, torch.cat([side.train(0).x, side.test(0).x]).tolist()))
        for side in (found, server)
    )
    np.testing.assert_allclose(left, right, atol=1e-5)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("width,height,label\n1,2,dog\n1,2,dog\n1,2,ant\n1,2,ant\n", "unknown class dog"),
        ("width,depth,label\n1,2,ant\n1,2,bee\n1,2,ant\n", "'height', which the federation needs"),
        ("width,label\n1,ant\n1,bee\n1,ant\n", "no column 'height'"),
        ("width,height\n1,2\n1,3\n1,4\n", "no column 'label', which the federation needs. Add"),
        (
            "width,Height,label\n1,2,ant\n1,2,bee\n",
            r"needs \(did you mean 'Height'\?\)\. Add or ren",
        ),
        ("width,height,label\n1,2,ant\n", "= 2; use more rows, or a smaller min_samples"),
    ],
)
def test_samples_of_another_kind_are_refused(table, tmp_path, text, words):
    path = tmp_path / "mine.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=words):
        own_data(table, path, build_data(table).preprocessing.public())


def test_a_file_that_is_not_there_is_corrected_in_the_node_config(table, tmp_path):
    with pytest.raises(DataError, match=r"none\.csv\. Correct data in the node config"):
        own_data(table, tmp_path / "none.csv", build_data(table).preprocessing.public())


def test_nothing_is_said_of_clients_by_the_rows_of_a_reference_table(tmp_path, recwarn):
    """A client's part of them has one class; what its own rows have, its node alone knows."""
    rows = [f"{i},{i * i % 7},{'xyz'[i // 20]},{'ant' if i < 30 else 'bee'}" for i in range(60)]
    (tmp_path / "server.csv").write_text("a,b,ward,label\n" + "\n".join(rows) + "\n")
    data = {"path": tmp_path / "server.csv", "group": "ward", "label": "label"}

    def said(**settings):
        recwarn.clear()
        with Simulation(Config.create(data=data, rounds=1, **settings), engine=Sequential):
            return [str(warning.message) for warning in recwarn]

    words = "2 of 3 clients have training rows of one class only: x, z"
    assert words in said()
    assert words not in said(engine="flower")


def test_images_keep_the_servers_standardization(tmp_path):
    rng = np.random.default_rng(0)
    pictures = rng.integers(0, 256, (30, 8, 8), np.uint8)
    np.savez(tmp_path / "server.npz", x=pictures, y=np.arange(30) % 3)
    np.savez(tmp_path / "mine.npz", x=pictures[:9] // 2, y=np.full(9, 2))
    config = Config.create(data={"path": str(tmp_path / "server.npz"), "clients": 2})
    server: FederatedData = build_data(config)
    mine = own_data(config, tmp_path / "mine.npz", server.preprocessing.public())
    x = torch.cat([mine.train(0).x, mine.test(0).x])
    raw = (pictures[:9] // 2 / 255 - float(server.mean[0])) / float(server.std[0])
    assert float(x.mean()) == pytest.approx(raw.mean(), abs=1e-4)
    assert set(mine.train(1).y.tolist()) == {2}


def test_the_schema_and_the_config_of_an_app_say_nothing_of_the_machine(table):
    files = app_files(table, build_data(table))
    assert set(files) == {"pyproject.toml", "federation.py", "config.toml", "schema.json"}
    assert Config.create(**{"data": {"dir": "/secret"}}).data.dir is not None
    assert b"secret" not in b"".join(
        app_files(
            Config.create(data={"name": "own", "path": "/secret/x.csv", "clients": 2}),
            build_data(table),
        ).values()
    )
    hidden = Config.create(data={"dir": "/secret"})
    assert b"/secret" not in b"".join(app_files(hidden, build_data(table)).values())


def test_a_project_is_not_written_over(table, tmp_path):
    write_project(tmp_path / "1st-try", table, build_data(table))
    assert 'name = "federation-1st-try"' in (tmp_path / "1st-try" / "pyproject.toml").read_text()
    schema = read_schema(tmp_path / "1st-try" / "schema.json")
    assert schema == build_data(table).preprocessing.public()
    with pytest.raises(RunError, match=r"already exists\. Choose"):
        write_project(tmp_path / "1st-try", table, build_data(table))


@pytest.mark.parametrize("client", [None, "2", -1, 1.0])
def test_a_node_without_a_number_says_so(table, tmp_path, client):
    write_project(tmp_path / "project", table, build_data(table))
    config = {} if client is None else {"client": client}
    context = SimpleNamespace(node_config=config, run_config={})
    with pytest.raises(ConfigError, match="client=0"):
        find_node(tmp_path / "project", context)


def test_a_node_config_with_a_slip_is_refused(table, tmp_path):
    write_project(tmp_path / "project", table, build_data(table))
    context = SimpleNamespace(node_config={"client": 0, "path": "x.csv"}, run_config={})
    with pytest.raises(ConfigError, match="unknown in the node config: path; it has client, data"):
        find_node(tmp_path / "project", context)


def test_a_run_config_that_is_not_closed_is_refused(table, tmp_path):
    write_project(tmp_path / "project", table, build_data(table))
    context = SimpleNamespace(node_config={"client": 0}, run_config={"set": 'seed="1'})
    with pytest.raises(ConfigError, match="No closing quotation"):
        find_node(tmp_path / "project", context)


def test_a_project_does_not_go_on_with_a_run_of_other_settings(table, tmp_path):
    write_project(tmp_path / "project", table, build_data(table))
    config = Config.load(tmp_path / "project" / "config.toml", ["engine=flower"]).closed()
    Simulation(config, tmp_path / "run").close()
    _same(config, tmp_path / "run")
    with pytest.raises(ConfigError, match=r"other settings than this project\."):
        _same(config.model_copy(update={"rounds": 99}), tmp_path / "run")


def test_what_needs_all_data_in_one_place_is_refused_over_a_network(table):
    config = Config.create(data=table.data.model_dump(), method={"name": "global"})
    with (
        Simulation(config) as simulation,
        pytest.raises(ConfigError, match="global needs all data in one place"),
    ):
        on_grid(simulation, lambda: None)


def test_keys_are_private_and_not_written_over(tmp_path):
    files = make_keys(tmp_path / "keys", ["localhost", "10.0.0.1"], clients=2)
    for file in files:
        assert file.exists()
        if file.suffix == ".key":
            assert file.stat().st_mode & 0o077 == 0
    assert read_public_key(tmp_path / "keys" / "client-1.pub").startswith(b"-----BEGIN PUBLIC")
    with pytest.raises(RunError, match="is not empty"):
        make_keys(tmp_path / "keys", ["localhost"], clients=2)
    with pytest.raises(RunError, match="cannot read the public key"):
        read_public_key(tmp_path / "keys" / "ca.crt")
    for host in ("", "bücher.example"):
        with pytest.raises(RunError, match="is not a valid name for a certificate"):
            make_keys(tmp_path / "more", [host], clients=0)
    assert not (tmp_path / "more").exists()


def test_tls_or_its_absence_must_be_asked_for(tmp_path):
    from fedbayes.errors import EngineError

    for arguments in ({}, {"insecure": True, "certificates": tmp_path / "ca.crt"}):
        with pytest.raises(EngineError, match="--insecure"):
            superlink_at("127.0.0.1:1", **arguments)
    for address in ("localhost", "localhost:notaport", "localhost:99999", "http://localhost:1"):
        with pytest.raises(EngineError, match="write HOST:PORT"):
            superlink_at(address, insecure=True)
    (tmp_path / "no.crt").write_text("no PEM certificate")
    with pytest.raises(EngineError, match="has no PEM certificate"):
        superlink_at("127.0.0.1:1", tmp_path / "no.crt")
    with pytest.raises(EngineError, match="cannot read"):
        superlink_at("127.0.0.1:1", tmp_path / "absent.crt")
    with pytest.raises(EngineError, match=r"cannot reach a SuperLink at 127\.0\.0\.1:1"):
        superlink_at("127.0.0.1:1", insecure=True).check()


# Targets that are not classes.


@pytest.fixture
def prices(tmp_path):
    """A reference table at the server with a real target of two columns."""
    rng = np.random.default_rng(0)
    write_prices(tmp_path / "server.csv", rng.normal((3, -2), (2, 50), (60, 2)))
    data = {"path": str(tmp_path / "server.csv"), "label": "rent,tax", "partition": "iid"}
    return Config.create(data={**data, "clients": 3})


def write_prices(path, y, names=("rent", "tax")):
    rows = "".join(f"{row[0]:.6f},{k % 7},{row[1]:.6f}\n" for k, row in enumerate(y))
    path.write_text(f"{names[0]},rooms,{names[1]}\n{rows}")
    return path


def test_own_targets_are_standardized_by_the_federations_numbers(prices, tmp_path):
    server = build_data(prices)
    schema = server.preprocessing.public()
    y = np.random.default_rng(1).normal((30, 5), (2, 50), (40, 2))
    mine = own_data(prices, write_prices(tmp_path / "mine.csv", y), schema)
    assert mine.preprocessing.target == server.target
    rows = server.dataset.y[np.sort(server.partition.train)].astype(float)
    np.testing.assert_allclose(mine.target.center, rows.mean(0), rtol=1e-12)
    np.testing.assert_allclose(mine.target.scale, rows.std(0), rtol=1e-12)
    found = torch.cat([mine.train(2).y, mine.test(2).y]).numpy()
    np.testing.assert_allclose(np.sort(found, axis=0), np.sort(y, axis=0), rtol=1e-5, atol=1e-5)


def test_own_targets_may_be_all_the_same(prices, tmp_path):
    """Of a single client nothing has to be learnt alone."""
    path = write_prices(tmp_path / "mine.csv", np.full((8, 2), 4.0))
    assert (
        own_data(prices, path, build_data(prices).preprocessing.public()).train(0).y.tolist()
        == [[4, 4]] * 6
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rent,rooms,levy\n1.5,2,3.5\n2.5,3,1.5\n", r"no column 'tax'"),
        (
            "rent,rooms,tax\n1.5,2,low\n2.5,3,1.5\n",
            r"column 'tax' has 1 cell that is not a number \('low'",
        ),
        ("rent,rooms,tax\n1.5,2,\n2.5,3,1.5\n", "have no label, first row 1"),
    ],
)
def test_targets_of_another_kind_are_refused(prices, tmp_path, text, words):
    path = tmp_path / "mine.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=words):
        own_data(prices, path, build_data(prices).preprocessing.public())


def test_a_node_reads_labels_as_what_the_federation_has(prices, tmp_path):
    """By itself a column of three values would be classes."""
    config = prices.model_copy(update={"data": prices.data.model_copy(update={"label": ("rent",)})})
    schema = build_data(config).preprocessing.public()
    assert schema.target.kind == "real"
    mine = write_prices(tmp_path / "mine.csv", np.resize([[1.0, 2.0], [2.0, 2.0]], (20, 2)))
    assert own_data(config, mine, schema).train(0).y.dtype == torch.float32


@pytest.mark.parametrize("name", ["table", "prices"])
def test_the_schema_is_kept_as_a_file(request, name, tmp_path):
    schema = build_data(request.getfixturevalue(name)).preprocessing.public()
    (tmp_path / "schema.json").write_bytes(schema.dump())
    assert read_schema(tmp_path / "schema.json") == schema
    (tmp_path / "schema.json").write_text('{"shape": [2]}')
    with pytest.raises(ConfigError, match=r"cannot read .*schema.json: .*scale"):
        read_schema(tmp_path / "schema.json")


@pytest.fixture
def wards(tmp_path):
    """A reference table at the server with a column of each kind."""
    path = tmp_path / "server.csv"
    ward_rows(60, 0).to_csv(path, index=False)
    return Config.create(data={"path": str(path), "clients": 3, "partition": "iid"})


def ward_rows(rows, seed):
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {
            "age": rng.normal(60, 12, rows),
            "sex": rng.choice(["m", "f"], rows),
            "born": pd.to_datetime(rng.integers(0, 20_000, rows), unit="D").strftime("%Y-%m-%d"),
            "code": rng.choice(["c0", "c1", "c2x"], rows),
            "label": rng.choice(["died", "lived"], rows),
        }
    )
    frame.loc[::7, "age"] = np.nan
    return frame


def test_a_node_names_the_sheet_of_its_own_file(wards, tmp_path):
    """In place of the sheet that the federation's settings name, which may be of another file."""
    frame = ward_rows(40, 1)
    with pd.ExcelWriter(tmp_path / "mine.xlsx") as file:
        for sheet, shift in (("one", 0), ("two", 5)):
            frame.assign(age=frame.age + shift).to_excel(file, sheet_name=sheet, index=False)
    schema = build_data(wards).preprocessing.public()
    ages = [
        own_data(wards, tmp_path / "mine.xlsx", schema, sheet=sheet).dataset.x[:, 0]
        for sheet in ("one", "two")
    ]
    np.testing.assert_allclose(np.sort(ages[1]), np.sort(ages[0] + 5), rtol=1e-6)
    with pytest.raises(DataError, match=r"has the sheets one, two\. Choose one"):
        own_data(wards, tmp_path / "mine.xlsx", schema)
    frame.to_csv(tmp_path / "mine.csv", index=False)
    with pytest.raises(DataError, match="no sheets"):
        own_data(wards, tmp_path / "mine.csv", schema, sheet="one")


def test_own_tables_are_encoded_as_the_federations(wards, tmp_path):
    """Whatever a silo's own columns would be taken for: here each row has a sex of its own."""
    seen = build_data(wards).preprocessing
    frame = ward_rows(40, 1).assign(sex=[f"s{k}" for k in range(39)] + ["f"], age=50)
    frame.to_csv(tmp_path / "mine.csv", index=False)
    with pytest.warns(FedbayesWarning, match="'sex' has a category, unlike all .* in 39 rows;"):
        mine = own_data(wards, tmp_path / "mine.csv", seen.public())
    assert mine.shape == seen.shape
    assert mine.preprocessing.same_inputs(seen)
    got = torch.cat([mine.train(0).x, mine.test(0).x])
    with pytest.warns(FedbayesWarning):
        wanted = seen.apply(frame)
    np.testing.assert_allclose(sorted(got.tolist()), sorted(wanted.tolist()), atol=1e-5)
    frame["age"] = frame.age.astype(object)
    frame.loc[4, "age"] = "old"
    frame.to_csv(tmp_path / "mine.csv", index=False)
    with pytest.raises(
        DataError, match=r"'age' has 1 cell that is not a number \('old' in row 5\)"
    ):
        own_data(wards, tmp_path / "mine.csv", seen.public())
    ward_rows(40, 1).assign(born="soon").to_csv(tmp_path / "mine.csv", index=False)
    with pytest.raises(
        DataError, match=r"'born' has text that is not a date .*'soon' in row 1; 40"
    ):
        own_data(wards, tmp_path / "mine.csv", seen.public())


def test_the_schema_of_a_table_says_how_columns_are_encoded(wards, tmp_path):
    write_project(tmp_path / "p", wards, build_data(wards))
    assert read_schema(tmp_path / "p" / "schema.json") == build_data(wards).preprocessing.public()
    hidden = wards.model_copy(
        update={"data": wards.data.model_copy(update={"database": "x://me@secret/db"})}
    )
    assert b"secret" not in b"".join(app_files(hidden, build_data(wards)).values())


@pytest.mark.parametrize("method", ["pvi", "fedlap", "ivon-admm"])
def test_a_node_with_own_data_knows_how_many_clients_there_are(method, tmp_path):
    """Each ward's rows at its own node: reports are those of a federation in one process."""
    rng = np.random.default_rng(3)
    rows = list(samples(rng, 90, ("ant", "bee", "cat")))
    frame = pd.DataFrame(rows, columns=["width", "height", "label"])
    frame["ward"] = rng.choice(["a", "b", "c"], len(frame))
    frame.to_csv(tmp_path / "all.csv", index=False)
    config = Config.create(
        cohort=2,
        engine="flower",
        data={"path": str(tmp_path / "all.csv"), "group": "ward", "label": "label"},
        training={"optimizer": "adam", "lr": 0.01},
        method={"name": method},
    )
    data = build_data(config)
    write_project(tmp_path / "p", config, data)
    here = build_runtime(config, data)
    sent = ServerMessages(here.run, here.method, here.method.init(here.run), 1)
    for client, ward in enumerate("abc"):
        path = tmp_path / f"{ward}.csv"
        frame[frame.ward == ward].to_csv(path, index=False)
        given = {"client": client, "data": str(path)}
        node = find_node(tmp_path / "p", SimpleNamespace(node_config=given, run_config={}))
        there = node.runtime()
        assert (there.run.clients, there.run.cohort) == (3, 2)
        (task,) = sent.tasks([client], {})
        rows = there.data.train(client)
        own = SimpleNamespace(train=lambda _, rows=rows: rows, test=data.test, number=data.number)
        here = replace(here, data=own)
        assert there.train(task).report == here.train(task).report


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_node_computes_as_repeatably_as_the_settings_say(
    deterministic, table, tmp_path, monkeypatch
):
    asked = []
    monkeypatch.setattr(apps, "repeatable", lambda device, wanted: asked.append((device, wanted)))
    config = table.model_copy(update={"deterministic": deterministic})
    write_project(tmp_path / "p", config, build_data(config))
    given = {"client": 0, "data": str(table.data.path)}
    find_node(tmp_path / "p", SimpleNamespace(node_config=given, run_config={})).runtime()
    assert asked == [(torch.device("cpu"), deterministic)]


def test_an_app_that_does_not_say_how_many_clients_there_are_is_refused(table, tmp_path):
    write_project(tmp_path / "p", table, build_data(table))
    file = tmp_path / "p" / "config.toml"
    file.write_text(file.read_text().replace("clients = 3", ""))
    given = {"client": 0, "data": str(table.data.path)}
    node = find_node(tmp_path / "p", SimpleNamespace(node_config=given, run_config={}))
    with pytest.raises(ConfigError, match="the number of clients"):
        node.runtime()


def test_own_rows_may_be_those_of_a_query(wards, tmp_path):
    seen = build_data(wards).preprocessing
    frame = ward_rows(40, 1)
    with create_engine(f"sqlite:///{tmp_path}/p.db").connect() as connection:
        frame.to_sql("rows", connection, index=False)
        connection.commit()
    write_project(tmp_path / "p", wards, build_data(wards))
    sql = {"query": "select * from rows", "database": f"sqlite:///{tmp_path}/p.db"}
    context = SimpleNamespace(node_config={"client": 0, **sql}, run_config={})
    mine = find_node(tmp_path / "p", context).runtime().data
    got = torch.cat([mine.train(0).x, mine.test(0).x])
    wanted = seen.apply(frame)
    np.testing.assert_allclose(sorted(got.tolist()), sorted(wanted.tolist()), atol=1e-5)
    both = SimpleNamespace(node_config={"client": 0, "data": "x.csv", **sql}, run_config={})
    with pytest.raises(ConfigError, match="data and query in the node config exclude"):
        find_node(tmp_path / "p", both)
