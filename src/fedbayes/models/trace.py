"""Which entries of which tensors belong to the same unit, traced through a network.

`torch.export` gives the operations of one forward pass. Every axis of every parameter begins
with an *atom* for each of its entries, and the trace carries atoms along the axes of all that is
computed: a layer hands on those of its rows, an addition makes the atoms of both sides the same,
flattening repeats them, the split of attention into heads puts them on two axes at once. Entries
whose atoms are the same in the end belong to one unit: they can only be permuted, zeroed or left
out together. Heads are blocks: where a product sums over one axis of two, the atoms along it
become one.

What no rule here understands makes the atoms that flow into it *untouchable*, with a reason, so
that a rule that is missing costs units and never answers. A tensor that modules share has one name
everywhere, its first, as `named_parameters` has it; only a `state_dict` has the others too.

Four more facts are noted of atoms:

- a unit *leaves a constant* if its reader sees something else than zero once all that it owns is
  zero (behind a sigmoid, say);
- units are *mixed* by layer normalization or an average over them: they can be permuted and
  zeroed, but their number counts;
- *cells*: units can only be exchanged with those of the same cell, as a group normalization has
  its groups. So can units of several entries that are joined to one another in other ways, as
  those of a stream to which it is added shuffled;
- the *outputs* of the network.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

Atoms = npt.NDArray[np.int64]
"""Atoms by number; a negative number is a constant that is the same at all its entries."""

LARGEST = 1_000_000
"""Entries of a field beyond which flattening is not followed."""


@dataclass(frozen=True)
class Field:
    """The atoms along some axes of a value."""

    axes: tuple[int, ...]
    atoms: Atoms
    """With the sizes of these axes."""
    zero: bool
    """Whether the value is zero at a unit of which all that it owns is zero."""
    source: tuple[str, int] | None = None
    """The parameter and its axis, if the value is a view of one."""


Named = tuple[frozenset[int], Field, tuple[int, ...], int]
"""A field of an operand: the letters of a product that it is on, itself, the letters of its axes,
and which operand it is of."""


@dataclass(frozen=True)
class Flow:
    """A value of the forward pass; axes that no field has are the same for every unit."""

    shape: tuple[int, ...]
    fields: tuple[Field, ...] = ()

    def at(self, axis: int) -> Field | None:
        """The field of an axis."""
        axis %= max(len(self.shape), 1)
        return next((f for f in self.fields if axis in f.axes), None)


@dataclass
class Trace:
    """What the forward pass says of the atoms; see the module."""

    axes: dict[tuple[str, int], Atoms] = field(default_factory=dict)
    """Of every parameter and buffer, the atoms along every axis."""
    order: dict[str, int] = field(default_factory=dict)
    """Parameters in the order in which they are used, inputs to outputs."""
    readers: set[tuple[str, int]] = field(default_factory=set)
    """Axes of parameters that a layer sums over."""
    makers: set[tuple[str, int]] = field(default_factory=set)
    """Axes of parameters that the result of an operation has as well."""
    untouchable: list[tuple[Atoms, str]] = field(default_factory=list)
    """Atoms that must stay, and why; without a reason where nobody would ask."""
    constant: list[Atoms] = field(default_factory=list)
    mixed: list[tuple[Atoms, str]] = field(default_factory=list)
    outputs: list[Atoms] = field(default_factory=list)
    cells: list[tuple[Atoms, npt.NDArray[np.int64]]] = field(default_factory=list)
    """Atoms, and numbers that differ between cells."""
    joined: list[tuple[Atoms, Atoms]] = field(default_factory=list)
    """Of every time that atoms were made the same: these and those, entry by entry."""
    group_norms: list[tuple[Atoms, str]] = field(default_factory=list)
    """Atoms that a group normalization counts, and its module."""
    across: dict[str, list[Atoms]] = field(default_factory=dict)
    """Of weights, the atoms along other axes of what a layer makes with them than its channels."""
    module: str = ""
    """Of the operation that is being traced."""
    _parents: list[int] = field(default_factory=list)
    _pairs: dict[frozenset[int], int] = field(default_factory=dict)
    """Constants that two others made together."""
    _constants: int = 0

    def fresh(self, count: int) -> Atoms:
        """New atoms."""
        start = len(self._parents)
        self._parents.extend(range(start, start + count))
        return np.arange(start, start + count)

    def find(self, atom: int) -> int:
        """The atom that stands for all that are the same."""
        parents = self._parents
        while parents[atom] != atom:
            parents[atom] = parents[parents[atom]]
            atom = parents[atom]
        return atom

    def roots(self, atoms: Atoms) -> Atoms:
        """`find` for every entry; constants stay."""
        flat = [self.find(a) if a >= 0 else a for a in atoms.ravel().tolist()]
        return np.array(flat, dtype=np.int64).reshape(atoms.shape)

    def same(self, one: Atoms, two: Atoms) -> Atoms:
        """Make atoms the same, entry by entry; a constant takes the other's place."""
        result, padded = one.copy(), np.zeros_like(one)
        differing = np.flatnonzero(one.ravel() != two.ravel())
        self.joined.append((one.ravel()[differing], two.ravel()[differing]))
        for at in differing.tolist():
            a, b = int(one.flat[at]), int(two.flat[at])
            if a >= 0 and b >= 0:
                self._parents[self.find(b)] = self.find(a)
            elif a < 0 and b < 0:
                pair = frozenset((a, b))
                if pair not in self._pairs:
                    self._pairs[pair] = self.pad()
                result.flat[at] = self._pairs[pair]
            else:
                result.flat[at], padded.flat[at] = max(a, b), min(a, b)
        if padded.any():
            self.cells.append((result, padded))
        return result

    def pad(self) -> int:
        """The number of a new constant."""
        self._constants -= 1
        return self._constants

    def along(self, atoms: Atoms, axes: Sequence[int]) -> Atoms:
        """Make atoms the same along these axes, which go."""
        if not axes:
            return atoms
        moved = np.moveaxis(atoms, axes, range(len(axes)))
        moved = moved.reshape(-1, *moved.shape[len(axes) :])
        first: Atoms = moved[0]
        for row in moved[1:]:
            first = self.same(first, row)
        return first

    def simple(self, found: Field) -> Field:
        """The field without axes along which its atoms do not differ."""
        axes, atoms, roots = list(found.axes), found.atoms, self.roots(found.atoms)
        for place in range(len(axes) - 1, -1, -1):
            if len(axes) == 1:
                break
            if (roots == roots.take([0], axis=place)).all():
                atoms, roots = (np.moveaxis(part, place, 0)[0] for part in (atoms, roots))
                del axes[place]
        return replace(found, axes=tuple(axes), atoms=atoms)

    def refuse(self, flows: Iterable[Flow], reason: str) -> None:
        """No unit of these values can be touched."""
        for flow in flows:
            for found in flow.fields:
                self.untouchable.append((found.atoms, reason))

    def merge(
        self,
        operands: Sequence[tuple[Flow, Sequence[int]]],
        shape: Sequence[int],
        out: Sequence[int],
        *,
        product: bool,
        constant: bool = False,
        reason: str,
    ) -> Flow:
        """An operation that goes entry by entry, or sums products: an Einstein sum.

        Args:
            operands: values, and a letter for each of their axes.
            shape: of the result.
            out: letters of the result's axes; others are summed over.
            product: whether operands are multiplied (one zero is enough for a zero).
            constant: whether something that is not zero is added besides.
            reason: what to say of atoms that cannot go on.
        """
        sizes: dict[int, int] = {}
        for flow, letters in operands:
            for letter, size in zip(letters, flow.shape, strict=True):
                sizes[letter] = max(size, sizes.get(letter, 1))
        found: list[tuple[frozenset[int], Field, tuple[int, ...], int]] = []
        for index, (flow, letters) in enumerate(operands):
            for f in flow.fields:
                named = tuple(letters[a] for a in f.axes)
                if f.atoms.shape != tuple(sizes[letter] for letter in named):
                    self.untouchable.append((f.atoms, f"{reason} broadcasts it"))
                else:
                    found.append((frozenset(named), f, named, index))
        result: list[Field] = []
        while found:
            cluster = [found.pop(0)]
            letters_of = set(cluster[0][0])
            while joined := [item for item in found if item[0] & letters_of]:
                found = [item for item in found if not item[0] & letters_of]
                cluster += joined
                letters_of |= {letter for item in joined for letter in item[0]}
            merged = self._cluster(cluster, letters_of, operands, out, product, constant, reason)
            if merged is not None:
                result.append(merged)
        return Flow(tuple(shape), tuple(self.simple(f) for f in result))

    def _cluster(
        self,
        cluster: Sequence[Named],
        letters: set[int],
        operands: Sequence[tuple[Flow, Sequence[int]]],
        out: Sequence[int],
        product: bool,
        constant: bool,
        reason: str,
    ) -> Field | None:
        """The field of the result that fields on the same letters become."""
        summed = letters - set(out)
        sources = [f.source for _, f, _, _ in cluster if f.source is not None]
        values = [f for _, f, _, _ in cluster if f.source is None]
        for _, f, named, _ in cluster:
            if f.source is not None:
                reads = summed & set(named) and (values or len(cluster) == 1)
                (self.readers if reads else self.makers).add(f.source)
        atoms = [f.atoms for _, f, _, _ in cluster]
        # A letter that an operand has, without a field on it: values of its own at every entry.
        for index, (flow, names) in enumerate(operands):
            for axis, letter in enumerate(names):
                covered = any(letter in named for _, _, named, at in cluster if at == index)
                if letter in letters and flow.shape[axis] > 1 and not covered:
                    self._refuse_all(atoms, f"{reason} combines it with other values")
                    return None
        common = frozenset.intersection(*(item[0] for item in cluster))
        widest = max(cluster, key=lambda item: len(item[0]))
        if not common or widest[0] != letters:
            self._refuse_all(atoms, f"{reason} combines axes in a way that is not followed")
            return None
        wide, merged = widest[2], self._merged(cluster, letters, common, widest)
        if product:
            zero = (
                any(f.zero for f in values)
                if summed and values
                else any(f.zero for _, f, _, _ in cluster)
            )
        else:
            zero = not constant and len({at for _, _, _, at in cluster}) == len(operands)
            zero &= all(f.zero for _, f, _, _ in cluster)
        if summed:
            left = [letter for letter in wide if letter not in summed]
            if not left:
                if not zero:
                    self.constant.append(merged)
                return None
            gone = [place for place, letter in enumerate(wide) if letter in summed]
            merged = self.along(merged, gone)
            wide = tuple(left)
        source = sources[0] if len(operands) == 1 and sources else None
        return Field(tuple(list(out).index(letter) for letter in wide), merged, zero, source)

    def _merged(
        self,
        cluster: Sequence[Named],
        letters: set[int],
        common: frozenset[int],
        widest: Named,
    ) -> Atoms:
        """The atoms of fields on the same letters, made the same along these."""
        alike = all(item[0] == letters for item in cluster)
        reduced: Atoms | None = None
        merged = widest[1].atoms
        for _, f, named, _ in cluster:
            if alike:
                turned = np.transpose(f.atoms, [named.index(letter) for letter in widest[2]])
                merged = turned if reduced is None else self.same(merged, turned)
                reduced = merged
                continue
            keep = [letter for letter in named if letter in common]
            gone = [place for place, letter in enumerate(named) if letter not in common]
            part = self.along(f.atoms, gone)
            part = np.transpose(part, [keep.index(letter) for letter in sorted(common)])
            reduced = part if reduced is None else self.same(reduced, part)
        return merged

    def _refuse_all(self, atoms: Iterable[Atoms], reason: str) -> None:
        self.untouchable.extend((found, reason) for found in atoms)

    def elementwise(
        self, operands: Sequence[Any], shape: Sequence[int], *, product: bool, reason: str
    ) -> Flow:
        """An operation entry by entry; operands are values or numbers."""
        flows = [x for x in operands if isinstance(x, Flow)]
        numbers = [x for x in operands if not isinstance(x, Flow)]
        letters = [range(len(shape) - len(flow.shape), len(shape)) for flow in flows]
        return self.merge(
            list(zip(flows, letters, strict=True)),
            shape,
            range(len(shape)),
            product=product,
            constant=any(n != 0 for n in numbers),
            reason=reason,
        )

    def reshape(self, flow: Flow, shape: Sequence[int], reason: str) -> Flow:
        """The same entries in another shape."""
        blocks = _blocks(flow.shape, tuple(shape))
        touched: dict[int, int] = {}
        for f in flow.fields:
            for number, (before, _) in enumerate(blocks):
                if set(before) & set(f.axes):
                    touched[number] = touched.get(number, 0) + 1
        result = []
        for f in flow.fields:
            own = [n for n, (before, _) in enumerate(blocks) if set(before) & set(f.axes)]
            before = [axis for n in own for axis in blocks[n][0]]
            after = [axis for n in own for axis in blocks[n][1]]
            sizes = [flow.shape[axis] for axis in before]
            if any(touched[n] > 1 for n in own) or prod(sizes) > LARGEST:
                self.untouchable.append((f.atoms, f"{reason} mixes it with another axis"))
                continue
            order = sorted(range(len(f.axes)), key=lambda i: f.axes[i])
            atoms = np.transpose(f.atoms, order)
            fits = [flow.shape[a] if a in f.axes else 1 for a in before]
            whole = np.broadcast_to(atoms.reshape(fits), sizes)
            whole = whole.reshape([shape[axis] for axis in after])
            kept = [i for i, axis in enumerate(after) if shape[axis] > 1] or [len(after) - 1]
            whole = whole.reshape([shape[after[i]] for i in kept])
            result.append(self.simple(replace(f, axes=tuple(after[i] for i in kept), atoms=whole)))
        return Flow(tuple(shape), tuple(result))

    def spread(self, flow: Flow, shape: Sequence[int], keep: int, reason: str) -> Flow:
        """An operation on all axes but the first so many: pooling, filters."""
        result = []
        for f in flow.fields:
            if max(f.axes) >= keep:
                self.untouchable.append((f.atoms, f"{reason} goes across it"))
            else:
                result.append(f)
        return Flow(tuple(shape), tuple(result))

    def reduce(
        self,
        flow: Flow,
        axes: Sequence[int],
        keepdim: bool,
        shape: Sequence[int],
        *,
        adds: bool,
        reason: str,
    ) -> Flow:
        """A summary of some axes; `adds` says that a zero adds nothing to it."""
        gone = {axis % len(flow.shape) for axis in axes} or set(range(len(flow.shape)))
        left = [a for a in range(len(flow.shape)) if a not in gone]
        result = []
        for f in flow.fields:
            if not gone & set(f.axes):
                result.append(f)
                continue
            if not adds:
                self.mixed.append((f.atoms, reason))
            elif not f.zero:
                self.constant.append(f.atoms)
            rest = tuple(a for a in f.axes if a not in gone)
            if rest:
                atoms = self.along(f.atoms, [i for i, a in enumerate(f.axes) if a in gone])
                result.append(replace(f, axes=rest, atoms=atoms))
        if not keepdim:
            result = [replace(f, axes=tuple(left.index(a) for a in f.axes)) for f in result]
        return Flow(tuple(shape), tuple(replace(f, source=None) for f in result))

    def pick(
        self, flow: Flow, axis: int, index: npt.NDArray[np.int64], shape: Sequence[int]
    ) -> Flow:
        """Some entries of an axis; the units of a group then differ by what is picked of them."""
        axis %= len(flow.shape)
        result = []
        for f in flow.fields:
            if axis in f.axes:
                place = f.axes.index(axis)
                marks = np.zeros_like(f.atoms)
                np.moveaxis(marks, place, 0)[index] = 1
                self.cells.append((f.atoms, marks))
                f = replace(f, atoms=f.atoms.take(index, axis=place))
            result.append(f)
        return Flow(tuple(shape), tuple(self.simple(f) for f in result))


def _blocks(one: tuple[int, ...], two: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """Runs of axes of both shapes with the same product, as short as can be."""
    blocks, i, j = [], 0, 0
    while i < len(one) or j < len(two):
        before: list[int] = []
        after: list[int] = []
        a = b = 1
        while not before or not after or a != b:
            if (a <= b and i < len(one)) or j >= len(two):
                if i >= len(one):
                    break
                a, before, i = a * one[i], [*before, i], i + 1
            else:
                b, after, j = b * two[j], [*after, j], j + 1
        blocks.append((before, after))
    # An axis of one entry at the end may have found no partner: it joins the block before it.
    while len(blocks) > 1 and not (blocks[-1][0] and blocks[-1][1]):
        before, after = blocks.pop()
        blocks[-1] = (blocks[-1][0] + before, blocks[-1][1] + after)
    return blocks
