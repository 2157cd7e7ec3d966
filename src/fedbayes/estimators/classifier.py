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
    """Train a classifier across clients, with the interface of scikit-learn.

    Training runs in memory and in this process, and writes no files. The columns are standardized
    with the mean and the standard deviation of all training rows. A missing value (NaN) is replaced
    by the mean of its column. Fits of one process run in turn, since they share PyTorch's random
    state.

    Args:
        method: name of a method, its class or an instance, or a table of its name and parameters:
            `{"name": "fedprox", "proximal": 0.1}`.
        model: name of a network, a `torch.nn.Module` or its class, or a table of settings as in
            `[model]`: `{"hidden": [50]}`.
        likelihood: of the classes, or a table of it and its settings: `auto` is categorical.
        rounds: number of rounds.
        cohort: number (10) or fraction (0.1) of clients per round; the former name of the next two.
        clients_per_round: number of clients in a round.
        client_fraction: share of the clients per round; all clients, if none of the three is set.
        training: settings as in `[training]`: `{"lr": 0.05, "epochs": 2}`.
        settings: other settings of a run, nested or with dots: `{"aggregation.rule": "median"}`.
            Settings that need a run folder, test samples or other processes raise an error.
        n_clients: number of clients of an artificial partition, if `fit` is called without clients.
        partition: scheme of that partition: `iid`, `dirichlet`, `dirichlet-equal` or `shards`; or a
            table with its settings: `{"partition": "dirichlet", "alpha": 0.1}`.
        shape: of one sample, if the network takes images: `(1, 28, 28)`.
        random_state: seed of all randomness, or a generator that gives one.

    Attributes:
        classes_: the classes [K], in rising order.
        clients_: ids of the clients [S]; 0 to S − 1 for an artificial partition.
        n_features_in_: columns of X.
        feature_names_in_: their names, if X was a DataFrame.
        n_iter_: number of rounds.
        history_: a DataFrame with one row per round: bytes, loss, rejected updates.
        privacy_: ε and δ, if the settings add noise; else empty.
        temperature_: temperature of the global model's probabilities, fitted on a tenth of each
            client's rows, which are not used for training. None without a temperature, as with
            `settings={"calibration": "none"}`.
        config_: all settings, as `fedbayes.run` takes them.

    Examples:
        >>> import numpy as np
        >>> from fedbayes import FederatedClassifier
        >>> X = np.random.default_rng(0).normal(size=(60, 3))
        >>> y = np.where(X[:, 0] > 0, "ill", "well")
        >>> model = FederatedClassifier("fedavg", rounds=3, random_state=0)
        >>> model.fit(X, y, clients=np.repeat(["north", "south"], 30)).classes_.tolist()
        ['ill', 'well']
        >>> model.predict_proba(X[:2]).shape
        (2, 2)
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
            raise ValueError(
                f"y has only one class, {str(self.classes_[0])!r}. Give at least two classes"
            )
        config = self._config(clients)
        if config.target_kinds and "class" not in config.target_kinds:
            raise ConfigError(
                f"the likelihood {config.task['likelihood']} needs "
                f"{' or '.join(config.target_kinds)} targets, not classes"
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
