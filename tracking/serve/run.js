"use strict";
// The page of one run: its curves (charts.js), heat maps (heat.js) and incidents, from JSON; texts are set as text.
{
  const key = document.getElementById("run").dataset.key; // quoted already
  const at = (path, more = []) => `${path}?key=${key}&${new URLSearchParams(more)}`;
  const folds = document.getElementById("fold");
  const opened = new Set();
  let curves = null; // what charts.js draws

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
    else drawIncidents(found.incidents);
    if (!found.steps) {
      document.getElementById("key").textContent = "no step was recorded yet";
    } else if (curves) {
      Object.assign(curves.runs[0], found.drawn.runs[0]);
      draw();
    } else {
      const holder = element("script");
      Object.assign(holder, { type: "application/json", id: "data", textContent: JSON.stringify(found.drawn) });
      document.body.append(holder);
      await load("uPlot.js");
      await load("charts.js");
      curves = data;
    }
    document.body.dataset.curves = found.steps;
  }

  function drawIncidents(incidents) {
    const list = document.getElementById("list");
    list.replaceChildren();
    list.className = incidents.length ? "" : "dim";
    if (!incidents.length) list.textContent = "none";
    for (const found of incidents) {
      const box = element("div", "incident");
      const head = element("p");
      head.append(element("b", "", `step ${found.step.toLocaleString("en")}: ${found.verdict}`), ` ${found.reason}`);
      box.append(head, ...found.causes.map((cause) => element("p", "dim", cause)));
      if (found.replay) {
        const line = element("p");
        line.append(element("code", "", found.replay));
        box.append(line);
      }
      list.append(box);
    }
  }

  // A click on a row of folded modules shows them one by one, and hides them again.
  function unfold(name) {
    if (folds.value === "modules") return;
    opened.has(name) ? opened.delete(name) : opened.add(name);
    drawHeat();
  }

  async function drawHeat() {
    const about = await get(at("/run/heat"));
    const [holder, panels] = [document.getElementById("panels"), about.panels.filter((panel) => panel.varies)];
    document.getElementById("heat").hidden = panels.length === 0;
    document.getElementById("out").hidden = about.panels.length === 0;
    document.getElementById("about").textContent = `${about.rows.toLocaleString("en")} modules, measured at ${about.measured.toLocaleString("en")} steps; click a row to unfold it`;
    document.getElementById("lines").replaceChildren(...about.panels.map((panel) => {
      const item = element("li");
      item.append(element("b", "", `${panel.title}: `), panel.line);
      return item;
    }));
    while (holder.children.length > panels.length) holder.lastChild.remove();
    while (holder.children.length < panels.length) holder.append(element("div", "chart"));
    for (const [index, panel] of panels.entries()) {
      const asked = [["panel", panel.key], ["fold", folds.value], ...[...opened].map((name) => ["open", name])];
      const found = await get(at("/run/heat", asked));
      holder.children[index].id = `heat-${panel.key}`;
      drawHeatPanel(holder.children[index], found, panel.line, unfold);
    }
    document.body.dataset.heat = "drawn";
  }

  folds.addEventListener("change", () => { opened.clear(); drawHeat(); });
  document.addEventListener("theme", () => { if (document.body.dataset.heat) drawHeat(); });
  const complain = (problem) => { document.getElementById("key").textContent = `this run cannot be read: ${problem.message}`; };
  drawCurves().then(drawHeat).catch(complain);
  let seen = document.querySelector(".facts")?.textContent ?? "";
  keepDoing(async () => {
    const state = document.getElementById("state");
    await refresh(state, at("/run/state"));
    const now = state.querySelector(".facts")?.textContent ?? "";
    if (now === seen) return;
    seen = now;
    await drawCurves();
    await drawHeat();
  }, 4);
}
