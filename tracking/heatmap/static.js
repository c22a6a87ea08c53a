"use strict";
// Draw the heat maps of a page that is one file.
{
  const panels = JSON.parse(document.getElementById("heat-data").textContent);
  const show = () => drawLayers(panels, (panel) => panel.folds[document.getElementById("fold").value], null);
  document.getElementById("fold").addEventListener("change", show);
  document.addEventListener("theme", show);
  document.getElementById("healthy").addEventListener("toggle", show);
  show();
}
