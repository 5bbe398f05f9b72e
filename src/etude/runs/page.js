"use strict";
const show = v => !isFinite(v) ? String(v) : Number.isInteger(v) ? v.toLocaleString("en-US") :
  (Math.abs(v) >= 1e-3 && Math.abs(v) < 1e5) ? String(+v.toPrecision(5)) : v.toExponential(2);
const setUp = () => {
const log = document.getElementById("log");
for (const svg of document.querySelectorAll("svg[data-curve]")) {
  const data = JSON.parse(svg.dataset.curve), figure = svg.closest("figure"), cursor = svg.querySelector(".cursor");
  const [W, H, L, R, T, B] = data.box;
  const outputs = [...figure.querySelectorAll("output")], at = figure.querySelector(".at");
  const last = outputs.map(o => o.textContent), rule = cursor.querySelector("path");
  const dots = data.lines.map((_, i) => {
    const dot = document.createElementNS(svg.namespaceURI, "circle"), drawn = outputs[i] && outputs[i].parentNode;
    dot.setAttribute("r", drawn ? 4 : 0); dot.setAttribute("class", drawn ? drawn.className : "");
    if (drawn) dot.style.cssText = drawn.style.cssText;
    cursor.append(dot); return dot; });
  const px = s => L + (s - data.x[0]) / (data.x[1] - data.x[0]) * (W - L - R);
  const py = v => { const isLog = log && log.checked && data.log, f = isLog ? Math.log10 : x => x;
    const [lo, hi] = (isLog ? data.log : data.linear).map(f);
    return H - B - Math.min(1, Math.max(0, (f(v) - lo) / (hi - lo))) * (H - T - B); };
  const nearest = (steps, step) => { let lo = 0, hi = steps.length - 1;
    while (lo < hi) { const mid = (lo + hi) >> 1; if (steps[mid] < step) lo = mid + 1; else hi = mid; }
    return lo > 0 && step - steps[lo - 1] < steps[lo] - step ? lo - 1 : lo; };
  let step = null;
  const move = wanted => {
    const main = data.lines[0][0]; step = main[nearest(main, wanted)];
    rule.setAttribute("d", `M${px(step)} ${T}V${H - B}`);
    data.lines.forEach(([steps, values], i) => { const k = nearest(steps, step);
      dots[i].setAttribute("cx", px(steps[k])); dots[i].setAttribute("cy", py(values[k]));
      if (outputs[i]) outputs[i].textContent = show(values[k]); });
    at.textContent = "at step " + step.toLocaleString("en-US"); cursor.setAttribute("visibility", "visible"); };
  const leave = () => { step = null; cursor.setAttribute("visibility", "hidden"); at.textContent = "last";
    outputs.forEach((o, i) => { o.textContent = last[i]; }); };
  svg.addEventListener("pointermove", e => { const box = svg.getBoundingClientRect();
    const x = (e.clientX - box.left) / box.width * W;
    move(data.x[0] + (x - L) / (W - L - R) * (data.x[1] - data.x[0])); });
  svg.addEventListener("pointerleave", leave); svg.addEventListener("blur", leave);
  svg.addEventListener("keydown", e => { const main = data.lines[0][0];
    const here = step === null ? main.length - 1 : nearest(main, step);
    const next = { ArrowLeft: here - 1, ArrowRight: here + 1, Home: 0, End: main.length - 1 }[e.key];
    if (next === undefined) return; e.preventDefault();
    move(main[Math.max(0, Math.min(main.length - 1, next))]); });
  if (log) log.addEventListener("change", leave);
}
};
setUp();
