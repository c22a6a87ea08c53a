"use strict";
// Draws heat maps on canvases: rows of modules, columns of steps. A click on a row calls `unfold` with its name.
const VIRIDIS = ["#440154", "#46327e", "#365c8d", "#277f8e", "#1fa187", "#4ac16d", "#a0da39", "#fde725"];
const REDS = ["#fdd0c0", "#fcaf93", "#fc8a6a", "#f96044", "#e83429", "#c9181d", "#a30f15", "#67000d"];
const APART = ["#2166ac", "#4f93c3", "#92c5de", "#d1e5f0", "#fddbc7", "#f4a582", "#d6604d", "#b2182b"]; // lower, higher
const DTYPE_COLOURS = ["#7f7f7f", "#1f77b4", "#2ca02c", "#d62728", "#9467bd"];
const ROW = 15; // pixels per row; fewer if there are many rows

function element(kind, className, text) {
  const made = document.createElement(kind);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function heatNumber(found, value) {
  if (value === null) return "not measured";
  if (found.codes.length) return found.codes[value];
  const real = found.log && !found.diverging ? 10 ** value : value;
  if (found.diverging) return found.log ? `${number(10 ** value, 3)} x` : number(value, 3);
  return found.percent ? percent(real, 3) : number(real);
}

function coloursOf(found) {
  if (found.codes.length) return DTYPE_COLOURS;
  return found.diverging ? APART : found.key === "nonfinite" ? REDS : VIRIDIS;
}

function colourAt(colours, share) {
  const at = Math.min(Math.max(share, 0), 1) * (colours.length - 1);
  const [below, rest] = [Math.floor(at), at - Math.floor(at)];
  const parts = [0, 1, 2].map((part) => {
    const [a, b] = [colours[below], colours[Math.min(below + 1, colours.length - 1)]].map((hex) => parseInt(hex.slice(1 + 2 * part, 3 + 2 * part), 16));
    return Math.round(a + (b - a) * rest);
  });
  return `rgb(${parts})`;
}

// Draw one panel into `box`: title, canvas and scale. Replaces previous content.
function drawHeatPanel(box, found, unfold) {
  const style = getComputedStyle(document.documentElement);
  const [dim, rule] = ["--dim", "--line"].map((name) => style.getPropertyValue(name).trim());
  const rows = found.rows.length;
  const row = rows > 60 ? Math.max(2, Math.min(ROW, 900 / rows)) : ROW;
  const width = Math.max(240, box.clientWidth - 22);
  const canvas = element("canvas");
  const pen = canvas.getContext("2d");
  pen.font = "11px system-ui, sans-serif";
  const label = Math.min(0.42 * width, 8 + Math.max(...found.rows.map((name) => pen.measureText(name).width)));
  const [wide, high] = [width - label - 2, rows * row];
  const density = window.devicePixelRatio || 1;
  canvas.width = width * density;
  canvas.height = (high + 20) * density;
  canvas.style.width = `${width}px`;
  canvas.style.height = `${high + 20}px`;
  pen.scale(density, density);
  pen.font = "11px system-ui, sans-serif";
  pen.fillStyle = rule;
  pen.fillRect(label, 0, wide, high);
  const [first, last] = [found.edges[0], found.edges[found.edges.length - 1]];
  const x = (step) => label + ((step - first) / Math.max(1, last - first)) * wide;
  const colours = coloursOf(found);
  const shown = (value) => (found.codes.length ? colours[value] : colourAt(colours, (value - found.low) / (found.high - found.low || 1)));
  found.values.forEach((values, at) => values.forEach((value, column) => {
    if (value === null || (found.key === "nonfinite" && value <= -12)) return;
    pen.fillStyle = shown(value);
    const [left, right] = [x(found.edges[column]), x(found.edges[column + 1])];
    pen.fillRect(left, at * row, Math.max(found.key === "nonfinite" ? 4 : 0.5, right - left + 0.4), row + 0.4);
  }));
  pen.fillStyle = dim;
  pen.textBaseline = "middle";
  pen.textAlign = "right";
  const every = Math.max(1, Math.ceil(13 / row));
  found.rows.forEach((name, at) => {
    if (at % every) return;
    let text = name;
    while (text.length > 4 && pen.measureText(text).width > label - 6) text = `...${text.slice(4)}`;
    pen.fillText(text, label - 4, (at + 0.5 * Math.min(every, rows - at)) * row);
  });
  pen.textBaseline = "alphabetic";
  pen.textAlign = "left";
  pen.fillText(`step ${first.toLocaleString("en")}`, label, high + 14);
  pen.textAlign = "right";
  pen.fillText(last.toLocaleString("en"), width - 2, high + 14);

  const title = element("h3", "", found.title);
  const reading = element("span", "dim");
  title.append(reading);
  const scale = element("p", "dim heat-scale");
  if (found.codes.length) {
    found.codes.forEach((name, code) => {
      if (!name) return;
      const chip = element("span", "heat-chip");
      chip.style.background = colours[code];
      scale.append(chip, `${name} `);
    });
  } else {
    const bar = element("span", "heat-bar");
    bar.style.background = `linear-gradient(to right, ${colours.join(", ")})`;
    scale.append(heatNumber(found, found.low), bar, heatNumber(found, found.high));
  }
  const cell = (event) => {
    const place = canvas.getBoundingClientRect();
    const at = Math.floor((event.clientY - place.top) / row);
    const step = first + ((event.clientX - place.left - label) / wide) * (last - first);
    return { at, column: found.edges.findIndex((edge) => edge >= step) - 1 };
  };
  canvas.addEventListener("mousemove", (event) => {
    const { at, column } = cell(event);
    const value = found.values[at]?.[column];
    reading.textContent = value === undefined ? "" : `${found.rows[at]}, step ${found.edges[column + 1].toLocaleString("en")}: ${heatNumber(found, value)}`;
  });
  canvas.addEventListener("mouseleave", () => { reading.textContent = ""; });
  if (unfold) {
    canvas.style.cursor = "pointer";
    canvas.addEventListener("click", (event) => { const { at } = cell(event); if (found.names[at] !== undefined) unfold(found.names[at]); });
  }
  box.names = found.names;
  box.replaceChildren(title, canvas, scale);
}

// Draw all panels: those with findings are open, healthy ones are folded. dataOf: returns the values of a panel.
async function drawLayers(panels, dataOf, unfold) {
  const folded = document.getElementById("healthy");
  const [findings, healthy] = [panels.filter((panel) => panel.finding !== false), panels.filter((panel) => panel.finding === false)];
  folded.hidden = healthy.length === 0;
  folded.firstElementChild.textContent = `${healthy.length} within their healthy range: ${healthy.map((panel) => panel.title).join("; ")}`;
  for (const [chosen, prefix] of [[findings, ""], [healthy, "healthy-"]]) {
    document.getElementById(`${prefix}lines`).replaceChildren(...chosen.map((panel) => {
      const item = element("li");
      item.append(element("b", "", `${panel.title}: `), panel.line);
      return item;
    }));
    const [holder, drawn] = [document.getElementById(`${prefix}panels`), chosen.filter((panel) => panel.varies !== false)];
    while (holder.children.length > drawn.length) holder.lastChild.remove();
    while (holder.children.length < drawn.length) holder.append(element("div", "chart"));
    if (prefix && !folded.open) continue; // nothing in there has a width yet
    for (const [index, panel] of drawn.entries()) {
      holder.children[index].id = `heat-${panel.key}`;
      drawHeatPanel(holder.children[index], await dataOf(panel), unfold);
    }
  }
  document.querySelector("#heat .controls").hidden = panels.length === 0;
  if (!findings.length) document.getElementById("lines").append(element("li", "dim", panels.length ? "nothing is outside its healthy range" : "no telemetry was recorded (telemetry.every_steps)"));
  document.body.dataset.heat = "drawn";
}
