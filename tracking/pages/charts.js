"use strict";
// Draw the curves of runs with uPlot, sharing x axis, zoom and cursor among all charts. Tables are already plain HTML.
const data = JSON.parse(document.getElementById("data").textContent);
const state = {
  axis: "step", logx: false, smoothing: 0, log: false, events: true, cut: false, seeds: false, range: null, hidden: new Set(), focus: null,
};
const CUT = 0.05; // initial share of a run that the y range of some charts ignores if `cut` is set, as it does diverged runs

// Eight hues that colour-blind readers can tell apart (after Okabe and Ito), with a shade per theme; then other dashes.
const HUES = {
  light: ["#0072b2", "#d55e00", "#00795a", "#b5528a", "#a87400", "#2e9bd6", "#6b4fbb", "#4a4f57"],
  dark: ["#5cb3ea", "#ff8a3d", "#2cc79b", "#e58fbf", "#f0b429", "#b3e0fa", "#a997f5", "#c9ced6"],
};
const DASHES = [[], [9, 4], [2, 3], [9, 3, 2, 3]];
const GLYPHS = {
  incident: "\u25c6", nonfinite: "\u271a", fault: "\u2605", scale: "\u25bc", skip: "\u2716", checkpoint: "\u25a0", run_start: "\u25b6", nan: "\u2297",
};
const KINDS = {
  incident: "incident", nonfinite: "non-finite tensor", fault: "injected fault", scale: "loss scale", skip: "skipped",
  checkpoint: "checkpoint", run_start: "resumed", nan: "loss not finite",
};
const AXES = { step: "optimizer step", tokens: "tokens", seconds: "running time" };
const few = data.runs.length <= 4;
const some = (name) => data.runs.some((run) => run.curve[name]?.some((value) => value !== null && value !== 0));
const scales = (run) => run.curve.loss_scale.some((value) => value !== null && value !== 1);
const unit = data.unit && ` (${data.unit})`;
const LOSS = { name: "loss", title: `Training loss${unit}`, cut: CUT, noisy: true };
const FIGURES = data.figures.map((figure) => ({ ...figure, name: figure.names[0], log: figure.log ? 10 : 0, zero: !figure.spread && !figure.log, noisy: true }));
// The headline metric of all runs comes first; the loss, uninformative in that case, comes later.
const LEADING = FIGURES.filter((chart) => chart.names.includes(data.headline)).map((chart) => ({ ...chart, wide: true, marks: true }));
const CHARTS = [
  ...LEADING,
  ...(LEADING.length ? [] : [{ ...LOSS, wide: true, marks: true }]),
  !LEADING.length && data.runs.some((run) => run.validation.loss.length) && { name: "validation", title: `Validation loss${unit}`, cut: 0 },
  ...FIGURES.filter((chart) => !chart.names.includes(data.headline)),
  ...(LEADING.length ? [LOSS] : []),
  !LEADING.length && data.gaps.length && { name: "gap", title: "Loss against the baseline at the same step (%)", cut: 0, noisy: true },
  some("grad_norm") && { name: "grad_norm", title: "Gradient norm (before clipping)", log: 10, cut: CUT, noisy: true },
  data.runs.some(scales) && { name: "loss_scale", title: "Loss scale", log: 2, step: true, marks: true },
  some("tokens_per_second") && { name: "tokens_per_second", title: "Speed (tokens per second)", zero: true, noisy: true },
  some("lr") && { name: "lr", title: "Learning rate", zero: true },
  some("memory_bytes") && { name: "memory_bytes", title: "Peak memory (MiB, largest rank)", divide: 2 ** 20, zero: true, machine: true },
  some("utilisation") && { name: "utilisation", title: "Device utilisation (% of peak FLOP/s)", zero: true, machine: true },
  some("data_seconds") && { name: "data_seconds", title: "Waiting for data (seconds per step)", zero: true, machine: true },
].filter(Boolean);

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const colour = (run) => HUES[isDark() ? "dark" : "light"][run % 8];
const dash = (run) => DASHES[Math.floor(run / 8) % 4];
const pale = (hex, alpha) => hex + Math.round(alpha * 255).toString(16).padStart(2, "0");

// --- numbers as text

const place = (value) => (state.axis === "seconds" ? duration(value) : value >= 1e6 ? `${number(value / 1e6)}M` : number(Math.round(value)));
const shown = (chart, value) => (chart.name === "loss_scale" ? scale(value) : chart.name === "lr" ? rate(value) : number(value, 5));

// --- what is drawn

// Exponential moving average; `weight` is that of the previous average. Debiased, so that it does not start near 0.
function smoothed(values, weight) {
  let [sum, total] = [0, 0];
  return values.map((value) => {
    if (value !== null) [sum, total] = [weight * sum + (1 - weight) * value, weight * total + (1 - weight)];
    return total ? sum / total : null;
  });
}

// x in ascending order; y scaled, null where the axis cannot show it.
function points(chart, x, y) {
  const log = isLog(chart);
  const kept = [[], []];
  x.forEach((at, index) => {
    if (at === null || (state.logx && at <= 0)) return;
    const value = y[index] === null || (log && y[index] <= 0) ? null : y[index] / (chart.divide || 1);
    kept[0].push(at);
    kept[1].push(value);
  });
  return kept;
}

const isLog = (chart) => chart.log || (state.log && (chart.name === "loss" || chart.name === "validation") ? chart.log || 10 : 0);

// The curves of a run in a chart: as recorded, and means over all steps for smoothing.
function columns(chart, run) {
  const item = data.runs[run];
  if (chart.names) {
    return chart.names.flatMap((name, index) => [
      item.curve[name] && { raw: item.curve, means: item.means, key: name, label: name, dashes: index, spread: item.curve[chart.spread] },
      item.validation[name] && { raw: item.validation, key: name, label: `${name}, validation`, dashes: index, dots: true },
    ].filter(Boolean));
  }
  if (chart.name === "gap") return run === 0 ? [] : [{ raw: data.gaps[run - 1], means: data.gap_means[run - 1], key: "gap" }];
  if (chart.name === "validation") return [{ raw: item.validation, means: item.validation, key: "loss", dots: true }];
  if (chart.name === "loss_scale" && !scales(item)) return [];
  return [{ raw: item.curve, means: item.means, key: chart.name }];
}

function lines(chart) {
  const found = [];
  const add = (run, x, y, look) => { if (x.length) found.push({ run, data: points(chart, x, y), ...look }); };
  if (state.seeds && chart.name !== "gap" && chart.name !== "validation") {
    data.groups.forEach((group) => {
      const run = group.runs[0];
      if (group.runs.every((member) => state.hidden.has(member))) return;
      const band = group.curves[chart.name];
      if (!band) return lineOf(chart, run, add);
      const x = group.curves[state.axis];
      const soft = (values) => (state.smoothing > 0 && chart.noisy ? smoothed(values, state.smoothing) : values);
      add(run, x, soft(band.high), { width: 0, top: true });
      add(run, x, soft(band.low), { width: 0, bottom: true });
      add(run, x, soft(band.mean), { width: 2.2, label: `${group.label} (mean of ${group.runs.length})` });
    });
    return found;
  }
  data.runs.forEach((_, run) => { if (!state.hidden.has(run)) lineOf(chart, run, add); });
  return found;
}

function lineOf(chart, run, add) {
  columns(chart, run).forEach(({ raw, means, key, spread, dots, ...look }) => {
    const [x, y] = [raw[state.axis], raw[key]];
    const smooth = state.smoothing > 0 && chart.noisy && !dots;
    const below = run === 0 && few && data.runs.length > 1; // drawn wider, so that an identical run on top does not hide it
    if (spread && few && !smooth) {
      const edge = (sign) => y.map((value, index) => (value === null || spread[index] === null ? null : value + sign * spread[index]));
      add(run, x, edge(1), { width: 0, top: true });
      add(run, x, edge(-1), { width: 0, bottom: true });
    }
    add(run, x, y, { width: smooth ? 1 : below ? 3.5 : 1.5, faint: smooth, dots, ...look });
    if (smooth) add(run, means[state.axis], smoothed(means[key], state.smoothing), { width: 2.2, ...look });
  });
}

// Legend text for the lines of a chart of metrics.
function keyOf(chart) {
  if (!chart.names) return "";
  const has = (part, name) => data.runs.some((run) => run[part][name]);
  const names = chart.names.filter((name) => has("curve", name));
  const parts = names.length > 1 ? names.map((name) => `${["solid", "dashed", "dotted", "dash-dotted"][chart.names.indexOf(name) % 4]} ${name}`) : [];
  if (few && has("curve", chart.spread)) parts.push("band: one standard deviation");
  if (chart.names.some((name) => has("validation", name))) parts.push("dots: validation");
  return parts.join(", ");
}

// --- axes

const WHOLE = Array.from({ length: 13 }, (_, power) => [1, 2, 5].map((digit) => digit * 10 ** power)).flat(); // tick distances for integer steps

// The x range that covers all visible runs.
function whole() {
  let [low, high] = [Infinity, -Infinity];
  data.runs.forEach((run, index) => {
    if (state.hidden.has(index)) return;
    [...run.curve[state.axis], ...run.validation[state.axis]].forEach((value) => {
      if (value === null || (state.logx && value <= 0)) return;
      low = Math.min(low, value);
      high = Math.max(high, value);
    });
  });
  return low < high ? [low, high] : low === high ? [low - (state.logx ? low / 2 : 1), high + 1] : state.logx ? [1, 10] : [0, 1];
}

// [lowest, highest] value, ignoring an initial share of each run, and diverged runs unless there are no others.
function usual(series, share) {
  let [low, high] = [Infinity, -Infinity];
  const sound = series.filter((one) => data.runs[one.run].verdict !== "diverged");
  (sound.length ? sound : series).forEach((one) => {
    const [x, y] = one.data;
    const start = x[0] + share * (x[x.length - 1] - x[0]);
    for (let index = 0; index < x.length; index += 1) {
      if (y[index] === null || x[index] < start) continue;
      low = Math.min(low, y[index]);
      high = Math.max(high, y[index]);
    }
  });
  return low > high ? [null, null] : [low, high];
}

// The y range of a chart. low, high: over the current x range; null if it is empty.
function heights(chart, low, high) {
  if (state.cut && chart.cut !== undefined && !state.range) [low, high] = usual(chart.series, chart.cut);
  if (low === null || low === undefined) return isLog(chart) ? [0.5, 2] : [0, 1];
  if (isLog(chart)) return low === high ? [low / 2, high * 2] : [low * (low / high) ** 0.06, high * (high / low) ** 0.06];
  if (chart.zero) low = Math.min(0, low);
  const room = 0.06 * (high - low || Math.abs(high) || 1);
  return [chart.zero && low === 0 ? 0 : low - room, high + room];
}

// Tick positions of a logarithmic axis: powers of two, or 1, 2 and 5 of each decade, at most about eight.
function logSplits(base) {
  return (u, axis, low, high) => {
    if (!(low > 0) || !(high > low)) return [];
    if (base === 2) {
      const [first, last] = [Math.ceil(Math.log2(low)), Math.floor(Math.log2(high))];
      const every = Math.max(1, Math.ceil((last - first + 1) / 8));
      return Array.from({ length: Math.floor((last - first) / every) + 1 }, (_, index) => 2 ** (first + index * every));
    }
    const decades = Math.log10(high / low);
    const digits = decades > 4 ? [1] : decades > 0.5 ? [1, 2, 5] : [1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9];
    const found = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += 1) found.push(...digits.map((digit) => Number(`${digit}e${power}`)));
    return found.filter((value) => value >= low && value <= high);
  };
}

// --- marks

const wantedKinds = (chart) => (!chart.wide ? ["skip", "incident"] : few ? Object.keys(GLYPHS) : ["incident", "nonfinite", "fault", "run_start", "nan"]);

function marksOf(chart) {
  if (!chart.marks || !state.events) return [];
  const kinds = wantedKinds(chart);
  return data.runs.flatMap((item, run) => (state.hidden.has(run) ? [] : item.marks.filter((mark) => kinds.includes(mark.kind)).map((mark) => ({ ...mark, run }))));
}

// Position of a mark in canvas pixels: on the curve, or at the upper edge if the step has no value.
function spot(u, chart, mark) {
  const at = mark[state.axis];
  if (at === null || at < u.scales.x.min || at > u.scales.x.max) return null;
  const value = mark[chart.name];
  const edge = value === null || value === undefined || (isLog(chart) && value <= 0);
  const size = 7 * devicePixelRatio;
  const y = edge ? u.bbox.top + size : Math.min(u.bbox.top + u.bbox.height, Math.max(u.bbox.top + size, u.valToPos(value, "y", true)));
  return { x: u.valToPos(at, "x", true), y, edge };
}

function drawMarks(u, chart) {
  const { ctx } = u;
  const there = {}; // looks of the marks at each spot: different ones are stacked, towards the middle
  ctx.save();
  ctx.textAlign = "center";
  ctx.textBaseline = "middle";
  ctx.lineWidth = 2 * devicePixelRatio;
  ctx.strokeStyle = css("--card");
  marksOf(chart).forEach((mark) => {
    const where = spot(u, chart, mark);
    if (!where) return;
    ctx.globalAlpha = state.focus !== null && state.focus !== mark.run ? 0.15 : 1;
    ctx.font = `${(mark.kind === "incident" || where.edge ? 15 : 12) * devicePixelRatio}px system-ui, sans-serif`;
    ctx.fillStyle = where.edge ? css("--bad-line") : colour(mark.run);
    const looks = (there[`${where.x} ${where.y}`] ||= []);
    const look = `${mark.kind} ${ctx.fillStyle} ${ctx.globalAlpha}`;
    if (looks.includes(look)) return;
    const down = where.y < u.bbox.top + u.bbox.height / 2 ? 1 : -1;
    const y = where.y + down * 14 * devicePixelRatio * (looks.push(look) - 1);
    ctx.strokeText(GLYPHS[mark.kind], where.x, y);
    ctx.fillText(GLYPHS[mark.kind], where.x, y);
  });
  if (few) {
    ctx.lineWidth = 1.2 * devicePixelRatio;
    ctx.setLineDash([2 * devicePixelRatio, 3 * devicePixelRatio]);
    data.divergences.forEach(({ run, step, beyond }) => {
      if (state.hidden.has(run)) return;
      new Set([step, beyond].filter((value) => value !== null)).forEach((value) => {
        const x = u.valToPos(at(run, value), "x", true);
        if (x < u.bbox.left || x > u.bbox.left + u.bbox.width) return;
        ctx.strokeStyle = colour(run);
        ctx.beginPath();
        ctx.moveTo(x, u.bbox.top);
        ctx.lineTo(x, u.bbox.top + u.bbox.height);
        ctx.stroke();
      });
    });
  }
  ctx.restore();
}

function at(run, step) {
  const curve = data.runs[run].curve;
  const index = curve.step.findIndex((value) => value >= step);
  return curve[state.axis][index < 0 ? curve.step.length - 1 : index];
}

// --- the cursor

const tip = Object.assign(document.createElement("div"), { id: "tip", hidden: true });
document.body.append(tip);

function nearest(one, x) {
  const xs = one.data[0];
  let [low, high] = [0, xs.length - 1];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle;
    else high = middle;
  }
  return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
}

// Values under the cursor: in the heading of every chart for few runs, and beside the mouse for all nearby ones.
function readout(u, chart) {
  const { left, top } = u.cursor;
  chart.values.replaceChildren();
  if (left === undefined || left < 0) {
    if (chart.under) tip.hidden = true;
    return;
  }
  const x = u.posToVal(left, "x");
  const found = chart.series.filter((one) => !one.faint && !one.top && !one.bottom && one.data[0].length).map((one) => {
    const index = nearest(one, x);
    return { one, x: one.data[0][index], value: one.data[1][index] };
  });
  if (few) found.forEach(({ one, value }) => {
    const text = document.createElement("b");
    text.style.color = colour(one.run);
    text.textContent = value === null ? "-" : shown(chart, value);
    chart.values.append(text);
  });
  if (!chart.under) return;
  const distance = ({ value }) => (value === null ? Infinity : Math.abs(u.valToPos(value, "y") - top));
  const near = found.sort((a, b) => distance(a) - distance(b)).slice(0, few ? 4 : 6);
  const rows = near.map(({ one, value }) => {
    const row = document.createElement("div");
    row.style.color = colour(one.run);
    row.textContent = `${value === null ? "not finite" : shown(chart, value)}  ${one.label || data.runs[one.run].label}`;
    return row;
  });
  const head = document.createElement("div");
  head.textContent = `${AXES[state.axis]} ${place(near.length ? near[0].x : x)}`;
  const events = marksOf(chart).filter((mark) => {
    const where = spot(u, chart, mark);
    return where && Math.abs(where.x / devicePixelRatio - u.bbox.left / devicePixelRatio - left) < 6;
  }).slice(0, 5).map((mark) => {
    const row = document.createElement("div");
    row.textContent = `${GLYPHS[mark.kind]} ${KINDS[mark.kind]}, step ${mark.step}, ${data.runs[mark.run].label}: ${mark.text}`;
    return row;
  });
  tip.replaceChildren(head, ...rows, ...events);
  tip.hidden = false;
  const box = u.over.getBoundingClientRect();
  const beside = box.left + left + 16;
  tip.style.left = `${beside + tip.offsetWidth > window.innerWidth ? Math.max(4, beside - tip.offsetWidth - 32) : beside}px`;
  tip.style.top = `${Math.max(4, Math.min(box.top + top, window.innerHeight - tip.offsetHeight - 4))}px`;
}

// --- drawing

const holder = document.getElementById("charts");
const machine = document.querySelector("#machine .charts"); // only on the page of a single run
const drawn = [];

// One zoom for all charts: they share the x range, and each adapts its y range.
function selected(u) {
  const { left, width } = u.select;
  if (width < 2) return;
  u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
  zoomTo([u.posToVal(left, "x"), u.posToVal(left + width, "x")]);
}

// range: in units of the current x axis; null shows the whole run.
function zoomTo(range) {
  state.range = range;
  const [min, max] = range || whole();
  drawn.forEach((u) => u.setScale("x", { min, max }));
}

// Values between two gaps, such as the only finite one: a line needs two points.
function isolated(u, series) {
  const y = u.data[series];
  return y.flatMap((value, index) => (value !== null && (y[index - 1] ?? null) === null && (y[index + 1] ?? null) === null ? [index] : []));
}

function options(chart) {
  const log = isLog(chart);
  const empty = chart.series.every((one) => one.data[1].every((value) => value === null)); // then its range is meaningless
  const axis = { stroke: () => css("--dim"), grid: { stroke: () => css("--line"), width: 1 }, ticks: { stroke: () => css("--line"), width: 1 }, font: "12px system-ui, sans-serif" };
  return {
    width: chart.plot.clientWidth || 500,
    height: chart.wide ? 380 : 260,
    legend: { show: false },
    focus: { alpha: 0.15 },
    cursor: { sync: { key: "runs", setSeries: false }, drag: { x: true, y: false, setScale: false }, bind: { dblclick: () => () => zoomTo(null) }, focus: { prox: few ? -1 : 16 }, points: { size: 6 } },
    scales: {
      x: { time: false, distr: state.logx ? 3 : 1, range: () => state.range || whole() },
      y: { distr: log ? 3 : 1, log: log || 10, range: (u, low, high) => heights(chart, low, high) },
    },
    axes: [
      { ...axis, ...(state.axis === "seconds" ? {} : { incrs: WHOLE }), values: (u, values) => values.map((value) => (value === null ? "" : place(value))), ...(state.logx ? { splits: logSplits(10), filter: (u, splits) => splits } : {}) },
      { ...axis, size: 66, values: (u, values) => values.map((value) => (value === null || empty ? "" : shown(chart, value))), ...(log ? { splits: logSplits(log), filter: (u, splits) => splits } : {}) },
    ],
    series: [{}, ...chart.series.map((one) => ({
      label: one.label || data.runs[one.run].label,
      stroke: () => (one.faint ? pale(colour(one.run), 0.3) : colour(one.run)),
      width: one.width,
      dash: one.faint ? [] : one.dashes === undefined ? dash(one.run) : DASHES[one.dashes % 4],
      paths: chart.step ? uPlot.paths.stepped({ align: 1 }) : undefined,
      points: { show: Boolean(one.dots), size: 7, fill: () => colour(one.run), filter: one.dots ? null : isolated },
    }))],
    bands: chart.series.flatMap((one, index) => (one.top ? [{ series: [index + 1, index + 2], fill: () => pale(colour(one.run), 0.18) }] : [])),
    hooks: {
      draw: [(u) => drawMarks(u, chart)],
      setCursor: [(u) => readout(u, chart)],
      setSelect: [selected],
    },
  };
}

function draw() {
  drawn.splice(0).forEach((u) => u.destroy());
  CHARTS.forEach((chart) => {
    chart.series = lines(chart);
    const joined = chart.series.length ? uPlot.join(chart.series.map((one) => one.data)) : [[], []];
    drawn.push(new uPlot(options(chart), joined, chart.plot));
  });
  focus(state.focus);
  document.body.dataset.drawn = "yes";
}

// Fade all runs but one; null fades none.
function focus(run) {
  state.focus = run;
  drawn.forEach((u, index) => {
    const place = CHARTS[index].series.findLastIndex((one) => one.run === run);
    u.setSeries(run === null || place < 0 ? null : place + 1, { focus: run !== null && place >= 0 }, false);
  });
}

const choose = (id, take) => {
  const input = document.getElementById(id);
  if (input) input.addEventListener("change", () => { take(input); draw(); });
};
choose("axis", (input) => { state.axis = input.value; state.range = null; });
choose("logx", (input) => { state.logx = input.checked; state.range = null; });
let soon = null;
document.getElementById("smoothing").addEventListener("input", ({ target }) => {
  state.smoothing = Number(target.value);
  document.getElementById("smoothed").textContent = state.smoothing ? target.value : "off";
  clearTimeout(soon);
  soon = setTimeout(draw, 40);
});
choose("log", (input) => { state.log = input.checked; });
choose("cut", (input) => { state.cut = input.checked; });
choose("events", (input) => { state.events = input.checked; });
choose("seeds", (input) => { state.seeds = input.checked; });
state.cut = document.getElementById("cut").checked = data.runs.some((run) => run.curve.step.length > 500) || (data.runs.length > 1 && data.runs.some((run) => run.verdict === "diverged"));
document.getElementById("whole").addEventListener("click", () => zoomTo(null));
if (window.innerWidth < 760) document.getElementById("options").open = false;

function showStep(step) {
  state.axis = document.getElementById("axis").value = "step";
  state.range = [step - 20, step + 20];
  draw();
  holder.scrollIntoView({ behavior: "smooth" });
}

const present = Object.keys(KINDS).filter((kind) => data.runs.some((run) => run.marks.some((mark) => mark.kind === kind)));
document.getElementById("key").textContent =
  present.map((kind) => `${GLYPHS[kind]} ${KINDS[kind]}`).join("   ") + (data.divergences.length && few ? "   \u2506 where runs diverge" : "");
for (const chart of CHARTS) {
  chart.element = document.createElement("div");
  chart.element.className = chart.wide ? "chart wide" : "chart";
  const head = document.createElement("h3");
  head.textContent = chart.title;
  chart.values = document.createElement("span");
  head.append(chart.values);
  const key = Object.assign(document.createElement("small"), { textContent: keyOf(chart) });
  head.append(" ", key);
  chart.plot = document.createElement("div");
  chart.element.append(head, chart.plot);
  chart.element.addEventListener("mouseenter", () => { chart.under = true; });
  chart.element.addEventListener("mouseleave", () => { chart.under = false; tip.hidden = true; });
  (chart.machine && machine ? machine : holder).append(chart.element);
}
if (machine) machine.parentElement.hidden = !machine.children.length;
document.addEventListener("theme", () => drawn.forEach((u) => u.redraw(false)));
new ResizeObserver(() => drawn.forEach((u, index) => {
  const width = CHARTS[index].plot.clientWidth;
  if (width && Math.abs(width - u.width) > 1) u.setSize({ width, height: u.height });
})).observe(holder);
draw();
