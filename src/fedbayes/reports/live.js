// Follows the runs: asks the server what they do now, and takes over its page where that has changed.
let version = JSON.parse(document.getElementById("state").textContent).version, taking = false, next = 0;
const EVERY = 1000, MODERATION = 8;  // milliseconds between two questions; times as long as it took to take a page over
const QUIET = 4000;  // milliseconds that the server may take to answer

function element(name, parent, of) {
  const made = document.createElement(name);
  if (of) made.className = of;
  parent.append(made);
  return made;
}
function write(place, text) { if (place.textContent !== text) place.textContent = text; }
function bar(card, of, [done, total], what) {
  let found = card.querySelector(`.progress.${of}`);
  if (!found) {
    found = element("div", card, `progress ${of}`);
    found.setAttribute("role", "progressbar");
    found.setAttribute("aria-label", what);
    element("i", found);
  }
  found.hidden = !total;
  found.style.display = total ? "" : "none";
  found.setAttribute("aria-valuenow", done); found.setAttribute("aria-valuemax", total);
  found.firstChild.style.width = `${100 * done / (total || 1)}%`;
}
// One card a run that is not over; those that are have one line together.
function tell(state) {
  const place = document.getElementById("live"), known = new Map([...place.querySelectorAll(".now")].map(card => [card.dataset.run, card]));
  place.querySelector(".lost")?.remove();
  const shown = state.runs.filter(run => run.state !== "ended" || state.runs.length === 1);
  const over = state.runs.length - shown.length;
  if (over) shown.push({ label: "", state: "ended", line: over === state.runs.length ? `all ${over} runs have ended` : `${over} of ${state.runs.length} runs have ended`, rounds: [0, 0], clients: [0, 0], details: [] });
  if (state.trouble) shown.push({ label: " ", state: "stopped", line: state.trouble, rounds: [0, 0], clients: [0, 0], details: [] });
  for (const run of shown) {
    let card = known.get(run.label);
    if (!card) {
      card = element("div", place, "now");
      card.dataset.run = run.label;
      if (state.runs.length > 1 && run.label.trim()) element("h3", card).textContent = run.label;
      element("p", card, "line");
    }
    known.delete(run.label);
    card.dataset.state = run.state;
    write(card.querySelector(".line"), run.line);
    bar(card, "rounds", run.rounds, "rounds");
    bar(card, "clients", run.state === "running" && run.clients[1] > 1 ? run.clients : [0, 0], "clients of this round");
    const details = [...card.querySelectorAll(".detail")];
    run.details.forEach(([heading, text], i) => {
      const line = details[i] || element("p", card, "detail");
      if (!line.firstChild) { element("b", line); element("span", line); }
      write(line.firstChild, heading + " "); write(line.lastChild, text);
    });
    details.slice(run.details.length).forEach(line => line.remove());
  }
  known.forEach(card => card.remove());
}
function lost() {
  const place = document.getElementById("live");
  if (place.querySelector(".lost")) return;
  const told = element("p", place, "lost");
  told.textContent = `The server does not answer: this is how it was at ${new Date().toLocaleTimeString()}. The page stays, and goes on when the server does.`;
  place.prepend(told);
}

const runs = () => JSON.parse(document.getElementById("data").textContent).runs;
// What the user has done with the page, to be done again with the next one.
function remembered() {
  const head = document.querySelector(".sortable th[aria-sort]"), focus = document.activeElement;
  const of = one => one && one.closest("[data-chart]") && [one.closest("[data-chart]").querySelector("h3").textContent, one.tagName === "svg"];
  return {
    hidden: [...hidden].map(run => runs()[run].name),
    sorted: head && [head.textContent, head.getAttribute("aria-sort") === "descending"],
    open: new Map([...document.querySelectorAll("details")].map(one => [heading(one), one.open])),
    aside: [...document.querySelectorAll(".scroll")].map(box => box.scrollLeft),
    focus: focus && (focus.id ? `#${focus.id}` : null), chart: of(focus),
    at: [scrollX, scrollY], pointed: tip.style.display === "block" && pointer,
  };
}
function heading(details) {
  let before = details.previousElementSibling;
  while (before && before.tagName !== "H2") before = before.previousElementSibling;
  return before ? before.textContent : "";
}
function restore(past) {
  document.querySelectorAll("details").forEach(one => { if (past.open.has(heading(one))) one.open = past.open.get(heading(one)); });
  if (past.sorted) {
    const head = [...document.querySelectorAll(".sortable th")].find(one => one.textContent === past.sorted[0]);
    if (head) sort(head, past.sorted[1]);
  }
  document.querySelectorAll(".scroll").forEach((box, i) => { box.scrollLeft = past.aside[i] || 0; });
  const chart = past.chart && [...document.querySelectorAll("[data-chart]")].find(one => one.querySelector("h3").textContent === past.chart[0]);
  const target = chart ? chart.querySelector(".plot[tabindex]") : past.focus && document.querySelector(past.focus);
  if (target) target.focus({ preventScroll: true });
  scrollTo({ left: past.at[0], top: past.at[1], behavior: "instant" });
  const under = past.pointed && document.elementFromPoint(pointer.clientX, pointer.clientY)?.closest(".plot");
  if (under) under.dispatchEvent(new PointerEvent("pointermove", pointer));
}
async function asked(path) {
  const answer = await fetch(path, { cache: "no-store", signal: AbortSignal.timeout(QUIET) });
  if (!answer.ok) throw new Error(answer.status);
  return answer;
}
// Text that is being selected, what is printed, and what the arrow keys are at, are left in peace.
const busy = () => printing || !getSelection().isCollapsed || (tip.style.display === "block" && document.activeElement.closest(".chart"));
let pointer = null;
addEventListener("pointermove", event => { if (event.isTrusted) pointer = { clientX: event.clientX, clientY: event.clientY }; });
async function take() {
  const began = performance.now(), text = await (await asked("./")).text();
  if (busy()) return;
  const page = new DOMParser().parseFromString(text, "text/html"), past = remembered();
  version = JSON.parse(page.getElementById("state").textContent).version;
  for (const id of ["data", "charts"]) document.getElementById(id).textContent = page.getElementById(id).textContent;
  hidden.clear();
  runs().forEach(({ name }, run) => { if (past.hidden.includes(name)) hidden.add(run); });
  page.getElementById("live").replaceWith(document.getElementById("live"));
  const style = page.querySelector("style");
  if (style.textContent !== document.querySelector("style").textContent) document.querySelector("style").replaceWith(style);
  document.title = page.title;
  document.querySelector("main").replaceWith(page.querySelector("main"));
  dress();
  restore(past);
  next = performance.now() + Math.min(MODERATION * (performance.now() - began), 10000);
}
async function follow() {
  try {
    const state = await (await asked("state")).json();
    tell(state);
    if (state.version !== version && !busy() && performance.now() >= next) await take();
  } catch (error) {
    lost();
  }
  setTimeout(follow, EVERY);
}
tell(JSON.parse(document.getElementById("state").textContent));
setTimeout(follow, EVERY);
