"use strict";
// What a script adds to a page that can be read without one: themes, tips, hidden runs, sorted tables, files.
const root = document.documentElement, tip = document.getElementById("tip");
const hidden = new Set();
let chosen = false;

function node(name, attributes, parent) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  parent.append(made);
  return made;
}
// What a chart says under the pointer, or step by step on the arrow keys.
function say(x, y, text) {
  tip.textContent = text;
  tip.style.display = "block";
  const box = tip.getBoundingClientRect();
  tip.style.left = Math.max(8, Math.min(x + 14, innerWidth - box.width - 8)) + "px";
  tip.style.top = Math.max(8, y - box.height - 10) + "px";
}
function attend(svg) {
  const byX = svg.dataset.by === "x", REACH = 40;
  let all = null, at = -1;
  const mark = byX ? node("line", { class: "mark", y1: 0, y2: svg.getAttribute("height"), "stroke-dasharray": "2 3" }, svg)
    : node("circle", { class: "mark", r: 8 }, svg);
  // Those of runs that are shown.
  const stops = () => (all ||= JSON.parse(svg.dataset.stops)).map(([x, y, told]) => {
    if (typeof told === "string") return { x, y, text: told };
    const shown = told.filter(([run]) => !hidden.has(run));
    return { x, y, text: shown.map(([, text]) => text).join("\n"), none: shown.every(([run]) => run < 0) };
  }).filter(stop => !stop.none);
  const leave = () => { tip.style.display = "none"; mark.style.visibility = "hidden"; at = -1; };
  const show = (stop, x, y) => {
    mark.style.visibility = "visible";
    for (const key of byX ? ["x1", "x2"] : ["cx"]) mark.setAttribute(key, 100 * stop.x + "%");
    if (!byX) mark.setAttribute("cy", stop.y);
    say(x, y, stop.text);
  };
  const point = event => {
    const box = svg.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
    let best = byX ? Infinity : REACH ** 2, found = -1, known = stops();
    known.forEach((stop, i) => {
      const far = (stop.x * box.width - x) ** 2 + (byX ? 0 : (stop.y - y) ** 2);
      if (far < best) { best = far; found = i; }
    });
    if (found < 0) { leave(); return; }
    at = found;
    show(known[at], event.clientX, event.clientY);
  };
  svg.addEventListener("pointermove", point);
  svg.addEventListener("pointerdown", point);
  svg.addEventListener("pointerleave", leave);
  svg.addEventListener("blur", leave);
  svg.addEventListener("keydown", event => {
    const known = stops(), last = known.length - 1;
    const next = { ArrowRight: Math.min(at + 1, last), ArrowLeft: Math.max(at - 1, 0), Home: 0, End: last }[event.key];
    if (event.key === "Escape") leave();
    if (next === undefined || last < 0) return;
    event.preventDefault();
    at = next;
    const box = svg.getBoundingClientRect();
    show(known[at], box.left + known[at].x * box.width, box.top + known[at].y);
  });
}
function conceal() {
  document.querySelectorAll(".chart [data-run]").forEach(one => { one.style.display = hidden.has(+one.dataset.run) ? "none" : ""; });
  document.querySelectorAll(".card[data-runs]").forEach(card => {
    card.style.display = card.dataset.runs.split(" ").every(run => hidden.has(+run)) ? "none" : "";
  });
  document.querySelectorAll("#legend button").forEach((button, run) => button.setAttribute("aria-pressed", String(!hidden.has(run))));
}
function measure() {
  document.querySelectorAll(".scroll").forEach(box => box.classList.toggle("over", box.scrollWidth > box.clientWidth + 1));
}
function sort(head, down) {
  const table = head.closest("table"), body = table.tBodies[0], index = head.cellIndex;
  table.querySelectorAll("th").forEach(other => other.removeAttribute("aria-sort"));
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  const value = row => row.cells[index].dataset.value;
  const none = row => value(row) === "" || value(row) === "nan";
  const numeric = [...body.rows].every(row => none(row) || !isNaN(value(row)));
  const compare = (a, b) => (numeric ? value(a) - value(b) : value(a).localeCompare(value(b))) * (down ? -1 : 1);
  [...body.rows].sort((a, b) => none(a) - none(b) || compare(a, b)).forEach(row => body.append(row));
}
function save(card) {
  const { rows } = JSON.parse(document.getElementById("charts").textContent)[card.dataset.chart];
  const cell = text => /[",\n]/.test(text) ? `"${String(text).replaceAll('"', '""')}"` : text;
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([rows.map(row => row.map(cell).join(",") + "\n").join("")], { type: "text/csv" }));
  link.download = card.querySelector("h3").textContent.replace(/\W+/g, "-").toLowerCase() + ".csv";
  link.click();
  URL.revokeObjectURL(link.href);
}
// Gives what the page holds something to do when it is used.
function dress() {
  document.querySelectorAll(".plot[data-stops]").forEach(attend);
  document.querySelectorAll("#legend button").forEach((button, run) => button.addEventListener("click", () => {
    hidden.delete(run) || hidden.add(run);
    conceal();
  }));
  document.querySelectorAll(".sortable th").forEach(head => head.addEventListener("click", () => sort(head, head.getAttribute("aria-sort") === "ascending")));
  document.querySelectorAll("[data-chart]").forEach(card => {
    const button = document.createElement("button");
    button.type = "button"; button.className = "save"; button.textContent = "CSV"; button.title = "save the numbers of this chart";
    button.addEventListener("click", () => save(card));
    card.append(button);
  });
  document.getElementById("theme").addEventListener("click", () => { chosen = true; theme(root.dataset.theme === "dark" ? "light" : "dark"); });
  document.querySelectorAll("details").forEach(one => one.addEventListener("toggle", measure));
  theme(root.dataset.theme || (system.matches ? "dark" : "light"));
  conceal();
  measure();
}
const system = matchMedia("(prefers-color-scheme: dark)");
function theme(name) { root.dataset.theme = name; document.querySelector("#theme span").textContent = name === "dark" ? "light" : "dark"; }
system.addEventListener("change", () => { if (!chosen) theme(system.matches ? "dark" : "light"); });
let closed = [], printing = false;
addEventListener("beforeprint", () => {
  printing = true;
  closed = [...document.querySelectorAll("details:not([open])")];
  closed.forEach(one => { one.open = true; });
});
addEventListener("afterprint", () => { printing = false; closed.forEach(one => { one.open = false; }); });
addEventListener("resize", measure);
dress();
