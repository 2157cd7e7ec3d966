"""What a node's config says of its client; light to import, for the node as for its apps."""

from collections.abc import Mapping
from typing import Any

from fedbayes.errors import ConfigError

NODE_CONFIG = (
    *("client", "data", "sheet", "query", "database", "data-dir", "state", "weights"),
    *("min-count", "secure"),
)
"""What a node's config may say; each app takes what concerns it."""


def check_node_config(given: Mapping[str, Any]) -> int:
    """See that a node's config says who it is, and nothing that no app knows; the client.

    Raises:
        ConfigError: it does not, or something in it is of the wrong kind.
    """
    client = given.get("client")
    if type(client) is not int or client < 0:
        raise ConfigError("start the node with --node-config 'client=0', or 1, 2, and so on")
    if unknown := given.keys() - NODE_CONFIG:
        raise ConfigError(
            f"unknown in the node config: {', '.join(sorted(unknown))}; it has "
            f"{', '.join(NODE_CONFIG)}"
        )
    if type(given.get("secure", False)) is not bool:
        raise ConfigError("secure in the node config must be true or false")
    if "data" in given and "query" in given:
        raise ConfigError("data and query in the node config exclude each other")
    if "sheet" in given and "data" not in given:
        raise ConfigError("sheet in the node config needs an Excel file. Set data to it")
    return client
