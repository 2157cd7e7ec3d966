"""Regression and survival analysis of clients' tables, as exact as of the pooled rows.

Clients send sums: of gradients and Hessians, of who is at risk at each event time. One small loop
runs every model (`newton.py`); an `Exchange` carries questions and answers, within this process or
over a network. Everything is computed in float64.

A new model is two functions: the sums of a client at some coefficients (`client.py` has it by the
name of the question), and what the server does with them, as in `fit_glm`, `fit_cox` and
`fit_curves`. Answers must stay sums, and results must agree with the pooled analysis of statsmodels
or lifelines. A `Carrier` is behind the exchange: `LocalClients` for tables in this process, or
`NodeCarrier`, for which each question is the task of a round of the engine `Flower` and each answer
a report. So resending, lost nodes and bounds are those of any federation. Every client must answer:
there is no exact fit of some of them.
"""

from typing import TYPE_CHECKING

from fedbayes.core.lazy import attributes

if TYPE_CHECKING:
    from fedbayes.biostatistics.analyses import cox, glm, kaplan_meier, meta_analysis
    from fedbayes.biostatistics.client import LocalClients, TableClient
    from fedbayes.biostatistics.curves import Curve, LogRank, Survival
    from fedbayes.biostatistics.exchange import Carrier, Packet
    from fedbayes.biostatistics.meta import MetaAnalysis, Pooled, pool
    from fedbayes.biostatistics.results import Regression

__all__ = [
    "Carrier",
    "Curve",
    "LocalClients",
    "LogRank",
    "MetaAnalysis",
    "Packet",
    "Pooled",
    "Regression",
    "Survival",
    "TableClient",
    "cox",
    "glm",
    "kaplan_meier",
    "meta_analysis",
    "pool",
]

__getattr__, __dir__ = attributes(
    __name__,
    {
        "fedbayes.biostatistics.analyses": "cox glm kaplan_meier meta_analysis",
        "fedbayes.biostatistics.client": "LocalClients TableClient",
        "fedbayes.biostatistics.curves": "Curve LogRank Survival",
        "fedbayes.biostatistics.exchange": "Carrier Packet",
        "fedbayes.biostatistics.meta": "MetaAnalysis Pooled pool",
        "fedbayes.biostatistics.results": "Regression",
    },
)
