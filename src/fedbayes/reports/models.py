"""One self-contained HTML page that compares models on the same test samples."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fedbayes.likelihoods.measures import better
from fedbayes.reports.charts import ChartCurve, Lines, filled, widely_spread
from fedbayes.reports.palette import looks
from fedbayes.reports.template import brief
from fedbayes.reports.template import filled as filled_page
from fedbayes.storage.formatting import words

if TYPE_CHECKING:
    from fedbayes.storage.card import Card
    from fedbayes.workflows.serve.model_evaluation import Score


def render(
    scores: "Sequence[Score]", cards: "Mapping[str, Card | None]", what: str, how: str
) -> str:
    """The page of a comparison.

    Args:
        scores: of each model, as `fedbayes evaluate` prints them.
        cards: of the models from files, by name.
        what: which samples they were tried on.
        how: by whose numbers these were standardized.
    """
    names = [score.name for score in scores]
    metrics = list(dict.fromkeys(key for score in scores for key in score.metrics))
    rows = [
        {
            "name": score.name,
            "kind": kind_of(score.name, cards.get(score.name)),
            "metrics": score.metrics,
            "parameters": score.parameters,
            "note": score.note,
        }
        for score in scores
    ]
    higher = {key: better(key) for key in metrics}
    best = {
        key: (max if up else min)(s.metrics[key] for s in scores if key in s.metrics)
        for key, up in higher.items()
        if up is not None
    }
    charts = [_chart(key, scores) for key in metrics[:2]]
    return filled_page(
        "models.html",
        names,
        looks([str(row["kind"]).removeprefix("fused by ") for row in rows]),
        [chart for chart in charts if filled(chart)],
        data=rows,
        rows=rows,
        metrics=[(key, words(key)) for key in metrics],
        best=best,
        what=what,
        how=how,
        brief=brief,
    )


def kind_of(name: str, card: "Card | None") -> str:
    """What a model is, in a few words."""
    if card is not None and card.fused:
        return f"fused by {str(card.method['name']).removeprefix('fuse ')}"
    if name.startswith(("ensemble", "average")):
        return name.partition(",")[0].partition(" ")[0]
    return "model"


def _chart(key: str, scores: "Sequence[Score]") -> Lines:
    """A metric of each model, against its size."""
    known = [(run, s) for run, s in enumerate(scores) if key in s.metrics]
    sizes, values = [s.parameters for _, s in known], [s.metrics[key] for _, s in known]
    return Lines(
        key,
        f"{words(key)[:1].upper()}{words(key)[1:]}, by size",
        "parameters",
        f"{words(key)} on test samples",
        [ChartCurve(run, [float(s.parameters)], [s.metrics[key]]) for run, s in known],
        log=widely_spread(values),
        log_x=bool(sizes) and max(sizes) > 2 * min(sizes),
    )
