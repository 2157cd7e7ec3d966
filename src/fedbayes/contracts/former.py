"""Names that methods set in former versions, and what declares the same now."""

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from fedbayes.errors import ConfigError

DECLARED_NOW = {
    "reduction": 'reports = Reports(reduce="set")',
    "takes_middle": 'reports = Reports(reduce="middle")',
    "entangled": "Part(joint=...)",
    "summable": "the parts of reports",
    "adds": 'Part(origin="zero")',
    "report_range": "Part(range=...)",
    "absent": "Part(missing=...)",
    "sparse_parts": 'Part(mask="chosen")',
    "masks_as_sent": 'Part(mask="sent")',
    "repeats_changes": "Part(tracked=True)",
    "remembered_parts": "Part(tracked=True, retract=...)",
    "acknowledged": "Part(tracked=True, retract=...)",
    "exact_parts": "Part(exact=True)",
    "uncompressed": "Part(uncompressed=...)",
    "incompressible": "Part(uncompressed=...)",
    "stale_reports": "Part(tracked=..., linear=...)",
    "has_global_model": "models = Models.PERSONAL",
    "keeps_models": "models = Models.PERSONAL or Models.BOTH",
    "headline": "models = Models.PERSONAL or Models.BOTH",
    "summary": "about = About(summary)",
    "paper": "about = About(paper=...)",
    "published": "about = About(published=...)",
    "centralized": "Reports(pooled=True)",
    "sends_final_model": "models = Models.COPIED",
    "weighted": "Reports(weighted=True)",
    "declared": "Part(unless=...)",
    "ordinary": "Part(typical=...)",
    "reweighted": "Reports(counts=...)",
    "remedy": "Reports(remedy=...)",
    "centre": "origin, which may give several",
    "changes": "chart",
    "resummed": "chart",
    "trouble": "accept, which returns the words",
    "stopped": "a field `stopped` of the server's state",
    "without": "update, which has `ReportList.refused`",
    "resolved": "remarks",
    "prior": "note, which gives a ClientNote",
    "falls_short": "note, which gives a ClientNote",
}
"""Former names by what declares the same."""


if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(BaseModel)


class FormerNames(ModelMetaclass):
    """Looks at a method's class before Pydantic does, which takes a flag for a field."""

    def __new__(
        cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **more: Any
    ) -> Any:
        """The class."""
        own = namespace.get("__annotations__", {})  # a parameter of a former name is the user's
        parameters = {n for n, kind in own.items() if "ClassVar" not in str(kind)}
        for flag in (DECLARED_NOW.keys() & namespace.keys()) - parameters:
            raise ConfigError(
                f"the method {name} sets {flag}, which has no effect. Declare "
                f"{DECLARED_NOW[flag]} instead (see fedbayes.contracts.parts)"
            )
        return super().__new__(cls, name, bases, namespace, **more)
