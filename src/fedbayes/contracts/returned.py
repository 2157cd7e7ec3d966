"""Checks of the values that functions of a method return; errors name the function and the slip."""

from collections.abc import Mapping
from typing import Any

from fedbayes.contracts.method import AnyMethod, Info, Method
from fedbayes.contracts.reports import Report
from fedbayes.errors import ConfigError


def started(method: AnyMethod, value: Any) -> Any:
    """The server's state before the first round, as `init` gave it.

    Raises:
        ConfigError: it is of another type.
    """
    _check(method, "init", value, {"the server's state": method.server_state})
    return value


def answered(method: AnyMethod, value: Any) -> tuple[Report, Any, Info]:
    """The client's answer, as `report` or `local` gave it.

    Raises:
        ConfigError: it is no report, private state and metrics.
    """
    parts = {"a Report": Report, "the client's state": method.client_state, "metrics": Mapping}
    own = type(method).local is not Method.local
    _check(method, "local" if own else "report", value, parts)
    report, state, info = value
    return report, state, info


def updated(method: AnyMethod, value: Any, before: Any) -> tuple[Any, Info]:
    """The server's new state and metrics, as `update` gave them for the state `before`.

    Raises:
        ConfigError: it is no such pair, or `weights` of the state lack one or have another type.
    """
    _check(method, "update", value, {"the server's state": method.server_state, "metrics": Mapping})
    state, info = value
    had, has = (getattr(server, "weights", {}) for server in (before, state))
    for name, tensor in had.items():
        if name not in has:
            raise ConfigError(f"update of {method.name} gives no weight {name!r}. Return all")
        if has[name].dtype != tensor.dtype:
            raise ConfigError(
                f"update of {method.name} gives the weight {name!r} as {has[name].dtype}, and it "
                f"was {tensor.dtype}. Convert it with .to({tensor.dtype})"
            )
    return state, info


def stopped(server: Any) -> str:
    """Why a server wants no further rounds, in words, as a field `stopped` of its state says it;
    empty while it does.
    """
    return str(getattr(server, "stopped", ""))


def _check(method: AnyMethod, function: str, value: Any, parts: Mapping[str, type]) -> None:
    """See that a value is what a function is to give: one thing, or a tuple of several."""
    values = (value,) if len(parts) == 1 else value
    if isinstance(values, tuple) and len(values) == len(parts):
        pairs = zip(values, parts.items(), strict=True)
        odd = [(what, one) for one, (what, kind) in pairs if not isinstance(one, kind)]
        if not odd:
            return
        what, one = odd[0]
        given = f"a {type(one).__name__} for {what}"
    else:
        given = f"a {type(value).__name__}"
        given += f" of {len(value)}" if isinstance(value, tuple) else ""
    wanted = ", ".join(f"{what} ({kind.__name__})" for what, kind in parts.items())
    hint = " Return an empty dict, {}, for no metrics." if "metrics" in parts else ""
    raise ConfigError(
        f"{function} of the method {method.name} returned {given}. Return {wanted}.{hint}"
    )
