"""A run that has ended, read from its folder: its metrics, plots and predictions."""

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedbayes.config.config import Config
from fedbayes.console.notebook import sparkline
from fedbayes.core.brief import table
from fedbayes.core.tensors import Samples, Tensors, to, unpack
from fedbayes.data import Preprocessing, pixel_order
from fedbayes.data.dataset import Array
from fedbayes.errors import RunError
from fedbayes.likelihoods import Likelihood, Numeric, predictor
from fedbayes.likelihoods.temperature import sampled_at
from fedbayes.runs.build import build_likelihood, stored_data, stored_run
from fedbayes.runs.frames import clients_frame, rounds_frame, troubles_frame
from fedbayes.runs.outcome import outcome_rows
from fedbayes.runs.personal import adapted_model, own_models, require_global, temperature_of
from fedbayes.runs.trained import Member, TrainedModel
from fedbayes.storage.best_tracker import flat
from fedbayes.storage.calibrations import (
    CONFORMAL,
    HAZARDS,
    read_calibration,
    read_temperature,
)
from fedbayes.storage.folder import RunFolder
from fedbayes.storage.metrics_file import Metrics

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

RawPredictor = Callable[[Any], Tensor]
"""Raw samples, a tensor, array or DataFrame of n, to predictions [n, ...]."""


class Interval(NamedTuple):
    """Prediction intervals in the unit of the target, [n, columns] each."""

    low: Tensor
    high: Tensor


class StoredRun:
    """A finished run, read from its folder."""

    def __init__(self, folder: Path | str, keep: object = None) -> None:
        self.folder = RunFolder(Path(folder))
        self._keep = keep  # a temporary folder lives as long as the run that is in it
        self.folder.require_run()
        self.summary = self.folder.summary()
        self.metrics = self.folder.metrics()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._title}, in {self.folder.path}>"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        headline = self.summary["headline"]
        values = (flat(line).get(headline) for line in self.metrics)
        curve = [value for value in values if value is not None]
        return table(self._title, outcome_rows(self.summary), sparkline(curve))

    @property
    def _title(self) -> str:
        """What was run, in words."""
        summary = self.summary
        return f"{summary['method']} on {summary['dataset']}, round {summary['rounds']}"

    def frame(self, of: str = "rounds") -> "pd.DataFrame":
        """Metrics as a pandas DataFrame.

        Args:
            of: `rounds`, a row for each round: metrics of the models, bytes, loss, how many clients
                were rejected; `clients`, a row for each client: its samples, metrics of the global
                model and of the one that it last reported on its own test samples, how often its
                report was rejected;
                `troubles`, a row for each report that was rejected, lost or odd, with the reason.

        Raises:
            RunError: there is no such frame, or the files that it is of are damaged.
        """
        lines = self.metrics
        if of == "rounds":
            return rounds_frame(lines, self.preprocessing.classes)
        if of not in ("clients", "troubles"):
            raise RunError(f"unknown frame {of!r}. Choose rounds, clients or troubles")
        if of == "troubles":
            return troubles_frame(self.folder.client_names(), lines)
        if (clients := self.folder.generated_clients()) is not None:
            raise RunError(
                f"{self.folder.path} has {clients:,} clients with generated samples, and no row "
                "per client is stored. Use summary['per_client']"
            )
        division = self.folder.partition()
        if division is None:
            raise RunError(f"partition file not found: {self.folder.partition_file}")
        sizes: dict[str, list[int | None]] = {
            "train_samples": np.diff(division.train_offsets).tolist(),
            "test_samples": np.diff(division.test_offsets).tolist(),
        }
        if self.config.reference:  # the division is of the server's rows
            from fedbayes.reports.gather import reported_sizes

            told = reported_sizes(self.folder, len(division.names))
            sizes = {
                name: told.get(name.replace("samples", "sizes"), [None] * len(division.names))
                for name in sizes
            }
        return clients_frame(division.names, sizes, self._per_client(division.names), lines)

    def _per_client(self, names: Sequence[str]) -> Metrics:
        """Metrics of each client by model; those of its own alone in folders of older versions."""
        if "per_client" in self.summary:
            told: Metrics = self.summary["per_client"]
            return told
        progress = self.folder.progress()
        each = {} if progress is None else progress.clients.each(self.likelihood)
        return {"local": {names[client]: found for client, found in each.items()}} if each else {}

    def plot(
        self, figure: str = "headline", *others: "StoredRun | Path | str", names: Sequence[str] = ()
    ) -> "Figure":
        """Draw one figure of the run, or of several together, as `fedbayes plot` does.

            run.plot("reliability").savefig("reliability.svg")

        Args:
            figure: a name in `fedbayes.reports.figures.FIGURES`, or of any column of `frame()`.
            *others: runs to compare with, or their folders.
            names: of this run and the others; their methods if these differ, else the ends of
                their folders.

        Returns:
            A Matplotlib figure, which notebooks show.

        Raises:
            RunError: there is no such figure, it has nothing to show, or there are not as many
                names as runs.
        """
        from fedbayes.reports.draw import figure_of, looks_of
        from fedbayes.reports.figures import charts
        from fedbayes.reports.gather import gather

        results = [self, *(o if isinstance(o, StoredRun) else StoredRun(o) for o in others)]
        records = gather([result.folder.path for result in results])
        methods = [result.summary["method"] for result in results]
        if len(set(methods)) < len(methods):
            methods = [record.label for record in records]
        if names and len(names) != len(results):
            raise RunError(
                f"there are {len(names)} names of {len(results)} runs. Give one name per run"
            )
        return figure_of(charts(figure, records), list(names) or methods, looks_of(records))

    @cached_property
    def config(self) -> Config:
        """The settings; what they name as `package.module:Class` is imported."""
        self.folder.refuse_changed_config()
        return self.folder.config()

    @property
    def model(self) -> Tensors:
        """The global model, including frozen weights.

        Raises:
            RunError: there is none: under some methods only clients have models; or frozen weights
                are not those that it was trained with.
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
        order. Predictions are at the run's temperature, where it has one, as those of `predict`.

        Args:
            client: name or index of a client, for its own model instead of the global one.

        Raises:
            RunError: there is no global model, or the client has none of its own.
        """
        cool = self._temperature(client)
        return predictor(self.likelihood, sampled_at(self.likelihood, self.draws(client), cool))

    def interval(self, x: Any, level: float = 0.9, client: str | int | None = None) -> Interval:
        """Prediction intervals for raw samples.

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
                f"the likelihood {likelihood.name} of {self.folder.path} has no intervals. "
                "predictor() gives probabilities"
            )
        return Interval(*likelihood.interval(self.draws(client)(x), level))

    @property
    def classes_(self) -> Array:
        """The names of the classes or labels [K], in the order of `predict_proba`."""
        return np.array(self.preprocessing.target.names, dtype=object)

    def predict(self, x: Any, client: str | int | None = None) -> Array:
        """Predict the class, the labels or the number of each sample, as scikit-learn does.

        Args:
            x: samples [n, ...], an array, tensor or DataFrame, as for `TrainedModel.predict`.
            client: name or index of a client, for its own model instead of the global one.

        Returns:
            Names of classes [n], which are text (`astype(int)` makes integers of those that are),
            labels 0 or 1 [n, K], predictive means [n] or [n, T], or log-risks [n].

        Raises:
            RunError: there is no global model, or the client has none of its own.
            DataError: the samples do not have the shape or the columns of the training data.

        Examples:
            >>> import fedbayes
            >>> from sklearn.datasets import load_digits
            >>> run = fedbayes.run(data="digits", rounds=1)
            >>> x = load_digits().images[:3, None]
            >>> run.predict(x).shape, run.predict_proba(x).shape
            ((3,), (3, 10))
        """
        return self.trained(client).predict(x)

    def predict_proba(self, x: Any, client: str | int | None = None) -> Array:
        """Predict the probability of each class or label, float64 [n, K], in the order `classes_`.

        Args:
            x: as for `predict`.
            client: as for `predict`.

        Raises:
            ConfigError: the run predicts numbers or times.
            RunError: as for `predict`.
        """
        return self.trained(client).predict_proba(x)

    def predict_interval(
        self, x: Any, level: float | None = None, client: str | int | None = None
    ) -> tuple[Array, Array]:
        """Predict the central interval that contains each number with a given probability.

        Args:
            x: as for `predict`.
            level: the probability; by default 0.9, or the level of the conformal calibration.
            client: as for `predict`.

        Returns:
            Lower and upper ends, float64 [n], or [n, T] for several targets.

        Raises:
            ConfigError: the run does not predict numbers, or has no interval of this level.
            RunError: as for `predict`.
        """
        return self.trained(client).predict_interval(x, level)

    def predict_frame(
        self, x: Any, client: str | int | None = None, *, level: float | None = None
    ) -> Any:
        """Predictions as a DataFrame, as `fedbayes predict` writes them; see
        `fedbayes.runs.trained.TrainedModel.predict_frame`.
        """
        return self.trained(client).predict_frame(x, level=level)

    def trained(
        self,
        client: str | int | None = None,
        *,
        site: str | int | None = None,
        conformal: bool = True,
        temperature: bool = True,
        adapt: Samples | None = None,
    ) -> TrainedModel:
        """The model as it predicts, without its run.

        Args:
            client: as for `predictor`, and so are the errors.
            site: name or index of the client whose own rows the conformal threshold, or the
                baseline hazard, of the global model is to be of, instead of all clients'.
            conformal: whether sets and intervals are conformal, if `fedbayes calibrate --method
                conformal` has calibrated the run.
            temperature: whether probabilities are at the run's temperature, or that of `fedbayes
                calibrate --method temperature`, where there is one.
            adapt: raw samples of a client that took no part; the model is adapted to them (see
                `fedbayes.runs.personal.adapted_model`).

        Raises:
            RunError: the run has no threshold of such a client, though it was calibrated; or it
                cannot be adapted.
        """
        if adapt is not None:
            cool = read_temperature(self.folder, personal=True) if temperature else None
            members = (Member(self.draws(adapt=adapt), self.preprocessing, self.config.data),)
            source = f"the adapted model of {self.folder.path}"
            return TrainedModel(members, self.likelihood, source, temperature=cool)
        names = self.folder.client_names()
        source, threshold = str(self.folder.path), None
        if client is not None and site is not None:
            raise RunError("a client's own model has its own threshold. Leave site out")
        if site is not None and not conformal:
            raise RunError("site has no effect without the conformal threshold. Leave it out")
        if conformal:
            whose = client if site is None else site
            name = None if whose is None else names[self.folder.find_client(whose)]
            threshold = read_calibration(CONFORMAL, self.folder, name, personal=client is not None)
            survival = self.likelihood.target.kind == "survival"
            if site is not None and threshold is None and not survival:
                raise RunError(
                    f"{source} has no conformal threshold of client {name}. Run fedbayes calibrate "
                    f"{source} --method conformal --per-client"
                )
        if client is not None:
            source = f"the model of client {client} of {source}"
        members = (Member(self.draws(client), self.preprocessing, self.config.data),)
        cool = self._temperature(client) if temperature else None
        hazards = None
        if self.likelihood.target.kind == "survival":
            whose = client if site is None else site
            name = None if whose is None else names[self.folder.find_client(whose)]
            hazards = read_calibration(HAZARDS, self.folder, name, personal=client is not None)
            if site is not None and hazards is None:
                raise RunError(
                    f"{source} has no hazards of client {name}. Run fedbayes calibrate {source} "
                    "--method hazards --per-client"
                )
        return TrainedModel(
            members,
            self.likelihood,
            source,
            conformal=threshold,
            hazards=hazards,
            temperature=cool,
        )

    def _temperature(self, client: str | int | None) -> float | None:
        """Of the global model, or of a client's own."""
        chosen = None if client is None else self.folder.find_client(client)
        return temperature_of(self.folder, chosen)

    def draws(
        self, client: str | int | None = None, *, adapt: Samples | None = None
    ) -> "RawPredictor":
        """A model as a function from raw samples to outputs, [draws, n, width], for `likelihood`; a
        posterior or an ensemble has several draws.

        Args:
            client: as for `predictor`, and so are the errors.
            adapt: as for `trained`.
        """
        preprocessing, method = self.preprocessing, self.config.build_method()
        run = stored_run(self.folder, self.config, preprocessing)
        order = None
        if adapt is not None:
            if preprocessing.permuted:
                raise RunError("the pixel order of a new client is unknown")
            device = run.network.device
            seen = Samples(preprocessing.apply(adapt.x).to(device), adapt.y.to(device))
            model = adapted_model(self.folder, method, run, seen)
        elif client is None:
            require_global(self.folder, method)
            model = self.model
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
