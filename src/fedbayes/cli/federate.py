"""`federate`: runs over a network, with Flower."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from click import Context

from fedbayes.cli.app import Console, app
from fedbayes.cli.commands import FORMER_COMMANDS, Application, Commands
from fedbayes.cli.options import ConfigFile, Json, MoreRounds, RunFolder, Setting, Track
from fedbayes.cli.run import new_folder, run_to_end
from fedbayes.errors import RunError, told_as
from fedbayes.storage.activity import Notify

if TYPE_CHECKING:
    from fedbayes.flower.superlink import SuperLink
    from fedbayes.runs.simulation import Simulation


class _Federate(Commands):
    """`federate CONFIG` is `federate run CONFIG`."""

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        former = [name.removeprefix("federate ") for name in FORMER_COMMANDS]
        if args and args[0] not in (*self.commands, *former, *self.get_help_option_names(ctx)):
            args = ["run", *args]
        return super().parse_args(ctx, args)


federate_app = Application(
    help="Run a federation over a network, on Flower.", no_args_is_help=True, cls=_Federate
)
app.add_typer(federate_app, name="federate")

SUPERLINK = "127.0.0.1:8000"
"""Where a SuperLink is, unless said otherwise."""
Connection = Annotated[str, typer.Option("--superlink", help="HOST:PORT of the SuperLink.")]
Certificates = Annotated[
    Path | None,
    typer.Option(
        "--root-certificates", help="PEM file of the CA that signed the SuperLink's certificate."
    ),
]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="Connect without TLS; for tests on one machine only.")
]
Secret = Annotated[
    Path | None,
    typer.Option("--superexec-secret", help="File with the SuperLink's secret: superexec.key."),
]


@dataclass(frozen=True)
class LinkOptions:
    """Options of the SuperLink."""

    superlink: Connection = SUPERLINK
    root_certificates: Certificates = None
    insecure: Insecure = False
    superexec_secret: Secret = None

    def open(self) -> "SuperLink":
        """The SuperLink."""
        from fedbayes.flower import superlink_at

        return superlink_at(*vars(self).values())

    def or_stored(self, folder: Path) -> "LinkOptions":
        """The same; without options, those that the run of a folder was started with."""
        if self != LinkOptions():
            return self
        from fedbayes.storage.folder import RunFolder

        run = RunFolder(folder)
        words, given = run.connection, dict[str, Any]()
        with told_as(RunError, f"{run.connection_file} is damaged", IndexError, TypeError):
            while words:
                name = words.pop(0).removeprefix("--").replace("-", "_")
                value = name == "insecure" or words.pop(0)
                path = name != "superlink" and isinstance(value, str)
                given[name] = Path(str(value)) if path else value
            return LinkOptions(**given)


@federate_app.command("run")
def federate(
    config: ConfigFile = None,
    *,
    link: LinkOptions,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Run folder.")] = None,
    track: Track = None,
    settings: Setting = None,
    as_json: Json = False,
) -> None:
    """Train a federation on the nodes of a SuperLink."""
    from fedbayes.config.config import Config

    settled = Config.load(config, [*(settings or []), "engine=flower"])

    def start(notify: Notify) -> "Simulation":
        from fedbayes.flower import federation
        from fedbayes.runs.tracking import check

        opened = link.open()
        check(track or ())
        folder = out or new_folder(settled.data.name, settled.method["name"])
        return federation(opened, settled, folder, notify=notify)

    run_to_end(start, track, as_json)


@federate_app.command("resume")
def federate_resume(
    folder: RunFolder,
    *,
    link: LinkOptions,
    rounds: MoreRounds = None,
    new_key: Annotated[
        list[int] | None,
        typer.Option(
            metavar="CLIENT", help="Number of a client that has a new key. Repeat it for several."
        ),
    ] = None,
    track: Track = None,
    as_json: Json = False,
) -> None:
    """Resume an interrupted federation, or add rounds to a finished one."""

    def start(notify: Notify) -> "Simulation":
        from fedbayes.flower import federation

        return federation(
            link.or_stored(folder).open(),
            None,
            folder,
            new_keys=new_key or (),
            rounds=rounds,
            notify=notify,
        )

    run_to_end(start, track, as_json)


@federate_app.command("init")
def federate_init(
    folder: Annotated[Path, typer.Argument(help="Folder to write.")],
    config: Annotated[Path | None, typer.Option(help="TOML file with settings.")] = None,
    settings: Setting = None,
) -> None:
    """Write a Flower project for `flwr run`."""
    from fedbayes.config.config import Config
    from fedbayes.flower import require_flower
    from fedbayes.runs.build import build_data, build_federation

    require_flower()
    from fedbayes.flower.project import write_project

    settled = Config.load(config, [*(settings or []), "engine=flower"])
    data = build_data(settled)
    chosen, _ = build_federation(settled, data, quiet=True, choosing=True)
    write_project(folder, chosen, data)
    Console().print(
        f"wrote {folder}; run it with: flwr run {folder} NAME, where NAME is a SuperLink "
        "connection "
        "in Flower's configuration",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


@federate_app.command("keys")
def federate_keys(
    folder: Annotated[Path, typer.Argument(help="Folder to write.")],
    host: Annotated[
        list[str],
        typer.Option(
            "--host", help="Host name or address of the SuperLink for nodes. Repeat it for several."
        ),
    ],
    clients: Annotated[int, typer.Option(min=0, help="Number of clients.")] = 3,
) -> None:
    """Create a CA, a certificate for the SuperLink, and a key for each client."""
    from fedbayes.flower import require_flower

    require_flower()
    from fedbayes.flower.keys import make_keys

    for file in make_keys(folder, host, clients):
        Console().print(f"wrote {file}", highlight=False, soft_wrap=True)


@federate_app.command("superlink")
def federate_superlink(
    folder: Annotated[Path, typer.Argument(help="Folder of `federate keys`.")],
    nodes: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT", help="Address for nodes; 0.0.0.0:9092 admits other machines."
        ),
    ] = "127.0.0.1:9092",
    port: Annotated[
        int,
        typer.Option(min=1, max=65535, help="Port of all other services, on this machine only."),
    ] = 8000,
) -> None:
    """Run a SuperLink; other machines can reach only its address for nodes."""
    from fedbayes.flower import host_and_port, require_flower

    require_flower()
    at = host_and_port("--nodes", nodes)
    from fedbayes.flower.hub import serve

    told = (
        f"nodes with a registered key connect to {nodes}; fedbayes federate run, register and "
        f"nodes connect to localhost:{port}, from this machine only"
    )
    say = Console(stderr=True).print
    serve(folder, at, port, lambda: say(told, highlight=False, soft_wrap=True))


@federate_app.command("node")
def federate_node(
    node_config: Annotated[
        str,
        typer.Option(
            metavar="TEXT", help="Number of the client and path of its data: 'client=0 data=\"…\"'."
        ),
    ],
    superlink: Annotated[
        str, typer.Option("--superlink", help="HOST:PORT of the SuperLink for nodes.")
    ] = "127.0.0.1:9092",
    root_certificates: Certificates = None,
    insecure: Insecure = False,
    key: Annotated[Path | None, typer.Option(help="Private key of the client.")] = None,
    warm: Annotated[
        float,
        typer.Option(
            min=0,
            metavar="SECONDS",
            help="Time that an idle process of a run stays loaded. 0: it ends at once.",
        ),
    ] = 600.0,
) -> None:
    """Run the node of a client; it keeps its data loaded between messages."""
    from fedbayes.flower import pem_at

    pem = pem_at(superlink, root_certificates, insecure)
    from fedbayes.flower.supernode import Connection as Way
    from fedbayes.flower.supernode import read_config, read_private_key, serve

    config = read_config(node_config)
    keys = None if key is None else read_private_key(key)
    serve(Way(superlink, pem, keys), config, warm)


@federate_app.command("register")
def federate_register(
    keys: Annotated[
        list[Path], typer.Argument(help="Public key files of clients: client-0.pub …", exists=True)
    ],
    superlink: Connection = SUPERLINK,
    root_certificates: Certificates = None,
    insecure: Insecure = False,
    client: Annotated[
        list[int] | None,
        typer.Option(
            min=0,
            metavar="NUMBER",
            help="Number of the client of a key, once for each key. Default: from the file name.",
        ),
    ] = None,
) -> None:
    """Register the keys of clients at a SuperLink, so that their nodes can connect."""
    from fedbayes.flower import superlink_at

    link = superlink_at(superlink, root_certificates, insecure)
    from fedbayes.flower.keys import key_names, read_public_key

    for file, name in key_names(keys, client or ()).items():
        node = link.admit(read_public_key(file), name)
        Console().print(f"{file} is node {node}", highlight=False, soft_wrap=True)
