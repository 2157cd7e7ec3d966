"""Modules of version 0.2 under their former names, with a warning, for one version."""

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "devices": "core.devices",
    "fields": "core.fields",
    "messages": "core.messages",
    "seeds": "core.seeds",
    "targets": "core.targets",
    "tensors": "core.tensors",
    "inputs.sums": "data.tables.sums",
    "runs.config": "config.config",
    "tools": "workflows",
    "tools.client_tables": "workflows.studies.client_tables",
    "tools.comparing": "workflows.experiments.comparing",
    "tools.export": "workflows.serve.export",
    "tools.posterior_files": "workflows.fuse.posterior_files",
    "tools.prediction": "workflows.serve.prediction",
    "tools.seed_runs": "workflows.experiments.seed_runs",
    "tools.trained_models": "workflows.serve.trained_models",
}
"""What programs import from outside, below `fedbayes`."""


class _Moved(MetaPathFinder, Loader):
    """Gives the module itself, under the former name too: so classes are the same."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.removeprefix("fedbayes.") not in MOVED:
            return None
        return ModuleSpec(fullname, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        now = f"fedbayes.{MOVED[spec.name.removeprefix('fedbayes.')]}"
        warnings.warn(f"{spec.name} is now {now}. Import it from there", FutureWarning, 2)
        # A new object with the same contents: the import system marks the one that it is given.
        module = ModuleType(spec.name)
        vars(module).update({n: v for n, v in vars(import_module(now)).items() if n[:2] != "__"})
        if spec.name == "fedbayes.tools":
            module.__path__ = []
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is left to do."""


def keep_former_names() -> None:
    """Let former names be imported; asked last, so it costs nothing where names are current."""
    sys.meta_path.append(_Moved())
