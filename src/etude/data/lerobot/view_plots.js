"use strict";
const $ = id => document.getElementById(id);
const make = (tag, text, kind) => { const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text; if (kind) made.className = kind; return made; };
const makeSvg = (tag, facts) => { const made = document.createElementNS(document.querySelector("svg").namespaceURI, tag);
  for (const [name, value] of Object.entries(facts || {})) made.setAttribute(name, value); return made; };
const show = v => !isFinite(v) ? String(v) : Number.isInteger(v) && Math.abs(v) < 1e7 ? v.toLocaleString("en-US") :
  (Math.abs(v) >= 1e-3 && Math.abs(v) < 1e5) ? String(+v.toPrecision(4)) : v === 0 ? "0" : v.toExponential(2);
const unpack = column => { const text = atob(column.data), bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return column.type === "f8" ? new Float64Array(bytes.buffer) : new Float32Array(bytes.buffer); };
const LINES = 6, MOST_LINES = 48, LEFT = 52, RIGHT = 8, TOP = 6, BOTTOM = 18, LARGEST = 1e300, DWARFED = 4;
// Returns the range to show; a few values that would dwarf the others lie beyond it.
const rangeOf = lines => {
  const all = []; let low = Infinity, high = -Infinity, beyond = 0, furthest = 0;
  for (const line of lines) for (const v of line) if (Math.abs(v) <= LARGEST) { all.push(v);
    if (v < low) low = v; if (v > high) high = v; }
  if (!all.length) return { low: 0, high: 1, beyond, furthest };
  all.sort((a, b) => a - b);
  const inner = [all[Math.floor(all.length * .02)], all[Math.ceil(all.length * .98) - 1]], width = inner[1] - inner[0];
  if (width > 0 && high / DWARFED - low / DWARFED > width) {
    const ends = [Math.max(low, inner[0] - .15 * width), Math.min(high, inner[1] + .15 * width)];
    for (const v of all) if (v < ends[0] || v > ends[1]) { beyond += 1; if (Math.abs(v) > Math.abs(furthest)) furthest = v; }
    [low, high] = ends;
  }
  if (!(high > low)) { const half = Math.abs(low) * .1 || .5; low -= half; high += half; }
  return { low, high, beyond, furthest };
};
const ticks = (low, high, most) => {
  const raw = (high - low) / most, power = 10 ** Math.floor(Math.log10(raw)), found = [];
  if (!(raw > 0) || !isFinite(raw) || !(power > 0)) return found;
  const width = [1, 2, 2.5, 5, 10].map(f => f * power).find(w => w >= raw * (1 - 1e-9)) || raw;
  for (let v = Math.ceil(low / width - 1e-9); v * width <= high + width * 1e-9 && found.length < 20; v++)
    found.push(+(v * width).toPrecision(10));
  return found; };
// Draws curves over frames; `move(frame)` is called when somebody points at one.
const plotOf = (title, names, lines, count, fps, flags, move) => {
  const figure = make("figure", undefined, "plot"), caption = make("figcaption"), legend = make("span", undefined, "legend");
  const outputs = names.map((name, i) => { const one = make("span", undefined, "c" + i), value = make("output");
    if (name) one.append(make("b", name), " "); one.append(value); legend.append(one); return value; });
  caption.append(make("h3", title), legend);
  const svg = makeSvg("svg", { tabindex: 0, role: "img" }), range = rangeOf(lines), rule = makeSvg("path");
  svg.setAttribute("aria-label", `${title} over time; arrow keys move the cursor`);
  figure.append(caption, svg);
  if (range.beyond) figure.append(make("p", `${range.beyond} value${range.beyond > 1 ? "s" : ""} beyond the scale, the furthest ` +
    show(range.furthest), "beyond note"));
  let width = 0, height = 0, now = 0;
  const px = f => LEFT + (count > 1 ? f / (count - 1) : .5) * (width - LEFT - RIGHT);
  const py = v => height - BOTTOM - Math.min(1, Math.max(0, (v - range.low) / (range.high - range.low))) * (height - TOP - BOTTOM);
  const path = line => { let d = "", pen = "M"; const step = Math.max(1, Math.floor(count / (2 * width)));
    const add = f => { const v = line[f]; if (!isFinite(v)) { pen = "M"; return; }
      d += `${pen}${px(f).toFixed(1)} ${py(v).toFixed(1)}`; pen = "L"; };
    for (let f = 0; f < count; f += step) {
      if (step === 1) { add(f); continue; }
      let least = f, most = f;
      for (let g = f; g < Math.min(count, f + step); g++) { if (!(line[g] >= line[least])) least = g; if (!(line[g] <= line[most])) most = g; }
      add(Math.min(least, most)); if (least !== most) add(Math.max(least, most)); }
    return d; };
  const place = frame => { now = frame; rule.setAttribute("d", `M${px(frame)} ${TOP}V${height - BOTTOM}`);
    lines.forEach((line, i) => { outputs[i].textContent = show(line[frame]); }); };
  const draw = () => {
    width = Math.max(220, Math.round(svg.clientWidth || 600)); height = 132;
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`); svg.style.height = height + "px"; svg.replaceChildren();
    const grid = makeSvg("g", { class: "grid" });
    for (const v of ticks(range.low, range.high, 4)) { grid.append(makeSvg("path", { d: `M${LEFT} ${py(v)}H${width - RIGHT}` }));
      const text = makeSvg("text", { x: LEFT - 6, y: py(v), dy: 3.5, "text-anchor": "end" }); text.textContent = show(v); grid.append(text); }
    const last = (count - 1) / fps;
    for (const s of ticks(0, last, Math.max(2, Math.floor(width / 110)))) { const text = makeSvg("text",
      { x: px(s * fps), y: height - 4, "text-anchor": s === 0 ? "start" : s > .96 * last ? "end" : "middle" }); text.textContent = s + " s"; grid.append(text); }
    svg.append(grid);
    lines.forEach((line, i) => { const group = makeSvg("g", { class: "c" + i }); group.append(makeSvg("path", { class: "line", d: path(line) }));
      if (count === 1 && isFinite(line[0])) group.append(makeSvg("circle", { cx: px(0), cy: py(line[0]), r: 3 }));
      for (let f = 0, drawn = 0; f < count && drawn < 200; f++) if (!isFinite(line[f])) { drawn++;
        svg.append(makeSvg("path", { class: "broken", d: `M${px(f)} ${height - BOTTOM}v-7` })); }
      svg.append(group); });
    for (const f of flags) svg.append(makeSvg("path", { class: "flag", d: `M${px(f)} ${TOP + 5}l-4 -7h8z` }));
    const cursor = makeSvg("g", { class: "cursor" }); cursor.append(rule); svg.append(cursor); place(now); };
  const point = e => { const box = svg.getBoundingClientRect(), x = (e.clientX - box.left) / box.width * width;
    move(Math.round((x - LEFT) / (width - LEFT - RIGHT) * (count - 1))); };
  svg.addEventListener("pointerdown", e => { svg.setPointerCapture(e.pointerId); point(e); });
  svg.addEventListener("pointermove", e => { if (e.buttons) point(e); });
  svg.addEventListener("keydown", e => { const next = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: count - 1 }[e.key];
    if (next !== undefined) { e.preventDefault(); move(next); } });
  return { figure, draw, place };
};
