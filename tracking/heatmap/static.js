"use strict";
// The heat maps of a page that is one file.
{
  const panels = JSON.parse(document.getElementById("heat-data").textContent);
  const show = () => drawStaticHeat(document.getElementById("panels"), panels, document.getElementById("fold").value);
  document.getElementById("fold").addEventListener("change", show);
  document.addEventListener("theme", show);
  show();
}
