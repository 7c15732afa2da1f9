"use strict";
// Typesets the formulas of a page with KaTeX, which the site brings along.
document.addEventListener("DOMContentLoaded", () => {
  for (const place of document.querySelectorAll(".arithmatex")) {
    const isBlock = place.tagName === "DIV";
    const formula = place.textContent.trim().replace(/^\\[([]|\\[)\]]$/g, "");
    katex.render(formula, place, { displayMode: isBlock, throwOnError: false });
  }
});
