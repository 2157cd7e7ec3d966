"""The contract tests that every method goes through, yours too.

    from fedbayes.testing import MethodContract

    class TestMine(MethodContract):
        method = "my_package.my_module:Mine"
        parameters = {"strength": 0.5}

Run it with pytest. Each test says in its docstring what it demands of a method. The class variables
`data` and `task` choose other data and another likelihood.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from fedbayes.config.config import Config
from fedbayes.contracts import (
    AnyMethod,
    ChangeCoordinates,
    Federation,
    Info,
    Loss,
    Method,
    Models,
    Problem,
    Report,
    Reports,
    RoundContext,
    Solved,
    Sum,
    Total,
    Tree,
)
from fedbayes.contracts.changes import part_of, types_of
from fedbayes.core import seeds
from fedbayes.core.messages import Masked, Message, decode, decode_file, dense, dtype_of, encode
from fedbayes.core.tensors import Samples, Tensors, pack, unpack
from fedbayes.errors import RunError
from fedbayes.federation.client_runtime import ClientFailure, ClientResult, Evaluation, Task
from fedbayes.federation.engines import Engine
from fedbayes.federation.engines.sequential import Sequential
from fedbayes.federation.stages.checks import check_entries, decode_report, encode_report
from fedbayes.inference.problem import each, stack
from fedbayes.runs.simulation import Simulation
from fedbayes.workflows.running import resume, run


def assert_identical(left: Tensors, right: Tensors) -> None:
    """Both hold the same tensors, bit for bit."""
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype, name
        assert torch.equal(tensor, right[name]), name


class Tampering:
    """An engine that counts what passes and lets a test change the outcomes of another one."""

    def __init__(
        self, engine: Engine, tamper: Callable[[Task, ClientResult], ClientResult]
    ) -> None:
        self._engine = engine
        self._tamper = tamper
        self.down = 0
        self.up = 0

    def train(self, tasks: Iterable[Task]) -> Iterator[ClientResult | ClientFailure]:
        """Run the tasks and change their outcomes."""
        tasks = list(tasks)
        self.down += sum(len(task.message) for task in tasks)
        for task, outcome in zip(tasks, self._engine.train(tasks), strict=True):
            if isinstance(outcome, ClientFailure):
                yield outcome
                continue
            changed = self._tamper(task, outcome)
            self.up += len(changed.report)
            yield changed

    def evaluate(self, evaluations: Iterable[Evaluation]) -> Iterator[Tensors]:
        """Run the evaluations, unchanged, on the engine inside."""
        return self._engine.evaluate(evaluations)

    def close(self) -> None:
        """Close the engine inside."""
        self._engine.close()


class MethodContract:
    """What a method promises, as tests. Derive from it and name the method.

    Examples:
        >>> from fedbayes.testing import MethodContract
        >>> class TestMine(MethodContract):
        ...     method = "fedprox"
        ...     parameters = {"proximal": 0.1}
        >>> TestMine.data["name"]
        'digits'
    """

    method: ClassVar[str]
    """A built-in name, or `package.module:Class`."""
    parameters: ClassVar[dict[str, Any]] = {}
    """Parameters of the method."""
    data: ClassVar[dict[str, Any]] = {"name": "digits", "partition": "iid", "limit": 400}
    """The `[data]` table of the runs, besides the number of clients."""
    task: ClassVar[dict[str, Any]] = {}
    """The `[task]` table of the runs: a likelihood, and its settings."""
    settings: ClassVar[dict[str, Any]] = {}
    """Further settings of the runs, as keyword arguments of `Config.create`."""

    def config(self, **changes: Any) -> Config:
        """A small federation: 4 clients, 3 in a round, 2 rounds."""
        settings = {
            "rounds": 2,
            "cohort": 3,
            "data": {"clients": 4, **self.data},
            "task": dict(self.task),
            "model": {"hidden": [8]},
            "method": {"name": self.method, **self.parameters},
            "metrics": [],  # of predictions, in which they are alike
            **self.settings,
            **changes,
        }
        training = settings.setdefault("training", {})
        if "steps" not in training:  # what is promised does not depend on how long clients train
            settings["training"] = {"epochs": 1, **training}
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
                reports = Reports.of(method).reduction()
                expected = method.expected(message, simulation.run)
                reports.add(0, decode_report(results[0][0], expected))
                updates.append(
                    pack(method.update(server, reports, RoundContext(simulation.run, 2))[0])
                )
            assert_identical(updates[0], updates[1])
            assert_identical(before, pack(server))

    def test_changes_come_to_the_same_update(self, tmp_path: Path) -> None:
        """The sum of the reports' changes, put together again, updates the server as the reports
        themselves do; so bounds, robust rules and noise work on what the update is made of. For
        methods whose reports add.
        """
        with self.after_one_round(tmp_path) as simulation:
            method, run, server = simulation.method, simulation.run, simulation.server
            reports, total = Reports.of(method).reduction(), Total()
            way = ChangeCoordinates.of(method, server, run)
            for client in range(3):
                at = simulation.runtime.at(Task(client, 2, b"", None))
                message, samples = method.message(server, at), simulation.data.train(client)
                report, _, _ = method.local(message, method.join(at), samples, at)
                reports.add(client, report)
                changes = way.changes(report)
                assert all(t.dtype == torch.float64 for p in changes.values() for t in p.values())
                total.add(changes, report.weight)
                total.dtypes |= types_of(report)
            if not isinstance(reports, Sum):
                return
            direct = pack(method.update(server, reports, RoundContext(run, 2))[0])
            summed = way.resummed(total)
            assert summed.clients == reports.clients
            assert summed.weight == reports.weight
            by_way_of_changes = pack(method.update(server, summed, RoundContext(run, 2))[0])
            assert direct.keys() == by_way_of_changes.keys()
            for name, tensor in direct.items():
                torch.testing.assert_close(by_way_of_changes[name], tensor, rtol=1e-4, atol=1e-6)

    def test_reports_are_what_is_declared(self, tmp_path: Path) -> None:
        """Every part of a report is declared, and its masks, its origin, what clients track of it
        and what may become of its numbers are as declared (`fedbayes.contracts.Reports`). Reports
        have every declared part and mask in one of the first two rounds, but for optional ones.
        """
        with self.after_one_round(tmp_path) as simulation:
            method, run, server = simulation.method, simulation.run, simulation.server
            declared = Reports.of(method)
            at = simulation.runtime.at(Task(0, 2, b"", None))
            message, before = method.message(server, at), method.join(at)
            sample = simulation.data.train(0)
            report, after, _ = method.local(message, before, sample, at)
            expected = method.expected(message, run)
            parts = {n: part_of(n, dtype_of(i), run.network) for n, i in expected.items()}
            check_entries(report, expected, method, run.network)
            first = simulation.runtime.at(Task(0, 1, b"", None))
            broadcast = method.message(method.init(run), first)
            earlier, _, _ = method.local(broadcast, method.join(first), sample, first)
            way = ChangeCoordinates.of(method, server, run)
            assert not (never := _never(declared, (earlier, report), way)), never

            moved, kept = _moved(before, after), dict[str, list[str]]()
            for name, item in dense(report.tensors).items():
                part = declared.part(parts[name])
                if not (found := [n for n, t in moved.items() if _same(t, item)]):
                    continue
                assert (part.tracked, part.origin) == (True, "zero"), (
                    f"clients keep the sum of what they report as {name!r} in {found}: declare "
                    f"Part(origin='zero', tracked=True) for {parts[name]!r}"
                )
                kept.setdefault(parts[name], []).extend(found)
            for part_name, names in kept.items():
                if declared.part(part_name).retract is None:
                    continue
                said = {n: t for n, t in dense(report.tensors).items() if parts[n] == part_name}
                left = _moved(before, declared.retracted(after, said))
                for name in names:
                    assert not torch.allclose(left[name], moved[name]), (
                        f"{name!r} is not restored after a lost report"
                    )

            if declared.refusals["compression"]:
                return
            rng, tensors = torch.Generator().manual_seed(0), dict[str, Tensor | Masked]()
            for name, sent in report.tensors.items():
                tensors[name] = sent
                if declared.part(parts[name]).exact or not dtype_of(sent).is_floating_point:
                    continue
                values = sent.values if isinstance(sent, Masked) else sent
                start = dense({name: message[name]})[name] if name in message else None
                change = values if start is None or start.shape != values.shape else values - start
                error = change.abs().max() * (torch.rand(values.shape, generator=rng) - 0.5) / 64
                tensors[name] = (
                    replace(sent, values=values + error)
                    if isinstance(sent, Masked)
                    else values + error
                )
            coarsened = Report(tensors, report.weight)
            method.accept(server, coarsened, run)
            reports = declared.reduction()
            reports.add(0, coarsened)
            for name, tensor in pack(
                method.update(server, reports, RoundContext(run, 2))[0]
            ).items():
                assert not tensor.is_floating_point() or tensor.isfinite().all(), name

    def test_the_loss_is_pure(self, tmp_path: Path) -> None:
        """The loss has the same value at the same arguments, whatever was asked of it between, and
        leaves them alone, but for buffers that a network moves in training. It captures no tensor:
        what is no parameter, it finds in the problem's `given` and `noise`.
        """
        with self.after_one_round(tmp_path) as simulation:
            run, method = simulation.run, simulation.method
            loss = method.loss(run)
            for kind in (loss, method.validation(run)):
                assert not (found := _captured(kind, run)), f"the loss captures {found}"
            one, other = (_Stated.of(simulation, client) for client in range(2))
            first = _value(loss, one)
            kept = _copied(one.arguments)
            for stated in (other, one):
                _value(loss, stated)
            assert torch.equal(first, _value(loss, one)), "the loss depends on what came before"
            assert torch.equal(first, _value(method.loss(run), one)), "a repeated loss differs"
            moved = loss(*one.arguments)
            assert moved.shape == (), "the loss is not a scalar"
            for place, (before, after) in _pairs(kept, one.arguments):
                buffer = place.rpartition("/")[2] in run.network.buffers
                assert buffer or torch.equal(before, after), f"the loss changed {place}"

    def test_losses_of_clients_can_be_mapped(self, tmp_path: Path) -> None:
        """`torch.func.vmap` of the loss, and of its gradient, over the stacked problems of two
        clients gives what single calls give, within 1e-5.

        A method that overrides `local` is excused: its clients are solved one by one.
        """
        with self.after_one_round(tmp_path) as simulation:
            method, run = simulation.method, simulation.run
            if type(method).local is not Method.local:
                return
            loss = method.loss(run)
            both = [_Stated.of(simulation, client) for client in range(2)]

            def energy(trained: Tensors, fixed: Tensors, *rest: Any) -> Tensor:
                value: Tensor = loss({**trained, **fixed}, *rest)
                return value

            split = [_split(stated.arguments[0], run.network.buffers) for stated in both]
            arguments = [(*s, *b.arguments[1:]) for s, b in zip(split, both, strict=True)]
            stacked = stack([_copied(a) for a in arguments])
            mapped = torch.func.vmap(torch.func.grad_and_value(energy), randomness="different")
            with seeds.global_rng(0, "layers", device=run.network.device):
                mapped(*_copied(stacked))
                _without_dropout(run.network.module)
                values = torch.func.vmap(energy, randomness="different")(*_copied(stacked))
                gradients, again = mapped(*_copied(stacked))
            torch.testing.assert_close(again, values, rtol=1e-5, atol=1e-5)
            for row, own in enumerate(arguments):
                expected, value = torch.func.grad_and_value(energy)(*_copied(own))
                torch.testing.assert_close(values[row], value, rtol=1e-5, atol=1e-5)
                for name, gradient in expected.items():
                    torch.testing.assert_close(gradients[name][row], gradient, rtol=1e-4, atol=1e-5)

    def test_info_is_only_told(self, tmp_path: Path) -> None:
        """No report and no state depends on what a solution says of itself for the user."""
        with self.after_one_round(tmp_path) as simulation:
            method, server = simulation.method, simulation.server
            at = simulation.runtime.at(Task(0, 2, b"", None))
            message, client = method.message(server, at), method.join(at)
            samples = simulation.data.train(0)
            honest = _local(method, message, client, samples, at)
            misled = _local(method, message, client, samples, _Misled(**vars(at)))
            assert honest[:2] == misled[:2], "a report or a state depends on Info"

    def test_states_survive_storage(self, tmp_path: Path) -> None:
        """Server and client states are the same after a checkpoint as before it."""
        with self.after_one_round(tmp_path) as simulation:
            kinds = [(simulation.method.server_state, pack(simulation.server))]
            kinds += [
                (simulation.method.client_state, decode_file(simulation.states[client]))
                for client in simulation.states
            ]
            for kind, packed in kinds:
                stored = decode_file(encode(dict(packed)))
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
            if simulation.method.reports.pooled:
                engine.down = engine.up = 0
            copies = 0
            if simulation.method.models is Models.COPIED:
                model = simulation.method.model(simulation.server, simulation.run)
                copies = simulation.data.clients * len(encode(dict(model)))
            sent = {
                key: first.metrics[key] + last.metrics[key] for key in ("bytes_down", "bytes_up")
            }
            assert sent["bytes_down"] == engine.down + copies
            assert sent["bytes_up"] == engine.up

    def test_bad_reports_are_refused(self, tmp_path: Path) -> None:
        """Garbage, NaN, wrong names and wrong shapes are rejected by name; the round goes on."""
        for index, (what, spoil) in enumerate(_SPOILS.items()):
            folder = tmp_path / str(index)
            with Simulation(self.config(rounds=1), folder) as simulation:
                victim: list[int] = []

                def tamper(task: Task, outcome: ClientResult, spoil: Any = spoil) -> ClientResult:
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
        """The global model, as it is saved, predicts every sample: log-probabilities of classes,
        or means in the unit of the target.
        """
        ended = run(self.config(), tmp_path)
        if not ended.config.build_method().models.has_global:
            with pytest.raises(RunError):
                ended.predictor()
            assert not ended.summary["metrics"].get("global")
            return
        predict = ended.predictor()
        with Simulation(None, tmp_path) as simulation:
            samples, likelihood = simulation.data.raw_test(0, 20), simulation.likelihood
        predicted, target = predict(samples), likelihood.target
        assert torch.isfinite(predicted).all()
        if target.classes:
            assert predicted.shape == (20, target.classes)
            torch.testing.assert_close(predicted.exp().sum(dim=1), torch.ones(20))
        else:
            assert predicted.shape == (20, target.predicted)
        metrics = ended.summary["metrics"]["global"]
        assert math.isfinite(metrics[likelihood.metric])
        assert math.isfinite(metrics["nll"])


class _Nonsense(Solved):
    """A solution whose words for the user are wrong."""

    @property
    def info(self) -> Info:
        return {"loss": -1e9, "steps": -17.0}


class _Misled(RoundContext):
    """A place whose solutions tell nonsense."""

    def solve(
        self, problem: Problem, loss: Loss, samples: Samples, *, validation: Loss | None = None
    ) -> Solved:
        solved = super().solve(problem, loss, samples, validation=validation)
        return _Nonsense(**vars(solved))


@dataclass(frozen=True)
class _Stated:
    """A client's problem, and the arguments of the first call of its loss."""

    arguments: tuple[Tensors, Samples, Tree, Tree]

    @classmethod
    def of(cls, simulation: Simulation, client: int, rows: int = 8) -> "_Stated":
        method, at = simulation.method, simulation.runtime.at(Task(client, 2, b"", None))
        samples = simulation.data.train(client)
        message = method.message(simulation.server, at)
        problem = method.problem(message, method.join(at), samples, at)
        batch = Samples(samples.x[:rows], samples.y[:rows])
        noise = problem.noise
        drawn = noise.draw(at.rng(noise.purpose), batch) if noise else {}
        return cls((problem.start, batch, problem.given, drawn))


def _value(loss: Loss, stated: _Stated) -> Tensor:
    """The loss at copies of its arguments, with the same random numbers of layers every time."""
    with torch.no_grad(), seeds.global_rng(0, "layers"):
        return loss(*_copied(stated.arguments))


def _without_dropout(module: nn.Module) -> None:
    """Mapped calls draw other numbers than single ones; so none are drawn."""
    for layer in module.modules():
        if isinstance(layer, nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.Dropout3d):
            layer.p = 0.0


def _captured(loss: Loss, run: Federation) -> list[str]:
    """The tensors that a loss reaches without being given them, but for those of the run."""
    seen: set[int] = set()
    for _ in _reached(run, seen):
        pass  # what the network and the likelihood hold is no capture
    return [f"a tensor of shape {tuple(tensor.shape)}" for tensor in _reached(loss, seen)]


def _reached(thing: Any, seen: set[int]) -> Iterator[Tensor]:
    """Tensors that a function's closure, defaults or arguments hold, or an object."""
    if id(thing) in seen or isinstance(thing, type | ModuleType):
        return
    seen.add(id(thing))
    inner: list[Any] = []
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, Mapping):
        inner = [*thing.values()]
    elif isinstance(thing, list | tuple | set | frozenset):
        inner = [*thing]
    elif isinstance(thing, partial):
        inner = [thing.func, thing.args, thing.keywords]
    elif isinstance(thing, MethodType):
        inner = [thing.__func__, thing.__self__]
    elif isinstance(thing, FunctionType):
        cells = [cell.cell_contents for cell in thing.__closure__ or ()]
        inner = [cells, thing.__defaults__, thing.__kwdefaults__, vars(thing)]
    elif hasattr(thing, "__dict__"):
        inner = [vars(thing)]
    for item in inner:
        yield from _reached(item, seen)


def _copied(tree: Any) -> Any:
    """A tree of tensors with tensors of its own."""
    return each(lambda tensor: tensor.clone(), tree)


def _pairs(one: Any, two: Any, place: str = "") -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
    """The tensors at each place of two trees of one form."""
    if isinstance(one, Tensor):
        yield place, (one, two)
        return
    items = one.items() if isinstance(one, dict) else enumerate(one)
    for name, item in items:
        yield from _pairs(item, two[name], f"{place}/{name}")


def _split(parameters: Tensors, buffers: frozenset[str]) -> tuple[Tensors, Tensors]:
    """What is trained, and buffers."""
    trained = {name: t for name, t in parameters.items() if name not in buffers}
    return trained, {name: t for name, t in parameters.items() if name in buffers}


def _never(declared: Reports, reports: Iterable[Report], way: ChangeCoordinates) -> str:
    """Which declared part no report has, or leaves out entries of; empty if there is none."""
    found, sparse = set[str](), set[str]()
    for report in reports:
        found |= way.changes(report).keys()
        for name, item in report.tensors.items():
            kind = part_of(name, dtype_of(item), way.network)
            found |= {kind, name.partition("/")[0]}  # integers are counters under any name
            sparse |= {kind} if isinstance(item, Masked) else set()
    for name, part in declared.parts.items():
        if part.optional or (name in found and (part.mask == "none" or name in sparse)):
            continue
        what = f"leaves out entries of {name!r}" if name in found else f"has the part {name!r}"
        return f"no report {what}, as `reports` declares. Correct it, or add optional=True"
    return ""


def _moved(before: Any, after: Any) -> Tensors:
    """What the tensors of a private state moved by, float64; from zero where there was none."""
    start = pack(before)
    return {
        n: t.double() - start[n].double() if n in start else t.double()
        for n, t in pack(after).items()
    }


def _same(moved: Tensor, item: Tensor) -> bool:
    """Whether a state moved by the very numbers of a report's tensor, which are not all zero."""
    return (
        moved.shape == item.shape
        and moved.numel() > 1
        and bool(item.any())
        and torch.allclose(moved, item.to(moved), rtol=1e-5, atol=1e-7)
    )


def _copy(tensors: Tensors) -> Tensors:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def _local(
    method: AnyMethod, message: Message, client: Any, samples: Samples, at: RoundContext
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
