"""Former names of modules that programs import."""

from importlib import import_module

import pytest

from fedbayes.core.moved import MOVED


@pytest.mark.parametrize("name", sorted(MOVED))
def test_a_former_name_gives_the_same_classes(name):
    now = import_module(f"fedbayes.{MOVED[name]}")
    with pytest.warns(FutureWarning, match=rf"fedbayes\.{name} is now {now.__name__}"):
        former = import_module(f"fedbayes.{name}")
    public = {n: v for n, v in vars(now).items() if not n.startswith("_")}
    assert all(vars(former)[n] is v for n, v in public.items())


def test_an_unknown_module_is_none():
    with pytest.raises(ModuleNotFoundError):
        import_module("fedbayes.tools.nowhere")


def test_former_names_of_the_contract_warn():
    import fedbayes.contracts as contracts

    for former, now in contracts.FORMER.items():
        with pytest.warns(FutureWarning, match=now):
            assert getattr(contracts, former) is getattr(contracts, now)
