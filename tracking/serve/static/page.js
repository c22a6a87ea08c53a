"use strict";
// Light or dark, before anything is drawn: the reader's choice, else the system's.
const system = window.matchMedia("(prefers-color-scheme: dark)");
const isDark = () => document.documentElement.classList.contains("dark");
function useTheme() {
  const wanted = localStorage.getItem("theme");
  document.documentElement.classList.toggle("dark", wanted ? wanted === "dark" : system.matches);
  document.dispatchEvent(new Event("theme"));
}
useTheme();
system.addEventListener("change", useTheme);
document.addEventListener("DOMContentLoaded", () => {
  document.getElementById("theme").addEventListener("click", () => {
    localStorage.setItem("theme", isDark() ? "light" : "dark");
    useTheme();
  });
});

// Replaces an element's content by a part of a page that the server rendered, if it has changed.
const tags = new Map();
async function refresh(element, address) {
  const answer = await fetch(address, { headers: tags.get(element)?.address === address ? { "If-None-Match": tags.get(element).tag } : {}, cache: "no-store" });
  if (answer.status === 304 || !answer.ok) return false;
  element.innerHTML = await answer.text();
  tags.set(element, { address, tag: answer.headers.get("ETag") });
  return true;
}

// Calls `work` again and again while the page is seen, `seconds` apart.
function keepDoing(work, seconds) {
  let timer = null;
  const turn = async () => {
    clearTimeout(timer);
    if (!document.hidden) {
      try { await work(); } catch { /* the server has ended, or is not back yet */ }
    }
    timer = setTimeout(turn, seconds * 1000);
  };
  document.addEventListener("visibilitychange", () => { if (!document.hidden) turn(); });
  timer = setTimeout(turn, seconds * 1000);
}
