const EVERY_MS = 2000;
const SAID = document.getElementById("live")?.textContent ?? "";
let mark = "";
const take = next => {
  const old = document.querySelector(".page"), isOpen = [...old.querySelectorAll("details")].map(one => one.open);
  const films = new Map([...old.querySelectorAll("video")].map(one => [one.getAttribute("src"), one]));
  const checked = new Map([...old.querySelectorAll("input[type=checkbox]")].map(one => [one.id, one.checked]));
  for (const one of next.querySelectorAll("video")) {
    const same = films.get(one.getAttribute("src"));
    if (same) one.replaceWith(same);
  }
  for (const one of next.querySelectorAll("input[type=checkbox]"))
    if (checked.has(one.id)) one.checked = checked.get(one.id);
  const folds = [...next.querySelectorAll("details")];
  if (folds.length === isOpen.length) folds.forEach((one, i) => { one.open = isOpen[i]; });
  old.replaceWith(document.adoptNode(next)); setUp();
};
const refresh = async () => {
  if (document.querySelector(".chart svg:hover")) return;
  const said = document.getElementById("live");
  try {
    const answer = await fetch(location.pathname, { headers: mark ? { "If-None-Match": mark } : {}, cache: "no-store" });
    if (answer.status === 200) {
      mark = answer.headers.get("ETag") || "";
      const found = new DOMParser().parseFromString(await answer.text(), "text/html");
      const next = found.querySelector(".page");
      document.title = found.title; if (next) take(next);
    } else if (said) said.textContent = answer.status === 304 ? SAID : "error " + answer.status;
  } catch { if (said) said.textContent = "no answer"; }
};
const goOn = async () => { if (!document.hidden) await refresh(); setTimeout(goOn, EVERY_MS); };
setTimeout(goOn, EVERY_MS);
