"""What goes with an exported program for whoever serves it: a card for people and for programs."""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedbayes.contracts import Federation, Sampler
from fedbayes.core.files import write_beside
from fedbayes.data import FederatedData, Preprocessing
from fedbayes.likelihoods import evaluate
from fedbayes.likelihoods.conformal import SCORES, Conformal
from fedbayes.likelihoods.measures import AUTO, fitting
from fedbayes.likelihoods.temperature import sampled_at
from fedbayes.likelihoods.trust import examine
from fedbayes.storage.card import Card
from fedbayes.storage.scores import GlobalEvaluation, test_parts
from fedbayes.workflows.calibrate.calibration import summary as of_trust

FORMAT = "fedbayes-model-card-1"

Facts = dict[str, Any]
"""A card as JSON has it."""


def measured(
    run: Federation,
    draw: Sampler,
    data: FederatedData | None,
    client: int | None,
    temperature: float | None,
) -> tuple[Facts, Facts, Facts]:
    """How a model does on the clients' test rows: metrics, those of each client, calibration; all
    empty where the data or test rows are not here.

    Args:
        run: its likelihood and network.
        draw: the model.
        data: of the clients.
        client: whose own model it is, which is tried on its test rows alone.
        temperature: of its probabilities; None: as they are.
    """
    if data is None:
        return {}, {}, {}
    parts = [data.test(client)] if client is not None else test_parts(data, run.likelihood)
    tests = [part.to(run.network.device) for part in parts]
    measures = fitting((AUTO,), run.likelihood)
    found = examine(run.likelihood, [(draw, part) for part in tests], measures, temperature)
    if found is None:
        return {}, {}, {}
    calibration = {k: v for k, v in of_trust(found).items() if k not in found.metrics}
    if temperature is not None:
        calibration["temperature"] = temperature
    each: Facts = {}
    if client is None:
        union, sizes = data.test_union(0, data.test_total), data.test_sizes().tolist()
        union = union.to(run.network.device)
        cooled = sampled_at(run.likelihood, draw, temperature)
        terms = evaluate(run.likelihood, cooled, union, measures=measures, sizes=sizes)
        clients = GlobalEvaluation.of(run.likelihood, terms, data, measures).clients
        rows = dict(zip(data.owners.tolist(), sizes, strict=True))
        each = {
            data.names[number]: {"test_rows": rows[number], **metrics}
            for number, metrics in clients.each(run.likelihood).items()
        }
    return {"test_rows": sum(len(part.y) for part in tests), **found.metrics}, each, calibration


def facts(
    card: Card,
    summary: Mapping[str, Any],
    name: str,
    *,
    parameters: int,
    results: tuple[Facts, Facts, Facts],
    conformal: Conformal | None,
    clients: Sequence[str],
) -> Facts:
    """All that there is to say of a model.

    Args:
        card: of its file.
        summary: of its run.
        name: of its file.
        parameters: of the exported network.
        results: as `measured` gives them.
        conformal: its threshold, if it was calibrated.
        clients: names of those that took part.
    """
    preprocessing = card.preprocessing
    metrics, each, calibration = results
    return {
        "format": FORMAT,
        "file": name,
        "model": {
            "network": card.model.get("name"),
            "parameters": parameters,
            "likelihood": card.task.get("likelihood"),
            "method": card.method,
            "rounds": card.round,
            "client": card.client or None,
            "fedbayes": card.fedbayes,
        },
        "data": {
            "name": preprocessing.dataset,
            "samples": preprocessing.samples or None,
            "digest": preprocessing.digest or None,
            "partition": summary.get("partition"),
            "clients": list(clients),
        },
        "target": asdict(preprocessing.target),
        "inputs": {"what": card.inputs, "shape": list(preprocessing.shape), **_inputs(card)},
        "outputs": card.outputs,
        "metrics": metrics,
        "clients": each,
        "calibration": calibration,
        "conformal": None if conformal is None else asdict(conformal),
        "privacy": {key: summary[key] for key in ("epsilon", "delta", "privacy") if key in summary}
        or None,
        "attack": card.attack or None,
        "use": usage(name, preprocessing),
    }


_ENCODED = {
    "number": "the number",
    "boolean": "0 or 1",
    "date": "days since 1970-01-01, in UTC",
    "category": "an input of 0 or 1 for each category",
    "text": "hashed counts of words",
}
"""How a column becomes inputs, by its kind."""


def _inputs(card: Card) -> Facts:
    """What the program reads: features, and how they are standardized inside."""
    preprocessing = card.preprocessing
    names = preprocessing.features or tuple(
        f"{'channel' if len(preprocessing.shape) > 1 else 'feature'} {k}"
        for k in range(preprocessing.shape[0])
    )
    return {
        "scale": preprocessing.scale,
        "columns": [
            {**asdict(column), "encoded": _ENCODED[column.kind]} for column in preprocessing.columns
        ],
        "features": [
            {"name": name, "mean": mean, "std": std}
            for name, mean, std in zip(names, preprocessing.mean, preprocessing.std, strict=True)
        ],
    }


def usage(name: str, preprocessing: Preprocessing) -> str:
    """Code that uses a program."""
    sizes = ", ".join(map(str, ("n", *preprocessing.shape)))
    if name.lower().endswith(".onnx"):
        return (
            f"import onnxruntime\n\nsession = onnxruntime.InferenceSession({name!r})\n"
            f'(answer,) = session.run(None, {{"samples": x}})  # x: float32 ({sizes})\n'
        )
    return (
        f"import torch\n\nprogram = torch.export.load({name!r}).module()\n"
        f"answer = program(x)  # x: float32 ({sizes})\n"
    )


def write_cards(path: Path, found: Facts) -> tuple[Path, Path]:
    """Write a card as JSON and as Markdown next to a model: `m.pt2.card.json`, `m.pt2.card.md`.

    Args:
        path: of the model.
        found: as `facts` gives them.

    Returns:
        Both files.
    """
    files = (
        path.with_name(f"{path.name}.card.json"),
        path.with_name(f"{path.name}.card.md"),
    )
    write_beside(files[0], (json.dumps(_plain(found), indent=2) + "\n").encode())
    write_beside(files[1], markdown(found).encode())
    return files


def _plain(value: Any) -> Any:
    """The same for JSON, which has no numbers that are not finite."""
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def markdown(found: Facts) -> str:
    """A card for people."""
    model, data, target = found["model"], found["data"], found["target"]
    kind = "own model of client " + _cell(model["client"]) if model["client"] else "global model"
    parts = [
        f"# {_cell(found['file'])}",
        f"The {kind} of a federation of {len(data['clients'])} clients: {model['network']}, "
        f"{model['parameters']:,} parameters, trained by {model['method'].get('name')} in "
        f"{model['rounds']} rounds (fedbayes {model['fedbayes']}).",
        "## Output",
        f"{_cell(', '.join(target['names']))} ({target['kind']}; likelihood "
        f"{model['likelihood']}). Outputs: {_cell(found['outputs'])}.",
        "## Input",
        f"Inputs: {_cell(found['inputs']['what'])}, of shape "
        f"({', '.join(map(str, ('n', *found['inputs']['shape'])))}), in this order. The program "
        f"itself standardizes: (x / {found['inputs']['scale']:g} − mean) / standard deviation. A "
        "missing value is replaced by the mean.",
        _columns(found["inputs"]["columns"]),
        _table(
            ("input", "mean", "standard deviation"),
            ((one["name"], one["mean"], one["std"]) for one in found["inputs"]["features"]),
        ),
        "## Data",
        _data(data),
        "## Metrics",
        _metrics(found),
        "## Uncertainty",
        _trust(found),
        "## Privacy",
        _privacy(found["privacy"]),
        "## Use",
        f"```python\n{found['use']}```",
        f"    fedbayes predict {found['file']} new.csv -o predictions.csv"
        if found["file"].lower().endswith(".pt2")
        else "",
    ]
    if found["attack"]:
        parts.insert(2, f"**Clients attacked this run**: {_cell(json.dumps(found['attack']))}.")
    return "\n\n".join(part for part in parts if part) + "\n"


def _columns(columns: Sequence[Facts]) -> str:
    """How raw columns of a table become inputs; empty where they are the inputs."""
    if not columns:
        return ""
    rows = (
        (
            one["name"],
            one["kind"] + (f", written as {one['date_format']}" if one["date_format"] else ""),
            one["encoded"],
            ", ".join(one["categories"]),
            "0 or 1 if empty" if one["gaps"] else "",
        )
        for one in columns
    )
    told = "Inputs are encoded columns of a table, which `fedbayes predict` encodes itself:"
    return (
        f"{told}\n\n{_table(('column', 'kind', 'encoded as', 'categories', 'another input'), rows)}"
    )


def _data(data: Facts) -> str:
    name, digest = data["name"] or "not named", data["digest"]
    samples = f"{data['samples']:,} samples" if data["samples"] else "samples not counted"
    told = f"{_cell(name)}, {samples}, divided {data['partition']}"
    told += f"; SHA-256 of their content {digest}" if digest else ""
    return f"{told}. Clients: {_cell(', '.join(data['clients']))}."


def _metrics(found: Facts) -> str:
    if not found["metrics"]:
        return "Not measured: the clients' test rows were not available when this card was written."
    rows = [("all", found["metrics"]), *found["clients"].items()]
    names = [name for name in found["metrics"] if name != "test_rows"]
    table = _table(
        ("client", "test rows", *names),
        ((who, m.get("test_rows"), *(m.get(name) for name in names)) for who, m in rows),
    )
    return f"On the clients' test rows, which were not used for training:\n\n{table}"


def _trust(found: Facts) -> str:
    parts = []
    if found["calibration"]:
        parts.append(_table(("calibration", ""), found["calibration"].items()))
    conformal = found["conformal"]
    if conformal is not None:
        how = {
            "probability": "the set of classes whose −log probability is at most the threshold",
            "adaptive": "the most probable classes, as long as −log of the remaining probability "
            "is at most the threshold",
            "adaptive-random": "likewise, with a random share of the last class's own probability",
            "residual": "the mean minus and plus the threshold",
            "quantile": "the model's own interval of this level, widened by the threshold",
        }[conformal["score"]]
        ends = [
            "none: too few rows" if end is None else f"{end:.6g}" for end in conformal["threshold"]
        ]
        parts.append(
            f"Conformal, for {100 * conformal['level']:g}% of new rows like the clients': {how} "
            f"({', '.join(ends)}; {SCORES[conformal['score']]}), from {conformal['rows']:,} "
            "held-out rows."
        )
    return "\n\n".join(parts) or "Not measured."


def _privacy(privacy: Facts | None) -> str:
    if privacy is None:
        return (
            "No differential privacy: the information about single training samples is not bounded."
        )
    epsilon = privacy.get("epsilon")
    spent = "no finite ε" if epsilon is None else f"ε = {epsilon:.4g}"
    detail = privacy.get("privacy", {})
    notes = "".join(f"\n- {_cell(note)}" for note in detail.get("notes", ()))
    return f"Spent: {spent} at δ = {privacy.get('delta')}, for {detail.get('protects')}.{notes}"


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(value: Any) -> str:
    """A value in Markdown, where it marks nothing."""
    if value is None:
        return ""
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return re.sub(r"([\\|`*<>\[\]])", r"\\\1", text).replace("\n", " ")
