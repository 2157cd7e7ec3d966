"""A JSON schema of a config, for editors."""

from typing import Any

from fedbayes.config.config import Config
from fedbayes.likelihoods import LIKELIHOODS
from fedbayes.methods import METHODS


def schema() -> dict[str, Any]:
    """A JSON schema of a config, for editors: of `[method]`, a branch for every method."""
    whole = Config.model_json_schema()
    branches: list[dict[str, Any]] = []
    for name, kind in METHODS.items():
        branch = kind.model_json_schema()
        whole.setdefault("$defs", {}).update(branch.pop("$defs", {}))
        choice = {"const": name, "description": kind.about.summary}
        branch["properties"] = {"name": choice, **branch.get("properties", {})}
        branch |= {"title": name, "description": kind.about.summary}
        # Without a name it is fedavg.
        branch["required"] = [] if name == "fedavg" else ["name"]
        branches.append(branch)
    branches.append(_own_branch("name"))
    auto = {"likelihood": {"const": "auto", "description": "by the target"}}
    tasks: list[dict[str, Any]] = [
        {"title": "auto", "type": "object", "properties": auto, "additionalProperties": False}
    ]
    for name, likelihood in LIKELIHOODS.items():
        branch = likelihood.model_json_schema()
        parts = branch.pop("$defs", {})
        parts.pop("Target", None)
        whole["$defs"].update(parts)
        choice = {"const": name, "description": likelihood.summary}
        own = {key: value for key, value in branch["properties"].items() if key != "target"}
        branch["properties"] = {"likelihood": choice, **own}
        branch |= {"title": name, "description": likelihood.summary, "required": ["likelihood"]}
        tasks.append(branch)
    tasks.append(_own_branch("likelihood"))
    for table, choices in (("task", tasks), ("method", branches)):
        about = whole["properties"][table]["description"]
        whole["properties"][table] = {"description": about, "oneOf": choices}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **whole}


def _own_branch(key: str) -> dict[str, Any]:
    """The branch of a JSON schema for a class of the user's own, which this key names."""
    own = {"type": "string", "pattern": ":", "description": "package.module:Class"}
    return {"title": "your own", "type": "object", "properties": {key: own}, "required": [key]}
