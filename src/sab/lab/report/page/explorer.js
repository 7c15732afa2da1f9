
// The credit explorer: what the chosen step of a sequence reads, and how the credit of its answer flows back.

const chosen = { model: 0, step: null, moment: null, isPinned: false };
const hiddenSeries = new Set();
const WIDEST = 16; // pixels of an arc with all the weight, or all the credit; others are as wide as their shares of it
const LEAST_LABELLED = 0.1;

const model = () => data.explorers[chosen.model];
const moment = () => model().moments[chosen.moment];
const number = (value) => Number(value.toPrecision(3)).toString();
const escaped = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;"); // for a figure
const percent = (share) => `${number(100 * share)}\u00a0%`;
const named = (sign) => model().names[sign] ?? sign;
const after = ({ iteration }) => `after ${iteration.toLocaleString("en")} iteration${iteration === 1 ? "" : "s"}`;
const readsOf = (step) => (hiddenSeries.has("read") ? [] : moment().reads[step] ?? []);

function listed(entries) {
  return entries.length < 2 ? entries.join("") : `${entries.slice(0, -1).join(", ")} and ${entries.at(-1)}`;
}

// By skip its share of the credit: that of all the paths that take it.
function skipShares() {
  const shares = new Map();
  if (hiddenSeries.has("skip")) return shares;
  for (const [share, skips] of moment().credit[chosen.step]?.paths ?? []) for (const skip of skips) {
    const name = skip.join(" ");
    shares.set(name, (shares.get(name) ?? 0) + share);
  }
  return shares;
}

// The step nearest to the chosen one whose credit is known; the chosen one itself where its is.
function nearestWithCredit() {
  const steps = Object.keys(moment().credit).map(Number);
  return steps.sort((one, other) => Math.abs(one - chosen.step) - Math.abs(other - chosen.step))[0];
}

const hasCreditRow = () => Boolean(model().timeline.layout.yaxis4);

// Why a row is empty; nothing where it is not.
function whyEmpty() {
  const { credit, reads } = moment();
  const { step } = chosen;
  const why = {};
  if (!reads[step]?.length) {
    if (!model().hasMemory) why.y = "This model has no memory, so it reads nothing.";
    else why.y = step <= model().keptEvery ? "Nothing to read: no microstate has been kept yet." : "This step reads nothing.";
  }
  if (!hasCreditRow()) return why;
  if (credit[step]) {
    if (!credit[step].paths.length) why.y3 = model().hasMemory ? "No credit takes a skip." : "No skips: all credit stays on the chain.";
  } else {
    const reason = model().right[step] === undefined ? "no answer counts at this step" : "the answer of this step was not traced";
    why.y3 = why.y4 = `No credit: ${reason}.`;
  }
  return why;
}

function tell() {
  const { seen, right } = model();
  const { reads, predictions, credit, of } = moment();
  const { step } = chosen;
  let told = `Step ${step}: input ${named(seen[step - 1])}`;
  const said = predictions[step];
  if (said !== undefined) told += `, prediction ${named(said)} (${said === right[step] ? "correct" : `target ${named(right[step])}`})`;
  else if (right[step] !== undefined) told += `, target ${named(right[step])}`;
  const read = (reads[step] ?? []).slice(0, 3).map(([at, weight]) => `step ${at} (${named(seen[at - 1])}) with weight ${number(weight)}`);
  told += read.length ? `. It reads ${listed(read)}${of ? `, ${of}` : ""}.` : `. ${whyEmpty().y ?? ""}`;
  const [best] = credit[step]?.paths ?? [];
  if (best) told += ` The largest single path of its credit skips ${best[1].map(([from, to]) => `from ${from} to ${to}`).join(", then ")}: ${percent(best[0])} of the credit.`;
  else if (hasCreditRow() && !credit[step]) told += ` ${whyEmpty().y4}`;
  return told;
}

function arc(from, to, axis, colour, share) {
  const { at } = model();
  const [start, end] = [at[from - 1], at[to - 1]];
  const [base, top] = axis === "y3" ? [1, 1 - 2 * height(from, to)] : [0, 2 * height(from, to)];
  return {
    type: "path", xref: "x", yref: axis, layer: "below", opacity: 0.85, path: `M${start},${base} Q${(start + end) / 2},${top} ${end},${base}`,
    line: { color: colour, width: WIDEST * share },
  };
}

function height(from, to) {
  const { at } = model();
  return 0.2 + 0.66 * Math.abs(at[from - 1] - at[to - 1]) / (at.at(-1) - at[0] || 1);
}

function shapes(found) {
  const { at, widths } = model();
  const { step } = chosen;
  const half = Math.max(widths[step - 1], (at.at(-1) - at[0]) / 200) / 2;
  const edge = chosen.isPinned ? { color: found("@ink"), width: 1.5 } : { width: 0 };
  const band = { type: "rect", xref: "x", yref: "paper", x0: at[step - 1] - half, x1: at[step - 1] + half, y0: 0, y1: 1, layer: "below", line: edge, fillcolor: found("@faint"), opacity: 0.45 };
  const arcs = readsOf(step).map(([to, weight]) => arc(step, to, "y", found("@read"), Math.min(weight, 1)));
  const below = [...skipShares()].map(([name, share]) => arc(...name.split(" ").map(Number), "y3", found("@skip"), share));
  return [band, ...arcs, ...below];
}

// The shares of the widest arcs, at their tops, and why a row is empty.
function labels(found) {
  const { at } = model();
  const placed = [];
  const made = [];
  const put = (from, to, share, axis, colour) => {
    const [x, y] = [(at[from - 1] + at[to - 1]) / 2, axis === "y3" ? 1 - height(from, to) : height(from, to)];
    const isNear = (one) => one.axis === axis && Math.abs(one.y - y) < 0.15 && Math.abs(one.x - x) * stepWidth() < 52;
    if (share < LEAST_LABELLED || placed.some(isNear)) return;
    placed.push({ axis, x, y });
    const shift = (axis === "y3" ? -1 : 1) * (9 + WIDEST * share / 2);
    made.push({ xref: "x", yref: axis, x, y, yshift: shift, text: percent(share), showarrow: false, font: { size: 12, color: colour } });
  };
  for (const [to, weight] of readsOf(chosen.step)) put(chosen.step, to, weight, "y", found("@read"));
  for (const [name, share] of [...skipShares()].sort(([, one], [, other]) => other - one)) put(...name.split(" ").map(Number), share, "y3", found("@skip"));
  for (const [axis, text] of Object.entries(whyEmpty())) {
    made.push({ xref: "paper", yref: axis === "y4" ? "y4 domain" : axis, x: 0.5, y: 0.5, text, showarrow: false, font: { size: 13, color: found("@muted") } });
  }
  return made;
}

function numbers() {
  const { seen } = model();
  const weights = new Map(moment().reads[chosen.step] ?? []);
  const credit = moment().credit[chosen.step] ?? { steps: [], direct: [], chain: [], skip: [] };
  const parts = new Map(credit.steps.map((step, place) => [step, [credit.direct[place], credit.chain[place], credit.skip[place]]]));
  const rows = [...new Set([...weights.keys(), ...parts.keys()])].sort((one, other) => one - other).map((step) => {
    const row = document.createElement("tr");
    const cells = [step, named(seen[step - 1]), weights.has(step) ? number(weights.get(step)) : "–", ...(parts.get(step) ?? []).map(number)];
    for (const cell of [...cells, "–", "–", "–"].slice(0, 6)) row.append(Object.assign(document.createElement("td"), { textContent: cell }));
    return row;
  });
  byId("numbers").tBodies[0].replaceChildren(...rows);
}

function putCredit(figure) {
  const { at, widths } = model();
  const credit = moment().credit[chosen.step];
  // The parts of a step's credit are next to each other: they are norms, which do not add up.
  const parts = figure.data.filter((trace) => credit && trace.name in credit && !hiddenSeries.has(trace.name));
  const least = 0.01 * Math.max(...parts.flatMap((trace) => credit[trace.name]));
  const present = (credit?.steps ?? []).map((_, place) => parts.filter((trace) => credit[trace.name][place] > least));
  for (const trace of parts) {
    const own = [...credit.steps.keys()].filter((place) => present[place].includes(trace));
    const room = (place) => Math.max(0.8 * widths[credit.steps[place] - 1], at.at(-1) / 300);
    trace.width = own.map((place) => room(place) / present[place].length);
    trace.x = own.map((place, which) => at[credit.steps[place] - 1] - room(place) / 2 + (present[place].indexOf(trace) + 0.5) * trace.width[which]);
    trace.y = own.map((place) => credit[trace.name][place]);
  }
}

// The model's answers where they are known, with a tick or a cross under each, and else the targets.
function putAnswers(figure) {
  const { right } = model();
  const { predictions } = moment();
  const [answers, marks] = ["answers", "marks"].map((name) => figure.data.find((trace) => trace.name === name));
  const label = figure.layout.annotations.find(({ text }) => text === "answer");
  if (!Object.keys(predictions).length) {
    if (label) label.text = "target";
    return;
  }
  const steps = Object.keys(right);
  const isRight = steps.map((step) => predictions[step] === right[step]);
  answers.text = steps.map((step) => escaped(predictions[step] ?? ""));
  answers.textfont.color = isRight.map((one) => (one ? "@ink" : "@wrong"));
  marks.text = isRight.map((one) => (one ? "✓" : "✗"));
  marks.textfont.color = isRight.map((one) => (one ? "@muted" : "@wrong"));
}

// Symbols as large as there is room for; where there is none, a long text has its own lines below.
function fitSymbols(figure) {
  const size = Math.min(16, 1.5 * stepWidth());
  for (const trace of figure.data) if (trace.textfont && trace.x.length > 1) {
    trace.textfont.size = trace.name === "marks" ? Math.min(12, size) : size;
    if (size < 7) trace.visible = false;
  }
  if (size < 7) figure.layout.annotations = figure.layout.annotations.filter(({ text }) => !["input", "answer", "target"].includes(text));
  if (byId("timeline").clientWidth < 600) for (const note of figure.layout.annotations) if (note.name === "narrowed") note.text = note.text.split(":")[0];
}

function drawTimeline(found) {
  const figure = structuredClone(model().timeline);
  putCredit(figure);
  putAnswers(figure);
  fitSymbols(figure);
  figure.layout.shapes = shapes(found);
  figure.layout.annotations.push(...labels(found));
  draw(byId("timeline"), figure);
}

// How wide an ordinary step is on the screen.
const stepWidth = () => (byId("timeline").clientWidth - 64) / model().at.at(-1);

function drawMap(found) {
  if (byId("map-figure").hidden) return;
  const figure = structuredClone(model().map);
  figure.data[0].z = moment().attention;
  figure.layout.shapes = [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: chosen.step, y1: chosen.step, line: { color: found("@skip"), width: 1.5 } }];
  draw(byId("map"), figure);
  follow(byId("map"), ({ y }) => y);
}

function drawImage() {
  const { image, places } = model();
  if (!image) return;
  const side = Math.round(Math.sqrt(places.length));
  const figure = structuredClone(image);
  const put = (name, marks) => {
    const trace = figure.data.find((one) => one.name === name);
    trace.x = marks.map(([step]) => places[step - 1] % side);
    trace.y = marks.map(([step]) => Math.floor(places[step - 1] / side));
    trace.marker.size = marks.map(([, share]) => 5 + 21 * Math.sqrt(Math.min(share, 1)));
  };
  const credit = hiddenSeries.has("skip") ? null : moment().credit[chosen.step];
  const largest = credit ? Math.max(...credit.skip, 1e-30) : 1;
  put("credit", credit ? credit.steps.map((step, place) => [step, credit.skip[place] / largest]).filter(([, share]) => share > 0.02) : []);
  put("reads", readsOf(chosen.step));
  put("step", [[chosen.step, 0.1]]);
  draw(byId("image"), figure);
  follow(byId("image"), ({ x, y }) => 1 + model().places.indexOf(y * side + x));
}

// A text in lines, a span a character: shaded as strongly as it is read, underlined as strongly as credit arrives.
function drawText() {
  const { seen, right, isText } = model();
  const { predictions, credit } = moment();
  byId("text-figure").hidden = !isText;
  if (!isText) return;
  const place = byId("text");
  if (place.childElementCount !== seen.length) {
    place.replaceChildren(...seen.map((sign, at) => Object.assign(document.createElement("span"), { textContent: sign, title: `step ${at + 1}` })));
  }
  const weights = new Map(readsOf(chosen.step));
  const own = hiddenSeries.has("skip") ? null : credit[chosen.step];
  const total = own ? own.steps.map((_, at) => Math.max(own.skip[at], own.chain[at], own.direct[at])) : [];
  const largest = Math.max(...total, 1e-30);
  const arrives = new Map((own?.steps ?? []).map((step, at) => [step, total[at] / largest]));
  for (const [at, span] of [...place.children].entries()) {
    const step = at + 1;
    span.style.setProperty("--read-share", `${100 * Math.min(weights.get(step) ?? 0, 1)}%`);
    span.style.setProperty("--credit-share", `${100 * (arrives.get(step) ?? 0)}%`);
    span.classList.toggle("chosen", step === chosen.step);
    span.classList.toggle("wrong", predictions[step] !== undefined && predictions[step] !== right[step]);
  }
}

function explore() {
  const { seen, moments, about } = model();
  chosen.step = Math.min(Math.max(chosen.step ?? model().start, 1), seen.length);
  chosen.moment = Math.min(chosen.moment ?? moments.length - 1, moments.length - 1);
  const found = colours();
  const told = tell();
  byId("about").textContent = about;
  Object.assign(byId("step"), { max: seen.length, value: chosen.step });
  Object.assign(byId("moment"), { max: moments.length - 1, value: chosen.moment });
  byId("moment").closest("div").hidden = moments.length < 2;
  byId("model").closest("div").hidden = data.explorers.length < 2;
  byId("step-told").textContent = `${chosen.step} of ${seen.length}`;
  byId("moment-told").textContent = after(moment());
  byId("told").textContent = told;
  byId("step").setAttribute("aria-valuetext", told);
  byId("moment").setAttribute("aria-valuetext", after(moment()));
  for (const [name, value] of Object.entries({ valuemax: seen.length, valuenow: chosen.step, valuetext: told })) byId("timeline").setAttribute(`aria-${name}`, value);
  byId("timeline").classList.toggle("short", !hasCreditRow());
  for (const button of byId("key").querySelectorAll("button")) button.hidden = button.dataset.series !== "read" && !hasCreditRow();
  byId("pin").textContent = chosen.isPinned ? `Release step ${chosen.step}` : `Pin step ${chosen.step}`;
  byId("pin").setAttribute("aria-pressed", chosen.isPinned);
  const nearest = hasCreditRow() ? nearestWithCredit() : undefined;
  byId("nearest").hidden = nearest === undefined || nearest === chosen.step;
  byId("nearest").textContent = `Nearest step with credit: ${nearest}`;
  byId("permalink").href = address();
  if (chosen.isPinned) history.replaceState(null, "", address());
  byId("map-figure").hidden = !model().map || !moment().attention.length;
  byId("image-figure").hidden = !model().image;
  byId("stage").classList.toggle("has-image", Boolean(model().image));
  drawTimeline(found);
  drawMap(found);
  drawImage();
  drawText();
  numbers();
}

// A step has an address: that of the page, and what is chosen.

const address = () => `#model=${chosen.model}&iteration=${moment().iteration}&step=${chosen.step}`;

// Whether the address is that of a step, which is then chosen.
function goToAddress() {
  const wanted = new URLSearchParams(location.hash.slice(1));
  const [place, iteration, step] = ["model", "iteration", "step"].map((name) => Number(wanted.get(name)));
  if (!wanted.has("step") || !data.explorers[place]) return false;
  const at = data.explorers[place].moments.findIndex((one) => one.iteration === iteration);
  Object.assign(chosen, { model: place, moment: at < 0 ? null : at, step: Number.isInteger(step) ? step : null, isPinned: true });
  byId("model").value = place;
  return true;
}

// The step under the mouse becomes the chosen one, as long as none is pinned; a click pins it.
function follow(place, step) {
  if (place.dataset.followed) return;
  place.dataset.followed = "yes";
  place.on("plotly_hover", ({ points }) => { if (!chosen.isPinned) choose({ step: step(points[0]) }); });
  place.on("plotly_click", ({ points }) => pin(step(points[0])));
}

function pin(step) {
  choose({ step, isPinned: !(chosen.isPinned && chosen.step === step) });
}

const KEYS = {
  ArrowLeft: () => chosen.step - 1, ArrowDown: () => chosen.step - 1, ArrowRight: () => chosen.step + 1, ArrowUp: () => chosen.step + 1,
  PageDown: () => chosen.step - 10, PageUp: () => chosen.step + 10, Home: () => 1, End: () => model().seen.length,
};

function pressed(event) {
  if (event.key in KEYS) choose({ step: Math.min(Math.max(KEYS[event.key](), 1), model().seen.length) });
  else if (event.key === "Enter" || event.key === " ") pin(chosen.step);
  else if (event.key === "Escape") choose({ isPinned: false });
  else return;
  event.preventDefault();
}

let planned = false;
function exploreSoon() {
  if (planned) return;
  planned = true;
  requestAnimationFrame(() => { planned = false; explore(); });
}

function choose(change) {
  if (Object.entries(change).every(([name, value]) => chosen[name] === value)) return;
  Object.assign(chosen, change);
  exploreSoon();
}

function startExplorer() {
  if (!data.explorers.length) return;
  byId("model").replaceChildren(...data.explorers.map(({ name }, place) => new Option(name, place)));
  chosen.model = Math.min(chosen.model, data.explorers.length - 1);
  const isAddressed = chosen.step === null && goToAddress();
  byId("model").value = chosen.model;
  byId("model").addEventListener("change", (event) => choose({ model: Number(event.target.value), step: null, moment: null, isPinned: false }));
  byId("step").addEventListener("input", (event) => choose({ step: Number(event.target.value) }));
  byId("moment").addEventListener("input", (event) => choose({ moment: Number(event.target.value) }));
  byId("pin").addEventListener("click", () => pin(chosen.step));
  byId("nearest").addEventListener("click", () => choose({ step: nearestWithCredit() }));
  byId("timeline").addEventListener("keydown", pressed);
  byId("text").addEventListener("click", ({ target }) => { if (target.matches("span")) pin(1 + [...target.parentElement.children].indexOf(target)); });
  byId("text").addEventListener("mouseover", ({ target }) => {
    if (target.matches("span") && !chosen.isPinned) choose({ step: 1 + [...target.parentElement.children].indexOf(target) });
  });
  for (const button of byId("key").querySelectorAll("button")) {
    button.setAttribute("aria-pressed", !hiddenSeries.has(button.dataset.series));
    button.addEventListener("click", () => {
      const { series } = button.dataset;
      hiddenSeries[hiddenSeries.has(series) ? "delete" : "add"](series);
      button.setAttribute("aria-pressed", !hiddenSeries.has(series));
      exploreSoon();
    });
  }
  explore();
  follow(byId("timeline"), ({ pointNumber }) => pointNumber + 1);
  if (isAddressed) byId("explorer").scrollIntoView();
}

addEventListener("hashchange", () => { if (data.explorers.length && goToAddress()) explore(); });
