"""How many actors there is room for on the nodes of a cluster of Ray."""

import time
from collections.abc import Mapping

import psutil
import ray

from fedbayes.errors import EngineError, warn
from fedbayes.federation.engines.ray_cluster import Cluster
from fedbayes.federation.engines.workers import WORKER_BYTES
from fedbayes.federation.ray_settings import RaySettings

_NAMED = 8
"""Nodes that a message tells of by name."""


def how_many(
    cluster: Cluster, settings: RaySettings, needs: Mapping[str, float], clients: int
) -> int:
    """How many actors to start.

    Raises:
        EngineError: there is no room for one, or for as many as were asked for.
    """
    asked = settings.actors or 1
    found = _wait_for_room(cluster, needs, asked, settings.start_timeout)
    wanted = " and ".join(f"{amount:g} {name}" for name, amount in needs.items())
    if not found or (found < asked and not cluster.own):
        after = f" after {settings.start_timeout:g} seconds (ray.start_timeout)"
        raise EngineError(
            f"there is no room for {asked} actor{'s' * (asked > 1)} of {wanted} "
            f"each{'' if cluster.own else after}: {there_is(cluster)}, room for {found}. Set "
            "fewer ray.actors, or smaller ray.cpus, ray.gpus or ray.resources"
        )
    if cluster.own:
        bearable = max(1, psutil.virtual_memory().available // WORKER_BYTES)
        found = min(found, bearable)
    if not settings.actors:
        return min(found, clients, max(spare(needs), 1))
    if found < asked:
        warn(
            f"{found} of {asked} actors are started, of {wanted} each: {there_is(cluster)}, and "
            f"memory for {bearable} at {WORKER_BYTES >> 20} MiB each"
        )
    return min(found, asked)


def there_is(cluster: Cluster) -> str:
    """What nodes there are, in words."""
    nodes = cluster.nodes
    each = [f"{node['NodeManagerAddress']}: {_amounts(node['Resources'])}" for node in nodes]
    more = [f"and {len(each) - _NAMED} more"] if len(each) > _NAMED else []
    what = "this machine" if cluster.own else f"the cluster at {cluster.address}"
    named = "; ".join([*each[:_NAMED], *more])
    return f"{what} has {len(each)} node{'s' * (len(each) != 1)} ({named})"


def room(cluster: Cluster, needs: Mapping[str, float]) -> int:
    """How many actors of such needs the nodes have room for, whoever is there now."""
    return sum(_fits(node["Resources"], needs) for node in cluster.nodes)


def spare(needs: Mapping[str, float]) -> int:
    """Return for how many more actors of such needs there may be room."""
    return _fits(ray.available_resources(), needs)


def free_words() -> str:
    """What those who are there now leave of the nodes, in words."""
    return _amounts(ray.available_resources())


def _fits(there: Mapping[str, float], needs: Mapping[str, float]) -> int:
    """How many times what is needed is there; a fraction of a GPU is of one GPU."""

    def times(name: str, amount: float) -> int:
        has = there.get(name, 0.0)
        if name == "GPU" and amount < 1:
            return int(has) * int(1 / amount + 1e-9)
        return int(has / amount + 1e-9)

    return min(times(name, amount) for name, amount in needs.items())


def _amounts(resources: Mapping[str, float]) -> str:
    """Resources of a node that are asked for by name, in words."""
    hidden = ("memory", "object_store_memory")
    named = {k: v for k, v in resources.items() if k not in hidden and not k.startswith("node:")}
    return ", ".join(f"{amount:g} {name}" for name, amount in sorted(named.items())) or "nothing"


def _wait_for_room(cluster: Cluster, needs: Mapping[str, float], count: int, seconds: float) -> int:
    """Wait for nodes with room for the actors; the number that there is room for."""
    end = time.monotonic() + seconds
    while (found := room(cluster, needs)) < count and not cluster.own:
        if time.monotonic() > end:
            break
        time.sleep(0.2)
    return found
