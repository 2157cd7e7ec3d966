"""`fedbayes glm` and `survival`: from files, over Flower and over nodes to a result."""

import json
import re
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from fedbayes.biostatistics import Packet, cox, glm
from fedbayes.data.plot import plain_numbers
from fedbayes.errors import EngineError, MessageError
from tests.helpers.command_line import command


@pytest.fixture(scope="module")
def patients():
    rng = np.random.default_rng(5)
    count = 300
    table = pd.DataFrame(
        {
            "age": rng.integers(30, 90, count),
            "sex": rng.choice(["f", "m"], count),
            "smoker": rng.random(count) < 0.3,
            "ward": rng.choice([3, 5, 12], count),
        }
    )
    risk = 0.04 * (table.age - 60) + 0.6 * (table.sex == "m") + 0.4 * table.smoker
    table["died"] = (rng.random(count) < 1 / (1 + np.exp(-risk))).astype(int)
    table["days"] = np.ceil(rng.exponential(200 * np.exp(-risk / 2)))
    table["hospital"] = rng.choice(["north", "south", "west"], count)
    return table


@pytest.fixture
def file(patients, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    patients.to_csv("patients.csv", index=False)
    for name, part in patients.groupby("hospital"):
        part.drop(columns="hospital").to_csv(f"{name}.csv", index=False)
    return tmp_path / "patients.csv"


FIT = ["--family", "binomial", "--outcome", "died", "--features", "age,sex,smoker"]
NAMES = ["intercept", "age", "sex=m", "smoker"]


def told(capsys, *arguments):
    """What a command prints as JSON."""
    capsys.readouterr()
    assert command(*arguments, "--json") == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def test_a_fit_of_a_table_is_that_of_python_and_of_a_file_for_each_client(file, patients, capsys):
    found = told(capsys, "stats", "glm", file, "--group", "hospital", *FIT)
    assert list(found["coefficients"]) == list(found["std_errors"]) == NAMES
    clients = {name: part for name, part in patients.groupby("hospital")}  # noqa: C416
    same = glm(clients, "died", ["age", "sex", "smoker"], family="binomial")
    assert list(found["coefficients"].values()) == same.estimates.tolist()
    apart = told(capsys, "stats", "glm", "north.csv", "south.csv", "west.csv", *FIT)
    assert apart == found
    assert set(found["rows"]) == {"north", "south", "west"}


def test_a_config_says_where_the_data_are(file, capsys):
    (file.parent / "study.toml").write_text(
        '[data]\npath = "patients.csv"\ngroup = "hospital"\nlabel = "died"\ndrop = "ward"\n'
    )
    found = told(capsys, "stats", "glm", "study.toml", "--family", "binomial", "--drop", "days")
    assert list(found["coefficients"]) == NAMES
    data = ["data.path=patients.csv", "data.group=hospital", "data.label=died"]
    named = [word for setting in data for word in ("--set", setting)]
    given = told(capsys, "stats", "glm", *named, "--family", "binomial", "--drop", "days,ward")
    assert given == found


def test_a_built_in_set_is_divided_as_for_a_run(capsys):
    sm = pytest.importorskip("statsmodels.api")
    from sklearn.datasets import load_diabetes

    table = load_diabetes(as_frame=True, scaled=False).frame.astype(np.float32).astype(float)
    found = told(capsys, "stats", "glm", "--set", "data.name=diabetes", "--set", "data.clients=4")
    fit = sm.OLS(table.target, sm.add_constant(table.drop(columns="target"))).fit()
    assert len(found["rows"]) == 4
    assert np.abs(np.array(list(found["coefficients"].values())) - fit.params).max() < 1e-6
    assert found["outcome"] == "progression"


def test_survival_from_the_command_line(file, patients, capsys):
    given = [file, "--group", "hospital", "--time", "days", "--event", "died"]
    found = told(capsys, "stats", "cox", *given, "--features", "age,ward", "--category", "ward",
                 "--reference", "ward=5")  # fmt: skip
    assert list(found["coefficients"]) == ["age", "ward=3", "ward=12"]
    curves = told(capsys, "stats", "km", *given, "--by", "sex")
    assert set(curves["curves"]) == {"f", "m"}
    events = sum(sum(curve["events"]) for curve in curves["curves"].values())
    assert events == patients.died.sum()
    assert curves["logrank"]["degrees"] == 1
    meta = told(capsys, "stats", "cox", *given, "--features", "age", "--per-client")
    assert set(meta["meta"]["age"]["sites"]) == {"north", "south", "west"}


def test_results_and_figures_are_written(file, capsys):
    given = [file, "--group", "hospital"]
    assert command("stats", "glm", *given, *FIT, "-o", "fit.csv", "--plot", "fit.svg") == 0
    frame = pd.read_csv("fit.csv", index_col="term")
    assert list(frame.index) == NAMES
    assert frame.loc["age", "odds_ratio"] == pytest.approx(np.exp(frame.loc["age", "coefficient"]))
    svg = (file.parent / "fit.svg").read_text()
    assert all(name in svg for name in NAMES[1:])
    assert "odds ratio" in svg
    assert (
        command("stats", "glm", *given, *FIT, "--per-client", "-o", "meta.json", "--plot", "f.svg")
        == 0
    )
    assert set(json.loads((file.parent / "meta.json").read_text())["meta"]) == set(NAMES)
    assert "random effects" in (file.parent / "f.svg").read_text()
    days = ["--time", "days", "--event", "died", "--by", "sex"]
    assert command("stats", "km", *given, *days, "-o", "km.csv", "--plot", "km.svg") == 0
    assert (pd.read_csv("km.csv").survival.between(0, 1)).all()
    assert "log-rank" in (file.parent / "km.svg").read_text()
    shown = capsys.readouterr().out
    assert "odds ratio" in shown
    assert "log-rank test" in shown
    assert "numbers" in shown


def test_ratios_and_sizes_are_marked_by_plain_numbers(file):
    """An axis that is marked by powers of ten has one mark, or none, where ratios are alike."""
    given = [file, "--group", "hospital", *FIT[:4], "--features", "age,sex", "--per-client"]
    assert command("stats", "glm", *given, "--plot", "f.svg") == 0
    axis = (file.parent / "f.svg").read_text().split('id="matplotlib.axis_2"')[0]
    marks = [float(mark) for mark in re.findall(r"<!-- ([\d.]+) -->", axis)]
    assert len(marks) > 2
    assert 1 in marks
    fine = Figure().subplots()
    for low, high, least in ((0.99971, 1.00032, 3), (1110, 8880, 2), (0.3, 2e5, 4)):
        fine.set(xscale="log", xlim=(low, high))
        plain_numbers(fine.xaxis)
        shown = fine.xaxis.get_major_formatter().format_ticks(fine.get_xticks())
        inside = [s for s, v in zip(shown, fine.get_xticks(), strict=True) if low <= v <= high]
        assert least <= len(inside) == len(set(inside)) < 9
        assert [float(text.replace(",", "")) for text in shown] == pytest.approx(fine.get_xticks())


def test_groups_without_events_have_curves_too(patients, file, capsys):
    patients.assign(arm=np.where(patients.died == 1, "old", patients.sex)).to_csv("arms.csv")
    given = ["arms.csv", "--group", "hospital", "--time", "days", "--event", "died", "--by", "arm"]
    found = told(capsys, "stats", "km", *given, "--plot", "arms.svg", "-o", "arms.csv.json")
    assert found["curves"]["f"]["survival"] == []
    assert found["curves"]["f"]["median"] is None
    assert command("stats", "km", *given, "-o", "km.csv") == 0
    curves = pd.read_csv("km.csv").set_index("group")
    assert curves.loc["f", ["time", "events", "survival", "low", "high"]].tolist() == [
        0,
        0,
        1,
        1,
        1,
    ]
    assert pd.isna(curves.loc["f", "at_risk"])
    assert curves.loc["old", "at_risk"].tolist() == found["curves"]["old"]["at_risk"]
    capsys.readouterr()
    assert "arm=old" in (file.parent / "arms.svg").read_text()
    assert command("stats", "km", *given) == 0
    assert "not reached" in capsys.readouterr().out


def test_rows_left_out_are_said(patients, file, capsys):
    patients.assign(age=patients.age.where(patients.index > 6)).to_csv("gaps.csv", index=False)
    given = ["stats", "glm", "gaps.csv", "--group", "hospital", *FIT]
    assert command(*given) == 2
    assert "7 of 'age'" in capsys.readouterr().err
    assert command(*given, "--drop-missing") == 0
    assert "7 rows are left out" in capsys.readouterr().err
    assert command(*given, "--set", "data.missing=drop") == 0
    assert "7 rows are left out" in capsys.readouterr().err


def test_a_blank_cell_is_an_empty_one_and_no_category(patients, file, capsys):
    blank = patients.copy()
    blank.loc[[3, 7], "sex"] = ["  ", " "]
    blank.to_csv("blank.csv", index=False)
    assert command("stats", "glm", "blank.csv", "--group", "hospital", *FIT) == 2
    assert "values are missing: 2 of 'sex'" in " ".join(capsys.readouterr().err.split())
    found = told(capsys, "stats", "glm", "blank.csv", "--group", "hospital", *FIT, "--drop-missing")
    patients.drop(index=[3, 7]).to_csv("rest.csv", index=False)
    wanted = told(capsys, "stats", "glm", "rest.csv", "--group", "hospital", *FIT)
    assert found["coefficients"] == wanted["coefficients"]


def test_settings_that_say_nothing_here_are_said_or_refused(file, capsys):
    given = ["stats", "glm", file, "--group", "hospital", *FIT]
    assert command(*given, "--set", "data.test=0.5") == 0
    assert "data.test has no effect" in capsys.readouterr().err
    assert command(*given, "--set", "data.missing=impute") == 2
    assert "--drop-missing" in capsys.readouterr().err
    assert command(*given, "--set", "data.dates=age") == 2
    assert "data.dates has no effect" in capsys.readouterr().err


def test_other_kinds_of_tables(patients, file, tmp_path, capsys):
    found = told(capsys, "stats", "glm", file, "--group", "hospital", *FIT)
    patients.to_csv("patients.csv.gz", index=False)
    patients.to_parquet("patients.parquet")
    for name in ("patients.csv.gz", "patients.parquet"):
        assert told(capsys, "stats", "glm", name, "--group", "hospital", *FIT) == found
    for name, part in patients.groupby("hospital"):
        part.drop(columns="hospital").to_csv(tmp_path / f"{name}.csv.gz", index=False)
    given = ["north.csv.gz", "south.csv", "west.csv.gz"]
    assert told(capsys, "stats", "glm", *given, *FIT) == found


def test_columns_that_a_config_calls_categories_are(file, capsys):
    given = [file, "--group", "hospital", "-y", "died", "-x", "age,ward"]
    found = told(capsys, "stats", "glm", *given, "--set", "data.categorical=ward")
    assert list(found["coefficients"]) == ["intercept", "age", "ward=5", "ward=12"]
    assert found == told(capsys, "stats", "glm", *given, "--category", "ward")


def test_rows_of_a_query(patients, file, monkeypatch, capsys):
    sqlalchemy = pytest.importorskip("sqlalchemy")
    url = f"sqlite:///{file.parent / 'hospital.db'}"
    patients.to_sql("patients", sqlalchemy.create_engine(url), index=False)
    monkeypatch.setenv("FEDBAYES_DATABASE", url)
    query = ["--set", "data.query=SELECT * FROM patients", "--group", "hospital"]
    there = told(capsys, "stats", "glm", *query, *FIT)["coefficients"]
    here = told(capsys, "stats", "glm", file, "--group", "hospital", *FIT)["coefficients"]
    assert list(there.values()) == pytest.approx(list(here.values()), abs=1e-9)


def test_the_outcome_is_the_column_label_where_none_is_named(patients, file, capsys):
    patients.rename(columns={"died": "label"}).to_csv("labelled.csv", index=False)
    found = told(
        capsys, "stats", "glm", "labelled.csv", "--group", "hospital", *FIT[:2], "-x", "age"
    )
    assert found["outcome"] == "label"
    assert command("stats", "glm", file, "--group", "hospital", *FIT[:2]) == 2
    assert "--outcome" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing.csv"], "Path 'nothing.csv' does not exist"),
        ([], "the clients' tables"),
        (["patients.csv", "--group", "hospitl"], "no column 'hospitl' (did you mean 'hospital'?)"),
        (["north.csv", "south.csv", "--group", "sex"], "group = 'sex' has no effect"),
        (["patients.csv", "--set", "data.clients=3"], "data.clients has no effect"),
        (["patients.csv", "--group", "hospital", "--features", "agee"], "did you mean 'age'?"),
        (
            ["patients.csv", "--group", "hospital", "--features", "age,hospital"],
            "features is 'hospital', the column of clients",
        ),
        (["patients.csv", "--per-client"], "There is only one client. Fit its rows without"),
        (["patients.csv", "--group", "hospital", "--level", "95"], "--level is 95"),
        (["patients.csv", "--group", "hospital", "-o", "fit.txt"], "ends in .csv or .json"),
        (["patients.csv", "--group", "hospital", "--plot", "x/fit.png"], "folder not found: x"),
        (["patients.csv", "--group", "hospital", "--reference", "sex"], "write COLUMN=CATEGORY"),
        (["patients.csv", "--group", "hospital", "--engine", "ray"], "--engine ray: choose"),
        (["patients.csv", "--group", "hospital", "--family", "beta"], "unknown family 'beta'"),
        (["patients.csv", "--insecure"], "work only with --superlink"),
        (["--superlink", "127.0.0.1:1", "--insecure"], "the number of clients"),
        (["north.csv", "--superlink", "127.0.0.1:1", "--insecure"], "have the tables."),
        (["patients.csv", "--clients", "3"], "--clients works only with --superlink"),
        (["--set", "data.name=digits"], "digits is not a table"),
    ],
)
def test_bad_input_is_refused_with_the_way_out(arguments, words, file, capsys):
    before = set(file.parent.iterdir())
    given = [*FIT, *arguments] if "--family" not in arguments else [*arguments, "-y", "died"]
    assert command("stats", "glm", *given) == 2
    assert words in capsys.readouterr().err.replace("\n", " ")
    assert set(file.parent.iterdir()) == before


def test_curves_and_strata_by_the_column_of_clients_are_told_how(file, capsys):
    given = [file, "--group", "hospital", "--time", "days", "--event", "died"]
    assert command("stats", "km", *given, "--by", "hospital") == 2
    assert "Add a second column with the same values" in capsys.readouterr().err
    assert command("stats", "cox", *given, "--strata", "hospital", "--features", "age") == 2
    assert "use --strata client" in capsys.readouterr().err


def test_a_table_without_groups_is_one_client_and_that_is_said(file, capsys):
    assert command("stats", "glm", file, *FIT) == 0
    assert "to one client." in capsys.readouterr().err


def test_over_flower_the_numbers_are_the_same(file, capsys):
    pytest.importorskip("flwr")
    given = [file, "--group", "hospital"]
    both = [
        told(capsys, "stats", "glm", *given, *FIT, "--engine", engine)
        for engine in ("sequential", "flower-simulation")
    ]
    assert both[0] == both[1]
    days = ["--time", "days", "--event", "died", "--features", "age,sex"]
    both = [
        told(capsys, "stats", "cox", *given, *days, "--engine", engine)
        for engine in ("sequential", "flower-simulation")
    ]
    assert both[0] == both[1]


def test_a_node_says_too_few_rows_and_keeps_its_data_to_itself(patients):
    pytest.importorskip("flwr")
    from fedbayes.flower.sums import simulated_nodes

    tables = {"a": patients[:100], "b": patients[100:103], "c": patients[103:]}
    nodes = simulated_nodes(tables, 10, 60)
    try:
        with pytest.raises(EngineError, match=r"client b: .*3 complete rows, .* minimum is 10"):
            glm(nodes, "died", ["age"], family="binomial")
    finally:
        nodes.close()
    negative = patients.assign(days=-patients.days)
    nodes = simulated_nodes({"a": negative[:100], "b": negative[100:]}, 0, 60)
    try:
        with pytest.raises(EngineError, match=r"client a: .*see its own log"):
            cox(nodes, "days", "died", ["age"])
    finally:
        nodes.close()


def test_packets_come_back_as_they_were():
    pytest.importorskip("flwr")
    from fedbayes.flower.sums_node import read_packet, write_packet

    numbers = {"words": np.arange(3.0), "empty": np.zeros((0, 4)), "one": np.eye(2)}
    packet = Packet({"ask": "glm", "names": ["ü", "words"]}, numbers)
    back = read_packet(write_packet(packet))
    assert back.told == packet.told
    assert back.numbers.keys() == packet.numbers.keys()
    for name, array in packet.numbers.items():
        assert back.numbers[name].dtype == np.float64
        assert np.array_equal(back.numbers[name], array)


def test_what_is_no_packet_is_refused():
    torch = pytest.importorskip("torch")
    pytest.importorskip("flwr")
    from fedbayes.core.messages import encode
    from fedbayes.flower.sums_node import read_packet

    words = torch.tensor(list(b"{}"), dtype=torch.uint8)
    for bad in (
        b"junk",
        encode({"numbers.a": torch.zeros(2, dtype=torch.float64)}),
        encode({"words": torch.tensor(list(b"[1"), dtype=torch.uint8)}),
        encode({"words": torch.tensor(list(b"[1]"), dtype=torch.uint8)}),
        encode({"words": words, "numbers.a": torch.zeros(2)}),
    ):
        with pytest.raises(MessageError):
            read_packet(bad)


@pytest.mark.parametrize(
    ("ask", "words", "numbers", "message"),
    [
        ("glm", {}, {"gradient": np.zeros(9)}, "client b answered with sums"),
        ("moments", {}, {"total": np.array([np.nan])}, "client b answered with sums that are not"),
        ("names", {"columns": 3}, {}, "client b is incomplete: names"),
        ("columns", {"rows": -1}, {}, "client b is incomplete: columns"),
        ("columns", {"columns": {}}, {}, "client b answered for columns"),
        ("event_times", {}, {"0": np.array([np.inf])}, "client b did not send its event times"),
        ("fit", {"rows": "many"}, {}, "client b is incomplete: fit"),
        ("fit", {}, {"estimates": np.zeros(9)}, "client b is incomplete: fit"),
    ],
)
def test_what_a_client_may_not_say_is_refused(patients, ask, words, numbers, message):
    from fedbayes.biostatistics import LocalClients, TableClient, meta_analysis

    class Odd(LocalClients):
        def ask(self, question, most):
            answers = super().ask(question, most)
            if question.told["ask"] == ask:
                honest = answers["b"]
                answers["b"] = Packet({**honest.told, **words}, {**honest.numbers, **numbers})
            return answers

    clients = Odd({"a": TableClient(patients[:150]), "b": TableClient(patients[150:])})
    fits = {
        "event_times": lambda: cox(clients, "days", "died", ["age"]),
        "fit": lambda: meta_analysis(clients, "died", ["age"], family="binomial"),
    }
    fit = fits.get(ask, lambda: glm(clients, "died", ["age"], family="binomial"))
    with pytest.raises(MessageError, match=message):
        fit()


@pytest.mark.slow
def test_nodes_of_a_superlink_give_the_same_numbers(file, tmp_path, patients, capsys):
    pytest.importorskip("flwr")
    from tests.helpers.deployment import Deployment

    names = ("north", "south", "west")
    here = told(capsys, "stats", "glm", *[f"{name}.csv" for name in names], *FIT)
    days = ["--time", "days", "--event", "died", "--by", "sex"]
    curves = told(capsys, "stats", "km", *[f"{name}.csv" for name in names], *days)
    with Deployment(tmp_path) as deployment:
        for client, name in enumerate(names):
            deployment.start_node(client, data=str(tmp_path / f"{name}.csv"))
        at = ["--superlink", deployment.address, "--insecure", "--clients", "3"]
        there = told(capsys, "stats", "glm", *at, *FIT)
        assert there["coefficients"] == here["coefficients"]
        assert there["std_errors"] == here["std_errors"]
        assert there["rows"] == {f"{i}": here["rows"][name] for i, name in enumerate(names)}
        there = told(capsys, "stats", "km", *at, *days)
        assert there["curves"] == curves["curves"]
        assert command("stats", "glm", *at, *FIT, "--min-count", "200") == 2
        assert "is 200" in capsys.readouterr().err


@pytest.mark.slow
def test_nodes_of_a_superlink_add_in_secret(file, tmp_path, patients, capsys):
    pytest.importorskip("flwr")
    from tests.helpers.deployment import Deployment

    names = ("north", "south", "west")
    fit = ["--outcome", "days", "--features", "age"]
    here = told(capsys, "stats", "glm", *[f"{name}.csv" for name in names], *fit)
    with Deployment(tmp_path) as deployment:
        for client, name in enumerate(names):
            deployment.start_node(client, data=str(tmp_path / f"{name}.csv"), secure=Toml("true"))
        at = ["--superlink", deployment.address, "--insecure", "--clients", "3"]
        near(told(capsys, "stats", "glm", *at, *fit, "--secure"), here)
        assert command("stats", "glm", *at, *fit) == 2
        assert "needs secure aggregation" in capsys.readouterr().err


class Toml(str):
    """A value of a node's config as it is written, without quotation marks."""

    __repr__ = str.__str__


@pytest.mark.parametrize("clients", [3, 4, 17])
def test_limbs_add_to_the_exact_sum(clients):
    """Against fractions, for numbers of any size."""
    from fractions import Fraction

    from fedbayes.biostatistics.limbs import Limbs

    rng, limbs = np.random.default_rng(clients), Limbs(clients)
    special = [0.0, -0.0, 1.5, 2.0**63, -(2.0**63), 2.0**-96, 1e-300, np.nextafter(1, 2)]
    told = [
        {"x": np.append(rng.normal(size=99) * 10.0 ** rng.integers(-20, 19, 99), special)}
        for _ in range(clients)
    ]
    vectors = [limbs.write(one) for one in told]
    assert all(np.array_equal(v, np.rint(v)) and abs(v).max() < limbs.range for v in vectors)
    assert clients * limbs.levels <= 2**31
    shapes = {"x": (107,)}
    assert len(vectors[0]) == limbs.entries(shapes)
    found = limbs.read(np.mean(vectors, axis=0) * clients, shapes)["x"]
    for place in range(107):
        wanted = sum(Fraction(float(one["x"][place])) for one in told)
        assert abs(Fraction(float(found[place])) - wanted) <= max(
            Fraction(2) ** -53 * abs(wanted), clients * Fraction(2) ** -97
        )


def test_limbs_of_what_cannot_be_added():
    from fedbayes.biostatistics.limbs import Limbs

    limbs = Limbs(3)
    fine, shapes = limbs.write({"x": np.ones(2)}), {"x": (2,)}
    for odd in (np.nan, np.inf, 2.0**64):
        sums = fine + fine + limbs.write({"x": np.array([1.0, odd])})
        assert np.isnan(limbs.read(sums, shapes)["x"]).all()
    for spoilt in (fine + 0.25, fine - np.eye(13)[0], fine + 2.0**32):
        with pytest.raises(MessageError, match="a client sent invalid numbers"):
            limbs.read(spoilt, shapes)


SECURE = ["--engine", "flower-simulation", "--secure"]


def near(found, wanted):
    for name in ("coefficients", "std_errors"):
        assert found[name].keys() == wanted[name].keys()
        ours, theirs = (np.array([*one[name].values()], float) for one in (found, wanted))
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-12)


def test_secure_sums_give_the_same_fit(file, capsys):
    pytest.importorskip("flwr")
    given = [file, "--group", "hospital", *FIT]
    near(told(capsys, "stats", "glm", *given, *SECURE), told(capsys, "stats", "glm", *given))


@pytest.mark.slow
def test_secure_sums_give_the_same_fits_and_curves(file, capsys):
    pytest.importorskip("flwr")
    given = [file, "--group", "hospital"]
    fit = ["--outcome", "days", "--features", "age,sex,smoker"]
    near(
        told(capsys, "stats", "glm", *given, *fit, *SECURE),
        told(capsys, "stats", "glm", *given, *fit),
    )
    days = ["--time", "days", "--event", "died"]
    for more in (["--features", "age,sex"], ["--features", "age", "--strata", "client"]):
        pair = [told(capsys, "stats", "cox", *given, *days, *more, *a) for a in (SECURE, [])]
        near(*pair)
    pair = [told(capsys, "stats", "km", *given, *days, "--by", "sex", *a) for a in (SECURE, [])]
    assert pair[0]["curves"] == pair[1]["curves"]


@pytest.mark.slow
def test_under_secure_sums_no_client_s_sums_are_seen(patients, monkeypatch):
    """Of each client a vector comes that is uniform, and every answer that is read is the sum."""
    pytest.importorskip("flwr")
    from flwr.common import bytes_to_ndarray
    from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key

    from fedbayes.flower import sums
    from fedbayes.flower.secagg_steps import SecaggSteps

    came, read = [], []
    take, plain = SecaggSteps._take, sums.NodeCarrier._answers

    def watch(self, answer, asked, stage):
        found = take(self, answer, asked, stage)
        for data in (
            found[0].content.config_records[RECORD_KEY_CONFIGS].get(Key.MASKED_PARAMETERS, [])
        ):
            came.append(bytes_to_ndarray(data))  # noqa: PERF401
        return found

    monkeypatch.setattr(SecaggSteps, "_take", watch)
    monkeypatch.setattr(
        sums.NodeCarrier, "_answers", lambda self, o: read.append(plain(self, o)) or read[-1]
    )
    tables = {"a": patients[:100], "b": patients[100:200], "c": patients[200:]}
    nodes = sums.simulated_nodes(tables, 0, 60, secure=True)
    try:
        found = glm(nodes, "died", ["age", "sex", "ward"], family="binomial")
    finally:
        nodes.close()
    vectors = [vector for vector in came if vector.size > 1]
    assert len(vectors) == 3 * (found.rounds - 2)  # all but names and columns
    together = np.concatenate(vectors) / 2.0**32
    counts = np.histogram(together, bins=8, range=(0, 1))[0]
    expected = together.size / 8
    assert ((counts - expected) ** 2 / expected).sum() < 30  # chi-squared of 7: one in 10,000
    sums_read = [[p.numbers for p in one.values()] for one in read if one["a"].numbers]
    assert len(sums_read) == found.rounds - 2
    for first, *others in sums_read:
        for other in others:
            assert all(np.array_equal(first[name], other[name]) for name in first)


def test_secure_sums_that_cannot_be(file, patients, capsys):
    pytest.importorskip("flwr")
    from fedbayes.flower.sums import simulated_nodes

    given = [file, "--group", "hospital", *FIT]
    for arguments, words in (
        ([*given, "--secure"], "--secure has no effect if all"),
        ([*given, *SECURE, "--per-client"], "--per-client shows each client's own fit"),
        (["north.csv", "south.csv", *FIT, *SECURE], "at least 3 clients, got 2"),
        ([*given, "--noise", "1"], "--noise is not available: sums of a fit have no bounded"),
    ):
        assert command("stats", "glm", *arguments) == 2
        assert words in " ".join(capsys.readouterr().err.split())
    negative = patients.assign(days=-patients.days)
    nodes = simulated_nodes(
        {"a": patients[:90], "b": negative[90:200], "c": patients[200:]}, 0, 60, secure=True
    )
    try:
        with pytest.raises(EngineError, match=r"client b: its node says: .*see its own log"):
            cox(nodes, "days", "died", ["age"], strata="client")
    finally:
        nodes.close()


def test_a_node_that_says_secure_sums_alone(patients):
    pytest.importorskip("flwr")
    from flwr.common.constant import PARTITION_ID_KEY

    from fedbayes.biostatistics import TableClient
    from fedbayes.flower import sums
    from fedbayes.flower.sums_node import SumsNode

    parts = [patients[:100], patients[100:200], patients[200:]]

    def node(context):
        number = int(context.node_config[PARTITION_ID_KEY])
        return SumsNode(number, lambda _: TableClient(parts[number]), secure=True)

    for secure in (False, True):
        grid, close = sums.simulated_grid(sums.answering(node), 3)
        engine = sums._engine(lambda grid=grid: grid, 3, 60, close, secure, poll=0.01)
        nodes = sums.NodeCarrier(engine, ("a", "b", "c"))
        try:
            if secure:
                assert glm(nodes, "died", ["age"], family="binomial").names == ("intercept", "age")
                continue
            with pytest.raises(EngineError, match="needs secure aggregation"):
                glm(nodes, "died", ["age"], family="binomial")
        finally:
            nodes.close()


def test_nodes_read_codes_as_they_are_written(coded):
    """01 in a file of numbers alone is the 01 of a file with A1; a numbered row is no feature."""
    pytest.importorskip("flwr")
    from flwr.common.constant import PARTITION_ID_KEY

    from fedbayes.flower import sums
    from fedbayes.flower.sums_node import find_client

    pd.read_csv("south.csv", dtype={"code": str}).to_csv("south.csv")  # with an index
    with pd.ExcelWriter("north.xlsx") as book:
        coded[0].to_excel(book, sheet_name="codes", index=False)
        coded[1].to_excel(book, sheet_name="others", index=False)
    own = ({"data": "north.xlsx", "sheet": "codes"}, {"data": "south.csv"})
    found = [find_client(SimpleNamespace(node_config={"client": number, **config}))
             for number, config in enumerate(own)]  # fmt: skip

    def node(context):
        return found[int(context.node_config[PARTITION_ID_KEY])]

    grid, close = sums.simulated_grid(sums.answering(node), 2)
    engine = sums._engine(lambda: grid, 2, 60, close, False, poll=0.01)
    nodes = sums.NodeCarrier(engine, ("north", "south"))
    whole = pd.concat(coded).reset_index(drop=True)
    pooled = glm({"all": whole.assign(code=whole.code.replace("5.0", "5"))}, "died",
                 drop=["hospital"], family="binomial")  # fmt: skip
    assert "code=02" in pooled.names
    try:
        options = {"drop": ["hospital"], "categories": ["code"], "family": "binomial"}
        over = glm(nodes, "died", **options)
    finally:
        nodes.close()
    assert over.names == pooled.names
    np.testing.assert_allclose(over.estimates, pooled.estimates, rtol=1e-6)


@pytest.mark.parametrize("study", ["glm", "km"])
def test_a_result_never_takes_the_place_of_the_table(file, capsys, study):
    asked = FIT if study == "glm" else ["--time", "days", "--event", "died"]
    before = file.read_bytes()
    for given in ([file.name, "--group", "hospital"], ["--set", f"data.path={file.name}"]):
        assert command("stats", study, *given, *asked, "--out", file) == 2
        assert "would replace one of the inputs" in " ".join(capsys.readouterr().err.split())
        assert file.read_bytes() == before


@pytest.fixture
def coded(patients, file):
    """Codes with leading zeros, which in one file are numbers alone; gaps make 5 of 5.0."""
    rng = np.random.default_rng(1)
    table = patients.assign(code=rng.choice(["01", "02", "5"], len(patients)))
    north, south = table[:150].copy(), table[150:].copy()
    north.loc[::6, "code"] = "A1"
    north["code"] = north.code.replace("5", "5.0")
    north.to_csv("north.csv", index=False)
    south.to_csv("south.csv", index=False)
    return north, south


def test_codes_with_leading_zeros_are_one_category_in_all_files(coded, capsys):
    fit = ["--family", "binomial", "--outcome", "died", "--features", "age,code"]
    found = told(capsys, "stats", "glm", "north.csv", "south.csv", *fit, "--category", "code")
    assert list(found["coefficients"]) == ["intercept", "age", "code=02", "code=5", "code=A1"]
    whole = pd.concat(coded)
    pooled = glm({"all": whole.assign(code=whole.code.replace("5.0", "5"))}, "died",
                 ["age", "code"], family="binomial")  # fmt: skip
    np.testing.assert_allclose(list(found["coefficients"].values()), pooled.estimates, rtol=1e-6)


def test_one_code_in_two_spellings_is_refused(coded, capsys):
    """As where a program has saved a file anew and left out the leading zeros."""
    coded[1].assign(code=coded[1].code.astype(int)).to_csv("south.csv", index=False)
    fit = ["--family", "binomial", "--outcome", "died", "--features", "code"]
    assert command("stats", "glm", "north.csv", "south.csv", *fit, "--category", "code") == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "category '01' at client north, which at client south is '1'" in said
    clients = {"north": pd.DataFrame({"y": [1.0, 2, 3, 4], "c": ["1", "01", "1", "01"]})}
    assert glm(clients | {"south": clients["north"]}, "y", ["c"]).names == ("intercept", "c=1")


def test_blanks_around_the_name_of_a_client_are_left_out_as_in_a_run(patients, file, capsys):
    wanted = told(capsys, "stats", "glm", file, "--group", "hospital", *FIT)
    table = patients.copy()
    table.loc[::3, "hospital"] += " "
    table.to_csv(file, index=False)
    assert command("stats", "glm", file, "--group", "hospital", *FIT, "--json") == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["rows"] == wanted["rows"]
    assert "white space around the name of a group is removed: 'north '" in " ".join(err.split())
    table.loc[4, "hospital"] = "  "
    table.to_csv(file, index=False)
    assert command("stats", "glm", file, "--group", "hospital", *FIT) == 2
    assert "1 of 300 rows have no 'hospital'" in " ".join(capsys.readouterr().err.split())


def test_a_baseline_for_each_client_whatever_the_column_of_clients_is_called(
    patients, file, capsys
):
    """`client` stands for each client; a column of that name says the same."""
    fit = ("--time", "days", "--event", "died", "--features", "age", "--strata", "client")
    patients.rename(columns={"hospital": "client"}).to_csv("named.csv", index=False)
    named = told(capsys, "stats", "cox", "named.csv", "--group", "client", *fit)
    assert named == told(capsys, "stats", "cox", file, "--group", "hospital", *fit)
