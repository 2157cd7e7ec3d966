"""Federated classification behind scikit-learn's interface."""

from typing import Any, Self

import numpy as np
from sklearn.base import ClassifierMixin
from sklearn.metrics import accuracy_score
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import column_or_1d, validate_data

from fedbayes.core.targets import Target
from fedbayes.data.dataset import Array
from fedbayes.errors import ConfigError
from fedbayes.estimators.base import FederatedEstimator
from fedbayes.likelihoods import Classes


class FederatedClassifier(ClassifierMixin, FederatedEstimator):  # type: ignore[misc]
    """A classifier that clients train together, each on rows of its own.

        model = FederatedClassifier("fedprox", rounds=10, random_state=0)
        model.fit(X, y, clients=hospital)
        model.predict_proba(X_new)

    Everything happens in memory and in this process, and nothing is left on disk. Columns are
    standardized by the mean and deviation of all training rows; a missing value (NaN) becomes the
    mean of its column. Fits of one process take turns, since PyTorch's random state is shared.

    Args:
        method: name of a method, its class or an instance, or a table of its name and parameters:
            `{"name": "fedprox", "proximal": 0.1}`.
        model: name of a network, a `torch.nn.Module` or its class, or a table of settings as in
            `[model]`: `{"hidden": [50]}`.
        likelihood: of the classes, or a table of it and its settings: `auto` is categorical.
        rounds: how many there are.
        cohort: clients in a round, a number (10) or a fraction (0.1); the older name of the next.
        clients_per_round: number of clients in a round.
        client_fraction: share of the clients in a round; all, if none of the three is given.
        training: settings as in `[training]`: `{"lr": 0.05, "epochs": 2}`.
        settings: any others of a run, nested or with dots: `{"aggregation.rule": "median"}`. Those
            that need a run folder, test samples or other processes are refused.
        n_clients: clients of an artificial partition, where `fit` is given none.
        partition: how it is made: `iid`, `dirichlet`, `dirichlet-equal`, `shards`; or a table with
            the settings of one: `{"partition": "dirichlet", "alpha": 0.1}`.
        shape: of one sample, where the network wants pictures: `(1, 28, 28)`.
        random_state: seed, or generator of one, of all randomness.

    Attributes:
        classes_: the classes [K], in rising order.
        clients_: ids of the clients [S]; 0 to S − 1 for an artificial partition.
        n_features_in_: columns of X.
        feature_names_in_: their names, if X was a DataFrame.
        n_iter_: rounds that were run.
        history_: a DataFrame with a row for each round: bytes, loss, reports that were refused.
        privacy_: ε and δ, where the settings ask for noise; else empty.
        temperature_: of the global model's probabilities, fitted on a tenth of each client's rows,
            which nobody trains on; None where there is none, as with `settings={"calibration":
            "none"}`.
        config_: all settings, as `fedbayes.run` takes them.

    Examples:
        >>> from sklearn.datasets import load_iris
        >>> from fedbayes import FederatedClassifier
        >>> x, y = load_iris(return_X_y=True)
        >>> model = FederatedClassifier(n_clients=3, rounds=2, random_state=0)
        >>> model.fit(x, y).predict_proba(x).shape
        (150, 3)
    """

    classes_: Array
    clients_: Array

    def fit(self, X: Any, y: Any, clients: Any = None) -> Self:
        """Run the federation.

        Args:
            X: rows [n, D] of numbers, an array or DataFrame; NaN where a value is missing.
            y: the class of each row [n].
            clients: the id of each row's client [n]; None divides the rows by `partition`.

        Raises:
            ValueError: an argument is of another shape or kind, or y has one class only.
            FedbayesError: a setting will not do, or no round had an update.
        """
        x, y = validate_data(self, X, y, ensure_all_finite="allow-nan", ensure_min_samples=2)
        y = column_or_1d(y, warn=True)
        check_classification_targets(y)
        self.classes_, labels = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"y has one class only, {str(self.classes_[0])!r}; there must be two")
        config = self._config(clients)
        if config.target_kinds and "class" not in config.target_kinds:
            raise ConfigError(
                f"the likelihood {config.task['likelihood']} is for "
                f"{' or '.join(config.target_kinds)} targets, and not for classes"
            )
        target = Target("class", tuple(str(name) for name in self.classes_.tolist()))
        self._train(config, x, labels, target, clients)
        self.temperature_ = self._federation.temperature
        return self

    def predict_log_proba(self, X: Any, client: Any = None) -> Array:
        """Logarithms of `predict_proba`, float64 [n, K].

        Args:
            X: as for `predict_proba`.
            client: as for `predict_proba`.
        """
        return np.log(self.predict_proba(X, client=client))

    def predict_proba(self, X: Any, client: Any = None) -> Array:
        """The probability of each class, float64 [n, K], in the order of `classes_`.

        Args:
            X: rows [n, D] as for `fit`.
            client: None for the global model; the id of a client for its own; or an id for each
                row [n]. Clients have models of their own under methods that keep one.

        Raises:
            ValueError: the rows have other columns, or there is no such client.
            RunError: there is no global model, or a client has none of its own.
        """

        def ask(outputs: Any) -> Any:
            likelihood = self._federation.run.likelihood
            assert isinstance(likelihood, Classes)
            return likelihood.log_probabilities(outputs).exp()

        proba = self._asked(X, ask, client)
        whole: Array = proba / proba.sum(axis=1, keepdims=True)
        return whole

    def predict(self, X: Any, client: Any = None) -> Array:
        """The most probable class of each row [n].

        Args:
            X: as for `predict_proba`.
            client: as for `predict_proba`.
        """
        best = self.predict_proba(X, client=client).argmax(axis=1)
        predicted: Array = self.classes_[best]
        return predicted

    def score(self, X: Any, y: Any, sample_weight: Any = None, client: Any = None) -> float:
        """The share of rows whose class is predicted.

        Args:
            X: as for `predict_proba`.
            y: their classes [n].
            sample_weight: weights of the rows [n].
            client: as for `predict_proba`; with an id for each row, each is predicted by its own
                client's model.
        """
        predicted = self.predict(X, client=client)
        return float(accuracy_score(y, predicted, sample_weight=sample_weight))
