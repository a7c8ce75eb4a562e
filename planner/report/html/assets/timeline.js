"use strict";
// The timeline: of all bars only those in sight are drawn, and bars too narrow to be seen are drawn as one, so that a
// step of any number of passes moves as quickly as one of a few hundred.
const FIELDS = 8; // start after the one before, length, kind, micro-batch, chunk, slice, how many, busy
const NARROW = 1.5; // pixels below which neighbours are put together
const AT_MOST = 4000; // bars; more are put together over wider windows

function seconds(value) {
  const [unit, name] = value >= 1 ? [1, "s"] : value >= 1e-3 ? [1e-3, "ms"] : [1e-6, "µs"];
  return Number((value / unit).toPrecision(3)) + " " + name;
}

function visibleBars(spec, lane, from, to, least) {
  const found = [];
  const bars = lane.bars;
  let last = null;
  let begun = 0;
  for (let at = 0; at < bars.length; at += FIELDS) {
    begun += bars[at];
    const start = begun * spec.unit;
    const length = bars[at + 1] * spec.unit;
    if (start + length < from) continue;
    if (start > to) break;
    const kind = bars[at + 2];
    const busy = bars[at + 6] > 1 ? bars[at + 7] * spec.unit : length;
    if (last !== null && length < least && start + length - last.start < 2 * least) {
      if (busy > last.longest) [last.kind, last.longest] = [kind, busy];
      last.length = Math.max(last.length, start + length - last.start);
      last.count += bars[at + 6];
      last.busy += busy;
      continue;
    }
    const bar = {
      start, length, kind, busy, longest: busy, count: bars[at + 6], part: bars[at + 3], chunk: bars[at + 4],
      slice: bars[at + 5],
    };
    found.push(bar);
    last = length < least ? bar : null;
  }
  return found;
}

function words(spec, lane, bar) {
  const name = spec.kinds[bar.kind].name;
  const when = seconds(bar.start) + " to " + seconds(bar.start + bar.length) + " (" + seconds(bar.length) + ")";
  const where = "stage " + lane.rank + (spec.chunks > 1 ? ", chunk " + bar.chunk : "");
  if (bar.count > 1) {
    const share = Math.min(100, Math.round((100 * bar.busy) / (bar.length || 1)));
    return "<b>" + bar.count + " passes or messages</b>, most of it " + name + "<br>" + where + "<br>" + when +
      ", busy " + share + "%";
  }
  const which = bar.part >= 0 ? " of micro-batch " + bar.part + (bar.slice > 0 ? ", slice " + bar.slice : "") : "";
  return "<b>" + name + "</b>" + which + "<br>" + where + "<br>" + when;
}

function barsInSight(spec, range, width) { // of every lane, few enough to be drawn at once
  let least = ((range[1] - range[0]) / Math.max(width, 200)) * NARROW;
  for (;;) {
    const found = spec.lanes.map((lane) => visibleBars(spec, lane, range[0], range[1], least));
    const count = found.reduce((sum, bars) => sum + bars.length, 0);
    if (count <= AT_MOST || least > range[1] - range[0]) return found;
    least *= Math.max(1.25, count / AT_MOST);
  }
}

function timelineTraces(spec, range, width) {
  const found = barsInSight(spec, range, width);
  const traces = spec.kinds.map((kind) => ({
    type: "bar", orientation: "h", name: kind.name, base: [], x: [], y: [], width: [], hovertext: [], hoverinfo: "text",
    marker: { color: colour(kind.colour), line: { width: 0 } },
  }));
  for (const [place, lane] of spec.lanes.entries()) {
    for (const bar of found[place]) {
      const trace = traces[bar.kind];
      trace.base.push(bar.start);
      trace.x.push(bar.length);
      trace.y.push(lane.rank + (lane.computes ? -0.1 : 0.3));
      trace.width.push(lane.computes ? 0.56 : 0.2);
      trace.hovertext.push(words(spec, lane, bar));
    }
  }
  for (const trace of traces) {
    if (trace.x.length === 0) { // the legend stays complete
      for (const field of ["base", "x", "y", "width"]) trace[field].push(0);
      trace.hovertext.push("");
    }
  }
  return traces;
}

let timelineRange = null;

function drawTimeline(element, spec) {
  const range = timelineRange ?? [0, spec.seconds];
  const layout = sized(coloured(spec.layout));
  layout.xaxis.range = [...range];
  const traces = legendApplied(element.dataset.figure, timelineTraces(spec, range, element.clientWidth));
  const drawn = Plotly.react(element, traces, layout, config);
  if (!element.dataset.bound) bindTimeline(element, spec);
  return drawn;
}

function bindTimeline(element, spec) {
  element.dataset.bound = "yes";
  element.on("plotly_relayout", (change) => {
    if (change["xaxis.autorange"]) return show(element, spec, [0, spec.seconds]);
    const from = change["xaxis.range[0]"];
    const to = change["xaxis.range[1]"];
    if (from !== undefined && to !== undefined) show(element, spec, [from, to]);
    return undefined;
  });
  element.on("plotly_doubleclick", () => { show(element, spec, [0, spec.seconds]); return false; });
  const moves = { "+": "in", "=": "in", "-": "out", ArrowLeft: "left", ArrowRight: "right", 0: "all" };
  element.addEventListener("keydown", (event) => {
    if (event.key in moves && !event.ctrlKey && !event.metaKey && !event.altKey) {
      event.preventDefault();
      move(element, spec, moves[event.key]);
    }
  });
  for (const button of element.parentElement.querySelectorAll("[data-zoom]")) {
    button.addEventListener("click", () => move(element, spec, button.dataset.zoom));
  }
}

function move(element, spec, how) {
  const [from, to] = timelineRange ?? [0, spec.seconds];
  const middle = (from + to) / 2;
  const half = (to - from) / 2;
  const next = {
    in: [middle - half / 2, middle + half / 2], out: [middle - half * 2, middle + half * 2],
    left: [from - half / 2, to - half / 2], right: [from + half / 2, to + half / 2], all: [0, spec.seconds],
  }[how];
  show(element, spec, next);
}

function show(element, spec, range) {
  const length = Math.min(Math.max(range[1] - range[0], spec.seconds / 1e6), spec.seconds);
  const from = Math.min(Math.max(range[0], 0), spec.seconds - length);
  timelineRange = length >= spec.seconds ? null : [from, from + length];
  const shown = element.parentElement.querySelector("[data-shown]");
  shown.textContent = timelineRange === null ? "" : "Shown: " + seconds(from) + " to " + seconds(from + length);
  drawTimeline(element, spec);
}
