"""What `fedbayes data check` finds suspicious in a table."""

import numpy as np
import pandas as pd
import pytest

from fedbayes.data.suspicions import suspicions


@pytest.fixture
def frame():
    rng = np.random.default_rng(0)
    died = np.where(rng.random(200) < 0.3, "yes", "no")
    return pd.DataFrame(
        {
            "age": rng.normal(60, 10, 200).round(3),
            "sex": rng.choice(["f", "m"], 200),
            "died": died,
            "site": rng.choice(["a", "b"], 200),
        }
    )


def of(frame, *features, group=None):
    return " | ".join(suspicions(frame, ["age", "sex", *features], "died", group))


def test_nothing_is_said_of_a_usual_table(frame):
    yes = int((frame.died == "yes").sum())
    assert of(frame) == f"rows of each class of 'died': no {200 - yes}, yes {yes}"


def test_columns_that_say_the_label(frame):
    frame["code"] = frame.died.map({"yes": 1, "no": 0})
    frame["copy"] = frame.died
    frame["nearly"] = frame.code
    frame.loc[0, "nearly"] = 1 - frame.loc[0, "nearly"]
    said = of(frame, "code", "copy", "nearly")
    assert "code: its values determine" in said
    assert "copy: its values determine" in said
    assert "nearly:" not in said


def test_rows_that_are_alike_by_chance_are_no_repeated_ones(frame):
    frame["age"] = frame["age"].round(-1)
    assert "repeat another row" not in of(frame)


def test_repeated_rows_are_counted_though_an_id_differs(frame):
    frame = pd.concat([frame, frame.head(7)], ignore_index=True)
    frame["id"] = np.arange(len(frame))
    assert "7 of 207 rows repeat another row" in of(frame, "id")


@pytest.mark.parametrize("value", [-999, 9999])
def test_numbers_that_stand_for_missing_ones(frame, value):
    frame.loc[:4, "age"] = value
    assert f"age: '{value}' occurs in 5 of 200 rows" in of(frame)
    frame["score"] = np.arange(200) % 100  # 99 is one of many
    frame["dose"] = np.where(np.arange(200) % 2, 0, -1)
    said = of(frame, "score", "dose")
    assert "score" not in said
    assert "dose" not in said


def test_words_that_stand_for_missing_values(frame):
    frame.loc[:9, "sex"] = "Unknown"
    assert "sex: 'Unknown' occurs in 10 of 200 rows" in of(frame)


def test_classes_by_client(frame):
    frame["died"] = np.where(np.arange(200) < 4, "yes", "no")
    frame["site"] = np.where(np.arange(200) < 100, "a", "b")
    said = of(frame, group="site")
    assert "'yes' has 2.0% of the rows" in said
    assert "training.class_weights=balanced" in said
    assert "no/yes by client: a 96/4; b 100/0" in said
    assert "1 of 2 clients have rows of one class only: b" in said


def test_a_client_with_another_unit(frame):
    """Creatinine in µmol/L at one of four hospitals, in mg/dL at the others."""
    rng = np.random.default_rng(1)
    frame["site"] = pd.Series(rng.choice(["a", "b", "c", "d"], 200))
    frame["creatinine"] = rng.normal(1, 0.3, 200)
    frame.loc[3, "creatinine"] = np.nan
    assert "unit" not in of(frame, "creatinine", group="site")
    there = frame.site == "b"
    frame.loc[there, "creatinine"] *= 88.4
    others = frame.loc[~there, "creatinine"]
    assert (
        f"creatinine: its mean is {frame.loc[there, 'creatinine'].mean():.4g} at b, and "
        f"{others.mean():.4g} at the other clients, with a standard deviation of "
        f"{others.std(ddof=0):.4g}. Check that its unit is the same"
    ) in (said := of(frame, "creatinine", group="site"))
    assert said.count("unit") == 1
    assert "unit" not in of(frame, "creatinine")
    frame["site"] = "a"  # of one client nothing can be said
    assert "unit" not in of(frame, "creatinine", group="site")
