"""Rounds logged to TensorBoard and MLflow, as they come."""

import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from fedbayes.core.files import write_beside
from fedbayes.errors import ConfigError, not_among, require_extra, told_as
from fedbayes.storage.best_tracker import flat
from fedbayes.storage.inventory import dotted
from fedbayes.storage.metrics_file import Metrics

if TYPE_CHECKING:
    from fedbayes.runs.simulation import Simulation

Log = Callable[[Metrics], None]
"""Takes the line of a round."""


def check(names: Sequence[str]) -> None:
    """See before a run begins that its trackers are known and installed, or raise a ConfigError."""
    for name in names:
        if name not in TRACKERS:
            raise ConfigError(not_among("tracker", name, TRACKERS))
        require_extra(name, f"the tracker {name}", ConfigError, name)


@contextmanager
def tracking(names: Sequence[str], simulation: "Simulation") -> Iterator[Log]:
    """Log the rounds of a run to trackers.

    After a resume the records go on where they were, without a round logged twice.

    Args:
        names: any of `tensorboard` (files under `tensorboard/` in the run folder) and `mlflow`
            (the server that MLFLOW_TRACKING_URI names, or else `mlflow/` in the run folder).
        simulation: whose rounds.

    Raises:
        ConfigError: as `check`, or the tracker cannot be reached.
    """
    check(names)
    with ExitStack() as stack:
        logs = [stack.enter_context(TRACKERS[name](simulation)) for name in names]

        def log(line: Metrics) -> None:
            for each in logs:
                each(line)

        yield log


@contextmanager
def _tensorboard(simulation: "Simulation") -> Iterator[Log]:
    from torch.utils.tensorboard import SummaryWriter

    done = simulation.progress.round
    writer = SummaryWriter(str(simulation.folder.path / "tensorboard"), purge_step=done + 1)
    if not done:
        writer.add_text("config", f"```toml\n{simulation.config.dump()}```")

    def log(line: Metrics) -> None:
        for key, value in _numbers(line).items():
            writer.add_scalar(key, value, line["round"])
        writer.flush()

    try:
        yield log
    finally:
        writer.close()


@contextmanager
def _mlflow(simulation: "Simulation") -> Iterator[Log]:
    from mlflow import MlflowClient, MlflowException
    from mlflow.entities import Metric, Param

    folder = simulation.folder.path
    place = os.environ.get("MLFLOW_TRACKING_URI") or (folder / "mlflow").resolve().as_uri()
    if place.startswith("file:"):
        # Files suit a run folder; MLflow would rather have a database.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    with told_as(ConfigError, f"cannot use MLflow at {place}", MlflowException):
        client = MlflowClient(place)
        known = folder / "mlflow-run.txt"
        if known.exists():
            run = known.read_text().strip()
        else:
            past = client.get_experiment_by_name("fedbayes")
            experiment = past.experiment_id if past else client.create_experiment("fedbayes")
            run = client.create_run(experiment, run_name=folder.name).info.run_id
            settings = dotted(simulation.config.model_dump(mode="json", exclude_none=True))
            params = [Param(key, str(value)[:6000]) for key, value in settings if value != {}]
            for at in range(0, len(params), _PARAMS):
                client.log_batch(run, params=params[at : at + _PARAMS])
            write_beside(known, run.encode())
        logged = max((m.step for m in client.get_metric_history(run, "bytes_up")), default=0)

    def log(line: Metrics) -> None:
        if line["round"] > logged:
            values = [
                # Names of target columns are free, those of MLflow's metrics are names of files.
                Metric(re.sub(r"[^\w\-. ]", "_", name), value, 0, line["round"])
                for name, value in _numbers(line).items()
            ]
            client.log_batch(run, metrics=values)

    status = "FAILED"
    try:
        yield log
        status = "FINISHED" if simulation.over else "KILLED"
    except KeyboardInterrupt:
        status = "KILLED"
        raise
    finally:
        client.set_terminated(run, status)


_PARAMS = 100
"""Settings that MLflow takes at once."""
TRACKERS = {"tensorboard": _tensorboard, "mlflow": _mlflow}
"""By name."""


def _numbers(line: Metrics) -> dict[str, float]:
    """The finite numbers of a round."""
    return {
        key: float(value)
        for key, value in flat(line).items()
        if isinstance(value, int | float) and key != "round" and math.isfinite(value)
    }
