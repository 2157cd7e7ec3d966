"""Settings by the names that they had in former versions."""

from collections.abc import Sequence
from numbers import Integral
from typing import Any

from fedbayes.errors import ConfigError, warn

COHORT = ("cohort", "clients_per_round", "client_fraction")
"""Settings that say how many clients are in a round, of which a config has one."""


def refuse_several(names: Sequence[str]) -> None:
    """See that one setting at most says how many clients are in a round."""
    if len(names) > 1:
        raise ConfigError(
            f"{' and '.join(names)} both set the number of clients per round. Give one of them"
        )


def of_cohort(settings: dict[str, Any], *, quiet: bool = False) -> dict[str, Any]:
    """Settings in which `cohort`, the older name of two, has its place in one of them.

    Args:
        settings: of a config.
        quiet: whether nothing is said of a cohort that is easily mistaken.
    """
    refuse_several([name for name in COHORT if settings.get(name) is not None])
    if "cohort" not in settings:
        return settings
    kept = {key: value for key, value in settings.items() if key != "cohort"}
    cohort = settings["cohort"]
    if cohort is None:
        return kept
    if isinstance(cohort, bool) or not isinstance(cohort, Integral | float):
        raise ConfigError(
            f"cohort is {cohort!r}; expected number. Give clients_per_round, such as 10, or "
            "client_fraction, such as 0.1"
        )
    whole = isinstance(cohort, Integral)
    cohort = int(cohort) if isinstance(cohort, Integral) else cohort
    name = "clients_per_round" if whole else "client_fraction"
    if cohort < 1 if whole else not 0 < cohort <= 1:
        least = "at least 1" if whole else "a fraction, above 0 and at most 1.0"
        raise ConfigError(f"cohort is {cohort}; it must be {least}. Better give {name}")
    if cohort == 1 and not quiet:
        means = "one client a round" if whole else "all clients in every round"
        warn(f"cohort = {cohort} means {means}. Give {name} = {cohort}, which is unambiguous")
    return {**kept, name: cohort}


def renewed(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings that a run left, by the names that they have now.

    Versions that had no `[privacy]` wrote its noise and δ into `[aggregation]`, with the defaults
    that they have today; `cohort` was one setting. Those that had no `calibration` trained on all
    samples. Under some methods all clients weighed alike, and there was no setting.
    """
    settings = of_cohort({"calibration": "none", **settings}, quiet=True)
    method = settings.get("method")
    if isinstance(method, dict) and method.get("name") in _ALIKE:
        settings = {**settings, "method": {"weighting": "uniform", **method}}
    before = settings.get("aggregation")
    if "privacy" in settings or not isinstance(before, dict):
        return settings
    moved = {key: before[key] for key in ("noise", "delta") if key in before}
    kept = {key: value for key, value in before.items() if key not in moved}
    return {**settings, "aggregation": kept, "privacy": moved}


_ALIKE = ("scaffold", "scaffold-fedsparse", "fedsparse", "feddrop", "fedl1", "pfedbayes")
"""Methods that got a setting `weighting` after runs with them had been stored."""
