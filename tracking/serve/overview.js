"use strict";
// Search, sorting, grouping, columns, notes and selection of runs; the server renders the table itself.
const asked = document.getElementById("asked");
const runs = document.getElementById("runs");
const chosen = new Set();
const MOST = 24;
const usual = asked.dataset.usual;
let downwards = null; // column whose default order is reversed

function query() {
  const form = new URLSearchParams(new FormData(asked));
  if (downwards === form.get("sort")) form.set("sort", `-${downwards}`);
  const columns = form.getAll("col").join(" ");
  if (columns === usual) form.delete("col");
  localStorage.setItem("columns", columns === usual ? "" : columns);
  return form.toString();
}

async function show() {
  const address = query();
  document.getElementById("export").href = `/runs.csv?${address}`;
  if (await refresh(runs, `/runs?${address}`)) mark();
}

function again() {
  history.replaceState(null, "", `/?${query()}`);
  show();
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

function choose(columns) {
  const wanted = columns.split(" ");
  asked.querySelectorAll("[name=col]").forEach((box) => { box.checked = wanted.includes(box.value); });
}

let waiting = null;
asked.addEventListener("input", () => {
  clearTimeout(waiting);
  waiting = setTimeout(again, 150);
});
asked.addEventListener("submit", (event) => event.preventDefault());
runs.addEventListener("click", (event) => {
  const [head, label, edit] = [".sort", ".label", ".note-it"].map((kind) => event.target.closest(kind));
  if (head) {
    const wanted = head.dataset.sort;
    downwards = asked.elements.sort.value === wanted && downwards !== wanted ? wanted : null;
    if (![...asked.elements.sort.options].some((option) => option.value === wanted)) asked.elements.sort.add(new Option(head.textContent, wanted));
    asked.elements.sort.value = wanted;
    again();
  } else if (label) {
    asked.elements.q.value = label.textContent;
    again();
  } else if (edit) {
    note(edit.dataset.key);
  }
});
runs.addEventListener("change", (event) => {
  if (!event.target.matches(".pick")) return;
  event.target.dataset.keys.split(" ").forEach((key) => (event.target.checked ? chosen.add(key) : chosen.delete(key)));
  mark();
});
document.addEventListener("click", (event) => {
  const columns = document.getElementById("columns");
  if (!columns.contains(event.target)) columns.open = false;
});
document.getElementById("usual").addEventListener("click", () => { choose(usual); again(); });
document.getElementById("clear").addEventListener("click", () => { chosen.clear(); mark(); });
document.getElementById("compare").addEventListener("click", () => {
  location.href = `/compare?${[...chosen].map((key) => `run=${key}`).join("&")}`; // keys are already quoted
});

// --- notes and tags, if the server accepts them

const box = document.getElementById("edit");
async function said(answer) {
  const text = await answer.text();
  try { return JSON.parse(text).error; } catch { return text.match(/explanation: \d+ - (.*)<\/p>/)?.[1] ?? answer.statusText; }
}

async function note(key) {
  const [form, problem] = [box.querySelector("form"), box.querySelector(".problem")];
  box.dataset.key = key;
  box.querySelector("h2").textContent = decodeURIComponent(key);
  const answer = await fetch(`/run/notes?key=${key}`, { cache: "no-store" });
  const found = answer.ok ? await answer.clone().json() : { tags: [], note: "" };
  problem.textContent = answer.ok ? "" : await said(answer);
  form.elements.tags.value = found.tags.join(", ");
  form.elements.note.value = found.note;
  box.showModal();
}

box?.querySelector("form").addEventListener("submit", async (event) => {
  if (event.submitter?.value === "cancel") return;
  event.preventDefault();
  const { tags, note: text } = event.target.elements;
  const body = JSON.stringify({ tags: tags.value.split(","), note: text.value });
  const answer = await fetch(`/run/notes?key=${box.dataset.key}`, { method: "POST", headers: { "X-Token": asked.dataset.token }, body }).catch(() => null);
  if (answer?.ok) {
    box.close();
    show();
  } else {
    box.querySelector(".problem").textContent = `not saved: ${answer ? await said(answer) : "the server does not answer"}`;
  }
});

const kept = localStorage.getItem("columns");
if (kept && !new URLSearchParams(location.search).has("col")) {
  choose(kept);
  again();
} else {
  document.getElementById("export").href = `/runs.csv?${query()}`;
}
mark();
keepDoing(show, 3);
