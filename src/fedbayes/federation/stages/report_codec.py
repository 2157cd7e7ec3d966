"""Messages in fewer bytes: what is sent of a broadcast and of a report, and what arrives.

A client compresses its change from the broadcast that it received. The server adds the change that
arrives to its own copy. So nothing that the broadcast lost is lost for good, and later stages get
an ordinary report. Methods see none of this. The client keeps the part of its change that it did
not send in its private state, together with the method's (`client_runtime.write_state`).
"""

from dataclasses import dataclass, replace
from math import prod

import numpy as np
import torch
from torch import Tensor

from fedbayes.contracts import AnyMethod, Federation, Report, Reports, RoundContext
from fedbayes.contracts.changes import part_of, reference, start_of
from fedbayes.core.coding import Bf16, Code, Coded, Int8, RandomK, TopK
from fedbayes.core.messages import Masked, Message, dtype_of, payload, shape_of
from fedbayes.core.tensors import Tensors
from fedbayes.errors import MessageError
from fedbayes.federation.settings import Compression
from fedbayes.federation.stages.checks import check_form, decode_report, encode_report

FEWEST = 64
"""Entries of a tensor that is compressed; one of fewer goes as it is."""
_STEPS = "/steps"
"""Name of the lengths of steps, of all tensors in the order of their names."""
_PLACES, _MASK = "/places/", "/mask:"
"""What is before the name of a tensor under which it is told which entries are sent."""


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
        """Of each tensor of a report, by name, the part that it belongs to.

        Args:
            expected: the pattern of a proper report.
        """
        network = self.run.network
        trained = network.split()[0]
        return {n: part_of(n, dtype_of(p), network, trained) for n, p in expected.items()}

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

    @property
    def repeated(self) -> bool:
        """Whether clients track all that is compressed of reports, so that what does not arrive is
        in the next change without error feedback.
        """
        declared, parts = Reports.of(self.method), self.parts(self._first)
        return all(declared.part(parts[name]).tracked for name in self.compressed)

    @property
    def compressed(self) -> list[str]:
        """Names of the tensors of a report of the first round that are compressed."""
        return self.shrinks(self._first)

    @property
    def _first(self) -> Message:
        """The pattern of a proper report of the first round."""
        message = self.method.message(self.method.init(self.run), RoundContext(self.run, 1, 0))
        return self.method.expected(message, self.run)

    def sent(self, message: Message) -> Message:
        """What is sent of a broadcast."""
        if self.settings.down == "none":
            return message
        names = set(self.shrinks(self.method.expected(message, self.run)))
        return {
            n: _cast(item, torch.bfloat16) if n in names else item for n, item in message.items()
        }

    def received(self, message: Message) -> Message:
        """The broadcast as a client works with it: what was sent, in the types that it had."""
        if self.settings.down == "none":
            return message
        return {
            name: _cast(item, torch.float32) if dtype_of(item) == torch.bfloat16 else item
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
            change = _entries(item) - self._start(name, item, self.received)
            remembered = declared.part(parts[name]).tracked
            if not remembered and name in memory:
                change = change + _of(item, memory[name])
            coded, arrived = code.write(change, rng)
            if remembered:
                missed[name] = _spread(item, change - arrived)
            elif link.settings.remembers:
                before = memory.get(name)
                before = torch.zeros(shape_of(item)) if before is None else before
                kept[name] = _spread(item, change - arrived, before)
            sent |= _sent(name, item, coded, code)
            if coded.step is not None:
                steps.append(coded.step)
        if steps:
            sent[_STEPS] = torch.stack(steps)
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
        rng, steps, told = self.at.rng("compression"), self._steps(sent, code), _told(sent)
        used = {_STEPS} if code.steps else set[str]()
        for number, name in enumerate(self.names):
            if name not in sent:
                continue  # which is said by who looks at names
            shape = shape_of(self.expected[name])
            form, coded = _received(name, sent, shape, code, told.get(name, {}))
            if code.steps:
                coded = replace(coded, step=steps[number])
            try:
                change = code.read(coded, len(_entries(form)), rng)
            except MessageError as error:
                raise MessageError(f"of {name!r}, {error}") from None
            found[name] = _filled(form, change + self._start(name, form, self.own))
            used |= {_PLACES + name} if code.places else set()
            used |= set() if code.whole else set(told.get(name, {}).values())
        return found | {n: item for n, item in sent.items() if n.startswith("/") and n not in used}

    def _steps(self, sent: Message, code: Code) -> Tensor:
        """The lengths of steps, float32 [names]."""
        steps = sent.get(_STEPS)
        if not (code.steps and self.names):
            return torch.zeros(0)
        if not isinstance(steps, Tensor):
            raise MessageError("the lengths of its steps are missing")
        check_form(_STEPS, steps, (len(self.names),), torch.float32)
        return steps

    def _moved(self, name: str, item: Tensor | Masked) -> Tensor | Masked:
        """A tensor that was measured from what the client has, measured from what this end has."""
        check_form(name, item, shape_of(self.expected[name]), torch.float32)
        change = _entries(item).double() - self._start(name, item, self.received)
        return _filled(item, (change + self._start(name, item, self.own)).float())

    def sent_by(self, report: Report) -> Report:
        """A report as the server takes it, as the client has it that sends it: measured from what
        the client received.
        """
        tensors = dict(report.tensors)
        for name in self.names:
            item = tensors[name]
            change = _entries(item).double() - self._start(name, item, self.own)
            entries = change + self._start(name, item, self.received)
            tensors[name] = _filled(item, entries.to(dtype_of(item)))
        return replace(report, tensors=tensors)

    def _start(self, name: str, item: Tensor | Masked, whence: Tensors) -> Tensor:
        """What the entries of a tensor are measured from, [entries] or a zero."""
        start = start_of(name, torch.Size(shape_of(item)), whence)
        return torch.zeros(()) if start is None else _of(item, start.cpu())


def _cast(item: Tensor | Masked, dtype: torch.dtype) -> Tensor | Masked:
    if isinstance(item, Masked):
        return replace(item, values=item.values.to(dtype))
    return item.to(dtype)


def _entries(item: Tensor | Masked) -> Tensor:
    """The entries that a tensor holds, in row-major order, [entries]."""
    return item.values if isinstance(item, Masked) else item.reshape(-1)


def _of(item: Tensor | Masked, whole: Tensor) -> Tensor:
    """The entries of another tensor that this one holds, [entries]."""
    return _entries(item.like(whole) if isinstance(item, Masked) else whole)


def _filled(item: Tensor | Masked, entries: Tensor) -> Tensor | Masked:
    """A tensor of the same form with other entries."""
    if isinstance(item, Masked):
        return replace(item, values=entries)
    return entries.reshape(item.shape)


def _spread(item: Tensor | Masked, entries: Tensor, before: Tensor | None = None) -> Tensor:
    """A dense tensor with these entries, and as before, or zero, where `item` holds none."""
    if not isinstance(item, Masked):
        return entries.reshape(item.shape)
    whole = torch.zeros(item.shape) if before is None else before.clone()
    whole[item.mask()] = entries
    return whole


def _sent(name: str, item: Tensor | Masked, coded: Coded, code: Code) -> Message:
    """What is sent of a tensor."""
    if code.whole:
        return {name: _filled(item, coded.values)}
    sent: Message = {name: coded.values}
    if coded.places is not None:
        sent[_PLACES + name] = coded.places
    if isinstance(item, Masked):
        for axes, mask in item.masks.items():
            bits = torch.from_numpy(np.packbits(mask.cpu().numpy().ravel()))
            sent[f"{_MASK}{','.join(map(str, axes))}/{name}"] = bits
    return sent


def _told(sent: Message) -> dict[str, dict[str, str]]:
    """Of each tensor, by axes, under which name the mask over them is sent."""
    found: dict[str, dict[str, str]] = {}
    for key in sent:
        if key.startswith(_MASK):
            axes, _, name = key.removeprefix(_MASK).partition("/")
            found.setdefault(name, {})[axes] = key
    return found


def _received(
    name: str, sent: Message, shape: tuple[int, ...], code: Code, told: dict[str, str]
) -> tuple[Tensor | Masked, Coded]:
    """A tensor of the form that came, whose entries do not count, and its numbers as they came."""
    item = sent[name]
    if code.whole:
        check_form(name, item, shape, code.dtype)
        return item, Coded(_entries(item))
    form = _masked(name, shape, {axes: sent[key] for axes, key in told.items()})
    check_form(name, item, (code.sent(len(_entries(form))),), code.dtype)
    if isinstance(item, Masked):
        raise MessageError(f"{name!r} is sparse, and so are its values")
    if not code.places:
        return form, Coded(item)
    places = sent.get(_PLACES + name)
    if not isinstance(places, Tensor) or places.dtype != torch.uint8 or places.ndim != 1:
        raise MessageError(f"the positions of {name!r} are missing")
    return form, Coded(item, places=places)


def _masked(name: str, shape: tuple[int, ...], told: Message) -> Tensor | Masked:
    """A tensor of zeros of this shape, which holds what masks keep.

    Args:
        name: of the tensor, for errors.
        shape: of the dense tensor.
        told: packed masks, as a stranger sent them, by axes in words.
    """
    free, masks = set(range(len(shape))), dict[tuple[int, ...], Tensor]()
    for words, bits in told.items():
        axes = tuple(axis for axis in range(len(shape)) if str(axis) in words.split(","))
        count = prod(shape[axis] for axis in axes)
        if (
            words != ",".join(map(str, axes))
            or not free.issuperset(axes)
            or not isinstance(bits, Tensor)
            or bits.dtype != torch.uint8
            or tuple(bits.shape) != (-(-count // 8),)
        ):
            raise MessageError(f"a mask of {name!r} does not fit its shape")
        free -= set(axes)
        unpacked = np.unpackbits(bits.numpy(), count=count)
        masks[axes] = torch.from_numpy(unpacked.view(np.bool_)).reshape([shape[a] for a in axes])
    if not masks:
        return torch.zeros(shape)
    alive = prod(int(mask.sum()) for mask in masks.values()) * prod(shape[axis] for axis in free)
    return Masked(torch.zeros(alive), shape, masks)
