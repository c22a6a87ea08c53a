"use strict";
// Curves, heat maps and incidents of one run, drawn from JSON; texts are set as text, never as markup.
const key = document.getElementById("run").dataset.key; // quoted already
const at = (path, more = {}) => `${path}?key=${key}&${new URLSearchParams(Object.entries(more).flatMap(([name, value]) => [value].flat().map((one) => [name, one])))}`;
const view = { axis: "step", smoothing: 0, log: false, fold: "kinds", open: new Set(), range: null };
const AXES = { step: "optimizer step", tokens: "tokens", seconds: "running time (s)" };
const KINDS = { incident: ["diamond", "incident"], nonfinite: ["cross", "not finite"], fault: ["star", "injected fault"], scale: ["triangle-down", "loss scale"], skip: ["x", "skipped"], run_start: ["triangle-right", "resumed"] };
const CHARTS = [
  { name: "loss", title: "Loss (nats per token)", wide: true, marks: Object.keys(KINDS) },
  { name: "grad_norm", title: "Gradient norm (before clipping)", log: true },
  { name: "loss_scale", title: "Loss scale", log: true, step: true, marks: ["skip", "incident"] },
  { name: "lr", title: "Learning rate", zero: true },
  { name: "tokens_per_second", title: "Speed (tokens per second)", zero: true },
];
let data = null;

async function get(address) {
  const answer = await fetch(address, { cache: "no-store" });
  const content = await answer.json();
  if (!answer.ok) throw new Error(content.error || answer.statusText);
  return content;
}

function element(kind, className, text) {
  const made = document.createElement(kind);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
// plotly reads a few tags and entities in what it draws.
const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;");
const wrapped = (text) => (plain(text).match(/.{1,70}(\s|$)|\S+/g) || []).join("<br>");

function layout(title, more) {
  const [ink, dim, rule, card] = ["--ink", "--dim", "--line", "--card"].map(style);
  return {
    title: { text: title, font: { size: 13.5, color: ink }, x: 0, xref: "paper", y: 0.97, yanchor: "top" },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: dim, family: "inherit", size: 12 },
    margin: { l: 60, r: 18, t: 38, b: 42 }, showlegend: false, hoverlabel: { bgcolor: card, bordercolor: rule, font: { color: ink } },
    ...more,
    xaxis: { gridcolor: rule, zeroline: false, linecolor: rule, ...more.xaxis }, yaxis: { gridcolor: rule, zeroline: false, linecolor: rule, ...more.yaxis },
  };
}
const OPTIONS = { responsive: true, displaylogo: false, displayModeBar: false };

function chart(parent, id, wide) {
  let box = document.getElementById(id);
  if (!box) {
    box = element("div", wide ? "chart wide" : "chart");
    box.id = id;
    box.append(element("div", "draw"));
    parent.append(box);
  }
  return box;
}

// Mean over `share` of the points around each.
function smoothed(values, share) {
  const half = Math.max(1, Math.round((values.length * share) / 2));
  return values.map((_, index) => {
    const near = values.slice(Math.max(0, index - half), index + half + 1).filter((value) => value !== null);
    return near.length ? near.reduce((a, b) => a + b, 0) / near.length : null;
  });
}

const isDrawn = (item) => data.curve[item.name].some((value) => value !== null && (item.name !== "loss_scale" || value !== 1));

function drawCurves() {
  const items = CHARTS.filter(isDrawn);
  items.forEach((item) => chart(document.getElementById("charts"), `chart-${item.name}`, item.wide)); // all first: a chart takes its width once
  for (const item of items) {
    const box = chart(document.getElementById("charts"), `chart-${item.name}`, item.wide);
    const smooth = view.smoothing > 0 && !item.step;
    const accent = style("--accent");
    const hovertemplate = "%{x:,}: %{y:.6~g}<extra></extra>";
    const traces = [{ x: data.curve[view.axis], y: data.curve[item.name], mode: "lines", opacity: smooth ? 0.3 : 1, line: { color: accent, width: 1.5, shape: item.step ? "hv" : "linear" }, hovertemplate }];
    if (smooth) traces.push({ x: data.means[view.axis], y: smoothed(data.means[item.name], view.smoothing), mode: "lines", line: { color: accent, width: 2.2 }, hovertemplate });
    if (item.name === "loss" && data.validation.loss.length) traces.push({ x: data.validation[view.axis], y: data.validation.loss, mode: "lines+markers", line: { color: style("--warn"), width: 1.5 }, marker: { size: 6 }, hovertemplate: "validation %{y:.6~g}<extra></extra>" });
    const log = item.log || (view.log && item.name === "loss");
    const ground = data.curve[item.name].reduce((low, value) => (value === null || (log && value <= 0) ? low : Math.min(low, value)), Infinity);
    for (const kind of item.marks || []) {
      const found = data.marks.filter((mark) => mark.kind === kind);
      if (!found.length) continue;
      // A step without a finite value is marked at the foot of the chart.
      traces.push({
        x: found.map((mark) => mark[view.axis]), y: found.map((mark) => mark[item.name] ?? ground), mode: "markers",
        text: found.map((mark) => `${KINDS[kind][1]}, step ${mark.step}<br>${wrapped(mark.text)}`), hovertemplate: "%{text}<extra></extra>",
        marker: { symbol: KINDS[kind][0], size: kind === "incident" ? 11 : 8, color: style(kind === "scale" || kind === "run_start" ? "--warn" : "--bad"), line: { width: 1, color: style("--paper") } },
      });
    }
    const range = view.range ? { range: view.range, autorange: false } : { autorange: true };
    Plotly.react(box.firstChild, traces, layout(item.title, {
      hovermode: "closest", xaxis: { title: { text: AXES[view.axis], standoff: 6 }, ...range },
      yaxis: { type: log ? "log" : "linear", exponentformat: "power", rangemode: item.zero ? "tozero" : "normal", ...heights(item, log), ...(item.name === "loss_scale" ? powers() : {}) },
    }), OPTIONS);
    if (!box.dataset.zooms) {
      box.dataset.zooms = "yes";
      box.firstChild.on("plotly_relayout", zoomed);
    }
  }
  document.getElementById("key").textContent = Object.entries(KINDS).filter(([kind]) => data.marks.some((mark) => mark.kind === kind)).map(([kind, [, name]]) => `${name} ${data.marks.filter((mark) => mark.kind === kind).length}`).join(", ");
}

// Powers of two, at most eight of them: what a loss scale is.
function powers() {
  const values = data.curve.loss_scale.filter((value) => value > 0);
  const low = Math.floor(Math.log2(values.reduce((a, b) => Math.min(a, b)))) - 1;
  const high = Math.ceil(Math.log2(values.reduce((a, b) => Math.max(a, b)))) + 1;
  const places = [];
  for (let power = low; power <= high; power += Math.max(1, Math.ceil((high - low) / 8))) places.push(power);
  return { tickvals: places.map((power) => 2 ** power), ticktext: places.map((power) => `2<sup>${power}</sup>`), range: [low * Math.log10(2), high * Math.log10(2)], autorange: false };
}

// The y range of what is seen: of the zoomed stretch, else of the run without its first steps, which dwarf the others.
function heights(item, log) {
  const x = data.curve[view.axis];
  if (x.length < 100 && !view.range) return { autorange: true };
  const [from, to] = view.range || [x[0] + 0.02 * (x[x.length - 1] - x[0]), Infinity];
  let [low, high] = [Infinity, -Infinity];
  data.curve[item.name].forEach((value, index) => {
    if (value === null || x[index] < from || x[index] > to || (log && value <= 0)) return;
    low = Math.min(low, value);
    high = Math.max(high, value);
  });
  if (!(low < high) || item.zero) return { autorange: true };
  const [a, b] = log ? [Math.log10(low), Math.log10(high)] : [low, high];
  return { range: [a - 0.06 * (b - a), b + 0.06 * (b - a)], autorange: false };
}

// One zoom for all curves and heat maps over steps.
function zoomed(change) {
  const range = change["xaxis.range"] || (change["xaxis.range[0]"] !== undefined ? [change["xaxis.range[0]"], change["xaxis.range[1]"]] : null);
  if (!range && !change["xaxis.autorange"]) return;
  view.range = range ? range.map(Number) : null;
  drawCurves();
}

function drawIncidents() {
  const list = document.getElementById("list");
  list.replaceChildren();
  list.className = data.incidents.length ? "" : "dim";
  if (!data.incidents.length) list.textContent = "none";
  for (const found of data.incidents) {
    const box = element("div", "incident");
    const head = element("p");
    head.append(element("b", "", `step ${found.step.toLocaleString("en")}: ${found.verdict}`), ` ${found.reason}`);
    box.append(head);
    for (const cause of found.causes) box.append(element("p", "dim", cause));
    if (found.replay) {
      const line = element("p");
      line.append(element("code", "", found.replay));
      box.append(line);
    }
    list.append(box);
  }
}

const DTYPE_COLOURS = ["#7f7f7f", "#1f77b4", "#2ca02c", "#d62728"];
async function drawPanel(panel) {
  const found = await get(at("/run/heat", { panel: panel.key, fold: view.fold, open: [...view.open] }));
  const box = chart(document.getElementById("panels"), `heat-${panel.key}`, false);
  const rows = found.rows.length;
  box.firstChild.style.height = `${Math.min(900, Math.max(240, 90 + rows * (rows > 60 ? 3 : 15)))}px`;
  const short = found.rows.map((name) => plain(shortened(name, box.clientWidth < 480 ? 16 : 30)));
  const dtype = found.codes.length > 0;
  const number = (value) => (value === null ? "not measured" : dtype ? found.codes[value] : found.percent ? `${(100 * (found.log ? 10 ** value : value)).toPrecision(3)}%` : (found.log ? 10 ** value : value).toPrecision(3));
  const text = found.values.map((row, index) => row.map((value, column) => `${plain(found.rows[index])}<br>after step ${found.edges[column].toLocaleString("en")} to ${found.edges[column + 1].toLocaleString("en")}: ${number(value)}`));
  const bar = { thickness: 10, outlinewidth: 0, len: 0.95, ...(dtype ? { tickvals: [0.375, 1.125, 1.875, 2.625], ticktext: ["-", ...found.codes.slice(1)] } : scaleOf(found)) };
  const colours = dtype ? DTYPE_COLOURS.flatMap((colour, index) => [[index / 4, colour], [(index + 1) / 4, colour]]) : panel.key === "nonfinite" ? "Reds" : "Viridis";
  const trace = {
    type: "heatmap", x: found.edges, y: Array.from({ length: rows + 1 }, (_, index) => index), z: found.values, zmin: found.low, zmax: found.high > found.low ? found.high : found.low + 1, colorscale: colours,
    reversescale: panel.key === "nonfinite", hoverinfo: "text", text, colorbar: bar, hoverongaps: false,
  };
  const every = Math.max(1, Math.ceil((rows * 13) / (box.firstChild.clientHeight - 90)));
  const places = found.rows.map((_, index) => index).filter((index) => index % every === 0);
  const margin = Math.min(0.45 * box.clientWidth, 16 + 6.6 * Math.max(...short.map((name) => name.length)));
  await Plotly.react(box.firstChild, [trace], layout(found.title, {
    margin: { l: margin, r: 8, t: 38, b: 36 }, xaxis: { title: { text: "optimizer step", standoff: 4 }, range: [found.edges[0], found.edges[found.edges.length - 1]] },
    yaxis: { range: [rows, 0], tickvals: places.map((index) => index + 0.5), ticktext: places.map((index) => short[index]), showgrid: false, fixedrange: rows < 60, ticks: "" },
  }), OPTIONS);
  if (!box.querySelector("p")) box.append(element("p", "dim"));
  box.querySelector("p").textContent = panel.line;
  box.names = found.names;
  if (!box.dataset.opens) {
    box.dataset.opens = "yes";
    box.firstChild.on("plotly_click", (event) => unfold(box.names[Math.floor(event.points[0].pointNumber[0])]));
  }
}

// Ticks of a colour bar: powers of ten where there are two of them, else four even places.
function scaleOf(found) {
  if (!found.log) return found.percent ? { tickformat: ".2~%" } : {};
  const span = found.high - found.low;
  const every = Math.max(1, Math.ceil(span / 5));
  const places = [];
  for (let power = Math.ceil(found.low); power <= found.high; power += every) places.push(power);
  if (places.length > 1) return { tickvals: places, ticktext: places.map((power) => (found.percent ? `${Number((10 ** (power + 2)).toPrecision(1))}%` : `10<sup>${power}</sup>`)) };
  const even = [0, 1, 2, 3].map((part) => found.low + (span * part) / 3);
  return { tickvals: even, ticktext: even.map((place) => (10 ** place).toExponential(1)) };
}

// A click on a row of folded modules shows them one by one, and hides them again.
function unfold(name) {
  if (view.fold === "modules") return;
  view.open.has(name) ? view.open.delete(name) : view.open.add(name);
  drawHeat();
}

function shortened(name, most) {
  const short = name.replace(/^.*\.\*\./, "").replace(/^model\./, "");
  return short.length <= most ? short : `...${short.slice(3 - most)}`;
}

async function drawHeat() {
  const about = await get(at("/run/heat"));
  document.getElementById("heat").hidden = about.panels.length === 0;
  document.getElementById("out").hidden = about.panels.length === 0;
  document.getElementById("about").textContent = `${about.rows.toLocaleString("en")} modules, measured at ${about.measured.toLocaleString("en")} steps; click a row to unfold it`;
  const lines = document.getElementById("lines");
  lines.replaceChildren(...about.panels.map((panel) => {
    const item = element("li");
    item.append(element("b", "", `${panel.title}: `), panel.line);
    return item;
  }));
  const drawnPanels = about.panels.filter((panel) => panel.varies);
  drawnPanels.forEach((panel) => chart(document.getElementById("panels"), `heat-${panel.key}`, false)); // all first: a chart takes its width once
  for (const panel of drawnPanels) await drawPanel(panel);
  document.body.dataset.heat = "drawn";
}

function draw() {
  drawCurves();
  drawIncidents();
}

async function load() {
  data = await get(at("/run/curves"));
  draw();
  document.body.dataset.curves = "drawn";
  await drawHeat();
}

const choose = (id, take) => document.getElementById(id).addEventListener("change", (event) => take(event.target));
choose("axis", (input) => { view.axis = input.value; view.range = null; drawCurves(); });
choose("smoothing", (input) => { view.smoothing = Number(input.value); drawCurves(); });
choose("log", (input) => { view.log = input.checked; drawCurves(); });
choose("fold", (input) => { view.fold = input.value; view.open.clear(); drawHeat(); });
document.addEventListener("theme", () => { if (data) { draw(); drawHeat(); } });
let drawn = "";
load().catch((problem) => { document.getElementById("lines").replaceChildren(element("li", "", `this run cannot be read: ${problem.message}`)); });
keepDoing(async () => {
  const state = document.getElementById("state");
  await refresh(state, at("/run/state"));
  const step = state.querySelector(".facts")?.textContent ?? "";
  if (step !== drawn && data && drawn) await load();
  drawn = step;
}, 4);
