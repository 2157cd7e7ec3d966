"""Settings that take away what others need: the table, and what follows from it."""

import pytest

from fedbayes import Config
from fedbayes.errors import ConfigError
from fedbayes.methods import METHODS
from fedbayes.runs.needs import Need, check_features, check_needs, settings

FLOWER = {"engine": "flower-simulation"}
LIVE = {"engine": "flower", "asynchronous": {"buffer": 2}}
NOISE = {"privacy": {"noise": 1.0}, "aggregation": {"clip": 1.0}}
TOGETHER = [
    (FLOWER | {"secure": {"enabled": True}}, {"aggregation": {"rule": "median"}}),
    (FLOWER | {"secure": {"enabled": True}}, {"compression": {"up": "int8"}}),
    (FLOWER | {"secure": {"enabled": True}}, {"sampling": "poisson"}),
    (FLOWER | {"secure": {"enabled": True}}, {"evaluate_at": "clients"}),
    (FLOWER | {"secure": {"enabled": True}}, {"method": {"name": "local"}, "stop_after": 2}),
    (LIVE, {"secure": {"enabled": True}}),
    (LIVE, NOISE),
    (LIVE, {"attack": {"kind": "sign-flip", "clients": 1}}),
    (LIVE, {"sampling": "cyclic"}),
    (NOISE, {"sampling": "somebody:chooses"}),
    ({"sampling": "poisson"}, {"clock": {"speeds": "log-normal"}}),
]


def asked(*tables):
    """The settings and the method of a config of several tables."""
    config = Config.create(**{key: value for table in tables for key, value in table.items()})
    return config, config.build_method()


@pytest.mark.parametrize(("one", "other"), TOGETHER)
def test_each_alone_is_fine_and_both_are_not(one, other):
    check_needs(*asked(one))
    check_needs(*asked(FLOWER | other))
    with pytest.raises(ConfigError, match=r"needs .*, but .* .*\. Use only one of them"):
        check_needs(*asked(one, other))


def test_every_need_is_had_and_taken_by_somebody():
    rows = [row for table in (LIVE, NOISE, *(o for _, o in TOGETHER)) for row in _rows(table)]
    needed = {need for row in rows for need in row.needs}
    denied = {need for row in rows for need in row.denies}
    assert needed == denied == set(Need)


def _rows(table):
    return settings(*asked(table))


@pytest.mark.parametrize("name", METHODS)
def test_a_feature_is_for_a_method_if_its_reports_allow_it(name):
    for feature, table in {
        "secure sums": FLOWER | {"secure": {"enabled": True}},
        "compression": {"compression": {"up": "int8"}},
        "robust rules": {"aggregation": {"rule": "krum"}},
        "asynchronous rounds": {"asynchronous": {"buffer": 2}},
    }.items():
        config, method = asked(table, {"method": {"name": name}})
        if METHODS[name].reports.refusals[feature]:
            with pytest.raises(
                ConfigError, match=f"does not work with {name}: .* It works with fedavg"
            ):
                check_features(config, method)
        else:
            check_features(config, method)
