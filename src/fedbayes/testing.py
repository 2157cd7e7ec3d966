"""The contract tests that every method goes through, yours too.

    from fedbayes.testing import MethodContract

    class TestMine(MethodContract):
        method = "my_package.my_module:Mine"
        parameters = {"strength": 0.5}

Run it with pytest. Each test says in its docstring what it demands of a method.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from fedbayes.contracts import AnyMethod, At, Report
from fedbayes.errors import RunError
from fedbayes.federation.checks import decode_report, encode_report
from fedbayes.federation.client_runtime import Evaluation, NoReport, Outcome, Task
from fedbayes.federation.engines import Engine
from fedbayes.federation.engines.sequential import Sequential
from fedbayes.messages import Masked, Message, decode, dense, encode
from fedbayes.runs.config import Config
from fedbayes.runs.simulation import Simulation
from fedbayes.start import resume, run
from fedbayes.tensors import Samples, Tensors, pack, unpack


def assert_identical(left: Tensors, right: Tensors) -> None:
    """Both hold the same tensors, bit for bit."""
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype, name
        assert torch.equal(tensor, right[name]), name


class Tampering:
    """An engine that counts what passes and lets a test change the outcomes of another one."""

    def __init__(self, engine: Engine, tamper: Callable[[Task, Outcome], Outcome]) -> None:
        self._engine = engine
        self._tamper = tamper
        self.down = 0
        self.up = 0

    def train(self, tasks: Iterable[Task]) -> Iterator[Outcome | NoReport]:
        """Run the tasks and change their outcomes."""
        tasks = list(tasks)
        self.down += sum(len(task.message) for task in tasks)
        for task, outcome in zip(tasks, self._engine.train(tasks), strict=True):
            if isinstance(outcome, NoReport):
                yield outcome
                continue
            changed = self._tamper(task, outcome)
            self.up += len(changed.report)
            yield changed

    def evaluate(self, evaluations: Iterable[Evaluation]) -> Iterator[Tensors]:
        """Run the evaluations."""
        return self._engine.evaluate(evaluations)

    def close(self) -> None:
        """End the engine."""
        self._engine.close()


class MethodContract:
    """What a method promises, as tests. Derive from it and name the method."""

    method: ClassVar[str]
    """A built-in name, or `package.module:Class`."""
    parameters: ClassVar[dict[str, Any]] = {}
    """Parameters of the method."""
    settings: ClassVar[dict[str, Any]] = {}
    """Further settings of the runs, as keyword arguments of `Config.create`."""

    def config(self, **changes: Any) -> Config:
        """A small federation: 4 clients, 3 in a round, 2 rounds, on digits."""
        settings = {
            "rounds": 2,
            "cohort": 3,
            "data": {"name": "digits", "clients": 4, "partition": "iid", "limit": 400},
            "model": {"hidden": [8]},
            "method": {"name": self.method, **self.parameters},
            **self.settings,
            **changes,
        }
        return Config.create(**settings)

    def after_one_round(self, folder: Path) -> Simulation:
        """A simulation with one round behind it."""
        simulation = Simulation(self.config(), folder)
        next(iter(simulation))
        return simulation

    def test_functions_are_pure(self, tmp_path: Path) -> None:
        """`message`, `local` and `update` leave their arguments alone and repeat themselves."""
        with self.after_one_round(tmp_path) as simulation:
            method, server = simulation.method, simulation.server
            before = _copy(pack(server))
            at = simulation.runtime.at(Task(0, 2, b"", None))
            message = method.message(server, at)
            sent = _copy(dense(message))
            client = method.join(at)
            kept = _copy(pack(client))
            samples = simulation.data.train(0)
            results = [_local(method, message, client, samples, at) for _ in range(2)]
            assert results[0] == results[1], "local gave two answers to one question"
            assert_identical(sent, dense(message))
            assert_identical(kept, pack(client))
            updates = []
            for _ in range(2):
                reports = method.reduction()
                expected = method.expected(message, simulation.run)
                reports.add(0, decode_report(results[0][0], expected))
                updates.append(pack(method.update(server, reports, At(simulation.run, 2))[0]))
            assert_identical(updates[0], updates[1])
            assert_identical(before, pack(server))

    def test_states_survive_storage(self, tmp_path: Path) -> None:
        """Server and client states are the same after a checkpoint as before it."""
        with self.after_one_round(tmp_path) as simulation:
            kinds = [(simulation.method.server_state, pack(simulation.server))]
            kinds += [
                (simulation.method.client_state, dense(decode(simulation.states[client])))
                for client in simulation.states
            ]
            for kind, packed in kinds:
                stored = dense(decode(encode(dict(packed))))
                assert_identical(packed, pack(unpack(kind, stored)))

    def test_engines_agree(self, tmp_path: Path) -> None:
        """`workers` ends bit for bit where `sequential` does."""
        one = run(self.config(), tmp_path / "sequential")
        two = run(self.config(engine="workers", workers=2), tmp_path / "workers")
        assert_identical(pack(one.server()), pack(two.server()))
        assert _timeless(one.metrics) == _timeless(two.metrics)

    def test_seed_decides(self, tmp_path: Path) -> None:
        """The same seed gives the same run."""
        one, two = (run(self.config(), tmp_path / name) for name in "ab")
        assert_identical(pack(one.server()), pack(two.server()))
        assert _timeless(one.metrics) == _timeless(two.metrics)

    def test_interruption_changes_nothing(self, tmp_path: Path) -> None:
        """A run that was left after its first round and resumed ends like an unbroken one."""
        whole = run(self.config(), tmp_path / "whole")
        self.after_one_round(tmp_path / "broken").close()
        resumed = resume(tmp_path / "broken")
        assert_identical(pack(whole.server()), pack(resumed.server()))
        assert _timeless(whole.metrics) == _timeless(resumed.metrics)

    def test_bytes_counted_are_bytes_encoded(self, tmp_path: Path) -> None:
        """What the metrics say of communication is what passed, to the byte."""
        with Simulation(self.config(rounds=2), tmp_path) as simulation:
            engine = Tampering(Sequential(simulation.runtime), lambda _, outcome: outcome)
            simulation._engine = engine
            first, last = list(simulation)
            if simulation.method.pooled:
                engine.down = engine.up = 0
            copies = 0
            if simulation.method.sends_final_model:
                model = simulation.method.model(simulation.server, simulation.run)
                copies = simulation.data.clients * len(encode(dict(model)))
            sent = {
                key: first.metrics[key] + last.metrics[key] for key in ("bytes_down", "bytes_up")
            }
            assert sent["bytes_down"] == engine.down + copies
            assert sent["bytes_up"] == engine.up

    def test_bad_reports_are_refused(self, tmp_path: Path) -> None:
        """Garbage, NaN, wrong names and wrong shapes are refused by name; the round goes on."""
        for index, (what, spoil) in enumerate(_SPOILS.items()):
            folder = tmp_path / str(index)
            with Simulation(self.config(rounds=1), folder) as simulation:
                victim: list[int] = []

                def tamper(task: Task, outcome: Outcome, spoil: Any = spoil) -> Outcome:
                    if victim and victim != [task.client]:  # noqa: B023
                        return outcome
                    victim[:] = [task.client]  # noqa: B023
                    return replace(outcome, report=spoil(outcome.report))

                simulation._engine = Tampering(Sequential(simulation.runtime), tamper)
                (step,) = list(simulation)
                assert list(step.metrics["refused"]) == [str(victim[0])], what
                assert step.metrics["refused"][str(victim[0])], what
                for name, tensor in simulation.method.model(
                    simulation.server, simulation.run
                ).items():
                    if tensor.is_floating_point():
                        assert torch.isfinite(tensor).all(), name

    def test_predictions_are_distributions(self, tmp_path: Path) -> None:
        """The global model, as it is saved, predicts a class for every sample."""
        ended = run(self.config(), tmp_path)
        if not ended.config.build_method().has_global_model:
            with pytest.raises(RunError):
                ended.predictor()
            assert ended.summary["global_accuracy"] is None
            return
        predict = ended.predictor()
        with Simulation(None, tmp_path) as simulation:
            samples = simulation.data.raw_test(0, 20)
            logits = predict(samples)
        assert logits.shape == (20, 10)
        assert torch.isfinite(logits.exp()).all()
        assert 0 <= ended.summary["global_accuracy"] <= 1


def _copy(tensors: Tensors) -> Tensors:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def _local(
    method: AnyMethod, message: Message, client: Any, samples: Samples, at: At
) -> tuple[bytes, bytes, str]:
    """One E-step in a form that can be compared."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        report, state, info = method.local(message, client, samples, at)
    return encode_report(report), encode(dict(pack(state))), json.dumps(info)


def _timeless(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The metrics without what the clock said."""
    return [{key: value for key, value in line.items() if key != "seconds"} for line in metrics]


def _garbage(report: bytes) -> bytes:
    return b"\xff" * 8 + report[8:]


def _surplus(report: bytes) -> bytes:
    return encode({**decode(report), "surplus": torch.zeros(1)})


def _change_first(change: Callable[[Tensor], Tensor]) -> Callable[[bytes], bytes]:
    """Spoil the first tensor of a report; a report without any is spoiled by a surplus."""

    def spoil(report: bytes) -> bytes:
        message = decode(report)
        names = [name for name, item in message.items() if name != "/weight"]
        if not names:
            return _surplus(report)
        item = message[names[0]]
        message[names[0]] = change(item.dense() if isinstance(item, Masked) else item)
        return encode(message)

    return spoil


def _nan_weight(report: bytes) -> bytes:
    message = {name: item for name, item in decode(report).items() if name != "/weight"}
    return encode_report(Report(message, float("nan")))


_SPOILS: dict[str, Callable[[bytes], bytes]] = {
    "garbage": _garbage,
    "a surplus tensor": _surplus,
    "a NaN": _change_first(lambda t: torch.full_like(t, torch.nan, dtype=torch.float32)),
    "a wrong shape": _change_first(lambda t: torch.zeros(7, 7, 7, dtype=t.dtype)),
    "a wrong type": _change_first(lambda t: t.to(torch.float16)),
    "a NaN for a weight": _nan_weight,
}
