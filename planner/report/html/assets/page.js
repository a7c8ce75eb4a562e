"use strict";
// The page itself: theme, tips on cells, arrow keys among them, printing.
const toggle = document.getElementById("theme");
const prefersDark = window.matchMedia("(prefers-color-scheme: dark)");
let chosen = null;

function setTheme(name) {
  root.dataset.theme = name;
  toggle.textContent = name === "dark" ? "Light" : "Dark";
  toggle.setAttribute("aria-label", "Switch to " + (name === "dark" ? "light" : "dark") + " colours");
  drawAll();
}

function wantedTheme() {
  return chosen ?? (prefersDark.matches ? "dark" : "light");
}

toggle.addEventListener("click", () => {
  chosen = root.dataset.theme === "dark" ? "light" : "dark";
  setTheme(chosen);
});
prefersDark.addEventListener("change", () => setTheme(wantedTheme()));

const tip = document.getElementById("tip");

function showTip(cell, text = cell.dataset.tip) {
  tip.textContent = text;
  tip.hidden = false;
  const box = cell.getBoundingClientRect();
  const left = Math.min(Math.max(8, box.left), window.innerWidth - tip.offsetWidth - 8);
  const below = box.bottom + 6;
  const top = below + tip.offsetHeight > window.innerHeight ? box.top - tip.offsetHeight - 6 : below;
  tip.style.left = Math.max(8, left) + "px";
  tip.style.top = Math.max(8, top) + "px";
}

// Words of the glossary: the browser shows their title to a pointer, the page to the keyboard.
document.addEventListener("focusin", (event) => {
  if (event.target.tagName === "ABBR") showTip(event.target, event.target.title);
});
document.addEventListener("focusout", (event) => {
  if (event.target.tagName === "ABBR") hideTip();
});

function hideTip() {
  tip.hidden = true;
}

for (const list of document.querySelectorAll(".cells, .strip")) {
  const cells = [...list.querySelectorAll(".cell")];
  list.addEventListener("mouseover", (event) => {
    const cell = event.target.closest(".cell");
    if (cell) showTip(cell);
  });
  list.addEventListener("mouseout", hideTip);
  list.addEventListener("focusin", (event) => showTip(event.target));
  list.addEventListener("focusout", hideTip);
  list.addEventListener("keydown", (event) => {
    const at = cells.indexOf(event.target);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: cells.length - 1 }[event.key];
    if (event.key === "Escape") hideTip();
    if (to === undefined || cells[to] === undefined) return;
    event.preventDefault();
    cells[at].tabIndex = -1;
    cells[to].tabIndex = 0;
    cells[to].focus();
  });
}

window.addEventListener("scroll", hideTip, { passive: true });
let resizing = 0;
window.addEventListener("resize", () => {
  clearTimeout(resizing);
  resizing = setTimeout(drawAll, 150); // the timeline puts together by pixels
});
window.addEventListener("beforeprint", () => {
  for (const details of document.querySelectorAll("figure[id] details")) details.open = true;
  printing = true;
  setTheme("light");
});
window.addEventListener("afterprint", () => {
  printing = false;
  setTheme(wantedTheme());
});

setTheme(wantedTheme());
document.addEventListener("DOMContentLoaded", () => {
  unpack().then(drawInTurn).then(() => {
    root.dataset.figures = "drawn";
  }, () => {
    root.dataset.figures = "failed";
    say("This browser cannot unpack the figures; all their numbers are in the tables.");
    for (const details of document.querySelectorAll("details")) details.open = true;
  });
});
