const index = JSON.parse($("index").textContent), total = index.lengths.length, fps = index.fps, ROW = 44;
const oddOf = n => index.odd[n] || [], textOf = n => index.texts[index.tasks[n]];
const seconds = frames => (frames / fps).toFixed(1) + " s";
// -- the list: only the rows that are seen exist ------------------------------------------------------------------
let listed = [], chosen = -1, first = -1, last = -1;
const option = (value, text) => { const made = make("option", text); made.value = value; return made; };
const counts = {}; for (const task of index.tasks) counts[task] = (counts[task] || 0) + 1;
$("task").append(option("", "All tasks"), ...Object.keys(index.texts).map(task => option(task,
  `${index.texts[task].slice(0, 80)} (${counts[task]})`)));
const kinds = {}; for (const marks of Object.values(index.odd)) for (const kind of new Set(marks.map(m => m[0]))) kinds[kind] = (kinds[kind] || 0) + 1;
$("odd").append(option("", "Odd or not"), option("any", `Odd (${Object.keys(index.odd).length})`),
  ...Object.keys(index.kinds).filter(kind => kinds[kind]).map(kind => option(kind, `${index.kinds[kind]} (${kinds[kind]})`)));
$("sort").append(option("number", "By number"), option("odd", "Oddest first"), option("long", "Longest first"), option("short", "Shortest first"));
if (index.returns) $("sort").append(option("best", "Most reward first"), option("worst", "Least reward first"));
if (index.success) { $("success").hidden = false;
  $("success").append(option("", "All outcomes"), option("true", "Success"), option("false", "Failure")); }
const ORDERS = { long: (a, b) => index.lengths[b] - index.lengths[a], short: (a, b) => index.lengths[a] - index.lengths[b],
  odd: (a, b) => (oddOf(b)[0] ? oddOf(b)[0][3] : 0) - (oddOf(a)[0] ? oddOf(a)[0][3] : 0),
  best: (a, b) => index.returns[b] - index.returns[a], worst: (a, b) => index.returns[a] - index.returns[b] };
const filter = () => {
  const task = $("task").value, kind = $("odd").value, outcome = $("success").value, wanted = $("search").value.trim().toLowerCase();
  listed = [];
  for (let n = 0; n < total; n++) {
    if (task !== "" && String(index.tasks[n]) !== task) continue;
    const marks = oddOf(n);
    if (kind !== "" && !(kind === "any" ? marks.length : marks.some(m => m[0] === kind))) continue;
    if (outcome && String(index.success[n]) !== outcome) continue;
    if (wanted && String(n) !== wanted && !textOf(n).toLowerCase().includes(wanted) &&
      (/^\d+$/.test(wanted) || !marks.some(m => m[1].toLowerCase().includes(wanted)))) continue;
    listed.push(n); }
  const order = ORDERS[$("sort").value]; if (order) listed.sort(order);
  $("count").textContent = listed.length === total ? `${total.toLocaleString("en-US")} episodes` :
    `${listed.length.toLocaleString("en-US")} of ${total.toLocaleString("en-US")} episodes`;
  $("rows").style.height = listed.length * ROW + "px"; first = -1; fill(); drawMap(); };
const rowOf = place => {
  const n = listed[place], row = make("button", undefined, "row"), marks = oddOf(n), facts = make("small");
  row.type = "button"; row.tabIndex = -1; row.style.top = place * ROW + "px"; row.dataset.episode = n;
  row.setAttribute("aria-current", n === chosen);
  if (index.success) facts.append(make("i", index.success[n] ? "\u2713 " : "\u2715 ", index.success[n] ? "success" : "failure"));
  if (marks.length) { const sign = make("i", "\u26a0 "); sign.title = marks.map(m => m[1]).join("\n"); facts.append(sign); }
  facts.append(seconds(index.lengths[n])); row.append(make("b", n), make("span", textOf(n)), facts);
  row.addEventListener("click", () => openEpisode(n)); return row; };
const fill = () => {
  const list = $("list"), from = Math.max(0, Math.floor(list.scrollTop / ROW) - 8);
  const to = Math.min(listed.length, Math.ceil((list.scrollTop + list.clientHeight) / ROW) + 8);
  if (from === first && to === last) return;
  [first, last] = [from, to]; const rows = []; for (let p = from; p < to; p++) rows.push(rowOf(p));
  $("rows").replaceChildren(...rows); };
const reveal = () => { const place = listed.indexOf(chosen), list = $("list"); if (place < 0) { first = -1; fill(); return; }
  if (place * ROW < list.scrollTop) list.scrollTop = place * ROW;
  if ((place + 1) * ROW > list.scrollTop + list.clientHeight) list.scrollTop = (place + 1) * ROW - list.clientHeight;
  first = -1; fill(); };
const neighbour = by => { const place = listed.indexOf(chosen), next = place < 0 ? 0 : place + by;
  if (next >= 0 && next < listed.length) openEpisode(listed[next]); };
// -- one episode --------------------------------------------------------------------------------------------------
let plots = [], videos = [], pictures = [], frame = 0, playing = false, begun = null, asked = 0;
const partOf = async n => { const held = $("part-" + n);
  if (held) return JSON.parse(held.textContent);
  if (!index.served) return null;
  const answer = await fetch("/episode/" + n); if (!answer.ok) throw new Error(await answer.text()); return answer.json(); };
const place = (wanted, seek) => {
  const count = index.lengths[chosen]; frame = Math.max(0, Math.min(count - 1, wanted));
  $("cursor").value = frame; $("at").textContent = `${(frame / fps).toFixed(2)} s, frame ${frame}`;
  for (const plot of plots) plot.place(frame);
  for (const one of pictures) { let k = one.frames.length - 1; while (k > 0 && one.frames[k] > frame) k--;
    const src = one.srcOf(k); if (one.img.getAttribute("src") !== src) one.img.src = src; }
  if (seek) for (const one of videos) { const at = one.from + (frame + .5) / fps; if (Math.abs(one.video.currentTime - at) > .2 / fps) one.video.currentTime = at; } };
const move = wanted => { pause(); place(wanted, true); };
const pause = () => { playing = false; $("play").textContent = "\u25b6"; $("play").setAttribute("aria-label", "Play"); for (const one of videos) one.video.pause(); };
const play = () => {
  if (frame >= index.lengths[chosen] - 1) place(0, true);
  playing = true; $("play").textContent = "\u2759\u2759"; $("play").setAttribute("aria-label", "Pause");
  const rate = +$("rate").value; begun = { frame, at: performance.now(), rate };
  for (const one of videos) { one.video.playbackRate = rate; one.video.play().catch(() => {}); }
  requestAnimationFrame(tick); };
const tick = now => {
  if (!playing) return;
  const lead = videos.find(one => one.video.readyState >= 2 && !one.video.error);
  const at = lead ? Math.floor((lead.video.currentTime - lead.from) * fps + 1e-3) : begun.frame + Math.floor((now - begun.at) / 1000 * begun.rate * fps);
  for (const one of videos) if (lead && one !== lead && Math.abs((one.video.currentTime - one.from) - (lead.video.currentTime - lead.from)) > .15)
    one.video.currentTime = one.from + lead.video.currentTime - lead.from;
  if (at !== frame) place(at, false);
  if (at >= index.lengths[chosen] - 1) { pause(); place(index.lengths[chosen] - 1, true); return; }
  requestAnimationFrame(tick); };
const cameraOf = one => {
  const figure = make("figure"), caption = make("figcaption", one.name);
  const fault = why => { const said = make("p", why, "none"); figure.replaceChildren(said, caption); };
  if (one.kind === "video") { const video = make("video"); video.muted = true; video.playsInline = true; video.preload = "auto";
    video.setAttribute("aria-label", one.name);
    video.addEventListener("error", () => { videos = videos.filter(other => other.video !== video); fault("This video cannot be played in this browser."); });
    video.src = one.src; figure.append(video, caption); const held = { video, from: one.from_s };
    video.addEventListener("loadedmetadata", () => { video.currentTime = held.from + (frame + .5) / fps; }); videos.push(held);
  } else if (one.kind === "pictures") { const img = make("img"); img.alt = one.name; figure.append(img, caption);
    const frames = one.frames || Array.from({ length: one.count }, (_, i) => i);
    if (one.frames && one.frames.length < index.lengths[chosen]) caption.textContent += ` (${frames.length} pictures)`;
    pictures.push({ img, frames, srcOf: k => one.address ? one.address + frames[k] : one.src[k] });
  } else fault(`No picture: ${one.why}.`);
  return figure; };
const plotsOf = (part, count, flags) => {
  const made = [], still = [], more = [];
  for (const column of part.columns) {
    const values = unpack(column), width = column.labels.length, constant = new Set(index.constant[column.name] || []);
    const moving = column.labels.map((_, i) => i).filter(i => !constant.has(i));
    if (constant.size) still.push(constant.size === width ? column.name : `${column.name} ${column.labels.filter((_, i) => constant.has(i)).join(", ")}`);
    if (moving.length > MOST_LINES) more.push(`${moving.length - MOST_LINES} more dimensions of ${column.name} are not drawn.`);
    for (let k = 0; k < Math.min(moving.length, MOST_LINES); k += LINES) {
      const group = moving.slice(k, Math.min(k + LINES, MOST_LINES));
      made.push(plotOf(column.name.replace(/^observation\./, ""), group.map(i => column.labels[i]),
        group.map(i => { const line = new Float64Array(count); for (let f = 0; f < count; f++) line[f] = values[f * width + i]; return line; }),
        count, fps, flags, move)); } }
  $("still").textContent = [still.length ? `The same in every frame of the dataset: ${still.join("; ")}.` : "", ...more].join(" ");
  return made; };
const openEpisode = async (n, at) => {
  if (!(n >= 0 && n < total)) return;
  pause(); chosen = n; const mine = ++asked, marks = oddOf(n), count = index.lengths[n];
  history.replaceState(null, "", "#episode=" + n); reveal(); drawMap();
  $("empty").hidden = true; $("shown").hidden = false; $("name").textContent = "Episode " + n;
  $("facts").textContent = [`${count.toLocaleString("en-US")} frames, ${seconds(count)}`, index.success ? (index.success[n] ? "success" : "failure") : "",
    index.returns ? `reward ${show(index.returns[n])}` : ""].filter(Boolean).join(" \u00b7 ");
  $("text").textContent = textOf(n); $("cursor").max = count - 1;
  $("marks").replaceChildren(...marks.map(([kind, text, where]) => { const item = make("li"), link = make("button", text);
    link.type = "button"; link.disabled = where === null; link.addEventListener("click", () => move(where)); item.append(link); return item; }));
  let part = null, fault = "This episode is left out of this file; `etude data view DATASET --serve` shows it.";
  try { part = await partOf(n); } catch (error) { fault = `This episode cannot be shown: ${error.message}`; }
  if (mine !== asked) return;  // another one was chosen meanwhile
  for (const one of videos) one.video.removeAttribute("src");
  plots = []; videos = []; pictures = []; $("still").textContent = ""; frame = at || 0;
  $("cameras").replaceChildren(...(part ? part.cameras.map(cameraOf) : []));
  plots = part ? plotsOf(part, count, [...new Set(marks.map(m => m[2]).filter(f => f !== null))]) : [];
  $("plots").replaceChildren(...(part ? plots.map(plot => plot.figure) : [make("p", fault, "none")]));
  for (const plot of plots) plot.draw();
  place(frame, true); $("episode").dataset.shown = n; };
// -- where episodes begin -----------------------------------------------------------------------------------------
const map = $("map"), cover = index.coverage, PAD = 14; let spots = [];
const drawMap = () => {
  if (!map || !cover) return;
  const style = getComputedStyle(document.documentElement), colour = name => style.getPropertyValue("--" + name).trim();
  const ratio = devicePixelRatio || 1, width = map.clientWidth, height = map.clientHeight, pen = map.getContext("2d");
  map.width = width * ratio; map.height = height * ratio; pen.scale(ratio, ratio);
  const ends = side => { let low = Infinity, high = -Infinity; for (const v of side) if (v !== null) { low = Math.min(low, v); high = Math.max(high, v); }
    return high > low ? [low, high] : [low - 1, high + 1]; };
  const [x0, x1] = ends(cover.x), [y0, y1] = ends(cover.y), shown = new Set(listed), tasks = Object.keys(index.texts);
  const shade = n => index.success ? colour(index.success[n] ? "good" : "bad") : colour("c" + (tasks.length > 6 ? 0 : tasks.indexOf(String(index.tasks[n]))));
  spots = []; pen.clearRect(0, 0, width, height);
  const spot = (n, alpha, radius) => { pen.globalAlpha = alpha; pen.fillStyle = shade(n); const [x, y] = spots[n]; pen.beginPath(); pen.arc(x, y, radius, 0, 7); pen.fill(); };
  const radius = total > 2000 ? 1.6 : total > 300 ? 2.4 : 3.5;
  for (let n = 0; n < total; n++) spots.push(cover.x[n] === null ? null : [PAD + (cover.x[n] - x0) / (x1 - x0) * (width - 2 * PAD), height - PAD - (cover.y[n] - y0) / (y1 - y0) * (height - 2 * PAD)]);
  for (let n = 0; n < total; n++) if (spots[n] && !shown.has(n)) spot(n, .12, radius);
  for (let n = 0; n < total; n++) if (spots[n] && shown.has(n)) spot(n, total > 2000 ? .55 : .8, radius);
  pen.globalAlpha = 1; pen.lineWidth = 1.5; pen.strokeStyle = colour("warn");
  for (const key of Object.keys(index.odd)) if (spots[key] && shown.has(+key)) { pen.beginPath(); pen.arc(...spots[key], radius + 2.5, 0, 7); pen.stroke(); }
  if (spots[chosen]) { pen.strokeStyle = colour("ink"); pen.lineWidth = 2; pen.beginPath(); pen.arc(...spots[chosen], radius + 5, 0, 7); pen.stroke(); } };
if (map && cover) {
  const nearest = e => { const box = map.getBoundingClientRect(), x = e.clientX - box.left, y = e.clientY - box.top, shown = new Set(listed);
    let best = -1, least = 400; spots.forEach((one, n) => { if (!one || !shown.has(n)) return; const d = (one[0] - x) ** 2 + (one[1] - y) ** 2; if (d < least) { least = d; best = n; } }); return best; };
  map.addEventListener("click", e => { const n = nearest(e); if (n >= 0) { openEpisode(n); $("episode").scrollIntoView({ block: "nearest" }); } });
  map.addEventListener("pointermove", e => { const n = nearest(e); map.title = n < 0 ? "" : `episode ${n}: ${textOf(n)}`; });
  const tasks = Object.keys(index.texts), named = (kind, text) => { const one = make("span", undefined, kind); one.append(make("b", "\u25cf " + text)); return one; };
  const legend = index.success ? [named("success", "success"), named("failure", "failure")] :
    tasks.length > 1 && tasks.length <= 6 ? tasks.map((task, i) => named("c" + i, index.texts[task].slice(0, 40))) : [];
  if (index.success) { legend[0].style.color = "var(--good)"; legend[1].style.color = "var(--bad)"; }
  const ring = make("span"); ring.style.color = "var(--warn)"; ring.append(make("b", "\u25cb odd")); if (Object.keys(index.odd).length) legend.push(ring);
  $("colours").append(...legend); }
// -- what people do -----------------------------------------------------------------------------------------------
for (const id of ["task", "odd", "success", "sort"]) $(id).addEventListener("change", () => { $("list").scrollTop = 0; filter(); });
$("search").addEventListener("input", () => { $("list").scrollTop = 0; filter(); });
$("list").addEventListener("scroll", fill, { passive: true });
$("list").addEventListener("keydown", e => { const by = { ArrowUp: -1, ArrowDown: 1 }[e.key]; if (by) { e.preventDefault(); neighbour(by); } });
$("before").addEventListener("click", () => neighbour(-1)); $("after").addEventListener("click", () => neighbour(1));
$("play").addEventListener("click", () => playing ? pause() : play());
$("cursor").addEventListener("input", e => move(+e.target.value));
$("rate").addEventListener("change", () => { if (playing) { pause(); play(); } });
addEventListener("resize", () => { first = -1; fill(); for (const plot of plots) plot.draw(); drawMap(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawMap);
const follow = isStart => {
  const asked = new URLSearchParams(location.hash.slice(1)), n = asked.get("episode"), kind = asked.get("odd");
  if (kind !== null && [...$("odd").options].some(one => one.value === kind)) { $("odd").value = kind; $("sort").value = "odd"; filter();
    if (listed.length) openEpisode(listed[0]); $("episodes").scrollIntoView(); }
  else if (n !== null && /^\d+$/.test(n)) { openEpisode(+n, +(asked.get("frame") || 0)); if (!isStart) $("episodes").scrollIntoView(); }
  else if (isStart) openEpisode(index.served || $("part-0") ? 0 : +(document.querySelector("[id^=part-]") || { id: "part-0" }).id.slice(5)); };
addEventListener("hashchange", () => follow(false));
filter(); follow(true);
