"use strict";
// A search field with data-filter="ID" shows only the rows of table ID that contain all of its words.
document.addEventListener("input", ({ target }) => {
  if (!target.matches("[data-filter]")) return;
  const words = target.value.toLowerCase().split(/\s+/).filter(Boolean);
  for (const row of document.querySelectorAll(`#${target.dataset.filter} tbody tr`)) {
    row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
  }
});
