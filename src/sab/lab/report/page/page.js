"use strict";
// Draws what the page's data say. Nothing of the data becomes markup: text goes into text nodes, and figures escape theirs.

const byId = (id) => document.getElementById(id);
let data = JSON.parse(byId("data").textContent);

// Theme: names of colours in the data stand for those of the style sheet; "@skip~26" is that of skips, nearly transparent.

function colours() {
  const style = getComputedStyle(document.documentElement);
  const of = (name) => style.getPropertyValue(`--${name}`).trim();
  const scales = { "@weights": [[0, of("panel")], [0.5, of("read")], [1, of("dark-end")]], "@pixels": [[0, of("panel")], [1, of("ink")]] };
  return (name) => {
    const [colour, alpha = ""] = name.slice(1).split("~");
    return scales[name] ?? of(colour) + alpha;
  };
}

function themed(value, found) {
  const isColour = (key) => /color|family/i.test(key);
  const walk = (one, key) => {
    if (typeof one === "string") return isColour(key) && one.startsWith("@") ? found(one) : one;
    if (Array.isArray(one)) return typeof one[0] === "number" ? one : one.map((entry) => walk(entry, key));
    if (one === null || typeof one !== "object") return one;
    return Object.fromEntries(Object.entries(one).map(([name, entry]) => [name, walk(entry, name)]));
  };
  return walk(value, "");
}

const CONFIG = { displayModeBar: false };

function draw(place, figure) {
  const found = colours();
  const axis = { gridcolor: found("@line"), linecolor: found("@line"), zerolinecolor: found("@line"), automargin: true };
  const base = {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", margin: { l: 56, r: 16, t: 16, b: 48 },
    font: { family: getComputedStyle(document.body).fontFamily, size: 13, color: found("@ink") },
    xaxis: axis, yaxis: axis, legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom" }, showlegend: false,
    hoverlabel: { bgcolor: getComputedStyle(document.body).backgroundColor, font: { color: found("@ink") } },
  };
  const { data: traces, layout } = themed(figure, found);
  const size = { width: place.clientWidth, height: place.clientHeight };
  Plotly.react(place, traces, { ...layout, ...size, template: { layout: base } }, CONFIG);
}

// Figures are drawn one after the other as soon as there is time, also those that nobody has scrolled to: they may be printed.

let waiting = [];

function drawFigures() {
  for (const name of Object.keys(data.figures)) addLegend(byId(name));
  addTools();
  waiting = Object.keys(data.figures);
  setTimeout(drawNext);
}

function drawNext() {
  const name = waiting.shift();
  if (name === undefined) return;
  if (byId(name)) draw(byId(name), data.figures[name]);
  setTimeout(drawNext);
}

function drawAll() {
  waiting = [];
  for (const name of Object.keys(data.figures)) draw(byId(name), data.figures[name]);
}

// A button for each line of a figure, which shows and hides it together with its band.

function addLegend(place) {
  const figure = data.figures[place.id];
  const lines = figure.data.filter(({ name }) => name);
  const key = place.parentElement.querySelector(".key");
  if (!key) return;
  key.hidden = !lines.length;
  key.replaceChildren(...lines.map((line) => {
    const button = document.createElement("button");
    const { color, dash = "solid" } = line.line ?? line.marker;
    Object.assign(button, { type: "button", textContent: new DOMParser().parseFromString(line.name, "text/html").body.textContent });
    const [, colour, alpha = "ff"] = /@([\w-]+)~?(\w*)/.exec(color);
    button.style.setProperty("--of", `var(--${colour})`);
    button.style.setProperty("--strength", parseInt(alpha || "ff", 16) / 255);
    button.dataset.dash = dash;
    button.setAttribute("aria-pressed", line.visible !== false);
    button.addEventListener("click", () => {
      const shown = line.visible === false;
      for (const one of figure.data) if (one === line || (line.legendgroup && one.legendgroup === line.legendgroup)) one.visible = shown;
      button.setAttribute("aria-pressed", shown);
      draw(place, figure);
    });
    return button;
  }));
}

// Saving figures: the picture as it is, with a legend, or its numbers.

function save(name, kind, content) {
  const link = Object.assign(document.createElement("a"), { href: content, download: `${name}.${kind}` });
  link.click();
}

async function saveImage(place, kind) {
  const { layout, data: traces } = place;
  const size = { format: kind, width: layout.width, height: layout.height, scale: kind === "png" ? 2 : 1 };
  const plain = { ...layout, showlegend: traces.some(({ name, type }) => name && !type), paper_bgcolor: getComputedStyle(document.body).backgroundColor };
  save(place.id, kind, await Plotly.toImage({ data: traces, layout: plain }, size));
}

const quoted = (cell) => (/[",\n]/.test(cell) ? `"${String(cell).replaceAll('"', '""')}"` : String(cell ?? ""));

// The lines of a figure, a point a row; of a heat map, a cell a row; of the time line, the table of the chosen step.
function rowsOf(place) {
  if (place.id === "timeline") return [...byId("numbers").rows].map((row) => [...row.cells].map(({ textContent }) => textContent));
  const rows = [["series", "x", "y"]];
  for (const { type, name, x, y, z } of place.data) {
    if (type === "heatmap") return [["step", "microstate", "weight"], ...z.flatMap((row, at) => row.map((weight, column) => [y[at], x[column], weight]))];
    if (name) x.forEach((one, at) => rows.push([name, one, y[at]]));
  }
  return rows;
}

function saveNumbers(place) {
  const text = rowsOf(place).map((row) => row.map(quoted).join(",")).join("\n");
  save(place.id, "csv", `data:text/csv;charset=utf-8,${encodeURIComponent(`${text}\n`)}`);
}

function addTools() {
  for (const tools of document.querySelectorAll(".tools[data-of]")) {
    const place = byId(tools.dataset.of);
    const kinds = { PNG: () => saveImage(place, "png"), SVG: () => saveImage(place, "svg"), CSV: () => saveNumbers(place) };
    tools.hidden = false;
    tools.replaceChildren("Save as ", ...Object.entries(kinds).map(([kind, act]) => {
      const button = Object.assign(document.createElement("button"), { type: "button", textContent: kind });
      button.addEventListener("click", act);
      return button;
    }));
  }
}

// Filters of the tables' rows.

function startFilters() {
  const inputs = ["filter", "filter-method", "filter-verdict"].map(byId);
  if (inputs.includes(null)) return;
  const filter = () => {
    const [text, method, verdict] = inputs.map(({ value }) => value);
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    let [shown, all] = [0, 0];
    for (const block of document.querySelectorAll(".block")) {
      const title = block.querySelector("h3").textContent.toLowerCase();
      const rows = [...block.querySelectorAll("tr[data-method]")];
      for (const row of rows) {
        const has = (word) => title.includes(word) || [...row.cells].some(({ textContent }) => textContent.toLowerCase().includes(word));
        row.hidden = !((!method || row.dataset.method === method) && (!verdict || row.dataset.verdict === verdict) && words.every(has));
      }
      block.hidden = rows.every(({ hidden }) => hidden);
      all += rows.length;
      shown += rows.filter(({ hidden }) => !hidden).length;
    }
    byId("filtered").textContent = shown === all ? `all ${all} rows` : `${shown} of ${all} rows`;
  };
  for (const input of inputs) input.addEventListener("input", filter);
  filter();
}

// Wide tables are folded on a phone.
function foldTables() {
  if (innerWidth < 640) for (const one of document.querySelectorAll("details.fold")) one.open = false;
}
