"""`stats`: regression and survival analysis, equal to that of the pooled rows."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import rich
import typer
from rich.markup import escape
from rich.table import Table

from fedbayes.cli.app import Console, app
from fedbayes.cli.commands import Application, Commands
from fedbayes.cli.federate import Certificates, Insecure, Secret
from fedbayes.cli.options import Json, Setting
from fedbayes.core.files import json_text
from fedbayes.errors import ConfigError

if TYPE_CHECKING:
    from fedbayes.biostatistics import MetaAnalysis, Regression, Survival
    from fedbayes.workflows.studies.study import Study, StudySite

stats_app = Application(
    help="Fit regressions and survival curves across clients, equal to a fit of the pooled rows.",
    no_args_is_help=True,
    cls=Commands,
)

Files = Annotated[
    list[Path] | None,
    typer.Argument(
        help="A table with --group, one table per client, or a TOML file with settings.",
        exists=True,
    ),
]
Group = Annotated[str | None, typer.Option("--group", help="Column with the client of each row.")]
Features = Annotated[
    list[str] | None,
    typer.Option(
        "--features", "-x", help="Columns that are features, as in age,sex. Default: all."
    ),
]
Category = Annotated[
    list[str] | None,
    typer.Option("--category", help="Column of numbers, or of many texts, that is a category."),
]
Reference = Annotated[
    list[str] | None,
    typer.Option(
        "--reference",
        metavar="COL=VALUE",
        help="Reference category of a column. Default: the first.",
    ),
]
Drop = Annotated[list[str] | None, typer.Option("--drop", help="Columns that are not features.")]
EventValue = Annotated[
    str,
    typer.Option(
        "--event-value",
        help="Value of the column that means an event. Default: 1, true, or the last of two texts.",
    ),
]
DropMissing = Annotated[
    bool, typer.Option("--drop-missing", help="Leave out rows with a missing value.")
]
MinCount = Annotated[
    int,
    typer.Option(
        "--min-count",
        min=0,
        help="Smallest number of rows of a client, and of a category, for which it sends sums.",
    ),
]
PerClient = Annotated[
    bool,
    typer.Option(
        "--per-client", help="Fit each client separately, and combine the fits (meta-analysis)."
    ),
]
Level = Annotated[float, typer.Option("--level", help="Level of the confidence intervals.")]
Time = Annotated[
    str, typer.Option("--time", help="Column: time of the event, or of the last observation.")
]
Event = Annotated[str, typer.Option("--event", help="Column: whether the event happened.")]
Coarsen = Annotated[
    float,
    typer.Option(
        "--coarsen", min=0.0, help="Round times up to multiples of this. 0: do not round."
    ),
]
Entry = Annotated[
    str,
    typer.Option("--entry", help="Column: start of the observation of a row (left truncation)."),
]
Weights = Annotated[
    str, typer.Option("--weights", help="Column: number of rows that a row represents.")
]
SampleWeight = Annotated[
    str,
    typer.Option(
        "--sample-weight",
        help="Column: weight of a row, in any unit; standard errors are then robust.",
    ),
]
Out = Annotated[Path | None, typer.Option("--out", "-o", help="File for the result: .csv, .json.")]
Figure = Annotated[Path | None, typer.Option("--plot", help="File for a figure: .png, .svg, .pdf.")]
Engine = Annotated[
    str, typer.Option("--engine", help="sequential, or flower-simulation (the same, over Flower).")
]
Link = Annotated[
    str | None,
    typer.Option("--superlink", help="HOST:PORT of a SuperLink whose nodes are the clients."),
]
Clients = Annotated[
    int | None, typer.Option("--clients", min=1, help="Number of clients at the SuperLink.")
]
Secure = Annotated[
    bool,
    typer.Option("--secure", help="Secure aggregation: the server sees only sums over clients."),
]
Noise = Annotated[
    float | None,
    typer.Option("--noise", help="Not available for these sums; the error explains why."),
]
Timeout = Annotated[
    float,
    typer.Option(
        "--timeout", min=0.1, help="Longest time of a round at the SuperLink, in seconds."
    ),
]


@dataclass(frozen=True)
class FeatureOptions:
    """Options of which columns are features, and how."""

    features: Features = None
    category: Category = None
    reference: Reference = None
    drop: Drop = None

    @property
    def columns(self) -> dict[str, Any]:
        """The columns by what they are."""
        references = {}
        for pair in self.reference or ():
            column, equals, level = pair.partition("=")
            if not (column and equals and level):
                raise ConfigError(f"--reference {pair}: write COLUMN=CATEGORY, as in sex=m")
            references[column] = level
        return {
            "features": _names(self.features),
            "categories": _names(self.category),
            "references": references,
            "drop": _names(self.drop),
        }


@dataclass(frozen=True)
class RowOptions:
    """Options of how rows count."""

    event_value: EventValue = ""
    weights: Weights = ""
    sample_weight: SampleWeight = ""
    drop_missing: DropMissing = False
    min_count: MinCount = 0

    @property
    def columns(self) -> dict[str, Any]:
        """The columns by what they are, and what is done with rows."""
        columns = vars(self).copy()
        return {"happened": columns.pop("event_value"), **columns}


@dataclass(frozen=True)
class TimeOptions:
    """Options of times of events."""

    time: Time
    event: Event
    entry: Entry = ""
    coarsen: Coarsen = 0.0


@dataclass(frozen=True)
class SiteOptions:
    """Options of where the clients are."""

    group: Group = None
    engine: Engine = "sequential"
    superlink: Link = None
    clients: Clients = None
    root_certificates: Certificates = None
    insecure: Insecure = False
    superexec_secret: Secret = None
    timeout: Timeout = 600.0
    secure: Secure = False
    noise: Noise = None
    settings: Setting = None

    def site(self, files: list[Path] | None) -> "StudySite":
        """Where the clients are."""
        from fedbayes.workflows.studies.study import StudySite

        given = vars(self).copy()
        if given.pop("noise") is not None:
            raise ConfigError(
                "--noise is not available: sums of a fit have no bounded sensitivity, and standard "
                "errors would ignore the noise (see docs/howto/biostatistics.md). --secure hides "
                "each client's sums, --min-count and --coarsen those of few rows"
            )
        if self.engine not in ("sequential", "flower-simulation"):
            raise ConfigError(f"--engine {self.engine}: choose sequential or flower-simulation")
        ways = given.pop("root_certificates"), self.insecure, given.pop("superexec_secret")
        if self.superlink is None and any(ways):
            raise ConfigError(
                "--root-certificates, --insecure and --superexec-secret work only with "
                "--superlink. Leave them out"
            )
        settings = given.pop("settings") or ()
        return StudySite(
            files=files or (), settings=settings, certificates=ways[0], secret=ways[2], **given
        )


@dataclass(frozen=True)
class ResultOptions:
    """Options of what becomes of a fit."""

    level: Level = 0.95
    out: Out = None
    plot: Figure = None
    as_json: Json = False


@stats_app.command("glm")
def glm(
    files: Files = None,
    *,
    family: Annotated[
        str,
        typer.Option(help="gaussian (linear), binomial (logistic) or poisson (counts)."),
    ] = "gaussian",
    outcome: Annotated[
        str,
        typer.Option("--outcome", "--label", "-y", help="Column to explain (data.label)."),
    ] = "",
    features: FeatureOptions,
    rows: RowOptions,
    offset: Annotated[str, typer.Option(help="Column added to the linear predictor.")] = "",
    exposure: Annotated[str, typer.Option(help="Column whose logarithm is added to it.")] = "",
    per_client: PerClient = False,
    site: SiteOptions,
    result: ResultOptions,
) -> None:
    """Fit a linear, logistic or Poisson regression across clients."""
    columns = {
        "outcome": outcome,
        "family": family,
        "offset": offset,
        "exposure": exposure,
        **rows.columns,
        **features.columns,
    }
    _run("glm", site.site(files), columns, per_client, result)


@stats_app.command("cox")
def cox(
    files: Files = None,
    *,
    times: TimeOptions,
    features: FeatureOptions,
    ties: Annotated[str, typer.Option(help="efron or breslow.")] = "efron",
    strata: Annotated[
        str,
        typer.Option(
            help="Column whose values have separate baseline hazards. client: one for each client."
        ),
    ] = "",
    rows: RowOptions,
    per_client: PerClient = False,
    site: SiteOptions,
    result: ResultOptions,
) -> None:
    """Fit a Cox regression across clients: hazard ratios."""
    place = site.site(files)
    columns = {"ties": ties, **vars(times), **rows.columns, **features.columns}
    if per_client:
        if strata:
            raise ConfigError("--strata has no effect with --per-client. Leave one of them out")
        columns["family"] = "cox"
    else:
        columns["strata"] = strata
    _run("cox", place, columns, per_client, result)


@stats_app.command("km")
def km(
    files: Files = None,
    *,
    times: TimeOptions,
    by: Annotated[str, typer.Option(help="Column of groups: one curve for each, and a test.")] = "",
    rows: RowOptions,
    site: SiteOptions,
    result: ResultOptions,
) -> None:
    """Estimate Kaplan-Meier curves across clients, with a log-rank test."""
    columns = {"by": by, **vars(times), **rows.columns}
    _run("km", site.site(files), columns, False, result)


app.add_typer(stats_app, name="stats")


def _names(given: list[str] | None) -> tuple[str, ...]:
    names = [name.strip() for words in given or () for name in words.split(",")]
    return tuple(dict.fromkeys(filter(None, names)))


def _run(
    kind: Any, site: "StudySite", columns: dict[str, Any], per_client: bool, wanted: ResultOptions
) -> None:
    from fedbayes.workflows.studies.study import Study

    level, out, plot = wanted.level, wanted.out, wanted.plot
    with rich.get_console().status("reading") as status:
        study = Study(
            site,
            columns,
            kind,
            per_client,
            level,
            out,
            plot,
            lambda number, what: status.update(f"round {number}: {what}"),
        )
        found = study.run()
    if wanted.as_json:
        print(json_text(found.to_dict(level)))
        return
    _show(study, found)
    for what, path in (("result", out), ("figure", plot)):
        if path is not None:
            Console().print(f"{what}: {path}", highlight=False, soft_wrap=True)


def _show(study: "Study", found: "Regression | Survival | MetaAnalysis") -> None:
    from fedbayes.biostatistics import MetaAnalysis, Regression

    if isinstance(found, Regression):
        _show_regression(found, study.level)
    elif isinstance(found, MetaAnalysis):
        _show_meta(found, study.level)
    else:
        _show_survival(found, study.level)


def _show_regression(found: "Regression", level: float) -> None:
    console = Console()
    table = Table("term", pad_edge=False)
    names = ["coefficient", "std error", found.statistic, "p", f"{_percent(level)} interval"]
    if found.ratio:
        names[2:3] = []
        names[-1:] = [found.ratio.replace("_", " "), f"{_percent(level)} interval"]
    for name in names:
        table.add_column(name, justify="right", no_wrap=name == names[-1])
    for term, row in found.frame(level).iterrows():
        cells = [f"{row['coefficient']:.5g}", f"{row['std_error']:.4g}"]
        if found.ratio:
            first = term == "intercept"
            shown = (row[name] for name in (found.ratio, "ratio_low", "ratio_high"))
            ratio, low, high = ("" if first else _ratio(value) for value in shown)
            cells += [_p(row["p"]), ratio, "" if first else f"{low}, {high}"]
        else:
            cells += [f"{row[found.statistic]:.3f}", _p(row["p"])]
            cells += [f"{row['low']:.4g}, {row['high']:.4g}"]
        table.add_row(escape(str(term)), *cells)
    console.print(found.heading(), highlight=False, soft_wrap=True, markup=False)
    console.print(table)
    chi2, degrees, p = found.ratio_test
    lines = [
        f"log-likelihood {found.loglik:.4f} (without features {found.null_loglik:.4f}), "
        f"AIC {found.aic:.4f}, BIC {found.bic:.4f}",
        f"likelihood-ratio test: chi2 {chi2:.4f}, {degrees} degrees of freedom, p {_p(p)}",
        f"each client sent at most {found.floats:,} numbers",
    ]
    if found.references:
        against = ", ".join(f"{column}={level}" for column, level in found.references)
        lines.insert(0, f"compared with {against}")
    console.print("\n".join(lines), highlight=False, soft_wrap=True, markup=False)


def _show_meta(found: "MetaAnalysis", level: float) -> None:
    console = Console()
    table = Table("term", "effects", pad_edge=False)
    for name in ("coefficient", f"{_percent(level)} interval", "p", "Q", "Q's p", "I²"):
        table.add_column(name, justify="right")
    for row in found.frame(level).to_dict("records"):
        first = row["effects"] == "fixed"
        table.add_row(
            escape(row["term"]) if first else "",
            row["effects"],
            f"{row['coefficient']:.5g}",
            f"{row['low']:.3g}, {row['high']:.3g}",
            _p(row["p"]),
            f"{row['q']:.2f}" if first else "",
            _p(row["q_p"]) if first else "",
            f"{row['i2']:.0%}" if first else "",
        )
    console.print(found.heading(), highlight=False, soft_wrap=True, markup=False)
    console.print(table)


def _show_survival(found: "Survival", level: float) -> None:
    console = Console()
    table = Table(escape(found.by or "rows"), pad_edge=False)
    for name in ("events", "median", f"{_percent(level)} interval", "survival at the last event"):
        table.add_column(name, justify="right")
    for name, curve in found.curves.items():
        median, low, high = (_reached(time) for time in curve.median(level))
        last = "-"
        if len(curve.times):
            bounds = curve.intervals(level)[-1]
            last = f"{curve.survival[-1]:.4f} ({bounds[0]:.4f} to {bounds[1]:.4f})"
        table.add_row(escape(name), f"{curve.events.sum():,.0f}", median, f"{low}, {high}", last)
    console.print(found.heading(), highlight=False, soft_wrap=True, markup=False)
    console.print(table)
    if found.test is not None:
        test = found.test
        console.print(
            f"log-rank test: chi2 {test.chi2:.4f}, {test.degrees} degrees of freedom, "
            f"p {_p(test.p)}",
            highlight=False,
            soft_wrap=True,
        )


def _percent(level: float) -> str:
    return f"{100 * level:.4g}%"


def _p(value: float) -> str:
    return f"{value:.4f}" if value >= 0.0001 else f"{value:.1e}"


def _ratio(value: float) -> str:
    return f"{value:.4f}" if 0.01 <= value < 1000 else f"{value:.4g}"


def _reached(time: float) -> str:
    return f"{time:,.6g}" if time < float("inf") else "not reached"
