"use strict";
// The page of one run: curves (charts.js) and heat maps (heat.js) from JSON, the rest as rendered by the server.
{
  const key = document.getElementById("run").dataset.key; // already quoted
  const at = (path, more = []) => `${path}?key=${key}&${new URLSearchParams(more)}`;
  const [folds, sections] = [document.getElementById("fold"), document.getElementById("sections")];
  const opened = new Set();
  let curves = null; // what charts.js draws
  let newer = false; // whether there are newer events than in the sections
  let due = 0; // when sections may be requested again: they take seconds for a long run

  async function get(address) {
    const answer = await fetch(address, { cache: "no-store" });
    const content = await answer.json();
    if (!answer.ok) throw new Error(content.error || answer.statusText);
    return content;
  }

  function load(script) {
    return new Promise((done, failed) => {
      const made = element("script");
      Object.assign(made, { src: `/static/${script}`, onload: done, onerror: failed });
      document.body.append(made);
    });
  }

  async function drawCurves() {
    const found = await get(at("/run/curves"));
    document.getElementById("reading").hidden = !found.sketch;
    if (found.sketch) setTimeout(() => drawCurves().catch(complain), 1500);
    if (!found.steps) {
      document.getElementById("key").textContent = "no step was recorded yet";
    } else if (curves) {
      Object.assign(curves.runs[0], found.drawn.runs[0]);
      draw();
    } else {
      const holder = element("script");
      Object.assign(holder, { type: "application/json", id: "data", textContent: JSON.stringify(found.drawn) });
      document.body.append(holder);
      await load("pages/uplot/uPlot.iife.min.js");
      await load("pages/charts.js");
      curves = data;
    }
    document.body.dataset.curves = found.steps;
  }

  // A click on a row of folded modules expands it into single modules, or collapses it again.
  function unfold(name) {
    if (folds.value === "modules") return;
    opened.has(name) ? opened.delete(name) : opened.add(name);
    drawHeat();
  }

  async function drawHeat() {
    const about = await get(at("/run/heat"));
    document.getElementById("about").textContent = about.measured ? `${number(about.rows)} modules, measured at ${number(about.measured)} steps; click a row to unfold it` : "";
    const asked = [["fold", folds.value], ...[...opened].map((name) => ["open", name])];
    await drawLayers(about.panels, (panel) => get(at("/run/heat", [["panel", panel.key], ...asked])), unfold);
  }

  // Keep what the reader has opened and searched for.
  async function drawSections() {
    await refresh(document.getElementById("incidents"), at("/run/incidents"));
    if (sections.contains(document.activeElement)) return;
    const [details, fields] = ["details", "[data-filter]"].map((kind) => () => [...sections.querySelectorAll(kind)]);
    const [open, words] = [details().map((part) => part.open), fields().map((field) => field.value)];
    const asked = Date.now();
    newer = false;
    if (await refresh(sections, at("/run/sections"))) {
      details().forEach((part, index) => { part.open = Boolean(open[index]); });
      fields().forEach((field, index) => {
        field.value = words[index] ?? "";
        field.dispatchEvent(new Event("input", { bubbles: true }));
      });
    }
    due = Date.now() + 20 * (Date.now() - asked);
    document.body.dataset.sections = "drawn";
  }

  folds.append(new Option("all modules", "modules"));
  folds.addEventListener("change", () => { opened.clear(); drawHeat(); });
  document.getElementById("healthy").addEventListener("toggle", () => { if (document.body.dataset.heat) drawHeat(); });
  document.addEventListener("theme", () => { if (document.body.dataset.heat) drawHeat(); });
  const complain = (problem) => { document.getElementById("key").textContent = `this run cannot be read: ${problem.message}`; };
  drawCurves().then(drawHeat).then(drawSections).catch(complain);
  let seen = document.querySelector(".facts")?.textContent ?? "";
  keepDoing(async () => {
    const state = document.getElementById("state");
    await refresh(state, at("/run/state"));
    const now = state.querySelector(".facts")?.textContent ?? "";
    if (now === seen) return;
    [seen, newer] = [now, true];
    await drawCurves();
    await drawHeat();
  }, 4);
  keepDoing(async () => { if (newer && Date.now() > due) await drawSections(); }, 15);
}
