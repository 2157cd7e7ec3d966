"""Every public name has an example in its docstring, and the examples do what they show."""

import doctest
import inspect
import re
from pkgutil import resolve_name

import pytest

import fedbayes
from fedbayes.errors import FedbayesError
from tests import DOCS
from tests.helpers.cases import cases

ON_PAGES = sorted(
    name
    for page in (DOCS / "reference" / "api").glob("*.md")
    for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)
)
NAMES = [*(f"fedbayes.{name}" for name in fedbayes.__all__ if name != "__version__"), *ON_PAGES]


def is_error(found: object) -> bool:
    return isinstance(found, type) and issubclass(found, Exception)


PUBLIC = {
    name: found
    for name, found in {id(one): (n, one) for n in NAMES for one in [resolve_name(n)]}.values()
    if not inspect.ismodule(found) and not (is_error(found) and found is not FedbayesError)
}
"""Each once, by the name on its page; of errors the base alone has an example."""
SLOW = {"compare", "Comparison", "run_seeds", "SeedRuns", "resume_seeds", "resume"}
"""Examples that run several federations."""


def test_the_api_pages_have_all_that_the_package_offers():
    on_pages = {id(resolve_name(name)) for name in ON_PAGES}
    missing = [n for n in fedbayes.__all__ if id(getattr(fedbayes, n)) not in on_pages]
    assert missing == ["__version__"]


def test_the_api_pages_have_all_that_the_example_methods_import():
    """Whoever writes a method as in `examples/` and the tutorial finds each name explained."""
    from fedbayes import contracts

    needed = {
        *("Federation", "RoundContext", "Method", "PointEstimate", "Part", "Reports", "Report"),
        *("Sum", "ReportList", "Problem", "Loss", "Noise", "Solved", "Stateless", "Weights"),
    }
    assert needed <= set(contracts.__all__)
    assert needed <= {name.rpartition(".")[2] for name in PUBLIC}


@pytest.mark.parametrize(
    "name",
    cases(PUBLIC, slow=[name for name in PUBLIC if name.split(".")[-1] in SLOW]),
)
def test_the_example_in_the_docstring(name, tmp_path, monkeypatch):
    """It runs as it stands, with no names but those that it imports."""
    monkeypatch.chdir(tmp_path)
    found = PUBLIC[name]
    parsed = doctest.DocTestParser().get_doctest(inspect.getdoc(found) or "", {}, name, None, 0)
    assert parsed.examples, f"{name} has no example in its docstring"
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    told: list[str] = []
    runner.run(parsed, out=told.append)
    assert not runner.failures, "".join(told)
