"""Pages in a real browser: what is measured of them."""

import base64
import os
from pathlib import Path

from fedbayes.reports.palette import DARK, LIGHT

WIDTHS = (390, 768, 1280, 1600)

# Every piece of text: where it is, what it stands in, its colour and what is behind it.
TEXTS = """
const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
const known = new Map();
const colour = text => {
  if (known.has(text)) return known.get(text);
  canvas.clearRect(0, 0, 1, 1);
  canvas.fillStyle = text;
  canvas.fillRect(0, 0, 1, 1);
  known.set(text, [...canvas.getImageData(0, 0, 1, 1).data]);
  return known.get(text);
};
const over = (front, share, back) => back.map((c, i) => front[i] * share + c * (1 - share));
const behind = element => {
  if (!element) return [255, 255, 255];
  const found = colour(getComputedStyle(element).backgroundColor);
  return found[3] === 255 ? found.slice(0, 3)
    : over(found, found[3] / 255, behind(element.parentElement));
};
const edges = r => [r.left, r.right, r.top, r.bottom];
const found = [];
for (const element of document.querySelectorAll("body *")) {
  if (["SCRIPT", "STYLE"].includes(element.tagName)) continue;
  if (![...element.childNodes].some(n => n.nodeType === 3 && n.data.trim())) continue;
  const svg = element.closest("svg"), style = getComputedStyle(element);
  if (!element.getClientRects().length || style.visibility === "hidden") continue;
  const own = [...element.childNodes].filter(n => n.nodeType === 3 && n.data.trim());
  const range = document.createRange();
  range.setStartBefore(own[0]);
  range.setEndAfter(own[own.length - 1]);
  const rect = (svg ? element : range).getBoundingClientRect();
  const box = element.closest(".scroll");
  const host = element.closest(".card, td, th, li, dd, section, main");
  let ground = behind(svg ? svg.parentElement : element);
  const before = svg && element.previousElementSibling;
  if (before && before.tagName === "rect") {
    const cell = before.getBoundingClientRect(), under = getComputedStyle(before);
    const x = (rect.left + rect.right) / 2, y = (rect.top + rect.bottom) / 2;
    if (x > cell.left && x < cell.right && y > cell.top && y < cell.bottom)
      ground = over(colour(under.fill), +under.fillOpacity, ground);
  }
  found.push({
    text: element.textContent.trim().slice(0, 60), rect: edges(rect),
    host: edges(host.getBoundingClientRect()), box: box && edges(box.getBoundingClientRect()),
    behind: ground, colour: colour(svg ? style.fill : style.color).slice(0, 3),
    plot: svg ? [...document.querySelectorAll(".plot")].indexOf(element.closest(".plot")) : null,
    cell: Boolean(element.closest("td, th, dd")), opacity: +style.opacity,
  });
}
return found;
"""

# Numbers, and names in cells, that stand in more than one line.
BROKEN = r"""
const found = [], range = document.createRange();
const lines = () => new Set([...range.getClientRects()].map(r => Math.round(r.top))).size;
const walk = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
while (walk.nextNode()) {
  const node = walk.currentNode, host = node.parentElement.closest("td, dd, strong");
  if (!host || host.closest("svg, .texts, .long") || !host.getClientRects().length) continue;
  const wanted = arguments[0] ? /[-−]?\d[\d,.]*(e[-+]?\d+)?/g : /\S.*\S|\S/g;
  for (const match of node.data.matchAll(wanted)) {
    range.setStart(node, match.index); range.setEnd(node, match.index + match[0].length);
    if (lines() > 1) found.push(match[0]);
  }
}
return found;
"""


def show(browser, page, width=1280, theme="light", media="screen"):
    """Open a page in a window of this width, with the theme of the system."""
    look(browser, width, theme, media)
    browser.get(page.as_uri())


def look(browser, width=1280, theme="light", media="screen"):
    """What a browser shows from now on: a width, a theme of the system, a screen or paper."""
    wanted = [{"name": "prefers-color-scheme", "value": theme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": wanted})
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False},
    )


def keep_picture(browser, name):
    """A picture of the whole page, if someone wants to look."""
    folder = os.environ.get("FEDBAYES_SCREENSHOTS")
    if folder:
        shot = browser.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True})
        Path(folder, f"{name}.png").write_bytes(base64.b64decode(shot["data"]))


def luminance(parts):
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one, other):
    low, high = sorted(luminance([c / 255 for c in colour]) for colour in (one, other))
    return (high + 0.05) / (low + 0.05)


def clipped(one):
    """What is seen of a text: nothing of what is scrolled away."""
    left, right, top, bottom = one["rect"]
    if one["box"]:
        left, right = max(left, one["box"][0]), min(right, one["box"][1])
    return left, right, top, bottom


def check_texts(browser, width):
    """Nothing is cut off, nothing overlaps, no number is broken, and all of it can be read."""
    inside = browser.execute_script(
        "const d = document.documentElement; return [d.scrollWidth, d.clientWidth]"
    )
    assert inside[0] <= inside[1], (width, inside)
    texts = browser.execute_script(TEXTS)
    assert len(texts) > 20
    for one in texts:
        assert one["opacity"] == 1, one
        assert contrast(one["colour"], one["behind"]) >= 4.5, one
        left, right, top, bottom = one["rect"]
        host = one["host"]
        assert left >= host[0] - 1, (width, one)
        assert right <= host[1] + 1, (width, one)
        assert top >= host[2] - 1, (width, one)
        assert bottom <= host[3] + 1, (width, one)
        if not one["box"]:
            assert left >= -1, (width, one)
            assert right <= width + 1, (width, one)
    for group in ([o for o in texts if o["cell"]], [o for o in texts if o["plot"] is not None]):
        seen = sorted(
            ((*clipped(one), one["plot"], one["text"]) for one in group), key=lambda o: o[2]
        )
        for place, a in enumerate(seen):
            for b in seen[place + 1 :]:
                if b[2] >= a[3] - 2:
                    break  # it and all that follow begin below
                if a[4] == b[4] and min(a[1], b[1]) - max(a[0], b[0]) > 1:
                    raise AssertionError((width, "overlap", a, b))
    for numbers in (True, False):
        assert browser.execute_script(BROKEN, numbers) == [], width


def paper_of(theme):
    paper = LIGHT.paper if theme == "light" else DARK.paper
    return f"rgb({', '.join(str(int(paper[i : i + 2], 16)) for i in (1, 3, 5))})"
