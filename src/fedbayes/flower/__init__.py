"""Federations over a network, on Flower: its apps, its simulation, and the way to a SuperLink.

`engine.py` is an engine like the others, so rounds, checkpoints and the display know nothing of
networks. Whatever comes from a node is read without trust and within bounds: keep that in any
change, and try it with `python -m tests.hostile`. What is not Flower's public interface may be
used only where it is used now: `superlink.py`, `hub.py`, `simulated.py`, `supernode.py`,
`warm_app.py`, `wire.py` (`link_size`), `fetching.py`, `joining.py`, the names of errors in
`engine.py` and `poller.py`, and the four files of secure aggregation. So the range of versions in
`pyproject.toml` is narrow.

`Flower` pushes the tasks of a round through a *grid* and yields a `ClientResult` or a
`ClientFailure` for each, in the order of the cohort. `Node.answer` is the other end, and `wire.py`
is what both know of a message. The `Roster` finds nodes and registers which client each is. The
`Poller` looks for answers side by side, so that no client is waited for where others are, and
opens a broken grid again. A grid comes from `simulated.py` (Flower's simulation with our backend),
from `superlink.py` (`fedbayes federate` submits a run and is its ServerApp), or from `apps.py`
(Flower starts the ServerApp, for `flwr run`).

What an engine stores as a client's state is a ticket here: the name and digest of a file that the
node keeps. So a state counts once its report does, and never leaves the client.
"""

import logging
import re
import ssl
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from fedbayes.errors import EngineError, require_extra, warn
from fedbayes.storage.activity import Notify, unnoticed

if TYPE_CHECKING:
    from fedbayes.config.config import Config
    from fedbayes.federation.engines import Engine
    from fedbayes.flower.superlink import SuperLink
    from fedbayes.runs.simulation import Simulation


def require_flower() -> None:
    """See that Flower is installed, or raise an EngineError."""
    require_extra("flower", "this", EngineError, "flwr")


def host_and_port(option: str, address: str) -> tuple[str, int]:
    """The parts of HOST:PORT; an IPv6 address is in brackets.

    Raises:
        EngineError: it is not that.
    """
    host, _, port = address.rpartition(":")
    if not re.fullmatch(r"[^\s/@]+:\d{1,5}", address) or not 0 < int(port) <= 65535:
        raise EngineError(f"{option} {address}: write HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)


def superlink_at(
    address: str,
    certificates: Path | None = None,
    insecure: bool = False,
    secret: Path | None = None,
) -> "SuperLink":
    """The SuperLink at an address.

    Args:
        address: host:port.
        certificates: PEM file of the CA that signed its certificate.
        insecure: whether it speaks no TLS.
        secret: file with the secret of its `--superexec-auth-secret-file`.

    Raises:
        EngineError: Flower is not installed, neither TLS nor its absence is asked for, or the
            address or the certificates are invalid.
    """
    pem_at(address, certificates, insecure)
    from fedbayes.flower.superlink import SuperLink

    logging.getLogger("flwr").setLevel(logging.ERROR)
    return SuperLink(address, certificates, secret)


def pem_at(address: str, certificates: Path | None, insecure: bool) -> bytes | None:
    """The certificates by which a SuperLink at an address is known; None if it speaks no TLS.

    Raises:
        EngineError: as for `superlink_at`.
    """
    require_flower()
    if (certificates is None) != insecure:
        raise EngineError(
            "the connection to the SuperLink is missing. Give --root-certificates CA.pem for "
            "TLS, or --insecure for a trial on one machine"
        )
    host_and_port("--superlink", address)
    if certificates is None:
        return None
    try:
        ssl.create_default_context(cafile=certificates.expanduser())
        return certificates.expanduser().read_bytes()
    except ssl.SSLError:
        raise EngineError(f"{certificates} has no PEM certificate") from None
    except OSError as error:
        raise EngineError(f"cannot read {certificates}: {error.strerror}") from None


def federation(
    link: "SuperLink",
    config: "Config | None",
    folder: Path,
    *,
    new_keys: Collection[int] = (),
    rounds: int | None = None,
    notify: Notify = unnoticed,
) -> "Simulation":
    """A run whose clients are the nodes of a SuperLink.

    Args:
        link: the SuperLink.
        config: the settings; None to resume the run that the folder holds.
        folder: the run folder.
        new_keys: clients that may come with another key than before.
        rounds: how many a resumed run is to have in total; None: as before.
        notify: is called with what the run is busy with.

    Raises:
        EngineError: the SuperLink cannot be reached.
    """
    from fedbayes.config.config import Config
    from fedbayes.flower.apps import on_grid
    from fedbayes.flower.project import app_files
    from fedbayes.flower.superlink import Submission
    from fedbayes.runs.simulation import Simulation

    link.check()  # before there is a run folder
    if where := link.open_to_others():
        warn(
            f"anyone who can reach {where} can start runs, which nodes execute, and register "
            "keys: Flower needs no password there. Start the SuperLink with `fedbayes federate "
            "superlink`, or with --host 127.0.0.1 behind a proxy (docs/howto/deploy.md)"
        )

    def start(simulation: Simulation) -> "Engine":
        # As it was written: a resumed run reads its own copy of `model.weights`, nodes have theirs.
        config = Config.stored(simulation.folder.config_file)
        submission = Submission(link, app_files(config, simulation.data))

        def close() -> None:
            submission.close(completed=simulation.over)

        engine = on_grid(simulation, submission.connect, close)
        engine.roster.changed = frozenset(new_keys)
        return engine

    simulation = Simulation(config, folder, engine=start, notify=notify, rounds=rounds)
    simulation.folder.keep_connection(link.options)
    return simulation
