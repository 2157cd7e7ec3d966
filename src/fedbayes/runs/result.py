"""What came of a run, as its folder tells it."""

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from fedbayes.data import Preprocessing, pixel_order
from fedbayes.likelihoods import predictor
from fedbayes.runs.build import stored_data, stored_run
from fedbayes.runs.folder import RunFolder
from fedbayes.runs.personal import own_models, require_global
from fedbayes.tensors import Tensors, to, unpack

RawPredictor = Callable[[Any], Tensor]
"""Raw samples, a tensor, array or DataFrame of n, to predictions [n, ...]."""


class Result:
    """A run that has ended, as its folder tells it."""

    def __init__(self, folder: Path | str, keep: object = None) -> None:
        self.folder = RunFolder(Path(folder))
        self._keep = keep  # a temporary folder lives as long as the run that is in it
        self.config = self.folder.config()
        self.summary = self.folder.summary()
        self.metrics = self.folder.metrics()

    @property
    def model(self) -> Tensors:
        """The global model.

        Raises:
            RunError: there is none: under some methods only clients have models.
        """
        return self.folder.model()

    def server(self, number: int | None = None) -> Any:
        """The server's state after a round (the last by default) that a checkpoint was kept of.

        With `keep_checkpoints = "best"`, `model` is that of `summary["best_round"]`, not the last.
        """
        progress = self.folder.progress(number)
        method = self.config.build_method()
        return unpack(method.server_state, progress.server) if progress else None

    @cached_property
    def preprocessing(self) -> Preprocessing:
        """What the network sees of a raw sample; names of classes and features."""
        stored = self.folder.preprocessing()
        return stored or stored_data(self.config, self.folder).preprocessing

    def predictor(self, client: str | int | None = None) -> "RawPredictor":
        """The global model as a function from raw samples to predictions.

        It takes samples as the data set has them, a tensor or array [n, ...] with NaN for missing
        values, or for a table a pandas DataFrame with its features as columns in any order; it
        gives log-probabilities [n, classes], classes in the order of `preprocessing.classes`, or
        predictive means [n, columns] in the unit of the target (probabilities, if it is labels).
        Where clients see pixels in an order of their own, the global model wants them in that
        order.

        Args:
            client: name or index of a client, for its own model in place of the global one.

        Raises:
            RunError: there is no global model, or the client has none of its own.
        """
        preprocessing, method = self.preprocessing, self.config.build_method()
        run = stored_run(self.folder, self.config, preprocessing)
        order = None
        if client is None:
            require_global(self.folder, method)
            model = self.model
        else:
            number = self.folder.find_client(client)
            ((_, model),) = own_models(self.folder, method, run, number)
            if preprocessing.permuted:
                order = pixel_order(self.config.seed, number, preprocessing.shape)

        model = to(model, run.network.device)
        predict = predictor(run.likelihood, method.draws(model, run))

        def predict_raw(x: Any) -> Tensor:
            seen = preprocessing.apply(x)
            if order is not None:
                seen = seen.flatten(1)[:, order].reshape(seen.shape)
            return predict(seen.to(run.network.device))

        return predict_raw
