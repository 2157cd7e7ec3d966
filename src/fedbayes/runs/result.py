"""What came of a run, as its folder tells it."""

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedbayes.data import Preprocessing, pixel_order
from fedbayes.errors import RunError
from fedbayes.likelihoods import Likelihood, Numeric, predictor
from fedbayes.runs.build import build_likelihood, stored_data, stored_run
from fedbayes.runs.config import Config
from fedbayes.runs.folder import RunFolder
from fedbayes.runs.personal import own_models, require_global
from fedbayes.tensors import Tensors, to, unpack

RawPredictor = Callable[[Any], Tensor]
"""Raw samples, a tensor, array or DataFrame of n, to predictions [n, ...]."""


class Interval(NamedTuple):
    """Where targets lie, in their own unit, [n, columns] each."""

    low: Tensor
    high: Tensor


class Result:
    """A run that has ended, as its folder tells it."""

    def __init__(self, folder: Path | str, keep: object = None) -> None:
        self.folder = RunFolder(Path(folder))
        self._keep = keep  # a temporary folder lives as long as the run that is in it
        self.summary = self.folder.summary()
        self.metrics = self.folder.metrics()

    @cached_property
    def config(self) -> Config:
        """The settings; what they name as `package.module:Class` is imported."""
        self.folder.refuse_changed_config()
        return self.folder.config()

    @property
    def model(self) -> Tensors:
        """The global model, with what is frozen in its network.

        Raises:
            RunError: there is none: under some methods only clients have models; or frozen weights
                are not those that it was trained beside.
        """
        model, progress = self.folder.model(), self.folder.progress()
        if progress is None or not progress.constants:
            return model
        network = stored_run(self.folder, self.config, self.preprocessing).network
        return network.whole(model)

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

    @cached_property
    def likelihood(self) -> Likelihood:
        """What the network's outputs mean for the target."""
        return build_likelihood(self.config, self.preprocessing.target, quiet=True)

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
        return predictor(self.likelihood, self.draws(client))

    def interval(self, x: Any, level: float = 0.9, client: str | int | None = None) -> Interval:
        """Where numbers lie that are predicted for raw samples.

        Args:
            x: samples, as for `predictor`.
            level: probability that a target is inside, above 0 and below 1.
            client: as for `predictor`.

        Returns:
            Lower and upper ends of the central predictive intervals, float64 [n, columns] each, in
            the unit of the target.

        Raises:
            RunError: as for `predictor`, or what is predicted is no number.
            ConfigError: the level is invalid, or quantiles that it needs are not among those that
                the run learnt.
        """
        likelihood = self.likelihood
        if not isinstance(likelihood, Numeric):
            raise RunError(
                f"the likelihood {likelihood.name} of {self.folder.path} has no intervals: "
                "predictor() gives probabilities"
            )
        return Interval(*likelihood.interval(self.draws(client)(x), level))

    def draws(self, client: str | int | None = None) -> "RawPredictor":
        """A model as a function from raw samples to what its network says, [draws, n, width], for
        `likelihood`: a posterior, or an ensemble, has several draws.

        Args:
            client: as for `predictor`, and so are the errors.
        """
        preprocessing, method = self.preprocessing, self.config.build_method()
        run = stored_run(self.folder, self.config, preprocessing)
        order = None
        if client is None:
            require_global(self.folder, method)
            model = self.folder.model()
        else:
            number = self.folder.find_client(client)
            ((_, model),) = own_models(self.folder, method, run, number)
            if preprocessing.permuted:
                order = pixel_order(self.config.seed, number, preprocessing.shape)

        model = to(model, run.network.device)
        draw = method.draws(model, run)

        @torch.no_grad()
        def draw_raw(x: Any) -> Tensor:
            seen = preprocessing.apply(x)
            if order is not None:
                seen = seen.flatten(1)[:, order].reshape(seen.shape)
            return draw(seen.to(run.network.device))

        return draw_raw
