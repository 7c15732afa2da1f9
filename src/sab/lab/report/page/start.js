
// The switch of the theme, printing, and what is new.

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  byId("theme").textContent = theme === "dark" ? "Light" : "Dark";
  byId("theme").setAttribute("aria-pressed", theme === "dark");
}

function redraw() {
  drawAll();
  if (data.explorers.length) explore();
}

addEventListener("resize", () => requestAnimationFrame(redraw));

const wantsDark = matchMedia("(prefers-color-scheme: dark)");
setTheme(wantsDark.matches ? "dark" : "light");
wantsDark.addEventListener("change", () => { setTheme(wantsDark.matches ? "dark" : "light"); redraw(); });
byId("theme").addEventListener("click", () => { setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"); redraw(); });

// On paper everything is light, as wide as the paper, drawn and unfolded; then the screen is as it was.
let before = null;
addEventListener("beforeprint", () => {
  const folded = [...document.querySelectorAll("details.fold:not([open])")];
  before = { theme: document.documentElement.dataset.theme, folded };
  for (const one of folded) one.open = true;
  document.documentElement.classList.add("printing");
  setTheme("light");
  redraw();
});
addEventListener("afterprint", () => {
  document.documentElement.classList.remove("printing");
  for (const one of before?.folded ?? []) one.open = false;
  setTheme(before?.theme ?? "light");
  redraw();
});

function start() {
  foldTables();
  startExplorer();
  drawFigures();
  startFilters();
}

async function renew(tag) {
  let answer;
  try {
    answer = await fetch("part", { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store" });
  } catch {
    byId("summary").textContent = "The watch has ended; this is the last state that it sent.";
    return;
  }
  if (answer.ok) {
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
    const last = chosen.moment === null || !data.explorers.length || chosen.moment === model().moments.length - 1;
    data = JSON.parse(fresh.getElementById("data").textContent);
    if (last) chosen.moment = null;
    for (const id of ["title", "summary", "main"]) byId(id).replaceChildren(...fresh.getElementById(id).childNodes);
    start();
    tag = answer.headers.get("ETag");
  }
  setTimeout(renew, 3000, tag);
}

start();
if (data.live) renew(null);
