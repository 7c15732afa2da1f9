"use strict";
// Draws what the page's data say. Nothing of the data becomes markup: text goes into text nodes, and figures escape theirs.

const byId = (id) => document.getElementById(id);
const chosen = { model: 0, step: null, moment: null };
let data = JSON.parse(byId("data").textContent);

// Theme: names of colours in the data stand for those of the style sheet.

function colours() {
  const style = getComputedStyle(document.documentElement);
  const of = (name) => style.getPropertyValue(`--${name}`).trim();
  const found = { "@ink": of("ink"), "@muted": of("muted"), "@faint": of("faint"), "@mono": of("mono") };
  for (let place = 1; place <= 6; place++) {
    found[`@${place}`] = of(`c${place}`);
    found[`@${place}~`] = `${of(`c${place}`)}26`;
  }
  Object.assign(found, { "@skip": of("c2"), "@chain": of("c3"), "@direct": of("c4"), "@line": of("line") });
  found["@weights"] = [[0, of("panel")], [0.5, of("c1")], [1, of("dark-end")]];
  found["@pixels"] = [[0, of("panel")], [1, of("ink")]];
  return found;
}

function themed(value, found) {
  const isColour = (key) => /color|family/i.test(key);
  const walk = (one, key) => {
    if (typeof one === "string") return isColour(key) ? found[one] ?? one : one;
    if (Array.isArray(one)) return typeof one[0] === "number" ? one : one.map((entry) => walk(entry, key));
    if (one === null || typeof one !== "object") return one;
    return Object.fromEntries(Object.entries(one).map(([name, entry]) => [name, walk(entry, name)]));
  };
  return walk(value, "");
}

const CONFIG = { displayModeBar: false };

function draw(place, figure) {
  const found = colours();
  const axis = { gridcolor: found["@line"], linecolor: found["@line"], zerolinecolor: found["@line"], automargin: true };
  const base = {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", margin: { l: 56, r: 16, t: 16, b: 48 },
    font: { family: getComputedStyle(document.body).fontFamily, size: 13, color: found["@ink"] },
    xaxis: axis, yaxis: axis, legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom" },
    hoverlabel: { bgcolor: getComputedStyle(document.body).backgroundColor, font: { color: found["@ink"] } },
  };
  const { data: traces, layout } = themed(figure, found);
  const lines = traces.filter(({ name, showlegend }) => name && showlegend !== false).length;
  const isNarrow = layout.showlegend !== false && place.clientWidth < 600;
  place.style.height = isNarrow ? `${16 + 2.6 * Math.max(lines, 2)}rem` : ""; // a name a line
  const size = { width: place.clientWidth, height: place.clientHeight };
  Plotly.react(place, traces, { ...layout, ...size, template: { layout: base } }, CONFIG);
}

// Figures are drawn when they come near; those of the explorer, which change all the time, as long as they are.

const near = new IntersectionObserver((entries) => {
  for (const { isIntersecting, target } of entries) {
    if (!isIntersecting) continue;
    near.unobserve(target);
    draw(target, data.figures[target.id]);
  }
}, { rootMargin: "400px" });

function drawFigures() {
  for (const name of Object.keys(data.figures)) near.observe(byId(name));
}

const inSight = new Set();
const sight = new IntersectionObserver((entries) => {
  for (const { isIntersecting, target } of entries) {
    inSight[isIntersecting ? "add" : "delete"](target.id);
    if (isIntersecting) ({ map: drawMap, image: drawImage })[target.id](colours());
  }
}, { rootMargin: "200px" });

// The explorer.

const model = () => data.explorers[chosen.model];
const moment = () => model().moments[chosen.moment];
const number = (value) => Number(value.toPrecision(3)).toString();
const escaped = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;"); // for a figure
const percent = (share) => `${number(100 * share)}\u00a0%`;
const named = (sign) => model().names[sign] ?? sign;

function listed(entries) {
  return entries.length < 2 ? entries.join("") : `${entries.slice(0, -1).join(", ")} and ${entries.at(-1)}`;
}

function tell() {
  const { seen, right } = model();
  const { reads, says, credit, of } = moment();
  const step = chosen.step;
  let told = `Step ${step} sees ${named(seen[step - 1])}`;
  if (says[step] !== undefined) told += ` and says ${named(says[step])}; right is ${named(right[step])}`;
  else if (right[step] !== undefined) told += `; right is ${named(right[step])}`;
  const read = (reads[step] ?? []).slice(0, 3).map(([at, weight]) => `step ${at} (${named(seen[at - 1])}) with weight ${number(weight)}`);
  told += read.length ? `. It reads ${listed(read)}${of ? `, ${of}` : ""}.` : ". It reads nothing.";
  const [best] = credit[step]?.paths ?? [];
  if (best) told += ` The largest path of its credit skips ${best[1].map(([from, to]) => `from ${from} to ${to}`).join(", then ")}: ${percent(best[0])}.`;
  else if (Object.keys(credit).length && !credit[step]) told += ` Credit is told of the answers at ${listed(Object.keys(credit).slice(-12))}.`;
  return told;
}

function arc(from, to, axis, height, colour, width, opacity) {
  const { at } = model();
  const [start, end] = [at[from - 1], at[to - 1]];
  return {
    type: "path", xref: "x", yref: axis, layer: "below", opacity,
    path: `M${start},${axis === "y3" ? 1 : 0} Q${(start + end) / 2},${axis === "y3" ? 1 - 2 * height : 2 * height} ${end},${axis === "y3" ? 1 : 0}`,
    line: { color: colour, width },
  };
}

function shapes(found) {
  const { at, widths } = model();
  const { reads, credit } = moment();
  const step = chosen.step;
  const span = at.at(-1) - at[0] || 1;
  const height = (from, to) => 0.25 + 0.7 * Math.abs(at[from - 1] - at[to - 1]) / span;
  const half = Math.max(widths[step - 1], span / 200) / 2;
  const band = { type: "rect", xref: "x", yref: "paper", x0: at[step - 1] - half, x1: at[step - 1] + half, y0: 0, y1: 1, layer: "below", line: { width: 0 }, fillcolor: found["@faint"], opacity: 0.35 };
  const arcs = (reads[step] ?? []).map(([to, weight]) => arc(step, to, "y", height(step, to), found["@1"], 1 + 7 * Math.min(weight, 1), 0.25 + 0.75 * Math.min(weight, 1)));
  const paths = credit[step]?.paths ?? [];
  const largest = paths[0]?.[0] || 1;
  const hops = new Map();
  for (const [share, skips] of paths) for (const [from, to] of skips) {
    const known = hops.get(`${from} ${to}`) ?? 0;
    hops.set(`${from} ${to}`, Math.max(known, share));
  }
  const below = [...hops].map(([name, share]) => {
    const [from, to] = name.split(" ").map(Number);
    return arc(from, to, "y3", height(from, to), found["@skip"], 1 + 5 * share / largest, 0.3 + 0.7 * share / largest);
  });
  return [band, ...arcs, ...below];
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

function drawTimeline(found) {
  const { at, widths, timeline } = model();
  const credit = moment().credit[chosen.step];
  const figure = structuredClone(timeline);
  // The parts of a step's credit are beside each other: they are norms, which do not add up.
  const parts = figure.data.filter((trace) => credit && trace.name in credit);
  const least = 0.01 * Math.max(...parts.flatMap((trace) => credit[trace.name]));
  const present = (credit?.steps ?? []).map((_, place) => parts.filter((trace) => credit[trace.name][place] > least));
  for (const trace of parts) {
    const own = [...credit.steps.keys()].filter((place) => present[place].includes(trace));
    const room = (place) => Math.max(0.8 * widths[credit.steps[place] - 1], at.at(-1) / 300);
    trace.width = own.map((place) => room(place) / present[place].length);
    trace.x = own.map((place, which) => at[credit.steps[place] - 1] - room(place) / 2 + (present[place].indexOf(trace) + 0.5) * trace.width[which]);
    trace.y = own.map((place) => credit[trace.name][place]);
  }
  for (const { textfont, x } of figure.data) if (textfont && x.length > 1) textfont.size = Math.min(16, 1.5 * stepWidth());
  const answers = figure.data.find((trace) => trace.name === "answers");
  const { right } = model();
  const { says } = moment();
  if (Object.keys(says).length) {
    answers.text = Object.keys(right).map((step) => escaped(says[step] ?? ""));
    answers.textfont.color = Object.keys(right).map((step) => (says[step] === right[step] ? "@chain" : "@skip"));
  }
  figure.layout.shapes = shapes(found);
  draw(byId("timeline"), figure);
}

// How wide an ordinary step is on the screen.
const stepWidth = () => (byId("timeline").clientWidth - 32) / model().at.at(-1);

// Where the time line is wider than the screen, the chosen step is kept in sight.
function scrollToStep() {
  const { scrollLeft, clientWidth } = byId("timeline").parentElement;
  const at = 16 + stepWidth() * model().at[chosen.step - 1];
  if (at < scrollLeft + 16 || at > scrollLeft + clientWidth - 16) byId("timeline").parentElement.scrollLeft = at - clientWidth / 2;
}

function drawMap(found) {
  const { map } = model();
  if (byId("map-figure").hidden || !inSight.has("map")) return;
  const figure = structuredClone(map);
  figure.data[0].z = moment().attention;
  figure.layout.shapes = [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: chosen.step, y1: chosen.step, line: { color: found["@2"], width: 1.5 } }];
  draw(byId("map"), figure);
  follow(byId("map"), ({ y }) => y);
}

function drawImage() {
  const { image, places } = model();
  if (!image || !inSight.has("image")) return;
  const side = Math.round(Math.sqrt(places.length));
  const figure = structuredClone(image);
  const put = (name, marks) => {
    const trace = figure.data.find((one) => one.name === name);
    trace.x = marks.map(([step]) => places[step - 1] % side);
    trace.y = marks.map(([step]) => Math.floor(places[step - 1] / side));
    trace.marker.size = marks.map(([, share]) => 6 + 18 * Math.sqrt(Math.min(share, 1)));
  };
  const credit = moment().credit[chosen.step];
  const largest = credit ? Math.max(...credit.skip, 1e-30) : 1;
  put("credit", credit ? credit.steps.map((step, place) => [step, credit.skip[place] / largest]).filter(([, share]) => share > 0.02) : []);
  put("reads", moment().reads[chosen.step] ?? []);
  put("step", [[chosen.step, 0.2]]);
  draw(byId("image"), figure);
}

function explore() {
  const { seen, timeline, moments, about } = model();
  chosen.step = Math.min(Math.max(chosen.step ?? model().start, 1), seen.length);
  chosen.moment = Math.min(chosen.moment ?? moments.length - 1, moments.length - 1);
  const found = colours();
  byId("about").textContent = about;
  Object.assign(byId("step"), { max: seen.length, value: chosen.step });
  Object.assign(byId("moment"), { max: moments.length - 1, value: chosen.moment });
  byId("moment").closest("div").hidden = moments.length < 2;
  byId("model").closest("div").hidden = data.explorers.length < 2;
  byId("step-told").textContent = `${chosen.step} of ${seen.length}`;
  byId("moment-told").textContent = moment().told;
  const told = tell();
  byId("told").textContent = told;
  byId("step").setAttribute("aria-valuetext", told);
  byId("moment").setAttribute("aria-valuetext", moment().told);
  byId("timeline").classList.toggle("short", !timeline.layout.yaxis4);
  byId("key").hidden = !timeline.layout.yaxis4;
  const hasSymbols = timeline.data.some(({ mode, x }) => mode === "text" && x.length > 1);
  byId("timeline").style.minWidth = hasSymbols ? `${Math.min(8 * model().at.at(-1), 1100)}px` : "";
  byId("map-figure").hidden = !model().map || !moment().attention.length;
  byId("image-figure").hidden = !model().image;
  drawTimeline(found);
  scrollToStep();
  drawMap(found);
  drawImage();
  numbers();
}

// The step under the mouse becomes the chosen one.
function follow(place, step) {
  if (place.dataset.followed) return;
  place.dataset.followed = "yes";
  for (const event of ["plotly_hover", "plotly_click"]) place.on(event, ({ points }) => choose({ step: step(points[0]) }));
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
  byId("model").value = chosen.model;
  byId("model").addEventListener("change", (event) => choose({ model: Number(event.target.value), step: null, moment: null }));
  byId("step").addEventListener("input", (event) => choose({ step: Number(event.target.value) }));
  byId("moment").addEventListener("input", (event) => choose({ moment: Number(event.target.value) }));
  explore();
  follow(byId("timeline"), ({ pointNumber }) => pointNumber + 1);
  sight.disconnect();
  for (const id of ["map", "image"]) sight.observe(byId(id));
}

// The switch of the theme, and what is new.

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  byId("theme").textContent = theme === "dark" ? "Light" : "Dark";
  byId("theme").setAttribute("aria-pressed", theme === "dark");
}

function redraw() {
  for (const name of Object.keys(data.figures)) if (byId(name).classList.contains("js-plotly-plot")) draw(byId(name), data.figures[name]);
  if (data.explorers.length) explore();
}

addEventListener("resize", () => requestAnimationFrame(redraw));

const wantsDark = matchMedia("(prefers-color-scheme: dark)");
setTheme(wantsDark.matches ? "dark" : "light");
wantsDark.addEventListener("change", () => { setTheme(wantsDark.matches ? "dark" : "light"); redraw(); });
byId("theme").addEventListener("click", () => { setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"); redraw(); });

function start() {
  startExplorer();
  drawFigures();
}

async function renew(tag) {
  let answer;
  try {
    answer = await fetch("part", { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store" });
  } catch {
    byId("summary").textContent = "The watch has ended; what is here is the last that it told.";
    return;
  }
  if (answer.ok) {
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
    const last = chosen.moment === null || !data.explorers.length || chosen.moment === model().moments.length - 1;
    data = JSON.parse(fresh.getElementById("data").textContent);
    if (last) chosen.moment = null;
    for (const id of ["summary", "main"]) byId(id).replaceChildren(...fresh.getElementById(id).childNodes);
    start();
    tag = answer.headers.get("ETag");
  }
  setTimeout(renew, 3000, tag);
}

start();
if (data.live) renew(null);
