"use strict";
// Search, order, grouping and the choice of runs; the table itself comes from the server.
const asked = document.getElementById("asked");
const runs = document.getElementById("runs");
const chosen = new Set();
const MOST = 24;
let downwards = null; // the column whose usual order is turned round

function query() {
  const form = new URLSearchParams(new FormData(asked));
  if (downwards === form.get("sort")) form.set("sort", `-${downwards}`);
  return form.toString();
}

async function show() {
  if (await refresh(runs, `/runs?${query()}`)) mark();
}

function mark() {
  runs.querySelectorAll(".pick").forEach((box) => {
    box.checked = box.dataset.keys.split(" ").every((key) => chosen.has(key));
  });
  const button = document.getElementById("compare");
  button.disabled = chosen.size < 1 || chosen.size > MOST;
  button.textContent = chosen.size === 1 ? "show" : "compare";
  document.getElementById("clear").hidden = chosen.size === 0;
  document.getElementById("chosen").textContent = chosen.size === 0 ? "" : chosen.size > MOST ? `${chosen.size} chosen, at most ${MOST} can be compared` : `${chosen.size} chosen`;
}

let waiting = null;
asked.addEventListener("input", () => {
  clearTimeout(waiting);
  waiting = setTimeout(() => { history.replaceState(null, "", `/?${query()}`); show(); }, 150);
});
asked.addEventListener("submit", (event) => event.preventDefault());
runs.addEventListener("click", (event) => {
  const head = event.target.closest(".sort");
  if (!head) return;
  const wanted = head.dataset.sort;
  downwards = asked.elements.sort.value === wanted && downwards !== wanted ? wanted : null;
  asked.elements.sort.value = wanted;
  history.replaceState(null, "", `/?${query()}`);
  show();
});
runs.addEventListener("change", (event) => {
  if (!event.target.matches(".pick")) return;
  event.target.dataset.keys.split(" ").forEach((key) => (event.target.checked ? chosen.add(key) : chosen.delete(key)));
  mark();
});
document.getElementById("clear").addEventListener("click", () => { chosen.clear(); mark(); });
document.getElementById("compare").addEventListener("click", () => {
  location.href = `/compare?${[...chosen].map((key) => `run=${key}`).join("&")}`; // keys are quoted already
});
mark();
keepDoing(show, 3);
