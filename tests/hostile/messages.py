"""Fuzzing of messages and reports: real ones of every method, changed, and others made up.

Of each there may come a message or `MessageError`, in `TIME` and in `MEMORY` times its bytes over
`FLOOR`; the error's text is short and can be printed.
"""

import json
import time
import tracemalloc
import warnings
import zlib
from functools import cache, partial

import numpy as np
import torch

from fedbayes import Config, Simulation
from fedbayes.core.messages import Masked, decode, decode_file, encode
from fedbayes.errors import FedbayesWarning, MessageError
from fedbayes.federation.broadcast import ServerMessages
from fedbayes.federation.settings import Compression
from fedbayes.federation.stages.checks import decode_report
from fedbayes.methods import METHODS
from tests.helpers.reference import OTHERS, PARAMETERS, SETTINGS

TIME = 0.02
"""Seconds of a processor that a message may take."""
MEMORY = 4
"""Times its bytes that a message may take, over the floor."""
FLOOR = 4_000_000
"""Bytes that any message may take."""
LONGEST_TEXT = 1000
"""Characters of an error."""
SAMPLE = 20
"""One in so many messages has its memory measured, which is slow."""

_DEFLATED = 1 << 63


def first_task(name, compression):
    """The first client's task under a method, its answer and the broadcast that it is of."""
    settings = {**SETTINGS, **OTHERS.get(name, {}), "rounds": 1}
    settings["method"] = {"name": name, **PARAMETERS.get(name, {})}
    settings["compression"] = compression.model_dump()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FedbayesWarning)
        with Simulation(Config.create(**settings)) as simulation:
            broadcast = ServerMessages(
                simulation.run, simulation.method, simulation.server, 1, compression
            )
            (task,) = broadcast.tasks([0], {})
            return task, simulation.runtime.train(task), broadcast


@cache
def corpus():
    """A broadcast, a report and a client's state of every method, each with what reads a report:
    its pattern, or the way of a compressed one.
    """
    found = []
    for name in METHODS:
        task, outcome, broadcast = first_task(name, Compression())
        pattern = partial(decode_report, expected=broadcast.expected(0))
        found += [(task.message, pattern), (outcome.report, pattern), (outcome.state, pattern)]
    for name in ("fedavg", "scaffold-fedsparse"):
        assert not METHODS[name].reports.refusals["compression"]
        for up in ("bf16", "int8", "top-k", "random-k"):
            _, outcome, broadcast = first_task(name, Compression(up=up, down="bf16", share=0.1))
            found += 3 * [(outcome.report, broadcast.codec(0).read)]
    mask = torch.arange(6) % 2 == 0
    sparse = Masked.keep(torch.ones(6, 4, 3), {(0,): mask, (1, 2): torch.ones(4, 3) > 0})
    large = {f"layer{number}.weight": torch.ones(30, 30) for number in range(250)}
    found.append((encode(large), partial(decode_report, expected=large)))
    small = {"w": torch.ones(6, 4, 3)}
    found.append(
        (encode({"w": sparse, "v": torch.ones(2)}), partial(decode_report, expected=small))
    )
    return [(data, read) for data, read in found if data]


def fuzz(count, seed):
    """Try so many messages.

    Returns:
        How many were tried and survived, what failed in words, and the worst of time and memory.
    """
    rng = np.random.default_rng(seed)
    failures, slowest, largest = [], 0.0, 0.0
    real = corpus()
    for number in range(count):
        data, read = real[rng.integers(len(real))]
        kind = CHANGES[rng.integers(len(CHANGES))]
        data = kind(data, rng)
        try:
            taken, share = measure(data, read, sample=number % SAMPLE == 0)
        except Exception as error:  # whatever it is, it is a failure
            failures.append(f"{kind.__name__}, {number} of seed {seed}: {error!r:.200}")
            continue
        slowest, largest = max(slowest, taken), max(largest, share)
    worst = {"ms": 1000 * slowest, "% of the memory allowed": 100 * largest}
    return count, count - len(failures), failures, worst


def measure(data, as_report, *, sample=False):
    """Read a message in every way.

    Returns:
        Seconds of the slowest way, and its memory as a share of what it may take.

    Raises:
        AssertionError: it took too long or too much, or an error's text is no text.
    """
    slowest, share = 0.0, 0.0
    for read in (decode, as_report):
        taken = min(_seconds(read, data) for _ in range(1))
        if taken > TIME:  # something else ran meanwhile?
            taken = min(_seconds(read, data) for _ in range(5))
        assert taken <= TIME, f"{taken:.3f} s for {len(data):,} bytes"
        slowest = max(slowest, taken)
    if sample:
        taken = memory(data)
        most = FLOOR + MEMORY * len(data)
        assert taken <= most, f"{taken:,} bytes for {len(data):,} bytes"
        _seconds(decode_file, data)
        share = taken / most
    return slowest, share


def memory(data):
    """Bytes that reading a message takes at most: what Python and NumPy allocate, and tensors."""
    found = {}
    tracemalloc.start()
    try:
        found = decode(data)
    except MessageError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    tensors = [item.values if isinstance(item, Masked) else item for item in found.values()]
    return peak + sum(tensor.nbytes + 500 for tensor in tensors)


def _seconds(read, data):
    start = time.thread_time()
    try:
        read(data)
    except MessageError as error:
        text = str(error)
        assert text.isprintable(), f"an error of {text!r:.100}"
        assert len(text) <= LONGEST_TEXT, f"an error of {len(text)} characters: {text:.100}"
    return time.thread_time() - start


def _split(data):
    """The header as text in bytes, and what follows it."""
    size = int.from_bytes(data[:8], "little")
    end = 8 + (size & ~_DEFLATED)
    header = data[8:end]
    if size & _DEFLATED:
        try:
            header = zlib.decompressobj().decompress(header, 10**7)
        except zlib.error:
            header = b"{}"
    return header, data[end:]


def _joined(header, body, rng):
    """A message of this header, deflated or not."""
    if rng.random() < 0.5:
        return len(header).to_bytes(8, "little") + header + body
    header = zlib.compress(header, 6)
    return (len(header) | _DEFLATED).to_bytes(8, "little") + header + body


def flipped(data, rng):
    """Some bytes are others."""
    found = np.frombuffer(data, np.uint8).copy()
    places = rng.integers(len(found), size=rng.integers(1, 9))
    found[places] = rng.integers(256, size=len(places))
    return found.tobytes()


def flipped_early(data, rng):
    """Some of the first bytes are others: the header's length and the header."""
    head = flipped(data[:64], rng)
    return head + data[64:]


def cut(data, rng):
    """The end is missing, or there is more after it."""
    if rng.random() < 0.5:
        return data[: rng.integers(len(data))]
    return data + rng.bytes(rng.integers(1, 100))


def moved(data, rng):
    """A piece is doubled, or stands elsewhere."""
    a, b, c = sorted(rng.integers(len(data) + 1, size=3))
    return data[:b] + data[a:c] + data[c:] if rng.random() < 0.5 else data[:a] + data[b:c] + data


def retold(data, rng):
    """Signs and numbers of the header are others."""
    header, body = _split(data)
    for _ in range(rng.integers(1, 6)):
        place = int(rng.integers(len(header) + 1))
        word = WORDS[rng.integers(len(WORDS))]
        header = header[:place] + word + header[place + int(rng.integers(len(word) + 1)) :]
    return _joined(header, body, rng)


def renumbered(data, rng):
    """Entries of the header have other names, types, shapes or places, or come twice."""
    header, body = _split(data)
    try:
        entries = list(json.loads(header).items())
    except (ValueError, AttributeError, RecursionError):
        return data
    for _ in range(rng.integers(1, 4)):
        if not entries:
            break
        place = rng.integers(len(entries))
        name, entry = entries[place]
        entry = dict(entry)
        match rng.integers(6):
            case 0:
                name += PARTS[rng.integers(len(PARTS))]
            case 1:
                entry["shape"] = [int(n) for n in SIZES[rng.integers(len(SIZES), size=3)]]
            case 2:
                entry["data_offsets"] = sorted(int(n) for n in rng.integers(len(body) + 9, size=2))
            case 3:
                entry["dtype"] = TYPES[rng.integers(len(TYPES))]
            case 4:
                entry[str(rng.integers(9))] = None
            case _:
                entries.append((name, entry))
        entries[place] = (name, entry)
    return _joined(_header(entries), body, rng)


def poisoned(data, rng):
    """Values are NaN, infinite, huge or none at all, sizes of sparse tensors lie."""
    header, body = _split(data)
    found = bytearray(body)
    for _ in range(rng.integers(1, 8)):
        place = int(rng.integers(len(found) // 4 + 1)) * 4
        found[place : place + 4] = VALUES[rng.integers(len(VALUES))]
    return _joined(header, bytes(found[: len(body)]), rng)


def spliced(data, rng):
    """The start of one message and the end of another."""
    other, _ = corpus()[rng.integers(len(corpus()))]
    return data[: rng.integers(len(data))] + other[rng.integers(len(other)) :]


def bomb(data, rng):
    """A header of much of the same, deflated: up to ten megabytes of a few kilobytes."""
    word = BOMBS[rng.integers(len(BOMBS))]
    header = word * int(10 ** rng.uniform(0, 7) / len(word))
    if rng.random() < 0.5:
        header = b"{" + header + b"}"
    return _joined(header, b"", rng) if len(header) < 10**5 else _deflated(header)


def many(data, rng):
    """Many tiny tensors, or few with many axes, in a proper file."""
    entries, body = [], b""
    axes = int(rng.choice([0, 1, 2, 40, 1000]))
    for number in range(int(10 ** rng.uniform(0, 3.6)) // (1 + axes // 10) + 1):
        size = int(rng.integers(2))
        shape = [1] * axes if size or not axes else [1] * (axes - 1) + [0]
        size = size if axes else 1
        entry = {"dtype": "U8", "shape": shape, "data_offsets": [len(body), len(body) + size]}
        entries.append((f"{number:x}", entry))
        body += b"\1" * size
    return _joined(_header(entries), body, rng)


def sparse(data, rng):
    """A sparse tensor whose shape and masks claim what they like."""
    axes = int(rng.choice([1, 2, 3, 8, 70, 2000], p=[0.3, 0.3, 0.2, 0.1, 0.05, 0.05]))
    shape = SIZES[rng.integers(len(SIZES), size=axes)].astype("<i4", casting="unsafe").tobytes()
    count = int(rng.choice([0, 1, 5, 300]))
    entries = [("w", "F32", [count], bytes(4 * count)), ("w#shape", "I32", [axes], shape)]
    for _ in range(rng.integers(3)):
        bits = rng.bytes(int(rng.choice([0, 1, 2, 50, 20_000])))
        over = ",".join(map(str, sorted(rng.integers(-1, axes + 1, size=rng.integers(1, 4)))))
        entries.append((f"w#mask:{over}", "U8", [len(bits)], bits))
    start, listed = 0, []
    for name, dtype, sizes, content in entries:
        place = [start, start := start + len(content)]
        listed.append((name, {"dtype": dtype, "shape": sizes, "data_offsets": place}))
    return _joined(_header(listed), b"".join(content for *_, content in entries), rng)


def named(data, rng):
    """Tensors of names that no network has."""
    names = [NAMES[rng.integers(len(NAMES))] * int(rng.choice([1, 1, 100])) for _ in range(3)]
    entries = [(n, {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}) for n in names]
    return _joined(_header(entries), b"", rng)


def noise(data, rng):
    """Bytes of nothing."""
    return rng.bytes(int(rng.integers(300)))


CHANGES = [
    *(flipped, flipped_early, cut, moved, retold, renumbered, poisoned, spliced),
    *(bomb, many, sparse, named, noise),
]
SIZES = np.array([0, 1, 2, 3, 7, 64, 1000, 2**16, 2**30, 2**31 - 1, 2**31, 2**62, -1])
TYPES = ["F32", "F64", "BOOL", "U8", "I32", "BF16", "F8_E4M3", "C64", "F4", "", "float32", None]
PARTS = ["#shape", "#mask:0", "#mask:0,1", "#mask:", "#mask:1,0", "#", "\x1b[2J", "\ud800", "\0"]
NAMES = ["a", "", "#", "w#mask:" + "0," * 500, "\x1b]0;x\x07", "\n", "\ud800", "é", "/weight", "😀"]
VALUES = [np.float32(v).tobytes() for v in (np.nan, np.inf, -np.inf, 3e38, 0)]
VALUES += [np.int32(v).tobytes() for v in (2**31 - 1, -1, 2**30, 1)]
WORDS = [*(c.encode() for c in '{}[]",:0#'), b"9" * 30, b"9" * 5000, b"1e999", b"NaN", b"null"]
WORDS += [b"-1", b"true", b"1.5", b'"a":{}', b"\xff", b"\\ud800", b"#mask:0", b"[" * 2000]
BOMBS = [
    *(b" ", b"[", b"{", b'{"a":', b"0,", b"257,", b"[],", b"{},", b'"",', b"9", b'"', b"\\", b"\0"),
    *(b'"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},', b'"a":[],', "😀".encode()),
    *(b'"__metadata__":{"a":"b"},', b'"a":"b",', b"1.5,", b"NaN,", b"\xff"),
]


def _header(entries):
    """A header of entries of which several may have the same name."""
    told = (f"{json.dumps(name)}:{json.dumps(entry)}" for name, entry in entries)
    return ("{" + ",".join(told) + "}").encode()


def _deflated(header):
    small = zlib.compress(header, 6)
    return (len(small) | _DEFLATED).to_bytes(8, "little") + small
