"use strict";
// The page of `plan ui`: asks this machine's server for searches, and shows what they find while they run.
const $ = (id) => document.getElementById(id);
const root = document.documentElement;
const token = new URLSearchParams(location.search).get("token") ?? "";
const form = $("job");
let devices = {}; // of every profile
let pinned = {}; // degrees
let shard = {}; // strategies by operator
let running = 0; // the number of the search that is followed
let shown = 0; // the number of the search whose plan is shown: an earlier one until there is a new plan
let plan = null; // what is shown of it
let kept = null;
let asked = ""; // the job of the last search
let free = null; // the best plan of that job with nothing pinned
let priced = ""; // the operator whose strategies the dialog shows

// What is asked of the server.
async function call(path, body) {
  const options = { headers: { "X-Plan-Token": token } };
  if (body !== undefined) Object.assign(options, { method: "POST", body: JSON.stringify(body) });
  const answer = await fetch(path, options).catch(() => {
    throw new Error("The server does not answer: plan ui was ended, or has another port.");
  });
  const text = await answer.text();
  if (answer.status === 403) throw new Error("Another plan ui answers here: " + text.trim() + ".");
  const content = JSON.parse(text);
  if (content.error && !answer.ok) throw new Error(content.error);
  return content;
}

function element(name, text, attributes = {}) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

function fail(text) {
  $("error").textContent = text;
  $("error").hidden = text === "";
}

// The theme, as on the page of a report.
const dark = window.matchMedia("(prefers-color-scheme: dark)");
let theme = null;
function paint() {
  const name = theme ?? (dark.matches ? "dark" : "light");
  root.dataset.theme = name;
  $("theme").textContent = name === "dark" ? "Light" : "Dark";
  $("theme").setAttribute("aria-label", "Switch to " + (name === "dark" ? "light" : "dark") + " colours");
}
$("theme").addEventListener("click", () => {
  theme = root.dataset.theme === "dark" ? "light" : "dark";
  paint();
});
dark.addEventListener("change", paint);
paint();

// The job.
function jobOf() {
  const given = new FormData(form);
  const job = { model: given.get("model").trim(), hardware: given.get("hardware") };
  for (const name of ["devices", "global_batch", "seq_len"]) {
    if (given.get(name).trim() !== "") job[name] = Number(given.get(name));
  }
  return job;
}

async function search() {
  if (!form.reportValidity()) return;
  fail("");
  const job = jobOf(), unpinned = !pins();
  if (JSON.stringify(job) !== asked) free = null;
  asked = JSON.stringify(job);
  root.dataset.search = "running";
  root.dataset.plan = "";
  try {
    const state = await call("/api/searches", { ...job, pinned, shard });
    running = state.job;
    $("stop").disabled = false;
    follow(running, unpinned);
  } catch (error) {
    fail(error.message);
  }
}

// Ask again and again, each answer comes when there is news.
async function follow(number, unpinned) {
  let seen = -1;
  while (running === number) {
    let state;
    try {
      state = await call("/api/searches/" + number + "?seen=" + seen);
    } catch (error) {
      if (running === number) fail(error.message);
      return;
    }
    if (running !== number) return;
    seen = state.version;
    show(state, unpinned);
    if (state.done) return;
    await new Promise((then) => setTimeout(then, 120));
  }
}

function show(state, unpinned) {
  const evaluated = state.total ? ", " + state.evaluated + " of " + state.total + " configurations evaluated" : "";
  $("status").textContent = state.error ? "" : sentence(state.phase) + (state.done ? "." : evaluated + " …");
  const bar = $("progress");
  bar.hidden = state.done || !state.total;
  if (state.total) bar.value = state.evaluated / state.total;
  if (state.error) fail(state.error);
  if (state.done) {
    $("stop").disabled = true;
    root.dataset.search = "done";
  }
  if (state.plan) {
    plan = state.plan;
    shown = state.job;
    if (plan.final && unpinned) free = plan;
    showPlan();
    showFront(state.points);
  }
}

function sentence(text) {
  return text.charAt(0).toUpperCase() + text.slice(1);
}

// The plan.
function tiles(list, rows) {
  list.replaceChildren(
    ...rows.map(([name, value, rest]) => {
      const box = element("div");
      const text = element("dd", value);
      if (rest) text.append(element("span", rest));
      box.append(element("dt", name), text);
      return box;
    }),
  );
}

function showPlan() {
  $("plans").hidden = $("front").hidden = $("operators").hidden = false;
  root.dataset.plan = plan.final ? "final" : "first";
  $("live-job").textContent = plan.job + "; " + plan.details;
  tiles($("live-figures"), plan.tiles);
  $("live-proof").textContent =
    (plan.final ? "" : "So far: ") + plan.proof + "." + (plan.simpler ? " " + plan.simpler + "." : "");
  showCost();
  const base = "/api/searches/" + shown + "/";
  $("download").href = base + "plan.json?token=" + encodeURIComponent(token);
  $("report").href = base + "report.html?token=" + encodeURIComponent(token);
  linkSettings();
  showDegrees();
  $("live-rows").replaceChildren(
    ...plan.degrees.map(([name, text]) => {
      const row = element("tr");
      row.append(element("th", name, { scope: "row" }), element("td", text));
      return row;
    }),
  );
  showOperators();
  showKept();
}

function showCost() {
  $("live-pins-cost").hidden = !(pins() && free);
  if (pins() && free) {
    const change = plan.step_seconds / free.step_seconds - 1;
    const words = (Math.abs(change) * 100).toFixed(1) + "% " + (change < 0 ? "faster" : "slower");
    const same = Math.abs(change) < 5e-4;
    $("live-pins-cost").textContent =
      "With the pinned values a step is " + (same ? "as fast as" : words + " than") + " without them (" + free.step + ").";
  }
}

function linkSettings() {
  const engine = encodeURIComponent($("engine").value);
  $("settings").href =
    "/api/searches/" + shown + "/settings.zip?engine=" + engine + "&token=" + encodeURIComponent(token);
}

function showDegrees() {
  const held = document.activeElement?.dataset?.degree;
  $("live-degrees").replaceChildren(
    ...plan.pins.map((one) => {
      const name = one.name.replace("_", "-").replace("zero", "ZeRO");
      const label = element("label", name + (one.name in pinned ? " (pinned)" : ""));
      const select = element("select", undefined, { "data-degree": one.name });
      for (const value of one.legal) select.append(new Option(value, value, false, value === one.value));
      select.addEventListener("change", () => {
        pinned[one.name] = Number(select.value);
        pin();
      });
      label.append(select);
      return label;
    }),
  );
  if (held) document.querySelector('[data-degree="' + held + '"]')?.focus();
}

function pins() {
  return Object.keys(pinned).length + Object.keys(shard).length;
}

function pin() {
  showPins();
  search();
}

function showPins() {
  const all = [
    ...Object.entries(pinned).map(([name, value]) => [name.replace("_", "-") + " " + value, () => delete pinned[name]]),
    ...Object.entries(shard).map(([name, value]) => [name + " = " + value, () => delete shard[name]]),
  ];
  $("pinned").replaceChildren(
    ...all.map(([text, remove]) => {
      const chip = element("button", text, { type: "button", "aria-label": "Unpin " + text });
      chip.addEventListener("click", () => {
        remove();
        pin();
        $("search").focus();
      });
      return chip;
    }),
  );
}

// Operators, and what other strategies cost.
function showOperators() {
  const columns = ["operator", ...plan.axes, "kept as", ""];
  $("operator-head").replaceChildren(
    ...columns.map((text) => {
      const cell = element("th", undefined, { scope: "col" });
      cell.append(text ? document.createTextNode(text) : element("span", "strategies", { class: "hidden" }));
      return cell;
    }),
  );
  const held = document.activeElement?.dataset?.operator;
  $("operator-rows").replaceChildren(
    ...plan.operators.map((one) => {
      const row = element("tr");
      row.append(element("th", one.short, { scope: "row", title: one.name }));
      row.append(...one.patterns.map((text) => element("td", text)), element("td", one.kept_as));
      const last = element("td");
      if (one.free) {
        const open = element("button", one.factors, {
          type: "button", "data-operator": one.name, "aria-label": "Strategies of " + one.short + ", now " + one.factors,
        });
        open.addEventListener("click", () => strategies(one));
        last.append(open);
      }
      row.append(last);
      return row;
    }),
  );
  if (held) [...document.querySelectorAll("[data-operator]")].find((one) => one.dataset.operator === held)?.focus();
}

async function strategies(one) {
  $("h-strategies").textContent = one.short;
  $("strategies-about").textContent = "Pricing every strategy, with the rest of the plan unchanged …";
  $("strategy-rows").replaceChildren();
  $("strategies").showModal();
  priced = one.name;
  try {
    const found = await call("/api/searches/" + shown + "/operator?name=" + encodeURIComponent(one.name));
    if (priced !== one.name) return; // another one was opened meanwhile
    const twins = found.twins > 1 ? " A strategy applies to all " + found.twins + " blocks with this operator." : "";
    $("strategies-about").textContent = "A factor for each mesh axis; the rest of the plan is unchanged." + twins;
    $("strategy-rows").replaceChildren(...found.choices.map((choice) => strategyRow(one.name, choice)));
  } catch (error) {
    if (priced === one.name) $("strategies-about").textContent = error.message;
  }
}

function strategyRow(name, choice) {
  const row = element("tr", undefined, choice.chosen ? { class: "differs" } : {});
  row.append(element("th", choice.strategy, { scope: "row" }));
  row.append(element("td", choice.chosen ? "as it is" : choice.change, { class: "number" }));
  row.append(element("td", choice.peak + (choice.fits ? "" : ", too much"), { class: "number" }));
  const button = element("button", "Pin", { type: "button", "aria-label": "Pin " + choice.strategy });
  button.addEventListener("click", () => {
    shard[name] = choice.strategy;
    $("strategies").close();
    pin();
  });
  const cell = element("td");
  cell.append(button);
  row.append(cell);
  return row;
}
$("close").addEventListener("click", () => $("strategies").close());

// Two plans side by side.
$("keep").addEventListener("click", () => {
  kept = plan;
  showKept();
});
$("drop").addEventListener("click", () => {
  kept = null;
  showKept();
  $("keep").focus();
});

function showKept() {
  $("other").hidden = kept === null;
  if (kept === null) return;
  $("other-job").textContent = kept.job + "; " + kept.details;
  tiles($("other-figures"), kept.tiles);
  const change = plan.step_seconds / kept.step_seconds - 1;
  $("difference").textContent =
    Math.abs(change) < 5e-4
      ? "Both plans are equally fast."
      : "The best plan is " + (Math.abs(change) * 100).toFixed(1) + "% " + (change < 0 ? "faster" : "slower") + " than this one.";
  const here = new Map([...plan.figures, ...plan.degrees]);
  const there = new Map([...kept.figures, ...kept.degrees]);
  const names = [...new Set([...here.keys(), ...there.keys()])].filter((name) => here.get(name) !== there.get(name));
  $("other-rows").replaceChildren(
    ...names.map((name) => {
      const row = element("tr");
      row.append(element("th", name, { scope: "row" }), element("td", here.get(name) ?? ""), element("td", there.get(name) ?? ""));
      return row;
    }),
  );
}

// The front.
function showFront(points) {
  const sorted = [...points].sort((one, other) => one.step_seconds - other.step_seconds);
  $("front-rows").replaceChildren(
    ...sorted.map((one) => {
      const row = element("tr");
      row.append(element("th", one.best ? "best" : "leaner", { scope: "row" }));
      row.append(element("td", one.step, { class: "number" }), element("td", one.peak, { class: "number" }));
      row.append(element("td", one.degrees[0][1]));
      return row;
    }),
  );
  if (!sorted.length) return;
  const chart = $("chart");
  chart.replaceChildren($("chart-title"));
  const x = scale(sorted.map((one) => one.peak_bytes / 2 ** 30), 60, 620);
  const y = scale(sorted.map((one) => one.step_seconds), 220, 16);
  const draw = (name, attributes, text) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    chart.append(made);
  };
  draw("line", { x1: 60, y1: 220, x2: 620, y2: 220 });
  draw("line", { x1: 60, y1: 16, x2: 60, y2: 220 });
  for (const at of x.ends) draw("text", { x: x.of(at), y: 238, "text-anchor": "middle" }, at.toPrecision(3));
  for (const at of y.ends) draw("text", { x: 54, y: y.of(at) + 4, "text-anchor": "end" }, at.toPrecision(3) + " s");
  draw("text", { x: 340, y: 254, "text-anchor": "middle" }, "GiB per device");
  const at = (one) => [x.of(one.peak_bytes / 2 ** 30), y.of(one.step_seconds)];
  draw("polyline", { points: sorted.map((one) => at(one).join(",")).join(" ") });
  for (const one of sorted) {
    const [cx, cy] = at(one);
    draw("circle", { cx, cy, r: one.best ? 7 : 5, class: one.best ? "best" : "other" });
  }
}

function scale(values, from, to) {
  const low = Math.min(...values), high = Math.max(...values);
  const room = high - low || high || 1;
  const ends = [low - room * 0.1, high + room * 0.1];
  return { ends, of: (value) => from + ((value - ends[0]) / (ends[1] - ends[0])) * (to - from) };
}

// The start.
form.addEventListener("submit", (event) => {
  event.preventDefault();
  search();
});
$("stop").addEventListener("click", () => call("/api/searches/" + running + "/stop", {}).catch((error) => fail(error.message)));
$("engine").addEventListener("change", linkSettings);
form.elements.hardware.addEventListener("change", () => {
  const most = devices[form.elements.hardware.value];
  if (most && Number(form.elements.devices.value) > most) form.elements.devices.value = most;
});
call("/api/choices").then(
  (found) => {
    $("models").replaceChildren(...found.models.map((name) => element("option", undefined, { value: name })));
    for (const one of found.hardware) {
      devices[one.name] = one.devices;
      form.elements.hardware.append(new Option(one.name, one.name, false, one.name === "h100-80gb"));
    }
    $("engine").replaceChildren(...found.engines.map((one) => new Option(one.title, one.name)));
    $("engine").value = "megatron";
    form.elements.model.value = found.models.includes("llama8b") ? "llama8b" : found.models[0];
    root.dataset.ready = "yes";
  },
  (error) => fail(error.message),
);
