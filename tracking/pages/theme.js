"use strict";
// Light or dark as set in the reader's system, until the button is pressed. Charts redraw on "theme".
const isDark = () => document.documentElement.classList.contains("dark");
function setTheme(dark) {
  document.documentElement.classList.toggle("dark", dark);
  document.dispatchEvent(new Event("theme"));
}
{
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  system.addEventListener("change", (event) => setTheme(event.matches));
  setTheme(system.matches);
  document.getElementById("theme").addEventListener("click", () => setTheme(!isDark()));
}
