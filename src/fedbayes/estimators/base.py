"""What the federated classifier and regressor share."""

from collections.abc import Callable, Mapping
from typing import Any, Self

import numpy as np
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from fedbayes.config.config import Config
from fedbayes.core.targets import Target
from fedbayes.core.wording import listed
from fedbayes.data.dataset import Array
from fedbayes.data.tables.precision import lost
from fedbayes.errors import warn
from fedbayes.estimators.federation import FittedClients
from fedbayes.estimators.samples import gathered, in_samples, owners
from fedbayes.estimators.settings import config_of
from fedbayes.runs.build import prepare
from fedbayes.runs.frames import rounds_frame

_TABLES = ("method", "model", "likelihood", "training", "partition", "settings")
"""Parameters that may be tables of settings."""
_KEYS = {"method": "name", "model": "name", "likelihood": "likelihood", "partition": "partition"}
"""What a word instead of such a table stands for."""


class FederatedEstimator(BaseEstimator):  # type: ignore[misc]
    """A federation behind scikit-learn's interface."""

    def __init__(
        self,
        method: Any = "fedavg",
        *,
        model: Any = "mlp",
        likelihood: Any = "auto",
        rounds: int = 20,
        cohort: int | float | None = None,
        clients_per_round: int | None = None,
        client_fraction: float | None = None,
        training: Mapping[str, Any] | None = None,
        settings: Mapping[str, Any] | None = None,
        n_clients: int = 5,
        partition: Any = "iid",
        shape: tuple[int, ...] | None = None,
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.method = method
        self.model = model
        self.likelihood = likelihood
        self.rounds = rounds
        self.cohort = cohort
        self.clients_per_round = clients_per_round
        self.client_fraction = client_fraction
        self.training = training
        self.settings = settings
        self.n_clients = n_clients
        self.partition = partition
        self.shape = shape
        self.random_state = random_state

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The parameters by name; with `deep` also those in tables, as in `training__lr`."""
        found: dict[str, Any] = super().get_params(deep=deep)
        if deep:
            for name in _TABLES:
                if isinstance(found[name], Mapping):
                    found |= {f"{name}__{key}": value for key, value in found[name].items()}
        return found

    def set_params(self, **params: Any) -> Self:
        """Set parameters, also single ones of a table: `training__lr=0.05`.

        The table is replaced by a changed copy, so that clones do not share it.
        """
        whole = {name: value for name, value in params.items() if "__" not in name}
        super().set_params(**whole)
        for name, value in params.items():
            first, inner, key = name.partition("__")
            if not inner:
                continue
            if first not in _TABLES:
                super().set_params(**{name: value})  # says that there is none
                continue
            before = getattr(self, first)
            if before is not None and not isinstance(before, Mapping):
                before = {_KEYS[first]: before}
            setattr(self, first, {**(before or {}), key: value})
        return self

    def __sklearn_tags__(self) -> Any:
        """Missing values become the mean of the training rows."""
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags

    def _config(self, clients: Any) -> Config:
        """The settings that the parameters stand for, under a seed drawn from `random_state`."""
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        return config_of(super().get_params(deep=False), seed=seed, given=clients is not None)

    def _train(self, config: Config, x: Array, y: Array, target: Target, clients: Any) -> Self:
        """Run the federation."""
        whose = None if clients is None else owners(clients, len(x))
        samples = in_samples(x, self.shape)
        known = getattr(self, "feature_names_in_", [f"column {k}" for k in range(x.shape[1])])
        for note in lost(np.asarray(x, np.float64), known, "X"):
            warn(note)
        names = getattr(self, "feature_names_in_", ()) if self.shape is None else ()
        data = gathered(samples, y, target, config, features=tuple(names), whose=whose)
        prepare(config, data, quiet=True)
        self._federation = FittedClients(config, data)
        self.clients_ = np.arange(data.clients) if whose is None else whose[0]
        self.config_ = config
        self.n_iter_ = len(self._federation.lines)
        self.history_ = rounds_frame(self._federation.lines)
        self.privacy_ = self._federation.privacy
        return self

    def _asked(self, X: Any, ask: Callable[[Tensor], Tensor], client: Any) -> Array:
        """What models say of rows, float64 [n, ...]; of the global model if client is None."""
        check_is_fitted(self, "_federation")
        x = validate_data(self, X, reset=False, ensure_all_finite="allow-nan")
        samples = in_samples(x, self.shape)
        if client is None or np.ndim(client) == 0:
            index = None if client is None else self._index(client)
            return self._federation.predict(samples, ask, index).numpy()
        ids, owner = owners(client, len(x))
        answer: Array | None = None
        for place, one in enumerate(ids):
            rows = owner == place
            part = self._federation.predict(samples[rows], ask, self._index(one)).numpy()
            if answer is None:
                answer = np.empty((len(x), *part.shape[1:]))
            answer[rows] = part
        assert answer is not None
        return answer

    def _index(self, client: Any) -> int:
        """The index of a client by its id."""
        found = np.flatnonzero(self.clients_ == client)
        if len(found) != 1:
            known = listed((str(one) for one in self.clients_), 10)
            raise ValueError(f"unknown client {client!r}. The clients are {known}")
        return int(found[0])
