"""What a run looks like while it goes: a live line on a terminal, plain lines elsewhere."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from fedbayes.experiment.record import Metrics
from fedbayes.experiment.run import Listener, Simulation, Step


def share(value: float | None) -> str:
    """An accuracy for people, or a dash where there is none yet."""
    return "–" if value is None else f"{value:.4f}"


@contextmanager
def display(simulation: Simulation, console: Console) -> Iterator[Listener]:
    """A listener that shows every round: live on a terminal, else line by line."""
    rounds = simulation.config.rounds
    console.print(
        f"{simulation.config.method['name']} on {simulation.data.dataset.name}: "
        f"{simulation.data.clients} clients, {simulation.cohort} in a round, "
        f"{simulation.config.model.name}, {simulation.config.engine}",
        highlight=False,
    )
    if not console.is_terminal:
        yield lambda _, step: console.print(
            _line(step, rounds), markup=False, highlight=False, soft_wrap=True
        )
        return
    progress = Progress(
        TextColumn("round"),
        MofNCompleteColumn(),
        BarColumn(bar_width=24),
        TextColumn("global [bold]{task.fields[globally]}"),
        TextColumn("local [bold]{task.fields[locally]}"),
        TextColumn("down {task.fields[down]}  up {task.fields[up]}"),
        TimeRemainingColumn(compact=True),
        console=console,
    )
    done = simulation.progress.round
    fields: dict[str, Any] = {"globally": "–", "locally": "–", "down": "–", "up": "–"}
    with progress:
        task = progress.add_task("", total=rounds, completed=done, **fields)

        def show(simulation: Simulation, step: Step) -> None:
            if "global_accuracy" in step.metrics:
                fields["globally"] = share(step.metrics["global_accuracy"])
            progress.update(
                task,
                completed=step.number,
                **{
                    **fields,
                    "locally": share(step.metrics["local_accuracy"]),
                    "down": decimal(simulation.progress.bytes_down),
                    "up": decimal(simulation.progress.bytes_up),
                },
            )
            for line in _troubles(step.metrics):
                progress.console.print(line, markup=False, highlight=False)

        yield show


def _line(step: Step, rounds: int) -> str:
    metrics = step.metrics
    troubles = "".join(f"\n  {line}" for line in _troubles(metrics))
    return (
        f"round {step.number:>{len(str(rounds))}}/{rounds}  "
        f"global {share(metrics.get('global_accuracy'))}  "
        f"local {share(metrics['local_accuracy'])}  "
        f"down {decimal(metrics['bytes_down'])}  up {decimal(metrics['bytes_up'])}  "
        f"{metrics['seconds']:.2f} s{troubles}"
    )


def _troubles(metrics: Metrics) -> list[str]:
    """What went wrong in a round, a line each."""
    lines = [f"client {client} refused: {reason}" for client, reason in metrics["refused"].items()]
    lines += [f"client {client} lost: {reason}" for client, reason in metrics["lost"].items()]
    lines += [
        f"client {client} reported after trouble: {reason}"
        for client, reason in metrics.get("troubles", {}).items()
    ]
    if metrics["skipped"]:
        lines.append("too few good reports: the global model is as before")
    return lines


def outcome(summary: Metrics) -> Table:
    """The summary as a table."""
    table = Table(show_header=False, box=None, pad_edge=False)
    accuracies = sorted(("global_accuracy", "local_accuracy"), key=summary["headline"].__ne__)
    rows = {
        **{name.replace("_", " "): share(summary[name]) for name in accuracies},
        "bytes down / up": f"{decimal(summary['bytes_down'])} / {decimal(summary['bytes_up'])}",
        "on the link": f"{decimal(summary['link_down'])} / {decimal(summary['link_up'])}",
        "parameters": f"{summary['model_parameters']:,} ({summary['sparsity']:.1%} zero)",
        "seconds a round": f"{summary['seconds_per_round']:.3f}",
        "refused reports": f"{summary['refused_reports']} ({summary['skipped_rounds']} rounds "
        "without an update)",
        "lost reports": str(summary["lost_reports"]),
        "stopped": f"{summary['stopped_reason']} after {summary['rounds']} rounds",
        "folder": summary["folder"],
    }
    if "epsilon" in summary:
        rows["privacy"] = f"ε = {summary['epsilon']:.3g} at δ = {summary['delta']:g}"
    if not summary["link_down"]:
        del rows["on the link"], rows["lost reports"]
    for name, value in rows.items():
        table.add_row(f"[bold]{name}", escape(value))
    return table


@contextmanager
def stop_after_round(simulation: Simulation, console: Console) -> Iterator[None]:
    """Let Ctrl-C (and SIGTERM) end the run after the round under way, a second one at once."""

    def ask(number: int, frame: FrameType | None) -> None:
        if simulation.stop:
            raise KeyboardInterrupt
        simulation.stop = True
        console.print("stopping after this round; Ctrl-C again stops at once", highlight=False)

    before = {name: signal.signal(name, ask) for name in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)
