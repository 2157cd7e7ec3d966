"""Small runs of every method end with the models that they always ended with.

`python -m tests.methods.test_reference_models` writes the numbers anew. Only a change of the
arithmetic that is meant is a reason to do so.
"""

import json
import warnings
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from fedbayes import Config, Simulation
from fedbayes.methods import METHODS
from tests.helpers.reference import OTHERS, PARAMETERS, SETTINGS

FILE = Path(__file__).parent / "reference_models.json"

LENET = {"model": {"name": "lenet5"}, "data": {"name": "mnist", "clients": 4, "limit": 200}}
LENET["data"]["limit_test"] = 100
CASES = {name: (name, OTHERS.get(name, {})) for name in METHODS}
CASES |= {f"{name} lenet5": (name, LENET) for name in ("fedavg", "fedsparse")}


def measured(case):
    """Norm of every tensor of the final model, and its inner product with fixed directions."""
    method, others = CASES[case]
    parameters = {"name": method, "preset": "published", **PARAMETERS.get(method, {})}
    config = Config.create(**{**SETTINGS, **others, "method": parameters})
    # fedfuse trains in bfloat16 where the processor has units for it; here all do.
    units = patch("torch.cpu._is_avx512_bf16_supported", lambda: True)
    with units, Simulation(config) as simulation:
        for _ in simulation:
            pass
        model = simulation.method.model(simulation.server, simulation.run)
    numbers = {}
    for name, tensor in model.items():
        flat = tensor.double().flatten()
        direction = torch.cos(torch.arange(len(flat), dtype=torch.float64))
        numbers[name] = [float(flat.norm()), float(flat @ direction)]
    return numbers


@pytest.mark.filterwarnings("ignore::fedbayes.errors.FedbayesWarning")
@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=pytest.mark.data) if "lenet5" in c else c for c in CASES]
)
def test_models_are_as_they_were(case):
    wanted = json.loads(FILE.read_text())[case]
    found = measured(case)
    assert found.keys() == wanted.keys()
    for name, (norm, product) in wanted.items():
        # Other processors round otherwise; a change of the arithmetic is far larger.
        assert found[name] == pytest.approx([norm, product], rel=1e-4, abs=1e-4 * norm), name


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    FILE.write_text(json.dumps({case: measured(case) for case in CASES}, indent=1) + "\n")
