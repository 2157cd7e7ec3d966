"""The server's secrets: outside of run folders, which people share.

They lie in the user's state folder (on Linux `fedbayes/noise` in $XDG_STATE_HOME or else
~/.local/state), one for each run, readable by the user alone, until the run is over.
"""

import re
import secrets
from hashlib import sha256
from pathlib import Path

import platformdirs

from fedbayes.core.files import write_beside
from fedbayes.errors import RunError, told_as
from fedbayes.federation.privacy.noise import Secret

_SIZE = 32


def key_file(run: str) -> Path:
    """Where the secret of a run is, by its id. Raises a RunError if it is no such id."""
    if not re.fullmatch(r"[0-9a-f]{32}", run):
        raise RunError("the id of the run in its checkpoint is damaged")
    return platformdirs.user_state_path("fedbayes", appauthor=False) / "noise" / f"{run}.key"


def new_id() -> str:
    """A name for a run that no other has."""
    return secrets.token_hex(16)


def secret(run: str) -> Secret:
    """The secret of a run, by its id, made where there is none: at first, and on another machine.

    Raises:
        RunError: it can be neither read nor written, or is damaged.
    """
    path = key_file(run)
    with told_as(RunError, f"cannot store the secret of the noise in {path}", OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not path.exists():
            # Of two processes, the first one's stays.
            write_beside(path, secrets.token_bytes(_SIZE), private=True, durable=True, keep=True)
        key = path.read_bytes()
    if len(key) != _SIZE:
        raise RunError(
            f"the secret of the noise in {path} is damaged. Remove it, and the run continues with "
            "a new one"
        )
    return Secret(key)


def forget(run: str) -> None:
    """Remove the secret of a run: from then on nobody can take its noise off."""
    key_file(run).unlink(missing_ok=True)


def public(seed: int) -> Secret:
    """What stands for a secret in a run that can be repeated: it follows from the seed, and whoever
    knows that can take the noise off.
    """
    return Secret(sha256(f"fedbayes noise of seed {seed}".encode()).digest())
