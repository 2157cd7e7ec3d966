"use strict";
let DATA = JSON.parse(document.getElementById("data").textContent);
const root = document.documentElement, tip = document.getElementById("tip");
const hidden = new Set();
const COLOURS = 7;

function node(name, attributes, parent, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  if (parent) parent.append(made);
  return made;
}
const colour = run => `var(--run${run % COLOURS})`;
const SHAPES = {
  "o": "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0", "s": "M-3.6 -3.6h7.2v7.2h-7.2z", "^": "M0 -4.6L4.4 3.4H-4.4z",
  "D": "M0 -4.8L4.8 0L0 4.8L-4.8 0z", "v": "M0 4.6L4.4 -3.4H-4.4z",
  "P": "M-1.6 -4.4h3.2v2.8h2.8v3.2h-2.8v2.8h-3.2v-2.8h-2.8v-3.2h2.8z",
  "X": "M-4 -2.2L-2.2 -4L0 -1.8L2.2 -4L4 -2.2L1.8 0L4 2.2L2.2 4L0 1.8L-2.2 4L-4 2.2L-1.8 0z", "<": "M-4.6 0L3.4 -4.4V4.4z",
};
function marker(run, x, y, parent, hollow) {
  return node("path", {
    d: SHAPES[DATA.markers[run % DATA.markers.length]], transform: `translate(${x.toFixed(1)} ${y.toFixed(1)})`,
    fill: hollow ? "var(--card)" : colour(run), stroke: colour(run), "stroke-width": hollow ? 1.5 : 0,
  }, parent);
}
function swatch(svg, run) {
  node("line", { x1: 0, x2: 26, y1: 6, y2: 6, stroke: colour(run), "stroke-width": 2 }, svg);
  marker(run, 13, 6, svg);
}
function ticks(low, high, count) {
  const rough = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find(s => s * power >= rough * 0.999);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-9; at += step) found.push(+at.toPrecision(12));
  return found;
}
function powers(low, high) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++)
    for (const s of Math.log10(high / low) > 3 ? [1] : [1, 2, 5]) found.push(s * 10 ** power);
  return found.filter(at => at >= low && at <= high);
}
const short = value => Math.abs(value) >= 1e6 ? +(value / 1e6).toPrecision(4) + " M" : Math.abs(value) >= 1e4 ? +(value / 1e3).toPrecision(4) + " k" : String(+value.toPrecision(4));
const number = value => Math.abs(value) >= 1e4 ? value.toLocaleString("en", { maximumFractionDigits: 0 }) : String(+value.toPrecision(4));
const clip = (text, most) => text.length > most ? text.slice(0, Math.max(1, most - 1)) + "…" : text;
const sum = values => values.reduce((a, b) => a + b, 0);
const LETTER = 6.6;  // of text of 12 pixels, about

// What a chart says under the pointer, or step by step on the arrow keys.
function say(x, y, text) {
  tip.textContent = text;
  tip.style.display = "block";
  const box = tip.getBoundingClientRect();
  tip.style.left = Math.max(8, Math.min(x + 14, innerWidth - box.width - 8)) + "px";
  tip.style.top = Math.max(8, y - box.height - 10) + "px";
}
function attend(svg, stops, nearest, mark) {
  if (!stops.length) return;
  const scale = () => svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
  let at = -1;
  const leave = () => { tip.style.display = "none"; mark(null); at = -1; };
  const point = event => {
    const box = svg.getBoundingClientRect();
    at = nearest((event.clientX - box.left) / scale(), (event.clientY - box.top) / scale());
    if (at < 0) { leave(); return; }
    mark(stops[at]);
    say(event.clientX, event.clientY, stops[at].text);
  };
  svg.setAttribute("tabindex", 0);
  svg.addEventListener("pointermove", point);
  svg.addEventListener("pointerdown", point);
  svg.addEventListener("pointerleave", leave);
  svg.addEventListener("blur", leave);
  svg.addEventListener("keydown", event => {
    const last = stops.length - 1;
    const next = { ArrowRight: Math.min(at + 1, last), ArrowLeft: Math.max(at - 1, 0), Home: 0, End: last }[event.key];
    if (event.key === "Escape") leave();
    if (next === undefined) return;
    event.preventDefault();
    at = next;
    mark(stops[at]);
    const box = svg.getBoundingClientRect();
    say(box.left + stops[at].x * scale(), box.top + stops[at].y * scale(), stops[at].text);
  });
}
function closest(stops, x, y, most) {
  let found = -1, best = most ** 2;
  stops.forEach((stop, i) => { const far = (stop.x - x) ** 2 + (stop.y - y) ** 2; if (far <= best) { best = far; found = i; } });
  return found;
}
function ring(svg) {
  const made = node("circle", { r: 8, fill: "none", stroke: "var(--ink)", "stroke-width": 1.5, visibility: "hidden" }, svg);
  return stop => {
    made.setAttribute("visibility", stop ? "visible" : "hidden");
    if (stop) { made.setAttribute("cx", stop.x); made.setAttribute("cy", stop.y); }
  };
}

let W = 640;  // of the card, so that text keeps its size
const RIGHT = 14, TOP = 10, BOTTOM = 44;
function drawing(chart, host, height) {
  return node("svg", { viewBox: `0 0 ${W} ${height}`, role: "img", "aria-label": chart.title }, host);
}
function folded(label, room) {
  const found = [""], most = Math.floor(room / LETTER);
  for (const word of label.split(" ")) {
    const last = found[found.length - 1];
    if (last && last.length + 1 + word.length > most) found.push(word); else found[found.length - 1] = (last + " " + word).trim();
  }
  return found;
}
function across(svg, label, left, x, xs, floor) {
  for (const at of xs) {
    node("line", { class: "axis", x1: x(at), x2: x(at), y1: floor, y2: floor + 4 }, svg);
    node("text", { x: x(at), y: floor + 18, "text-anchor": "middle" }, svg, short(at));
  }
  node("line", { class: "axis", x1: left, x2: W - RIGHT, y1: floor, y2: floor }, svg);
  folded(label, W - left - RIGHT).forEach((line, i) => node("text", { x: (left + W - RIGHT) / 2, y: floor + 38 + 15 * i, "text-anchor": "middle" }, svg, line));
}
function up(svg, label, left, y, ys, top, bottom) {
  for (const at of ys) {
    node("line", { class: "grid", x1: left, x2: W - RIGHT, y1: y(at), y2: y(at) }, svg);
    node("text", { x: left - 8, y: y(at) + 4, "text-anchor": "end" }, svg, short(at));
  }
  const told = folded(label, bottom - top);
  told.forEach((line, i) => node("text", { transform: `translate(${(told.length > 1 ? 6 : 12) + 14 * i} ${(top + bottom) / 2}) rotate(-90)`, "text-anchor": "middle" }, svg, line));
}
function lines(chart, host) {
  const curves = chart.curves.filter(c => !hidden.has(c.run) && c.x.length);
  const H = printing ? 200 : 300, LEFT = 62, svg = drawing(chart, host, H);
  if (!curves.length) { node("text", { x: W / 2, y: H / 2, "text-anchor": "middle" }, svg, "no run is shown"); return; }
  const all = key => curves.flatMap(c => c[key]);
  let [x0, x1, y0, y1] = [Math.min(...all("x")), Math.max(...all("x")), Math.min(...all("y")), Math.max(...all("y"))];
  if (x0 === x1) { x0 -= 0.5; x1 += 0.5; }
  const level = chart.log ? Math.log10 : v => v;
  const pad = (level(y1) - level(y0)) * 0.06 || Math.abs(y1) * 0.1 || 1;
  if (chart.log) { y0 *= 10 ** -pad; y1 *= 10 ** pad; } else { y0 = y0 >= 0 ? Math.max(0, y0 - pad) : y0 - pad; y1 += pad; }
  const x = v => LEFT + (v - x0) / (x1 - x0) * (W - LEFT - RIGHT);
  const y = v => H - BOTTOM - (level(v) - level(y0)) / (level(y1) - level(y0)) * (H - BOTTOM - TOP);
  const whole = chart.x_label === "round";
  up(svg, chart.y_label, LEFT, y, chart.log ? powers(y0, y1) : ticks(y0, y1, 6), TOP, H - BOTTOM);
  across(svg, chart.x_label, LEFT, x, ticks(x0, x1, W / 64).filter(v => !whole || Number.isInteger(v)), H - BOTTOM);
  for (const curve of curves) {
    const points = curve.x.map((v, i) => [x(v), y(curve.y[i])]);
    node("path", {
      d: "M" + points.map(p => p.map(v => v.toFixed(1)).join(" ")).join("L"), fill: "none", stroke: colour(curve.run),
      "stroke-width": 2, "stroke-linejoin": "round", ...(curve.dashed ? { "stroke-dasharray": "6 4" } : {}),
    }, svg);
    const step = Math.max(1, Math.ceil(points.length / 24));
    points.forEach((p, i) => { if (i % step === 0 || i === points.length - 1) marker(curve.run, p[0], p[1], svg, curve.dashed); });
  }
  const name = c => DATA.runs[c.run] + (c.dashed ? ({ local: " (global)", privacy: " (add or remove)" }[chart.key] || " (wanted)") : "");
  if (!whole) {
    const stops = curves.flatMap(c => c.x.map((v, i) => ({ x: x(v), y: y(c.y[i]), text: `${name(c)}: ${number(c.y[i])}\n${number(v)} ${chart.x_label}` })));
    attend(svg, stops, (px, py) => closest(stops, px, py, 60), ring(svg));
    return;
  }
  const rule = node("line", { class: "axis", y1: TOP, y2: H - BOTTOM, visibility: "hidden", "stroke-dasharray": "2 3" }, svg);
  const rounds = [...new Set(all("x"))].sort((a, b) => a - b);
  const stops = rounds.map(round => {
    const here = curves.filter(c => c.x.includes(round)).map(c => `${name(c)}: ${number(c.y[c.x.indexOf(round)])}`);
    return { x: x(round), y: TOP + 40, text: [`round ${round}`, ...here].join("\n") };
  });
  attend(svg, stops, px => stops.reduce((best, s, i) => Math.abs(s.x - px) < Math.abs(stops[best].x - px) ? i : best, 0), stop => {
    rule.setAttribute("visibility", stop ? "visible" : "hidden");
    if (stop) { rule.setAttribute("x1", stop.x); rule.setAttribute("x2", stop.x); }
  });
}
function quantile(sorted, q) {
  const at = (sorted.length - 1) * q, low = Math.floor(at);
  return sorted[low] + (sorted[Math.min(low + 1, sorted.length - 1)] - sorted[low]) * (at - low);
}
function spread(chart, host) {
  const groups = chart.groups.filter(g => !hidden.has(g.run)), row = printing ? 56 : 66, left = 14, floor = TOP + row * groups.length;
  if (!groups.length) return;
  const height = floor + BOTTOM + 15 * (folded(chart.x_label, W - left - RIGHT).length - 1);
  const svg = drawing(chart, host, height);
  const all = groups.flatMap(g => g.values);
  let [x0, x1] = [Math.min(...all), Math.max(...all)];
  const pad = (x1 - x0) * 0.04 || 0.05; x0 = x0 >= 0 ? Math.max(0, x0 - pad) : x0 - pad; x1 += pad;
  const x = v => left + (v - x0) / (x1 - x0) * (W - left - RIGHT);
  across(svg, chart.x_label, left, x, ticks(x0, x1, W / 64), floor);
  const stops = [];
  groups.forEach((group, index) => {
    const middle = TOP + row * index + row - 24, sorted = [...group.values].sort((a, b) => a - b);
    const [q1, q2, q3] = [0.25, 0.5, 0.75].map(q => quantile(sorted, q));
    const order = group.values.map((_, i) => i).sort((a, b) => group.values[a] - group.values[b]);
    const most = Math.floor((W - left - RIGHT) / LETTER), last = order[order.length - 1];
    // As much of who is lowest and highest as there is room for.
    const run = DATA.runs.length > 1 ? `${clip(DATA.runs[group.run], most / 3)}, ` : "", room = most - run.length;
    const told = (i, letters) => `${clip(group.names[i], letters)} ${Math.abs(group.values[i]) < 10 ? group.values[i].toFixed(3) : number(group.values[i])}`;
    const one = `lowest: ${told(order[0], Infinity)}`, both = `${one}, highest: ${told(last, Infinity)}`;
    const label = run + (order.length > 1 && both.length <= room ? both : one.length <= room ? one : `lowest: ${told(order[0], room - 14)}`);
    node("text", { class: "strong", x: left, y: middle - 24 }, svg, label);
    node("rect", { x: x(q1), y: middle - 17, width: Math.max(1, x(q3) - x(q1)), height: 34, rx: 3, fill: colour(group.run), "fill-opacity": 0.14, stroke: colour(group.run) }, svg);
    order.forEach(i => {
      const stop = { x: x(group.values[i]), y: middle + ((i * 0.618034) % 1 - 0.5) * 24 };
      marker(group.run, stop.x, stop.y, svg).setAttribute("fill-opacity", 0.75);
      const of = DATA.runs.length > 1 ? `${DATA.runs[group.run]}, ` : "";
      stops.push({ ...stop, text: `${of}${group.names[i]}: ${number(group.values[i])}` });
    });
    node("line", { x1: x(q2), x2: x(q2), y1: middle - 20, y2: middle + 20, stroke: "var(--ink)", "stroke-width": 2.5 }, svg);
  });
  attend(svg, stops, (px, py) => closest(stops, px, py, 24), ring(svg));
}
const parts = text => text.startsWith("#") ? [1, 3, 5].map(i => parseInt(text.slice(i, i + 2), 16)) : [0, 0, 0];
const luminance = rgb => sum(rgb.map(v => v / 255).map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4).map((c, i) => c * [0.2126, 0.7152, 0.0722][i]));
function heat(chart, host) {
  if (chart.runs.every(run => hidden.has(run))) return;
  const rows = chart.rows.length, columns = chart.columns.length;
  const left = 26 + Math.min(Math.min(150, W * 0.3), 7.2 * Math.max(...chart.rows.map(r => r.length)) + 10);
  const width = (W - left - RIGHT) / columns, longest = Math.max(...chart.columns.map(c => c.length));
  const named = columns <= 40 && width >= 12, level = chart.columns.map(name => folded(name, width - 4));
  const upright = named && level.some(told => told.length > 4 || told.some(line => line.length * LETTER > width - 4));
  const bottom = 24 + (upright ? Math.min(170, 7.2 * longest + 8) : named ? 5 + 15 * Math.max(...level.map(told => told.length)) : 2);
  const cell = Math.max(printing ? 2 : 4, Math.min(40, (printing ? 180 : rows > 40 ? 480 : 300) / rows)), height = TOP + cell * rows + bottom;
  const svg = drawing(chart, host, height);
  const rowTotals = chart.counts.map(sum), columnTotals = chart.columns.map((_, j) => sum(chart.counts.map(r => r[j])));
  const shareOf = (count, i, j) => count / ((chart.by === "row" ? rowTotals[i] : columnTotals[j]) || 1);
  const digits = String(Math.max(...chart.counts.flat())).length;
  const size = [12, 10, 8].find(s => digits * s * 0.58 + 3 <= width);
  const written = chart.by === "row" && rows <= 12 && size;
  const style = getComputedStyle(root), [full, empty] = ["--heat", "--paper"].map(name => parts(style.getPropertyValue(name).trim()));
  const stops = [];
  node("rect", { x: left, y: TOP, width: W - left - RIGHT, height: cell * rows, fill: "var(--paper)" }, svg);
  chart.counts.forEach((counts, i) => counts.forEach((count, j) => {
    const share = shareOf(count, i, j), strength = Math.sqrt(share), at = { x: left + width * (j + 0.5), y: TOP + cell * (i + 0.5) };
    stops.push({ ...at, text: `${chart.row_label} ${chart.rows[i]}, ${chart.column_label} ${chart.columns[j]}\n${count.toLocaleString("en")} samples, ${(100 * share).toFixed(1)} %` });
    if (!count) return;
    node("rect", { x: (left + width * j).toFixed(2), y: (TOP + cell * i).toFixed(2), width: (width + 0.3).toFixed(2), height: (cell + 0.3).toFixed(2), style: `fill: color-mix(in srgb, var(--heat) ${(100 * strength).toFixed(1)}%, var(--paper))` }, svg);
    if (!written) return;
    // Black or white, whichever stands out more: of any grey one of them has 4.5:1.
    const light = luminance(full.map((v, c) => v * strength + empty[c] * (1 - strength)));
    node("text", { x: at.x, y: at.y + size / 3, "text-anchor": "middle", style: `fill: ${light > 0.179 ? "#000" : "#fff"}; font-size: ${size}px` }, svg, count);
  }));
  node("rect", { x: left, y: TOP, width: W - left - RIGHT, height: cell * rows, fill: "none", class: "grid" }, svg);
  const every = Math.ceil(12 / cell), most = Math.max(1, Math.floor(cell / 13));
  chart.rows.forEach((name, i) => {
    if (i % every) return;
    const told = folded(name, left - 30);
    if (told.length > most) told.splice(most - 1, told.length, told.slice(most - 1).join(" "));
    told.forEach((line, k) => node("text", { x: left - 6, y: TOP + cell * (i + 0.5) + 4 + 13 * (k - (told.length - 1) / 2), "text-anchor": "end" }, svg, clip(line, Math.floor((left - 26) / LETTER))));
  });
  if (named) chart.columns.forEach((name, j) => {
    const at = left + width * (j + 0.5), under = TOP + cell * rows + 6;
    if (upright) node("text", { transform: `translate(${at + 4} ${under}) rotate(-90)`, "text-anchor": "end" }, svg, clip(name, 22));
    else level[j].forEach((line, k) => node("text", { x: at, y: under + 10 + 15 * k, "text-anchor": "middle" }, svg, line));
  });
  node("text", { x: (left + W - RIGHT) / 2, y: height - 5, "text-anchor": "middle" }, svg, chart.column_label);
  node("text", { transform: `translate(12 ${TOP + cell * rows / 2}) rotate(-90)`, "text-anchor": "middle" }, svg, chart.row_label);
  const frame = node("rect", { width, height: cell, fill: "none", stroke: "var(--ink)", "stroke-width": 1.5, visibility: "hidden" }, svg);
  attend(svg, stops, (px, py) => {
    const [i, j] = [Math.floor((py - TOP) / cell), Math.floor((px - left) / width)];
    return i >= 0 && i < rows && j >= 0 && j < columns ? i * columns + j : -1;
  }, stop => {
    frame.setAttribute("visibility", stop ? "visible" : "hidden");
    if (stop) { frame.setAttribute("x", stop.x - width / 2); frame.setAttribute("y", stop.y - cell / 2); }
  });
}
function points(chart, host) {
  const [run] = chart.runs;
  if (hidden.has(run)) return;
  const H = printing ? 220 : 340, LEFT = 62, svg = drawing(chart, host, H);
  let [low, high] = [Math.min(...chart.x, ...chart.y), Math.max(...chart.x, ...chart.y)];
  const pad = (high - low) * 0.04 || Math.abs(high) * 0.1 || 1; low -= pad; high += pad;
  const x = v => LEFT + (v - low) / (high - low) * (W - LEFT - RIGHT);
  const y = v => H - BOTTOM - (v - low) / (high - low) * (H - BOTTOM - TOP);
  up(svg, chart.y_label, LEFT, y, ticks(low, high, 6), TOP, H - BOTTOM);
  across(svg, chart.x_label, LEFT, x, ticks(low, high, W / 80), H - BOTTOM);
  node("line", { class: "axis", x1: x(low), y1: y(low), x2: x(high), y2: y(high), "stroke-dasharray": "2 3" }, svg);
  const stops = chart.x.map((v, i) => ({ x: x(v), y: y(chart.y[i]), text: `${chart.x_label} ${number(v)}\n${chart.y_label} ${number(chart.y[i])}` }));
  stops.forEach(stop => marker(run, stop.x, stop.y, svg).setAttribute("fill-opacity", 0.6));
  attend(svg, stops, (px, py) => closest(stops, px, py, 24), ring(svg));
}
function reliability(chart, host) {
  const [run] = chart.runs;
  if (hidden.has(run)) return;
  const H = printing ? 232 : 360, LEFT = 46, floor = printing ? 130 : 230, svg = drawing(chart, host, H), plot = W - LEFT - RIGHT;
  const x = v => LEFT + v * plot, y = v => floor - v * (floor - TOP);
  up(svg, "accuracy", LEFT, y, [0, 0.2, 0.4, 0.6, 0.8, 1], TOP, floor);
  across(svg, "confidence", LEFT, x, [0, 0.2, 0.4, 0.6, 0.8, 1], H - BOTTOM);
  node("line", { class: "axis", x1: x(0), y1: y(0), x2: x(1), y2: y(1), "stroke-dasharray": "2 3" }, svg);
  for (const bin of chart.bins)
    node("line", { x1: x(bin.confidence), x2: x(bin.confidence), y1: y(bin.confidence), y2: y(bin.accuracy), stroke: colour(run), "stroke-width": 4, "stroke-opacity": 0.3 }, svg);
  node("path", { d: "M" + chart.bins.map(b => `${x(b.confidence).toFixed(1)} ${y(b.accuracy).toFixed(1)}`).join("L"), fill: "none", stroke: colour(run), "stroke-width": 2 }, svg);
  const most = Math.max(...chart.bins.map(b => b.count)), ground = H - BOTTOM, room = ground - floor - (printing ? 28 : 44);
  node("text", { transform: `translate(12 ${(floor + ground) / 2 + 4}) rotate(-90)`, "text-anchor": "middle" }, svg, "samples");
  const stops = [];
  for (const bin of chart.bins) {
    const high = Math.max(1, bin.count / most * room), [a, b] = [x(bin.low), x(bin.high)], text = bin.count.toLocaleString("en");
    node("rect", { x: a + 0.5, y: ground - high, width: b - a - 1, height: high, fill: colour(run), "fill-opacity": 0.35 }, svg);
    const [cx, cy] = [(a + b) / 2, ground - high - 4], flat = text.length * 6.2 + 2 <= b - a;
    node("text", { ...(flat ? { x: cx, y: cy, "text-anchor": "middle" } : { transform: `translate(${cx + 4} ${cy}) rotate(-90)` }), style: "font-size: 11px" }, svg, text);
    marker(run, x(bin.confidence), y(bin.accuracy), svg);
    stops.push({ x: x(bin.confidence), y: y(bin.accuracy), text: `confidence ${bin.low.toFixed(2)} to ${bin.high.toFixed(2)}, mean ${bin.confidence.toFixed(3)}\naccuracy ${bin.accuracy.toFixed(3)} of ${text} samples` });
  }
  attend(svg, stops, px => chart.bins.findIndex(b => px >= x(b.low) && px <= x(b.high)), ring(svg));
}
const printed = wide => wide ? (DATA.runs.length > 1 ? 980 : 670) : 310;  // width of a card on paper
let printing = false;
function draw() {
  const held = document.activeElement.tagName === "svg" && document.activeElement.closest("[data-chart]");
  tip.style.display = "none";
  document.querySelectorAll("[data-chart]").forEach(card => {
    const chart = DATA.charts[card.dataset.chart], place = card.querySelector(".chart");
    card.hidden = false;
    place.replaceChildren();
    W = printing ? printed(card.classList.contains("wide")) : Math.max(240, place.clientWidth);
    ({ Lines: lines, Spread: spread, Heat: heat, Points: points, Reliability: reliability })[chart.kind](chart, place);
    card.hidden = !place.firstChild;
  });
  document.querySelectorAll(".scroll").forEach(box => box.classList.toggle("over", box.scrollWidth > box.clientWidth + 1));
  if (held) held.querySelector("svg[tabindex]")?.focus({ preventScroll: true });
}
function sort(head, down) {
  const body = document.querySelector("#runs tbody"), index = head.cellIndex;
  document.querySelectorAll("#runs th").forEach(other => other.removeAttribute("aria-sort"));
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  const value = row => row.cells[index].dataset.value;
  const none = row => value(row) === "" || value(row) === "nan";
  const numeric = [...body.rows].every(row => none(row) || !isNaN(value(row)));
  const compare = (a, b) => (numeric ? value(a) - value(b) : value(a).localeCompare(value(b))) * (down ? -1 : 1);
  [...body.rows].sort((a, b) => none(a) - none(b) || compare(a, b)).forEach(row => body.append(row));
}
// Gives what the page holds its marks, and something to do when it is used.
function dress() {
  document.querySelectorAll("svg[data-run]").forEach(svg => swatch(svg, +svg.dataset.run));
  const legend = document.getElementById("legend");
  if (legend) DATA.runs.forEach((name, run) => {
    const button = document.createElement("button");
    button.type = "button"; button.setAttribute("aria-pressed", String(!hidden.has(run))); button.title = "show or hide";
    swatch(node("svg", { class: "key", viewBox: "0 0 26 12", "aria-hidden": "true" }, button), run);
    button.append(name);
    button.addEventListener("click", () => {
      const shown = hidden.delete(run) || !hidden.add(run);
      button.setAttribute("aria-pressed", String(shown));
      draw();
    });
    legend.append(button);
  });
  document.querySelectorAll("#runs thead th").forEach(head => head.addEventListener("click", () => sort(head, head.getAttribute("aria-sort") === "ascending")));
  document.getElementById("theme").addEventListener("click", () => { chosen = true; theme(root.dataset.theme === "dark" ? "light" : "dark"); });
  document.querySelectorAll("details").forEach(one => one.addEventListener("toggle", () => { if (!printing) draw(); }));
}
const system = matchMedia("(prefers-color-scheme: dark)");
let chosen = false;
function theme(name) { root.dataset.theme = name; document.getElementById("theme").textContent = name === "dark" ? "light" : "dark"; draw(); }
system.addEventListener("change", () => { if (!chosen) theme(system.matches ? "dark" : "light"); });
let before = null;
addEventListener("beforeprint", () => {
  const closed = [...document.querySelectorAll("details:not([open])")];
  before = { theme: root.dataset.theme, closed };
  closed.forEach(one => { one.open = true; });
  printing = true;
  theme("light");
});
addEventListener("afterprint", () => {
  printing = false;
  before.closed.forEach(one => { one.open = false; });
  theme(before.theme);
});
let waiting = 0, drawn = innerWidth;
addEventListener("resize", () => {
  if (innerWidth === drawn) return;  // a phone's bars come and go
  drawn = innerWidth;
  clearTimeout(waiting);
  waiting = setTimeout(draw, 120);
});
dress();
theme(system.matches ? "dark" : "light");
