"""Messages in fewer bytes: what is sent of a broadcast and of a report, and what arrives.

A client compresses its change from the broadcast that it received. The server adds the change that
arrives to its own copy. So nothing that the broadcast lost is lost for good, and later stages get
an ordinary report. Methods see none of this. The client keeps the part of its change that it did
not send in its private state, together with the method's (`client_runtime.write_state`).
"""

from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from fedbayes.contracts import AnyMethod, Federation, Report, Reports, RoundContext
from fedbayes.contracts.changes import part_of, reference, start_of
from fedbayes.core.coding import Bf16, Code, Int8, RandomK, TopK
from fedbayes.core.messages import Masked, Message, dtype_of, payload, shape_of
from fedbayes.core.tensors import Tensors
from fedbayes.errors import MessageError
from fedbayes.federation.settings import Compression
from fedbayes.federation.stages.checks import check_form, decode_report, encode_report
from fedbayes.federation.stages.coded_forms import (
    PLACES,
    cast,
    coded_received,
    coded_tensor,
    entries_of,
    filled,
    masks_told,
    same_entries,
    spread,
)

FEWEST = 64
"""Entries of a tensor that is compressed; one of fewer goes as it is."""
STEPS = "/steps"
"""Name of the lengths of steps, of all tensors in the order of their names."""


@dataclass(frozen=True)
class Compressor:
    """How messages of a run are sent."""

    settings: Compression
    method: AnyMethod
    run: Federation

    @property
    def code(self) -> Code | None:
        """How changes are written; None where whole reports are sent as they are."""
        share, scaled = self.settings.share, not self.settings.error_feedback
        codes: dict[str, Code] = {
            "bf16": Bf16(),
            "int8": Int8(),
            "top-k": TopK(share),
            "random-k": RandomK(share, scaled),
        }
        return codes.get(self.settings.up)

    def parts(self, expected: Message) -> dict[str, str]:
        """Of each tensor of a proper report, by name, the part that it belongs to."""
        network = self.run.network
        return {n: part_of(n, dtype_of(p), network) for n, p in expected.items()}

    def shrinks(self, expected: Message) -> list[str]:
        """Names of the tensors of a report that are compressed: of many numbers in float32, and of
        no part that must be exact. Of a broadcast those of the same names.

        Args:
            expected: the pattern of a proper report.
        """
        declared, parts = Reports.of(self.method), self.parts(expected)
        return sorted(
            name
            for name, pattern in expected.items()
            if dtype_of(pattern) == torch.float32
            and prod(shape_of(pattern)) >= FEWEST
            and not declared.part(parts[name]).exact
        )

    def sent(self, message: Message) -> Message:
        """What is sent of a broadcast."""
        if self.settings.down == "none":
            return message
        names = set(self.shrinks(self.method.expected(message, self.run)))
        return {
            n: cast(item, torch.bfloat16) if n in names else item for n, item in message.items()
        }

    def received(self, message: Message) -> Message:
        """The broadcast as a client works with it: what was sent, in the types that it had."""
        if self.settings.down == "none":
            return message
        return {
            name: cast(item, torch.float32) if dtype_of(item) == torch.bfloat16 else item
            for name, item in message.items()
        }

    def codec(self, message: Message, at: RoundContext) -> "ReportCodec":
        """The way of a client's report.

        Args:
            message: the broadcast as the server has it, or, for a client, as it was received.
            at: round and client.
        """
        expected = self.method.expected(message, self.run)
        if not self.settings.active:
            return ReportCodec(self, expected, (), {}, {}, at)
        own = reference(self.method, message, self.run)
        received = own
        if self.settings.down != "none":
            received = reference(self.method, self.received(self.sent(message)), self.run)
        return ReportCodec(self, expected, tuple(self.shrinks(expected)), own, received, at)


@dataclass(frozen=True)
class Written:
    """A report on its way."""

    data: bytes
    memory: Tensors
    """What the client could not say so far, by name."""
    missed: Tensors
    """What it said less what arrives, of what the method's own state remembers, by name."""


@dataclass(frozen=True)
class ReportCodec:
    """The way of one client's report."""

    link: Compressor
    expected: Message
    """The pattern of a proper report."""
    names: tuple[str, ...]
    """Tensors that are compressed."""
    own: Tensors
    """What reports are measured from, as this end has it."""
    received: Tensors
    """The same as the client has it."""
    at: RoundContext

    def write(self, report: Report, memory: Tensors) -> Written:
        """A client's report as bytes.

        Args:
            report: as the method has it.
            memory: what the client could not say before, by name.
        """
        code, link = self.link.code, self.link
        if code is None:
            return Written(encode_report(report), memory, {})
        rng = self.at.rng("compression")
        sent: Message = {n: item for n, item in report.tensors.items() if n not in self.names}
        kept, missed, steps = dict(memory), Tensors(), list[Tensor]()
        declared, parts = Reports.of(link.method), link.parts(self.expected)
        for name in self.names:
            item = report.tensors[name].to("cpu")
            change = entries_of(item) - self._start(name, item, self.received)
            remembered = declared.part(parts[name]).tracked
            if not remembered and name in memory:
                change = change + same_entries(item, memory[name])
            coded, arrived = code.write(change, rng)
            if remembered:
                missed[name] = spread(item, change - arrived)
            elif link.settings.remembers:
                before = memory.get(name)
                before = torch.zeros(shape_of(item)) if before is None else before
                kept[name] = spread(item, change - arrived, before)
            sent |= coded_tensor(name, item, coded, code)
            if coded.step is not None:
                steps.append(coded.step)
        if steps:
            sent[STEPS] = torch.stack(steps)
        return Written(encode_report(Report(sent, report.weight)), kept, missed)

    def read(self, data: bytes) -> tuple[Report, int]:
        """A report as the method's server takes it, and how many bytes it saved.

        Raises:
            MessageError: the bytes are no proper report. The text says why.
        """
        saved = 0

        def expanded(sent: Message) -> Message:
            nonlocal saved
            found = self._expanded(sent)
            saved = payload(found) - payload(sent)
            return found

        return decode_report(data, self.expected, expanded), saved

    def _expanded(self, sent: Message) -> Message:
        """The tensors of a report of those that were sent."""
        code = self.link.code
        found = {n: item for n, item in sent.items() if not n.startswith("/")}
        if code is None:
            return found | {n: self._moved(n, sent[n]) for n in self.names if n in sent}
        rng, steps, told = self.at.rng("compression"), self._steps(sent, code), masks_told(sent)
        used = {STEPS} if code.steps else set[str]()
        for number, name in enumerate(self.names):
            if name not in sent:
                continue  # which is said by who looks at names
            shape = shape_of(self.expected[name])
            form, coded = coded_received(name, sent, shape, code, told.get(name, {}))
            if code.steps:
                coded = replace(coded, step=steps[number])
            try:
                change = code.read(coded, len(entries_of(form)), rng)
            except MessageError as error:
                raise MessageError(f"of {name!r}, {error}") from None
            found[name] = filled(form, change + self._start(name, form, self.own))
            used |= {PLACES + name} if code.places else set()
            used |= set() if code.whole else set(told.get(name, {}).values())
        return found | {n: item for n, item in sent.items() if n.startswith("/") and n not in used}

    def _steps(self, sent: Message, code: Code) -> Tensor:
        """The lengths of steps, float32 [names]."""
        steps = sent.get(STEPS)
        if not (code.steps and self.names):
            return torch.zeros(0)
        if not isinstance(steps, Tensor):
            raise MessageError("the lengths of its steps are missing")
        check_form(STEPS, steps, (len(self.names),), torch.float32)
        return steps

    def _moved(self, name: str, item: Tensor | Masked) -> Tensor | Masked:
        """A tensor that was measured from what the client has, measured from what this end has."""
        check_form(name, item, shape_of(self.expected[name]), torch.float32)
        change = entries_of(item).double() - self._start(name, item, self.received)
        return filled(item, (change + self._start(name, item, self.own)).float())

    def sent_by(self, report: Report) -> Report:
        """A report as the server takes it, as the client has it that sends it: measured from what
        the client received.
        """
        tensors = dict(report.tensors)
        for name in self.names:
            item = tensors[name]
            change = entries_of(item).double() - self._start(name, item, self.own)
            entries = change + self._start(name, item, self.received)
            tensors[name] = filled(item, entries.to(dtype_of(item)))
        return replace(report, tensors=tensors)

    def _start(self, name: str, item: Tensor | Masked, whence: Tensors) -> Tensor:
        """What the entries of a tensor are measured from, [entries] or a zero."""
        start = start_of(name, torch.Size(shape_of(item)), whence)
        return torch.zeros(()) if start is None else same_entries(item, start.cpu())
