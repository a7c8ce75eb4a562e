"use strict";
// Figures: unpack plotly.js, look colours up for the theme, draw, and draw again when the theme changes.
let specs = {};
const root = document.documentElement;

function colour(word) {
  return getComputedStyle(root).getPropertyValue("--" + word.slice(1)).trim();
}

function coloured(value) {
  if (typeof value === "string") return value.startsWith("@") ? colour(value) : value;
  if (Array.isArray(value)) return value.map(coloured);
  if (value !== null && typeof value === "object") {
    return Object.fromEntries(Object.entries(value).map(([key, one]) => [key, coloured(one)]));
  }
  return value;
}

const config = { displaylogo: false, responsive: true, displayModeBar: false };

let printing = false;
const PAPER = 690; // pixels that a sheet of A4 is wide, without its margins

function sized(layout) {
  return printing ? { ...layout, width: PAPER } : { ...layout, autosize: true };
}

const leftOut = {}; // names of the legend that are not drawn, by figure

function legendApplied(key, traces) {
  return traces.map((trace) => ({ ...trace, visible: !leftOut[key]?.has(trace.name) }));
}

for (const button of document.querySelectorAll(".legend button")) {
  button.addEventListener("click", () => {
    const { of: key, name } = button.dataset;
    const names = (leftOut[key] ??= new Set());
    if (!names.delete(name)) names.add(name);
    button.setAttribute("aria-pressed", String(!names.has(name)));
    if (window.Plotly !== undefined) draw(key);
  });
}

function draw(key) {
  const element = document.getElementById("chart-" + key);
  const { spec, by } = specs[key];
  if (by === "timeline") return drawTimeline(element, spec);
  return Plotly.react(element, legendApplied(key, coloured(spec.data)), sized(coloured(spec.layout)), config);
}

function drawAll() {
  if (window.Plotly === undefined) return;
  for (const key of Object.keys(specs)) draw(key);
}

async function drawInTurn() { // the page stays alive between two figures
  for (const key of Object.keys(specs)) {
    await new Promise((done) => setTimeout(done));
    draw(key);
  }
}

async function unpacked(id) { // the text of a script that is gzip in base64
  const packed = atob(document.getElementById(id).textContent);
  const bytes = new Uint8Array(packed.length);
  for (let at = 0; at < packed.length; at += 1) bytes[at] = packed.charCodeAt(at);
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
}

async function unpack() {
  specs = JSON.parse(await unpacked("specs"));
  const script = document.createElement("script");
  script.textContent = await unpacked("plotly");
  document.head.append(script);
}

function say(text) {
  const notice = document.getElementById("notice");
  notice.textContent = text;
  notice.hidden = false;
}
