"""Federations as scikit-learn estimators: `fit`, `predict`, `score`, all of it in memory.

`settings` makes a config of constructor parameters, `samples` clients' data of arrays, `federation`
runs the rounds without a run folder, and `base` is what classifier and regressor share.

Parameters may be added at the end; names and defaults follow scikit-learn and must stay. An
estimator trains as a run with the same settings does.
"""

from typing import TYPE_CHECKING

from fedbayes.core.lazy import attributes

if TYPE_CHECKING:
    from fedbayes.estimators.classifier import FederatedClassifier
    from fedbayes.estimators.regressor import FederatedRegressor

__all__ = ["FederatedClassifier", "FederatedRegressor"]

__getattr__, __dir__ = attributes(
    __name__,
    {
        "fedbayes.estimators.classifier": "FederatedClassifier",
        "fedbayes.estimators.regressor": "FederatedRegressor",
    },
)
