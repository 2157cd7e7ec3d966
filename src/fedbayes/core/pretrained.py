"""What others trained: found by name on the Hugging Face hub, or in a local folder."""

import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from types import ModuleType
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator

from fedbayes.errors import FedbayesError, did_you_mean, require_extra

Thing = TypeVar("Thing")

TIMM = "timm:"
"""What the names of timm's networks begin with where others may stand."""
PADDING = -1
"""What follows the tokens of a text that is shorter than others, instead of a token."""
_LONGEST = 300
"""Characters of another library's error that are repeated."""
PATIENCE = 3.0
"""Seconds that the hub has to answer at all."""


def unreachable(patience: float = PATIENCE) -> str:
    """Why the hub does not answer; empty if it does.

    The libraries try again for half a minute, so it is asked once before they are. Its name is
    looked up without a time limit, hence the thread.
    """
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    outcome = [f"it does not answer within {patience:.0f} seconds"]

    def ask() -> None:
        try:
            get_session().head(constants.ENDPOINT, timeout=patience)
            outcome[0] = ""
        except Exception as error:
            outcome[0] = f"it cannot be reached ({str(error).strip() or type(error).__name__})"

    thread = Thread(target=ask, daemon=True)
    thread.start()
    thread.join(patience)
    return outcome[0]


def absolute(name: str) -> str:
    """A name as a stored config has it: of a folder that is there, its whole path."""
    path = Path(name).expanduser()
    return str(path.absolute()) if path.is_dir() else name


PretrainedName = Annotated[str, AfterValidator(absolute)]
"""A name on a hub, or a folder, which means the same from every other folder."""


def require(package: str, what: str, error: type[FedbayesError]) -> None:
    """See that a package of the extra `hf` can be imported.

    Raises:
        FedbayesError: of the given class; it is not installed, or does not work.
    """
    require_extra("hf", what, error, package)
    with _importing(what, error), _quiet():
        _import_torchvision()
        __import__(package)
        if package == "transformers":
            import transformers

            _ = transformers.PreTrainedModel, transformers.AutoImageProcessor


def _import_torchvision() -> None:
    """Import torchvision, if it is there; without its operators where these do not load."""
    if find_spec("torchvision") is None:
        return
    try:
        import torchvision  # type: ignore[import-untyped]
    except RuntimeError as error:
        if "operator torchvision::" not in str(error):
            raise
        name = "torchvision._meta_registrations"
        sys.modules.setdefault(name, ModuleType(name))
        import torchvision  # noqa: F401


@contextmanager
def _importing(what: str, error: type[FedbayesError]) -> Iterator[None]:
    try:
        yield
    except Exception as broken:  # packages that do not fit together raise anything
        cause: BaseException = broken
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise error(
            f"{what} cannot be imported: {_in_short(cause)}. Packages may have incompatible "
            "versions, such as torch and torchvision. Install both from the same source"
        ) from broken


def load(
    what: str,
    name: str,
    loader: Callable[..., Thing],
    error: type[FedbayesError],
) -> Thing:
    """Load something by its name on the hub, or from a folder; no code of it is ever run.

    Args:
        what: it is, for messages: `the tokenizer`.
        name: `owner/name`, with `@revision` at the end for a fixed state of it; or a folder.
        loader: called as `loader(place, revision=..., local_files_only=...)`.
        error: class of errors to be raised.

    Raises:
        FedbayesError: of the given class; it is not there, the hub does not answer and there is no
            copy here, or it needs code of its own.
    """
    place, _, revision = name.partition("@")
    folder = Path(name).expanduser()
    silent = ""
    options: dict[str, Any] = {"revision": revision or None, "local_files_only": False}
    if folder.is_dir():
        place, options = str(folder), {"revision": None, "local_files_only": True}
    elif folder.is_absolute() or name.startswith((".", "~")):
        raise error(f"folder not found: {name}, to load {what}. Correct the path")
    else:
        silent = unreachable()
        options["local_files_only"] = bool(silent)
    try:
        with _quiet(), _offline() if silent else nullcontext():
            return loader(place, **options)
    except FedbayesError:
        raise
    except Exception as broken:  # of a dozen classes, by library and version
        raise error(_told(what, name, broken, folder.is_dir(), silent)) from broken


def _told(what: str, name: str, broken: Exception, folder: bool, silent: str) -> str:
    reason = _in_short(broken)
    if "trust_remote_code" in str(broken):
        return (
            f"{what} {name} needs its own code, which fedbayes never runs. Choose one that the "
            "package supports, or write a factory (model.name = package.module:factory)"
        )
    if folder:
        return f"cannot load {what} from the folder {name}: {reason}"
    if silent:
        where = name.partition("@")[0]
        way = f"hf download {where} --local-dir FOLDER, and give the FOLDER"
        if "/" not in where:  # of timm, which has its own names for what is on the hub
            way = "load it once by its name, and copy the cache (HF_HOME)"
        return (
            f"cannot load {what} {name}: the Hugging Face hub does not answer ({silent}), and "
            f"there is no cached copy or folder of this name. On a machine with a network: {way}"
        )
    return f"cannot load {what} {name} from the Hugging Face hub: {reason}"


def _in_short(error: BaseException) -> str:
    text = " ".join(str(error).split())
    short = text if len(text) <= _LONGEST else text[:_LONGEST].rsplit(" ", 1)[0] + " …"
    return short.rstrip(".") or type(error).__name__


@contextmanager
def _offline() -> Iterator[None]:
    """Have the libraries look into the hub's cache alone, as HF_HUB_OFFLINE does."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the libraries from writing to the terminal what is told in other words, or raised."""
    bars = _bars()
    with silenced("transformers", "huggingface_hub", "timm", "httpx"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if bars is not None:
            bars.disable_progress_bar()
        yield


@contextmanager
def silenced(*names: str) -> Iterator[None]:
    """Keep libraries from logging what they also raise."""
    logs = [logging.getLogger(name) for name in names]
    levels = [log.level for log in logs]
    for log in logs:
        log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for log, level in zip(logs, levels, strict=True):
            log.setLevel(level)


def _bars() -> Any:
    """What shows bars while weights are read; None if it is not in use."""
    if "transformers" not in sys.modules:
        return None
    from transformers.utils import logging as bars

    return bars


def tokenizer(name: str, error: type[FedbayesError]) -> Any:
    """The tokenizer of a pretrained network.

    Raises:
        FedbayesError: of the given class; there is none, or only one that needs code of its own.
    """
    require("transformers", "text", error)
    from transformers import AutoTokenizer

    def loader(place: str, **options: Any) -> Any:
        return AutoTokenizer.from_pretrained(place, trust_remote_code=False, **options)

    return load("the tokenizer", name, loader, error)


def image_processor(name: str, error: type[FedbayesError]) -> Any:
    """The image processor of a pretrained network of `transformers`.

    Raises:
        FedbayesError: of the given class; there is none, or only one that needs code of its own.
    """
    require("transformers", "an image processor", error)
    from transformers import AutoImageProcessor

    def loader(place: str, **options: Any) -> Any:
        kind: Any = AutoImageProcessor
        return kind.from_pretrained(place, trust_remote_code=False, backend="pil", **options)

    return load("the image processor", name, loader, error)


def timm_data(name: str, error: type[FedbayesError]) -> dict[str, Any]:
    """What a network of timm, by its name without `timm:`, was trained to see: `input_size`,
    `mean`, `std`, `crop_pct`.

    Raises:
        FedbayesError: of the given class; timm knows no such network.
    """
    require("timm", "a network of timm", error)
    import timm

    require_timm_name(name, error)
    data: Any = timm.data
    config: Any = timm.get_pretrained_cfg(name)
    found: dict[str, Any] = data.resolve_data_config(pretrained_cfg=config.to_dict())
    return found


def require_timm_name(name: str, error: type[FedbayesError]) -> None:
    """See that timm has a network of this name, or raise an error of this class."""
    import timm

    if not timm.is_model(name):
        like = did_you_mean(name.partition(".")[0], timm.list_models())
        raise error(
            f"timm has no network {name!r}{like}. List them in Python with "
            "timm.list_models('*part*')"
        )
