"use strict";
const live = document.getElementById("live"), form = document.getElementById("key");
const state = document.getElementById("state"), EVERY_MS = 2000;
const refresh = async () => {
  const key = sessionStorage.getItem("etude-key");
  try {
    const answer = await fetch("status", { headers: key ? { "X-API-Key": key } : {}, cache: "no-store" });
    form.hidden = answer.status !== 401;
    if (answer.ok) { live.innerHTML = (await answer.json()).html; state.textContent = "running"; }
    else { state.textContent = answer.status === 401 ? "key needed" : "error " + answer.status; }
  } catch { state.textContent = "no answer"; }
};
const go_on = async () => { await refresh(); setTimeout(go_on, EVERY_MS); };
form.addEventListener("submit", event => { event.preventDefault();
  sessionStorage.setItem("etude-key", form.querySelector("input").value.trim()); refresh(); });
setTimeout(go_on, EVERY_MS);
if (!form.hidden && sessionStorage.getItem("etude-key")) refresh();
