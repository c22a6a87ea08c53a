// The runs of a comparison: shown, hidden, searched, sorted. Continues pages/charts.js.
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
document.querySelectorAll(".go").forEach((button) => button.addEventListener("click", () => showStep(Number(button.dataset.step))));
document.addEventListener("theme", paint);
paint();
