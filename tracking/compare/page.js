// Show, hide, search and sort the runs of a comparison. Continues pages/charts.js.
const table = document.getElementById("runs");
const chips = [...document.querySelectorAll(".chip")];
const everyRun = data.runs.map((_, run) => run);

function paint() {
  document.querySelectorAll("[data-run]").forEach((item) => {
    const run = Number(item.dataset.run);
    const stroke = item.querySelector("line");
    stroke.setAttribute("stroke", colour(run));
    stroke.setAttribute("stroke-width", 3);
    stroke.setAttribute("stroke-dasharray", dash(run).join(" "));
    if (item.matches(".chip")) item.setAttribute("aria-pressed", String(!state.hidden.has(run)));
    else item.classList.toggle("off", state.hidden.has(run));
  });
}

function show(runs) {
  state.hidden = new Set(everyRun.filter((run) => !runs.includes(run)));
  paint();
  draw();
  drawPoints();
}

const visible = () => everyRun.filter((run) => !state.hidden.has(run));
const onlyOrAll = (run) => show(visible().length === 1 && visible()[0] === run ? everyRun : [run]);

chips.forEach((chip) => {
  const run = Number(chip.dataset.run);
  chip.addEventListener("click", () => show(state.hidden.has(run) ? [...visible(), run] : visible().filter((other) => other !== run)));
  chip.addEventListener("mouseenter", () => focus(run));
  chip.addEventListener("mouseleave", () => focus(null));
});

if (table) {
  const body = table.tBodies[0];
  const rows = [...body.rows];
  const found = document.getElementById("found");
  const search = document.getElementById("search");
  rows.forEach((row) => {
    const run = Number(row.dataset.run);
    row.querySelector(".only").addEventListener("click", () => onlyOrAll(run));
    row.addEventListener("mouseenter", () => focus(run));
    row.addEventListener("mouseleave", () => focus(null));
  });
  search.addEventListener("input", () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const hits = rows.filter((row) => {
      const run = data.runs[Number(row.dataset.run)];
      row.hidden = !words.every((word) => run.label.toLowerCase().includes(word) || run.verdict.toLowerCase().includes(word));
      return !row.hidden;
    });
    found.textContent = words.length ? `${hits.length} of ${rows.length} runs` : "";
    show(hits.map((row) => Number(row.dataset.run)));
  });
  document.getElementById("all").addEventListener("click", () => { search.value = found.textContent = ""; rows.forEach((row) => { row.hidden = false; }); show(everyRun); });
  document.getElementById("more").addEventListener("change", (event) => table.classList.toggle("wide", event.target.checked));
  [...table.tHead.rows[0].cells].forEach((head, column) => head.addEventListener("click", () => {
    const up = head.dataset.up !== "yes";
    head.dataset.up = up ? "yes" : "no";
    const key = (row) => row.cells[column].dataset.sort;
    rows.sort((a, b) => {
      const [x, y] = [Number(key(a)), Number(key(b))];
      const order = Number.isNaN(x) || Number.isNaN(y) ? key(a).localeCompare(key(b), "en", { numeric: true }) : x - y;
      return up ? order : -order;
    });
    body.append(...rows);
  }));
}
// --- any setting against any measure: one point per run, evenly spaced if the setting is not numeric

const plot = document.getElementById("points");
const [across, up, logup] = ["across", "up", "logup"].map((id) => document.getElementById(id));

// Maps values to pixels between `from` and `to`, with ticks; logarithmic if requested and possible.
function axisOf(values, from, to, log) {
  const known = values.filter((value) => value !== null);
  if (known.some((value) => typeof value === "string")) {
    const names = [...new Set(known.map(String))].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
    const at = (value) => from + ((names.indexOf(String(value)) + 0.5) / names.length) * (to - from);
    return { at, ticks: names.length > 12 ? [] : names.map((name) => [at(name), name]) };
  }
  const scaled = log && known.every((value) => value > 0) ? Math.log10 : (value) => value;
  const [low, high] = [Math.min(...known.map(scaled)), Math.max(...known.map(scaled))];
  const at = (value) => (low === high ? (from + to) / 2 : from + ((scaled(value) - low) / (high - low)) * (to - from));
  const few = [...new Set(known)].sort((a, b) => a - b);
  const inner = Array.from({ length: 5 }, (_, index) => low + ((high - low) * index) / 4).map((value) => (scaled === Math.log10 ? 10 ** value : value));
  return { at, ticks: (few.length <= 6 ? few : inner).map((value) => [at(value), number(value, 5)]) };
}

function drawPoints() {
  if (!plot) return;
  const [width, height, left, bottom] = [Math.max(300, plot.parentElement.clientWidth - 20), 300, 80, 40];
  const shape = (kind, values, text) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", kind);
    Object.entries(values).forEach(([name, value]) => made.setAttribute(name, value));
    if (text !== undefined) made.textContent = text;
    plot.append(made);
    return made;
  };
  plot.replaceChildren();
  plot.setAttribute("width", width);
  plot.setAttribute("height", height);
  const [settings, measure] = [data.scatter.settings[across.value], data.scatter.measures[Number(up.value)]];
  const shown = visible().filter((run) => measure.values[run] !== null);
  plot.dataset.points = shown.length;
  if (!shown.length) return void shape("text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, "no run has a value for this");
  const [x, y] = [shown.map((run) => settings[run]), shown.map((run) => measure.values[run])];
  const wide = typeof x[0] === "number" && Math.min(...x) > 0 && Math.max(...x) / Math.min(...x) >= 8;
  const [places, heights] = [axisOf(x, left + 16, width - 16, wide), axisOf(y, height - bottom - 12, 26, logup.checked)];
  const labels = [];
  let last = -Infinity;
  places.ticks.forEach(([at, text]) => {
    if (at - last < 60) return;
    last = at;
    shape("line", { x1: at, x2: at, y1: 4, y2: height - bottom });
    shape("text", { x: at, y: height - bottom + 16, "text-anchor": "middle" }, text.length > 18 ? `${text.slice(0, 17)}\u2026` : text);
  });
  last = Infinity;
  heights.ticks.forEach(([at, text]) => {
    if (last - at < 14) return;
    last = at;
    shape("line", { x1: left, x2: width - 4, y1: at, y2: at });
    shape("text", { x: left - 6, y: at + 4, "text-anchor": "end" }, text);
  });
  shape("text", { x: (left + width) / 2, y: height - 4, "text-anchor": "middle", class: "title" }, across.value + (wide ? " (logarithmic)" : ""));
  shown.forEach((run, index) => {
    const point = shape("circle", { cx: places.at(x[index]), cy: heights.at(y[index]), r: 6, fill: colour(run) });
    const label = document.createElementNS("http://www.w3.org/2000/svg", "title");
    label.textContent = `${data.runs[run].label}: ${across.value} ${x[index]}, ${measure.title} ${measure.texts[run]}`;
    point.append(label);
    point.addEventListener("mouseenter", () => focus(run));
    point.addEventListener("mouseleave", () => focus(null));
    if (shown.length > 12) return;
    const place = { x: places.at(x[index]) + 9, y: heights.at(y[index]) - 6 };
    while (labels.some((other) => Math.abs(other.x - place.x) < 90 && Math.abs(other.y - place.y) < 13)) place.y -= 13;
    labels.push(place);
    const end = place.x > width - 140;
    shape("text", { x: end ? place.x - 18 : place.x, y: Math.max(12, place.y), "text-anchor": end ? "end" : "start" }, data.runs[run].label.slice(-24));
  });
}

[across, up, logup].forEach((input) => input?.addEventListener("change", drawPoints));
if (plot) new ResizeObserver(drawPoints).observe(plot.parentElement);
document.querySelectorAll(".go").forEach((button) => button.addEventListener("click", () => showStep(Number(button.dataset.step))));
document.addEventListener("theme", () => { paint(); drawPoints(); });
paint();
drawPoints();
