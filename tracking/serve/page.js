"use strict";
// Replace an element's content with a fragment rendered by the server, if it has changed.
const tags = new Map();
async function refresh(element, address) {
  const answer = await fetch(address, { headers: tags.get(element)?.address === address ? { "If-None-Match": tags.get(element).tag } : {}, cache: "no-store" });
  if (answer.status === 304 || !answer.ok) return false;
  element.innerHTML = await answer.text();
  tags.set(element, { address, tag: answer.headers.get("ETag") });
  return true;
}

// Call `work` every `seconds` while the page is visible.
function keepDoing(work, seconds) {
  let timer = null;
  const turn = async () => {
    clearTimeout(timer);
    if (!document.hidden) {
      try { await work(); } catch { /* the server has stopped, or is not back yet */ }
    }
    timer = setTimeout(turn, seconds * 1000);
  };
  document.addEventListener("visibilitychange", () => { if (!document.hidden) turn(); });
  timer = setTimeout(turn, seconds * 1000);
}
