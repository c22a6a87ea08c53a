"use strict";
// Draws the curves of a comparison; every table is plain HTML already.
const data = JSON.parse(document.getElementById("data").textContent);
const charts = document.getElementById("charts");
const state = { axis: "step", smoothing: 0, log: false, events: true, cut: false, range: null, hidden: new Set(), focus: null };
const CUT = 0.05; // share of a run at its start that the height of a chart ignores when `cut` is set

// Six hues that stay apart for colour-blind eyes (after Okabe and Ito), in a shade for each theme; then other dashes.
const HUES = {
  light: ["#0072b2", "#d55e00", "#00795a", "#b5528a", "#a87400", "#2e9bd6"],
  dark: ["#5cb3ea", "#ff8a3d", "#2cc79b", "#e58fbf", "#f0b429", "#b3e0fa"],
};
const DASHES = ["solid", "dash", "dot"];
const SYMBOLS = {
  incident: "diamond", nonfinite: "cross", fault: "star", scale: "triangle-down", skip: "x", checkpoint: "square", run_start: "triangle-right",
};
const KINDS = {
  incident: "incident", nonfinite: "non-finite", fault: "injected fault", scale: "loss scale", skip: "skipped",
  checkpoint: "checkpoint", run_start: "resumed",
};
const AXES = { step: "optimizer step", tokens: "tokens", seconds: "running time (s)" };
const some = (name) => data.runs.some((run) => run.curve[name].some((value) => value !== null && value !== 0));
const scales = (run) => run.curve.loss_scale.some((value) => value !== null && value !== 1);
const scaled = data.runs.some(scales);
const CHARTS = [
  { name: "loss", title: "Training loss (nats per token)", wide: true, marks: true, cut: true },
  data.runs.some((run) => run.validation.loss.length) && { name: "validation", title: "Validation loss (nats per token)" },
  data.gaps.length && { name: "gap", title: "Loss against the baseline at the same step (%)" },
  some("grad_norm") && { name: "grad_norm", title: "Gradient norm (before clipping)", log: true, cut: true },
  scaled && { name: "loss_scale", title: "Loss scale", log: true, step: true, marks: true },
  some("tokens_per_second") && { name: "tokens_per_second", title: "Speed (tokens per second)", zero: true, ticks: "~s" },
  some("lr") && { name: "lr", title: "Learning rate", zero: true },
  some("memory_bytes") && { name: "memory_bytes", title: "Peak memory (GiB, largest rank)", divide: 2 ** 30, zero: true },
].filter(Boolean);

const dark = () => document.documentElement.classList.contains("dark");
const colour = (run) => HUES[dark() ? "dark" : "light"][run % 6];
const dash = (run) => DASHES[Math.floor(run / 6) % 3];
const few = data.runs.length <= 4;

// Mean over `share` of the points around each, from the means of the whole run and not from the drawn extremes.
function smoothed(values, share) {
  const half = Math.max(1, Math.round((values.length * share) / 2));
  return values.map((_, index) => {
    const near = values.slice(Math.max(0, index - half), index + half + 1).filter((value) => value !== null);
    return near.length ? near.reduce((a, b) => a + b, 0) / near.length : null;
  });
}

function column(chart, values) {
  return chart.divide ? values.map((value) => (value === null ? null : value / chart.divide)) : values;
}

function line(chart, run, x, y, options) {
  const faded = state.focus !== null && state.focus !== run;
  return {
    x, y, name: plotText(data.runs[run].label), type: "scatter", mode: "lines", showlegend: false,
    opacity: (faded ? 0.12 : 1) * (options.faint ? 0.3 : 1),
    line: { color: colour(run), width: options.width, dash: options.faint ? "solid" : dash(run), shape: chart.step ? "hv" : "linear" },
    hovertemplate: "%{y:.5~g}<extra>%{fullData.name}</extra>",
    ...(options.quiet ? { hoverinfo: "skip", hovertemplate: undefined } : {}), ...options.more,
  };
}

function traces(chart) {
  const drawn = [];
  data.runs.forEach((item, run) => {
    if (state.hidden.has(run) || (chart.name === "loss_scale" && !scales(item))) return;
    if (chart.name === "gap") {
      if (run === 0) return;
      const gaps = data.gaps[run - 1];
      drawn.push(line(chart, run, gaps[state.axis], gaps.gap, { width: 1.4 }));
      return;
    }
    if (chart.name === "validation") {
      const marker = { size: 7, color: colour(run) };
      drawn.push(line(chart, run, item.validation[state.axis], item.validation.loss, { width: 1.8, more: { mode: "lines+markers", marker } }));
      return;
    }
    const smooth = state.smoothing > 0 && !chart.step;
    const raw = column(chart, item.curve[chart.name]);
    const below = run === 0 && few && data.runs.length > 1; // a run on top of it that is the same must not hide it
    drawn.push(line(chart, run, item.curve[state.axis], raw, { width: smooth ? 1 : below ? 3.5 : 1.5, faint: smooth, quiet: smooth }));
    if (smooth) {
      const values = smoothed(column(chart, item.means[chart.name]), state.smoothing);
      drawn.push(line(chart, run, item.means[state.axis], values, { width: 2.2 }));
    }
    if (chart.marks && state.events) drawn.push(...markers(chart, item, run));
  });
  return drawn;
}

function markers(chart, item, run) {
  const faded = state.focus !== null && state.focus !== run;
  const wanted = chart.name !== "loss" ? ["skip", "incident"] : few ? Object.keys(SYMBOLS) : ["incident", "nonfinite", "fault", "run_start"];
  const ink = getComputedStyle(document.documentElement).getPropertyValue("--ink").trim();
  return wanted.map((kind) => {
    const found = item.marks.filter((mark) => mark.kind === kind);
    return {
      x: found.map((mark) => mark[state.axis]), y: found.map((mark) => mark[chart.name]),
      text: found.map((mark) => `${KINDS[kind]}, step ${mark.step}<br>${wrapped(mark.text)}`),
      type: "scatter", mode: "markers", showlegend: false, name: plotText(item.label), opacity: faded ? 0.12 : 0.95,
      marker: { symbol: SYMBOLS[kind], size: kind === "incident" ? 12 : 8, color: colour(run), line: { width: 1.2, color: ink } },
      hovertemplate: "%{text}<extra>%{fullData.name}</extra>",
    };
  }).filter((trace) => trace.x.length);
}

// plotly reads a few tags and entities in what it draws.
function plotText(text) {
  return text.replace(/&/g, "&amp;").replace(/</g, "&lt;");
}

function wrapped(text) {
  return (plotText(text).match(/.{1,70}(\s|$)|\S+/g) || []).join("<br>");
}

// The steps at which runs diverge, on the current axis; only for few runs, a dozen lines would hide the curves.
function lines() {
  if (data.runs.length > 4) return [];
  return data.divergences.flatMap(({ run, step, beyond }) =>
    [...new Set([step, beyond])].filter((place) => place !== null && !state.hidden.has(run)).map((place) => ({
      type: "line", yref: "paper", y0: 0, y1: 1, x0: at(run, place), x1: at(run, place),
      line: { color: colour(run), width: 1.2, dash: "dot" },
    })));
}

function at(run, step) {
  const curve = data.runs[run].curve;
  const index = curve.step.findIndex((value) => value >= step);
  return curve[state.axis][index < 0 ? curve.step.length - 1 : index];
}

// The y range of a chart without the first steps, whose losses and norms dwarf all others; null for the full range.
function heights(chart, log) {
  if (!state.cut || !chart.cut || state.range) return null;
  let [low, high] = [Infinity, -Infinity];
  data.runs.forEach((item, run) => {
    if (state.hidden.has(run)) return;
    const steps = item.curve.step;
    const start = steps[0] + CUT * (steps[steps.length - 1] - steps[0]);
    item.curve[chart.name].forEach((value, index) => {
      if (value === null || steps[index] < start || (log && value <= 0)) return;
      low = Math.min(low, value);
      high = Math.max(high, value);
    });
  });
  if (low >= high) return null;
  const [a, b] = log ? [Math.log10(low), Math.log10(high)] : [low, high];
  return [a - 0.06 * (b - a), b + 0.06 * (b - a)];
}

// Powers of two, at most eight of them: what a loss scale is.
function powers() {
  const values = data.runs.filter(scales).flatMap((run) => run.curve.loss_scale).filter((value) => value > 0);
  const low = Math.floor(Math.log2(values.reduce((a, b) => Math.min(a, b))));
  const high = Math.ceil(Math.log2(values.reduce((a, b) => Math.max(a, b))));
  const every = Math.max(1, Math.ceil((high - low) / 8));
  const found = [];
  for (let power = low; power <= high; power += every) found.push(power);
  return { tickmode: "array", tickvals: found.map((power) => 2 ** power), ticktext: found.map((power) => `2<sup>${power}</sup>`) };
}

function layout(chart) {
  const style = getComputedStyle(document.documentElement);
  const [ink, dim, rule] = ["--ink", "--dim", "--line"].map((name) => style.getPropertyValue(name).trim());
  const log = chart.log || (state.log && (chart.name === "loss" || chart.name === "validation"));
  const range = heights(chart, log);
  return {
    title: { text: chart.title, font: { size: 13.5, color: ink }, x: 0, xref: "paper", y: 0.97, yanchor: "top" },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: dim, family: "inherit", size: 12 },
    margin: { l: 62, r: 18, t: 40, b: 42 }, shapes: lines(), hovermode: few ? "x unified" : "closest",
    hoverlabel: { bgcolor: style.getPropertyValue("--card").trim(), bordercolor: rule, font: { color: ink } },
    xaxis: {
      title: { text: AXES[state.axis], standoff: 6 }, gridcolor: rule, zeroline: false, linecolor: rule,
      ...(state.range ? { range: state.range, autorange: false } : { autorange: true }),
    },
    yaxis: {
      type: log ? "log" : "linear", gridcolor: rule, zeroline: chart.name === "gap", zerolinecolor: dim, linecolor: rule,
      exponentformat: "power", tickformat: chart.ticks, rangemode: chart.zero ? "tozero" : "normal", ...(chart.name === "loss_scale" ? powers() : {}),
      ...(range ? { range, autorange: false } : { autorange: true }),
    },
  };
}

let syncing = false;
function draw() {
  syncing = true;
  const done = CHARTS.map((chart) => Plotly.react(chart.element, traces(chart), layout(chart), { responsive: true, displaylogo: false, displayModeBar: false }));
  Promise.all(done).then(() => { syncing = false; document.body.dataset.drawn = "yes"; });
}

// One zoom for all charts: they show the same stretch of the run.
function zoomed(change) {
  if (syncing) return;
  const auto = change["xaxis.autorange"];
  const range = change["xaxis.range"] || (change["xaxis.range[0]"] !== undefined ? [change["xaxis.range[0]"], change["xaxis.range[1]"]] : null);
  if (!auto && !range) return;
  state.range = auto ? null : range;
  draw();
}

function paint() {
  document.querySelectorAll(".chip").forEach((chip) => {
    const run = Number(chip.dataset.run);
    const stroke = chip.querySelector("line");
    stroke.setAttribute("stroke", colour(run));
    stroke.setAttribute("stroke-width", 3);
    stroke.setAttribute("stroke-dasharray", { solid: "", dash: "7 4", dot: "2 3" }[dash(run)]);
    chip.setAttribute("aria-pressed", String(!state.hidden.has(run)));
  });
}

function setTheme(isDark) {
  document.documentElement.classList.toggle("dark", isDark);
  paint();
  draw();
}

const choose = (id, take) => document.getElementById(id).addEventListener("change", (event) => { take(event.target); draw(); });
choose("axis", (input) => { state.axis = input.value; state.range = null; });
choose("smoothing", (input) => { state.smoothing = Number(input.value); });
choose("log", (input) => { state.log = input.checked; });
choose("cut", (input) => { state.cut = input.checked; });
choose("events", (input) => { state.events = input.checked; });
state.cut = document.getElementById("cut").checked = data.runs.some((run) => run.curve.step.length > 500);
document.getElementById("whole").addEventListener("click", () => { state.range = null; draw(); });
document.getElementById("theme").addEventListener("click", () => setTheme(!dark()));
document.querySelectorAll(".go").forEach((button) => button.addEventListener("click", () => {
  const step = Number(button.dataset.step);
  state.axis = document.getElementById("axis").value = "step";
  state.range = [step - 20, step + 20];
  draw();
  charts.scrollIntoView({ behavior: "smooth" });
}));
document.querySelectorAll(".chip").forEach((chip) => {
  const run = Number(chip.dataset.run);
  chip.addEventListener("click", () => { state.hidden.has(run) ? state.hidden.delete(run) : state.hidden.add(run); paint(); draw(); });
  chip.addEventListener("mouseenter", () => { state.focus = run; draw(); });
  chip.addEventListener("mouseleave", () => { state.focus = null; draw(); });
});
const GLYPHS = {
  incident: "\u25c6", nonfinite: "\u271a", fault: "\u2605", scale: "\u25bc", skip: "\u2716", checkpoint: "\u25a0", run_start: "\u25b6",
};
const present = Object.keys(KINDS).filter((kind) => data.runs.some((run) => run.marks.some((mark) => mark.kind === kind)));
document.getElementById("key").textContent =
  present.map((kind) => `${GLYPHS[kind]} ${KINDS[kind]}`).join("   ") + (data.divergences.length && few ? "   \u2506 where runs diverge" : "");
for (const chart of CHARTS) {
  chart.element = document.createElement("div");
  chart.element.className = chart.wide ? "chart wide" : "chart";
  charts.append(chart.element);
}
const system = window.matchMedia("(prefers-color-scheme: dark)");
system.addEventListener("change", (event) => setTheme(event.matches));
setTheme(system.matches);
CHARTS.forEach((chart) => chart.element.on("plotly_relayout", zoomed));
