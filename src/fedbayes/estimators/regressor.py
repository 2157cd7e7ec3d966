"""Federated regression behind scikit-learn's interface."""

from typing import Any, Self

import numpy as np
import torch
from sklearn.base import RegressorMixin
from sklearn.metrics import r2_score
from sklearn.utils.validation import check_is_fitted, validate_data

from fedbayes.data.dataset import Array
from fedbayes.data.sources.labels import read_target
from fedbayes.errors import ConfigError, warn
from fedbayes.estimators.base import FederatedEstimator
from fedbayes.likelihoods import Numeric, Parametric


class FederatedRegressor(RegressorMixin, FederatedEstimator):  # type: ignore[misc]
    """Train a regressor across clients, with the interface of scikit-learn.

    It works as `FederatedClassifier`. The likelihood `auto` is Gaussian; use `poisson` for counts,
    `student-t` for data with outliers and `quantile` for quantiles.

    Args:
        method: as for `FederatedClassifier`.
        model: as for `FederatedClassifier`.
        likelihood: of the numbers, or a table of it and its settings: `auto` is Gaussian.
        rounds: number of rounds.
        cohort: number (10) or fraction (0.1) of clients per round; the former name of the next two.
        clients_per_round: number of clients in a round.
        client_fraction: share of the clients per round; all clients, if none of the three is set.
        training: as for `FederatedClassifier`.
        settings: as for `FederatedClassifier`.
        n_clients: number of clients of an artificial partition, if `fit` is called without clients.
        partition: `iid`; other schemes need classes.
        shape: as for `FederatedClassifier`.
        random_state: seed of all randomness, or a generator that gives one.

    Attributes:
        clients_: ids of the clients [S]; 0 to S − 1 for an artificial partition.
        n_features_in_: columns of X.
        feature_names_in_: their names, if X was a DataFrame.
        n_iter_: number of rounds.
        history_: a DataFrame with one row per round.
        privacy_: ε and δ, if the settings add noise; else empty.
        config_: all settings, as `fedbayes.run` takes them.

    Examples:
        >>> import numpy as np
        >>> from fedbayes import FederatedRegressor
        >>> X = np.random.default_rng(0).normal(size=(60, 3))
        >>> model = FederatedRegressor(rounds=3, random_state=0).fit(X, X[:, 0] + 1)
        >>> mean, std = model.predict(X[:2], return_std=True)
        >>> low, high = model.predict_interval(X[:2], level=0.8)
        >>> bool((low < mean).all()), std.shape
        (True, (2,))
    """

    clients_: Array

    def __sklearn_tags__(self) -> Any:
        """Targets may have several columns."""
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def fit(self, X: Any, y: Any, clients: Any = None) -> Self:
        """Run the federation.

        Args:
            X: rows [n, D] of numbers, an array or DataFrame; NaN where a value is missing.
            y: the number of each row [n], or several [n, T].
            clients: the id of each row's client [n]; None divides the rows at random.

        Raises:
            ValueError: an argument is of another shape or kind.
            FedbayesError: a setting will not do, y is the same everywhere or not of the
                likelihood's kind, or no round had an update.
        """
        import pandas as pd

        x, y = validate_data(
            self,
            X,
            y,
            ensure_all_finite="allow-nan",
            ensure_min_samples=2,
            multi_output=True,
            y_numeric=True,
        )
        self._flat = y.ndim == 1
        y = y.reshape(len(y), -1).astype(np.float64)
        config = self._config(clients)
        kinds = config.target_kinds or ("real",)
        if not set(kinds) & {"real", "count"}:
            raise ConfigError(
                f"the likelihood {config.task['likelihood']} needs {' or '.join(kinds)} targets, "
                "not numbers"
            )
        names = ["y"] if self._flat else [f"y{column}" for column in range(y.shape[1])]
        notes: list[str] = []
        labels, target = read_target(pd.DataFrame(y, columns=names), (), kinds, "y", notes)
        for note in notes:
            warn(note)
        return self._train(config, x, labels, target, clients)

    def predict(self, X: Any, return_std: bool = False, client: Any = None) -> Any:
        """The predictive mean of each row, float64 [n] or [n, T], in the unit of y.

        Args:
            X: rows [n, D] as for `fit`.
            return_std: whether the standard deviation of the predictive distribution comes too:
                noise, and what the draws of a posterior differ by.
            client: None for the global model; the id of a client for its own; or an id for each
                row [n]. Clients have models of their own under methods that keep one.

        Returns:
            The mean; or mean and standard deviation.

        Raises:
            ValueError: the rows have other columns, there is no such client, or the likelihood has
                no standard deviation.
            RunError: there is no global model, or a client has none of its own.
        """
        if not return_std:
            return self._shaped(self._asked(X, lambda f: self._likelihood().mean(f), client))
        likelihood = self._likelihood()
        if not isinstance(likelihood, Parametric):
            raise ValueError(
                f"the likelihood {likelihood.name} has no standard deviation. Use predict_interval"
            )
        found = self._asked(
            X, lambda f: torch.stack((likelihood.mean(f), likelihood.std(f).total), 1), client
        )
        return self._shaped(found[:, 0]), self._shaped(found[:, 1])

    def predict_interval(
        self, X: Any, level: float = 0.9, client: Any = None
    ) -> tuple[Array, Array]:
        """The central interval in which y lies with a probability, by the predictive distribution.

        The noise is learnt on training rows. With a few hundred rows, intervals contain fewer
        values than `level` says; those of `fedbayes calibrate --method conformal` contain as many.

        Args:
            X: rows [n, D] as for `fit`.
            level: the probability, above 0 and below 1.
            client: as for `predict`.

        Returns:
            Lower and upper ends, float64 [n] or [n, T] each.

        Raises:
            ConfigError: the level is invalid, or is of quantiles that were not learnt.
        """
        likelihood = self._likelihood()
        found = self._asked(X, lambda f: torch.stack(likelihood.interval(f, level), 1), client)
        return self._shaped(found[:, 0]), self._shaped(found[:, 1])

    def score(self, X: Any, y: Any, sample_weight: Any = None, client: Any = None) -> float:
        """R², the share of variance explained; of several columns the mean.

        Args:
            X: as for `predict`.
            y: their numbers [n] or [n, T].
            sample_weight: weights of the rows [n].
            client: as for `predict`.
        """
        predicted = self.predict(X, client=client)
        return float(r2_score(y, predicted, sample_weight=sample_weight))

    def _likelihood(self) -> Numeric:
        check_is_fitted(self, "_federation")
        likelihood = self._federation.run.likelihood
        assert isinstance(likelihood, Numeric)
        return likelihood

    def _shaped(self, columns: Array) -> Array:
        """Columns [n, T] as y was."""
        return columns[:, 0] if self._flat else columns
