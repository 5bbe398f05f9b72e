"""Style and script of the report page; both are inlined, nothing is fetched."""

from __future__ import annotations

STYLE = """
:root { color-scheme: light dark;
  --page: #f6f7f9; --card: #fff; --ink: #1a1f29; --soft: #5b6472; --line: #e2e5ea; --grid: #eceef2; --accent: #3056d3;
  --good: #17744a; --good-bg: #e2f4ea; --warn: #8a5300; --warn-bg: #fdf1d8; --bad: #b3261e; --bad-bg: #fde7e5;
  --run: #1d4fb8; --run-bg: #e4ecfd;
  --c0: #3056d3; --c1: #d1561f; --c2: #128a6b; --c3: #a43bb5; --c4: #a07800; --c5: #5b6472; }
@media (prefers-color-scheme: dark) { :root {
  --page: #0f1217; --card: #171b22; --ink: #e7eaf0; --soft: #98a2b3; --line: #2a303a; --grid: #232933;
  --accent: #8aa8ff;
  --good: #6fd7a3; --good-bg: #12301f; --warn: #f1c26b; --warn-bg: #33270d; --bad: #ff9a92; --bad-bg: #3a1715;
  --run: #9bb8ff; --run-bg: #17244a;
  --c0: #8aa8ff; --c1: #ff9d6b; --c2: #55d0ab; --c3: #dd8cf0; --c4: #e3bd4f; --c5: #98a2b3; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif;
  font-variant-numeric: tabular-nums; }
.page { max-width: 1180px; margin: 0 auto; padding: 32px 24px 48px; }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0; letter-spacing: -.015em; overflow-wrap: anywhere; }
h2 { font-size: 1.05rem; margin: 40px 0 12px; letter-spacing: -.005em; }
h3 { font-size: .875rem; font-weight: 600; margin: 0; overflow-wrap: anywhere; }
a { color: var(--accent); }
header .top { display: flex; flex-wrap: wrap; align-items: center; gap: 6px 14px; }
header .facts { margin: 6px 0 0; color: var(--soft); }
nav { margin-top: 14px; display: flex; flex-wrap: wrap; gap: 4px 18px; font-size: .875rem; }
nav a { text-decoration: none; } nav a:hover { text-decoration: underline; }
.pill { font-size: .8125rem; font-weight: 600; padding: 2px 12px; border-radius: 99px;
  background: var(--run-bg); color: var(--run); }
.pill.finished { background: var(--good-bg); color: var(--good); }
.pill.interrupted, .pill.stale { background: var(--warn-bg); color: var(--warn); }
.pill.failed, .pill.killed { background: var(--bad-bg); color: var(--bad); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(140px, 1fr)); gap: 12px; margin: 24px 0 0; }
.tile, .chart, .panel { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
.tile { padding: 12px 16px; }
.tile dt { color: var(--soft); font-size: .8125rem; overflow-wrap: anywhere; }
.tile dd { margin: 0; font-size: 1.375rem; font-weight: 600; letter-spacing: -.01em; }
.tile small { display: block; font-size: .75rem; font-weight: 400; letter-spacing: 0; color: var(--soft);
  min-height: 1.5em; }
.warnings { margin: 20px 0 0; padding: 12px 16px 12px 34px; border-radius: 10px; background: var(--warn-bg);
  color: var(--warn); }
.warnings.bad { background: var(--bad-bg); color: var(--bad); }
.curves-head { display: flex; align-items: baseline; justify-content: space-between; gap: 16px; }
.switch { font-size: .875rem; color: var(--soft); cursor: pointer; user-select: none; }
.switch input { accent-color: var(--accent); vertical-align: -1px; margin: 0 6px 0 0; }
.group { font-size: .8125rem; font-weight: 600; color: var(--soft); margin: 22px 0 8px; }
.group:first-of-type { margin-top: 0; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 400px), 1fr)); gap: 14px; }
.chart { margin: 0; padding: 12px 14px 8px; min-width: 0; }
.chart figcaption { display: flex; flex-wrap: wrap; justify-content: space-between; gap: 2px 12px; padding: 0 2px; }
.chart svg { display: block; width: 100%; height: auto; touch-action: pan-y; border-radius: 6px; }
.chart svg:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
.chart .range, .chart .none { margin: 2px; font-size: .75rem; color: var(--soft); min-height: 1.5em; }
.chart .range strong { color: var(--bad); font-weight: 600; }
.legend { font-size: .8125rem; display: flex; flex-wrap: wrap; gap: 0 12px; align-items: baseline; }
.legend b { font-weight: 400; } .legend output { font-weight: 600; } .legend small { color: var(--soft); }
.legend span { color: var(--c0); }
.grid path { stroke: var(--grid); } .grid text { fill: var(--soft); font-size: 10.5px; }
.line { fill: none; stroke: currentColor; stroke-width: 1.8; stroke-linejoin: round; stroke-linecap: round; }
.line.raw { stroke-width: 1; opacity: .28; }
svg circle { fill: currentColor; } svg .best { fill: none; stroke: var(--ink); stroke-width: 1.4; }
svg .broken { stroke: var(--bad); stroke-width: 2; }
.cursor path { stroke: var(--soft); stroke-dasharray: 3 3; } .cursor circle { stroke: var(--card); stroke-width: 1.5; }
.c0, .legend .c0 { color: var(--c0); } .c1, .legend .c1 { color: var(--c1); } .c2, .legend .c2 { color: var(--c2); }
.c3, .legend .c3 { color: var(--c3); } .c4, .legend .c4 { color: var(--c4); } .c5, .legend .c5 { color: var(--c5); }
.chart g.log { display: none; }
body:has(#log:checked) .chart:not(.linear-only) g.log { display: inline; }
body:has(#log:checked) .chart:not(.linear-only) g.linear { display: none; }
.panel { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .875rem; }
th, td { text-align: left; padding: 7px 16px; border-top: 1px solid var(--line); vertical-align: top; }
thead th { border-top: 0; color: var(--soft); font-weight: 600; font-size: .8125rem; white-space: nowrap; }
tbody th { font-weight: 400; color: var(--soft); white-space: nowrap; width: 1%; }
tbody tr:first-child > * { border-top: 0; } thead + tbody tr:first-child > * { border-top: 1px solid var(--line); }
td { overflow-wrap: anywhere; } .number { text-align: right; white-space: nowrap; overflow-wrap: normal; }
.tag { font-size: .75rem; font-weight: 600; border-radius: 99px; padding: 1px 9px; margin-right: 4px;
  background: var(--run-bg); color: var(--run); }
.tag.best { background: var(--good-bg); color: var(--good); }
pre { margin: 0; padding: 14px 18px; font: 12.5px/1.6 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace;
  tab-size: 2; overflow-x: auto; }
pre .k { color: var(--accent); } pre .o { color: var(--soft); }
details > summary { cursor: pointer; padding: 9px 16px; font-size: .875rem; color: var(--soft); }
details[open] > summary { border-bottom: 1px solid var(--line); }
.none { color: var(--soft); } .panel > .none { padding: 0 16px; }
footer { margin-top: 40px; font-size: .8125rem; color: var(--soft); }
@media print { :root { color-scheme: light; --page: #fff; --card: #fff; --ink: #000; --soft: #444; --line: #ccc;
    --grid: #e8e8e8; }
  .page { max-width: none; padding: 0; } nav, .switch { display: none; } .chart, .tile, tr { break-inside: avoid; }
  h2, .group { break-after: avoid; } .charts { grid-template-columns: 1fr 1fr; } pre { white-space: pre-wrap; } }
"""

# Geometry arrives from charts.py; the script only moves a cursor over what is already drawn.
SCRIPT = """
"use strict";
const W = %(width)d, H = %(height)d, L = %(left)d, R = %(right)d, T = %(top)d, B = %(bottom)d;
const show = v => !isFinite(v) ? String(v) : Number.isInteger(v) ? v.toLocaleString("en-US") :
  (Math.abs(v) >= 1e-3 && Math.abs(v) < 1e5) ? String(+v.toPrecision(5)) : v.toExponential(2);
const log = document.getElementById("log");
for (const svg of document.querySelectorAll("svg[data-curve]")) {
  const data = JSON.parse(svg.dataset.curve), figure = svg.closest("figure"), cursor = svg.querySelector(".cursor");
  const outputs = [...figure.querySelectorAll("output")], at = figure.querySelector(".at");
  const last = outputs.map(o => o.textContent), rule = cursor.querySelector("path");
  const dots = data.lines.map((_, i) => {
    const dot = document.createElementNS(svg.namespaceURI, "circle");
    dot.setAttribute("r", 4); dot.setAttribute("class", "c" + i %% 6); cursor.append(dot); return dot; });
  const px = s => L + (s - data.x[0]) / (data.x[1] - data.x[0]) * (W - L - R);
  const py = v => { const isLog = log.checked && data.log, f = isLog ? Math.log10 : x => x;
    const [lo, hi] = (isLog ? data.log : data.linear).map(f);
    return H - B - (f(v) - lo) / (hi - lo) * (H - T - B); };
  const nearest = (steps, step) => { let lo = 0, hi = steps.length - 1;
    while (lo < hi) { const mid = (lo + hi) >> 1; if (steps[mid] < step) lo = mid + 1; else hi = mid; }
    return lo > 0 && step - steps[lo - 1] < steps[lo] - step ? lo - 1 : lo; };
  let step = null;
  const move = wanted => {
    const main = data.lines[0][0]; step = main[nearest(main, wanted)];
    rule.setAttribute("d", `M${px(step)} ${T}V${H - B}`);
    data.lines.forEach(([steps, values], i) => { const k = nearest(steps, step);
      dots[i].setAttribute("cx", px(steps[k])); dots[i].setAttribute("cy", py(values[k]));
      outputs[i].textContent = show(values[k]); });
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
  log.addEventListener("change", leave);
}
"""
