"""A run that has ended, with its data and models: for what its clients count afterwards."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar

from fedbayes.config.config import Config
from fedbayes.contracts import AnyMethod, Federation, Sampler
from fedbayes.core.tensors import to
from fedbayes.data import FederatedData
from fedbayes.errors import RunError, warn
from fedbayes.runs.build import stored_data, stored_run
from fedbayes.runs.personal import own_models, require_global
from fedbayes.storage.calibrations import (
    TEMPERATURE,
    CalibrationKind,
    StoredCalibration,
    calibrated_model,
    write_calibration,
)
from fedbayes.storage.folder import RunFolder

Found = TypeVar("Found")


@dataclass(frozen=True)
class EndedRun:
    """A run and the models that something is to be found of."""

    folder: RunFolder
    config: Config
    method: AnyMethod
    data: FederatedData
    run: Federation
    personal: bool
    """Whether the models are clients' own; else it is the global one."""

    @classmethod
    def open(cls, path: Path | str, *, personal: bool) -> Self:
        """A run from its folder.

        Raises:
            FedbayesError: it has not ended, has no such model, or its data are not here.
        """
        folder = RunFolder(Path(path))
        folder.require_run()
        folder.summary()  # it has ended
        if not os.access(folder.path, os.W_OK):
            raise RunError(
                f"cannot write into {folder.path}, where calibrations are stored. Make the folder "
                "writable, or use a copy of it"
            )
        folder.refuse_changed_config()  # before anything that it names is imported
        config = folder.config()
        method = config.build_method()
        if not personal:
            require_global(folder, method, of_all=True)
        data = stored_data(config, folder, changed="refuse")
        run = stored_run(folder, config, data.preprocessing)
        if not personal and len(data.owners) < data.clients:
            warn(
                f"this uses {len(data.owners):,} of {data.clients:,} clients, those that are read "
                "before the first round (data.test_clients)"
            )
        return cls(folder, config, method, data, run, personal)

    def models(self) -> Iterator[tuple[int, Sampler]]:
        """Clients, and the model of each as what gives outputs under its draws."""
        if self.personal:
            for client, model in own_models(self.folder, self.method, self.run):
                yield client, self.method.draws(model, self.run)
            return
        model = to(self.folder.model(), self.run.network.device)
        draw = self.method.draws(model, self.run)
        for client in self.data.owners.tolist():
            yield client, draw

    def keep(
        self, kind: CalibrationKind[Found], common: Found, single: Mapping[int, Found]
    ) -> Path:
        """Write a calibration next to the models.

        Args:
            kind: of calibration.
            common: found from all clients' rows; of clients' own models kept only where they share
                one, as they do a temperature.
            single: found from each client's rows alone.
        """
        names, shared = self.folder.client_names(), kind is TEMPERATURE or not self.personal
        found = StoredCalibration(
            self.personal,
            calibrated_model(self.folder, personal=self.personal),
            common if shared else None,
            {names[client]: own for client, own in single.items()},
        )
        return write_calibration(kind, self.folder, found)

    def note_no_noise(self, what: str) -> None:
        """Say so where what clients send now is not covered by the run's privacy."""
        if self.config.privacy.noise:
            warn(f"{what} have no noise: the ε of {self.folder.path} does not cover them")
