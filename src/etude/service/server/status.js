"use strict";
const EVERY_MS = 2000, KEY = "etude-key";
const live = document.getElementById("live"), form = document.getElementById("key");
const state = document.getElementById("state"), when = document.getElementById("when");
const show = (text, kind) => { state.textContent = text; state.className = "pill " + kind; };
const refresh = async () => {
  const key = sessionStorage.getItem(KEY);
  if (!form.hidden && !key) return;
  try {
    const answer = await fetch("status", { headers: key ? { "X-API-Key": key } : {}, cache: "no-store" });
    form.hidden = answer.status !== 401;
    if (answer.ok) {
      const seen = await answer.json();
      // What someone reads or marks is not taken from under them: only what has changed is put in its place.
      if (live.dataset.html !== seen.html) { live.innerHTML = seen.html; live.dataset.html = seen.html; }
      when.textContent = new Date().toLocaleTimeString();
      show("running", "finished");
    } else if (answer.status === 401) {
      sessionStorage.removeItem(KEY);
      live.textContent = "";
      show("key needed", "interrupted");
    } else show("error " + answer.status, "failed");
  } catch { show("no answer", "failed"); }
};
const go_on = async () => { if (!document.hidden) await refresh(); setTimeout(go_on, EVERY_MS); };
form.addEventListener("submit", event => { event.preventDefault();
  sessionStorage.setItem(KEY, form.querySelector("input").value.trim()); form.reset(); refresh(); });
document.addEventListener("visibilitychange", () => { if (!document.hidden) refresh(); });
if (!form.hidden) refresh();
setTimeout(go_on, EVERY_MS);
