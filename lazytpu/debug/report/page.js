"use strict";
// The page: what is shown follows the address, `#graph=3&tab=code&op=12`.

const $ = (id) => document.getElementById(id);
const TABS = ["code", "modules", "drawing", "diff", "memory", "mesh"];
const PHASES = [
  ["python_s", "Python and torch", "#94a3b8"], ["recording_s", "recording", "#6366f1"], ["cutting_s", "cutting", "#a78bfa"],
  ["lowering_s", "lowering", "#f59e0b"], ["compiling_s", "XLA", "#ef4444"], ["loading_s", "disk cache", "#f472b6"], ["dispatching_s", "starting", "#14b8a6"], ["interpreting_s", "interpreting", "#a3e635"],
  ["waiting_s", "waiting", "#22c55e"], ["transferring_s", "transfers", "#0ea5e9"],
];
const page = { run: null, parts: new Map(), current: null, charts: [], panes: null, drawing: null };

/** The JSON in a script element: base64 of gzip. */
async function unpack(id) {
  const bytes = Uint8Array.from(atob($(id).textContent.trim()), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

function part(index) {
  if (!page.parts.has(index)) page.parts.set(index, unpack(`data-graph-${index}`));
  return page.parts.get(index);
}

const seconds = (s) => (s === null || s === undefined ? "–" : s >= 1 ? `${s.toFixed(2)} s` : s >= 1e-3 ? `${(1e3 * s).toFixed(2)} ms` : `${(1e6 * s).toFixed(1)} µs`);
const bytes = (n) => `${amount(n)}B`;
const tile = (value, name) => `<div class="tile"><b>${value}</b><span>${name}</span></div>`;
const stat = (value, name) => `<span><b>${value}</b> ${name}</span>`;
const median = (values) => { const v = [...values].sort((a, b) => a - b); return v.length ? v[v.length >> 1] : null; };

function go(change) {
  const next = new URLSearchParams(location.hash.slice(1));
  for (const [key, value] of Object.entries(change)) value === null ? next.delete(key) : next.set(key, value);
  location.hash = next.toString();
}

// --- the run -------------------------------------------------------------------------------------------

function showRun() {
  const { run } = page, steady = run.steps.filter((s) => !s.compiles);
  $("about").textContent = [run.device, ...Object.entries(run.versions).map(([k, v]) => `${k} ${v}`)].join(" · ");
  const compile = run.graphs.reduce((n, g) => n + (g.lower_s || 0) + (g.compile_s || 0), 0);
  const cuts = run.summary.cuts.reduce((n, c) => n + c.count, 0), fallbacks = run.summary.fallbacks.reduce((n, c) => n + c.count, 0);
  $("run-tiles").innerHTML = [
    tile(run.graphs.length, "graphs compiled"), tile(seconds(compile), "spent compiling"),
    tile(run.steps.length + run.steps_left_out, "steps"), tile(seconds(median((steady.length ? steady : run.steps).map((s) => s.total_s))), "median step"),
    tile(cuts, "cuts forced by reads"), tile(fallbacks, "ops on the CPU"),
  ].join("");
  $("side").innerHTML = `<a href="#"><div class="row"><b>Overview</b></div></a>` + run.graphs.map((g) =>
    `<a href="#graph=${g.number}" data-number="${g.number}" title="${escapeHtml(g.cause.text)}"><div class="row"><b>Graph ${g.number}</b><span>${g.ops} ops · ${seconds((g.lower_s || 0) + (g.compile_s || 0))}</span></div><small>${escapeHtml(g.cause.text)}</small></a>`).join("");
  const rows = run.graphs.map((g) => ({ ...g, why: g.cause.text, at: g.cause.at, seconds: (g.lower_s || 0) + (g.compile_s || 0), peak: g.memory.peak_bytes }));
  const made = table("graph-table", rows, [
    { title: "", field: "number", width: 56, hozAlign: "right" },
    { title: "compiled because", field: "why", minWidth: 170, widthGrow: 3, tooltip: true }, { title: "at", field: "at", widthGrow: 1, minWidth: 146, tooltip: true, formatter: (c) => `<span class="mono">${escapeHtml(c.getValue())}</span>` },
    number("ops", "ops", (n) => n, 74), number("FLOPs", "flops", (n) => amount(n), 84), number("bytes", "bytes", bytes, 84),
    number("peak", "peak", bytes, 84), number("compile", "seconds", seconds, 94), number("runs", "runs", (n) => n ?? "–", 64), number("one run", "run_s", seconds, 94),
  ]);
  made.on("rowClick", (_, row) => go({ graph: row.getData().number }));
  showSlow();
  tallies();
  drawTimeline();
}

/** Where the time of a step goes, the costliest lines, and what could be saved. */
function showSlow() {
  const { slow } = page.run;
  if (!slow.steps) return;
  const percent = (share) => `${(100 * share).toFixed(0)} %`, mono = (text) => `<span class="mono">${escapeHtml(text)}</span>`;
  const parts = slow.parts.filter(([, s]) => s >= 0.005 * slow.total_s).map(([name, s]) => `<tr><td class="n">${seconds(s)}</td><td class="n">${percent(s / slow.total_s)}</td><td>${name}</td></tr>`).join("");
  const lines = slow.lines.filter((l) => l.rows.length).map((l) => `<h3>The costliest lines</h3><p class="hint">${escapeHtml(l.how)}</p><table>${l.rows.map(([line, share, ops]) =>
    `<tr><td class="n">${percent(share)}</td><td>${mono(line)}</td><td>${mono(ops.join(", "))}</td></tr>`).join("")}</table>`).join("");
  const found = slow.findings.map((f) => `<p><b>${seconds(f.costs_s)}</b> (${percent(f.costs_s / slow.total_s)}) ${escapeHtml(f.text)}</p>` +
    `<dl>${f.line ? `<dt>at</dt><dd>${mono(f.line)}</dd>` : ""}${f.fix ? `<dt>fix</dt><dd>${escapeHtml(f.fix)}</dd>` : ""}</dl>`).join("");
  const which = slow.steady ? "steady" : "of the last, none of them steady,";
  $("slow").innerHTML = `<div class="card-head"><h2>Where the time of a ${slow.unit} goes</h2><span class="hint">${seconds(slow.total_s)}, the mean of ${slow.steps} ${which} ${slow.unit}s</span></div>` +
    `<p>${escapeHtml(slow.bound)}</p><div class="pair"><div><table>${parts}</table>${lines}</div><div><h3>What could be saved</h3>${found || "<p>nothing was found</p>"}</div></div>`;
  $("slow").hidden = false;
}

const number = (title, field, show, width) => ({ title, field, hozAlign: "right", headerHozAlign: "right", width, formatter: (c) => show(c.getValue()) });

function table(id, data, columns, more = {}) {
  return new Tabulator(`#${id}`, { data, columns, layout: "fitColumns", selectableRows: false, headerSortElement: "<span></span>", ...more });
}

function tallies() {
  const names = { cuts: "What forced cuts", reads: "Reads and waits that cut nothing", fallbacks: "Ops that ran on the CPU" };
  $("tallies").replaceChildren();
  for (const [kind, title] of Object.entries(names)) {
    const rows = page.run.summary[kind];
    if (!rows.length) continue;
    $("tallies").insertAdjacentHTML("beforeend", `<div class="card"><div class="card-head"><h2>${title}</h2></div><div id="tally-${kind}"></div></div>`);
    table(`tally-${kind}`, rows, [{ title: "what", field: "what", widthGrow: 2 }, { title: "line", field: "line", formatter: (c) => `<span class="mono">${escapeHtml(c.getValue())}</span>` }, number("count", "count", (n) => n, 80), number("time", "seconds", seconds, 100)]);
  }
}

function drawTimeline() {
  const { steps } = page.run;
  if (!steps.length) {
    $("timeline").innerHTML = `<p class="hint">No steps were measured: the run made no <code>lazytpu.mark_step()</code>, or was killed before its first ended.</p>`;
    $("timeline").style.height = "auto";
    return;
  }
  const style = getComputedStyle(document.documentElement), ink = style.getPropertyValue("--soft").trim(), line = style.getPropertyValue("--line").trim();
  const chart = remake("timeline");
  const labels = steps.map((s) => s.number), fit = $("fit").getAttribute("aria-pressed") === "true";
  const steady = steps.filter((s) => !s.compiles).map((s) => s.total_s), top = steady.length ? 1.15 * Math.max(...steady.sort((a, b) => a - b).slice(0, Math.ceil(0.98 * steady.length))) : null;
  const highest = Math.max(...steps.map((s) => s.total_s)), max = rounded(fit && top ? top : highest * 1.05);
  const series = PHASES.map(([field, name, color]) => ({ name, type: "bar", stack: "step", color, barMaxWidth: 26, emphasis: { focus: "series" }, data: steps.map((s) => 1e3 * (s[field] || 0)) }));
  const compiled = steps.map((s, i) => [i, s]).filter(([, s]) => s.compiles), more = steps.map((s, i) => [i, s]).filter(([, s]) => s.cuts > 1 || s.fallbacks);
  series.push({ name: "compiled", type: "scatter", symbol: "triangle", symbolSize: 12, itemStyle: { color: "#ef4444", borderColor: "#fff", borderWidth: 1.5 }, data: compiled.map(([i]) => [i, 0.97e3 * max]), z: 5 });
  series.push({ name: "cut more than once", type: "scatter", symbol: "diamond", symbolSize: 10, color: "#d946ef", data: more.map(([i]) => [i, 0.91e3 * max]), z: 5 });
  chart.setOption({
    animation: false, textStyle: { fontFamily: "inherit" }, grid: { left: 64, right: 18, top: 40, bottom: steps.length > 40 ? 66 : 32 },
    legend: { top: 0, textStyle: { color: ink }, itemWidth: 12, itemHeight: 10, icon: "roundRect" },
    tooltip: { trigger: "axis", confine: true, formatter: (items) => stepTip(steps[items[0].dataIndex]) },
    xAxis: { type: "category", data: labels, axisLabel: { color: ink }, axisLine: { lineStyle: { color: line } }, name: "" },
    yAxis: { type: "value", max: 1e3 * max, axisLabel: { color: ink, formatter: (v) => (v ? seconds(v / 1e3).replace(/\.?0+ /, " ") : "0") }, splitLine: { lineStyle: { color: line } } },
    dataZoom: steps.length > 40 ? [{ type: "inside" }, { type: "slider", height: 20, bottom: 12 }] : [{ type: "inside" }], series,
  });
  $("steps-hint").textContent = fit && top && highest > max ? "bars of steps that compiled are cut off" : "";
}

/** The next larger number of two digits, for the end of an axis. */
function rounded(x) {
  const unit = 10 ** (Math.floor(Math.log10(x)) - 1);
  return Math.ceil(x / unit) * unit;
}

function stepTip(step) {
  const rows = PHASES.filter(([f]) => step[f]).map(([f, name, color]) => `<tr><td><span style="color:${color}">■</span> ${name}</td><td style="text-align:right">${seconds(step[f])}</td></tr>`);
  return `<b>step ${step.number}</b> ${seconds(step.total_s)}<table>${rows.join("")}</table>${step.ops} ops, ${step.cuts} cuts, ${step.compiles} compiled, ${step.fallbacks} on the CPU<br>device running ${seconds(step.running_s)}, in ${bytes(step.bytes_in)}, out ${bytes(step.bytes_out)}`;
}

function remake(id) {
  const old = echarts.getInstanceByDom($(id));
  if (old) old.dispose();
  const dark = document.documentElement.dataset.theme === "dark";
  return echarts.init($(id), dark ? { backgroundColor: "transparent", tooltip: { backgroundColor: "#232736", borderColor: "#2a2e3d", textStyle: { color: "#e6e8f0" } } } : null, { renderer: "canvas" });
}

// --- a graph -------------------------------------------------------------------------------------------

async function showGraph(head, tab, op) {
  const index = page.run.graphs.indexOf(head), data = await part(index);
  if (page.current !== head) {
    page.current = head;
    $("graph-title").textContent = `Graph ${head.number}`;
    $("graph-name").textContent = head.name;
    $("graph-tiles").innerHTML = [
      stat(head.ops, "ops"), stat(amount(head.flops), "FLOPs"), stat(bytes(head.bytes), "moved"), stat(bytes(head.memory.peak_bytes), "at the peak"), stat(bytes(head.memory.donated_bytes), "donated"),
      stat(seconds((head.lower_s || 0) + (head.compile_s || 0)), "to compile"), stat(head.runs ?? "–", head.runs === 1 ? "run" : "runs"), stat(seconds(head.run_s), "the last timed"),
    ].join("");
    showCause(head);
    page.panes.load(data);
    document.querySelector("#tabs [data-tab=mesh]").hidden = !head.mesh;
    if (!head.mesh && tab === "mesh") tab = "code";
    $("mesh-grid").dataset.of = "";
    for (const built of ["modules", "drawing", "diff", "memory"]) $(built === "memory" ? "memory-chart" : built).dataset.of = "";
  }
  for (const button of document.querySelectorAll("#tabs button")) button.setAttribute("aria-selected", String(button.dataset.tab === tab));
  for (const box of document.querySelectorAll(".tab")) box.hidden = box.dataset.tab !== tab;
  if (tab === "code" && op !== null && data.ops[op]) page.panes.select([op]);
  else if (tab === "code") page.panes.select([...page.panes.selected]);
  if (tab === "modules") showModules(head, data);
  if (tab === "drawing") { page.drawing.load(data); page.drawing.mark(op !== null ? [op] : [...page.panes.selected]); }
  if (tab === "diff") showDiff(head, data);
  if (tab === "memory") showMemory(head, data);
  if (tab === "mesh") showMesh(head);
}

function showCause(head) {
  const c = head.cause, rows = [["at", c.at], ["was", c.was && c.was !== c.at && c.was !== "?" ? c.was : ""], ["with", c.with], ["fix", c.fix]];
  $("cause").innerHTML = `<div class="why"><span class="badge">${escapeHtml(c.kind)}</span><span>${escapeHtml(c.text)}</span>` +
    (head.nearest ? `<a href="#graph=${head.number}&tab=diff">difference from ${`graph ${Number(head.nearest.split("-")[1])}`}</a>` : "") + "</div><dl>" +
    rows.filter(([, text]) => text).map(([key, text]) => `<dt>${key}</dt><dd>${key === "at" || key === "was" ? `<code>${escapeHtml(text)}</code>` : escapeHtml(text)}</dd>`).join("") + "</dl>";
}

/** Rows of the tree of modules: a module's figures are those of all that is inside. */
function moduleRows(data) {
  const total = Math.max(1, data.ops.reduce((n, op) => n + op.flops, 0));
  const sum = (ops, key) => ops.reduce((n, i) => n + (data.ops[i][key] || 0), 0);
  const timed = data.ops.some((op) => op.seconds !== null);
  const row = (node) => ({
    name: node.name, count: node.all.length, flops: sum(node.all, "flops"), share: sum(node.all, "flops") / total, bytes: sum(node.all, "bytes"), seconds: timed ? sum(node.all, "seconds") : null, op: null,
    _children: [...[...node.children.values()].map(row).sort((a, b) => b.flops - a.flops), ...node.ops.map((i) => {
      const op = data.ops[i];
      return { name: `${op.name} ${op.op}`, count: 1, flops: op.flops, share: op.flops / total, bytes: op.bytes, seconds: op.seconds, op: i };
    })],
  });
  return row(moduleTree(data.ops))._children;
}

function showModules(head, data) {
  if ($("modules").dataset.of === head.name) return;
  $("modules").dataset.of = head.name;
  const rows = moduleRows(data);
  const longestTime = Math.max(1e-12, ...rows.map((r) => r.seconds || 0));
  const bar = (share, text) => `<span class="cell-bar"><i style="width:${Math.min(100, 100 * share).toFixed(1)}%"></i><b>${text}</b></span>`;
  const made = table("modules", rows, [
    { title: "module", field: "name", widthGrow: 3, minWidth: 260, formatter: (c) => `<span class="${c.getData().op === null ? "" : "mono"}">${escapeHtml(c.getValue())}</span>` },
    number("ops", "count", (n) => n, 80), { ...number("FLOPs", "flops", null, 150), formatter: (c) => bar(c.getData().share, amount(c.getValue())) },
    number("share", "share", (s) => `${(100 * s).toFixed(1)} %`, 90), number("bytes", "bytes", bytes, 110),
    { ...number(head.profiled ? "time of one run" : "time", "seconds", null, 150), formatter: (c) => (c.getValue() === null || c.getValue() === undefined ? `<span class="hint">–</span>` : bar(c.getValue() / longestTime, seconds(c.getValue()))) },
  ], { dataTree: true, dataTreeStartExpanded: [rows.length < 6, false], height: "calc(100vh - 170px)", headerSortTristate: true });
  made.on("rowClick", (event, row) => { if (row.getData().op !== null) go({ tab: "code", op: row.getData().op }); else row.treeToggle(); });
  if (!head.profiled) $("modules").insertAdjacentHTML("afterend", `<p class="hint">Times come from a profile: <code>python -m lazytpu run --dump DIR --profile DIR/times/profile SCRIPT</code></p>`);
}

function showDiff(head, data) {
  if ($("diff").dataset.of === head.name) return;
  $("diff").dataset.of = head.name;
  const lines = data.diff.length ? data.diff : [head.missing["diff.txt"] || "no earlier graph is like this one"];
  const kind = { "+": "add", "-": "del", "@": "hunk" };
  const list = new LineList($("diff"), { html: (i) => coloured(lines[i], TOKENS), number: () => "", paint: (i) => (/^(\+\+\+|---)/.test(lines[i]) ? "hunk" : kind[lines[i][0]] || "") });
  list.show(lines.length, longest(lines));
}

function showMemory(head, data) {
  if ($("memory-chart").dataset.of === head.name) return;
  $("memory-chart").dataset.of = head.name;
  const m = head.memory, rows = [["arguments", m.arguments_bytes], ["of these donated", m.donated_bytes], ["outputs", m.outputs_bytes], ["outputs in donated memory", m.aliased_bytes], ["temporaries", m.temporaries_bytes], ["peak", m.peak_bytes]].reverse();
  const ink = getComputedStyle(document.documentElement).getPropertyValue("--soft").trim(), line = getComputedStyle(document.documentElement).getPropertyValue("--line").trim();
  remake("memory-chart").setOption({
    animation: false, grid: { left: 170, right: 90, top: 8, bottom: 30 }, xAxis: { type: "value", axisLabel: { color: ink, formatter: bytes }, splitLine: { lineStyle: { color: line } } },
    yAxis: { type: "category", data: rows.map(([name]) => name), axisLabel: { color: ink }, axisTick: { show: false }, axisLine: { show: false } },
    series: [{ type: "bar", barWidth: 16, color: "#6366f1", itemStyle: { borderRadius: 4 }, data: rows.map(([, n]) => n || 0), label: { show: true, position: "right", color: ink, formatter: (p) => bytes(p.value) } }],
  });
  table("inputs", data.inputs.map((v) => ({ ...v, donated: v.donated ? "donated" : "" })), [{ title: "input", field: "name", width: 120 }, { title: "type", field: "type", formatter: (c) => `<span class="mono">${escapeHtml(c.getValue())}</span>` }, number("bytes", "bytes", bytes, 140), { title: "", field: "donated", width: 140 }], { height: 360 });
}

/** The devices of a mesh, the last axis across; each has as many bytes of inputs as the others. */
function showMesh(head) {
  if ($("mesh-grid").dataset.of === head.name) return;
  $("mesh-grid").dataset.of = head.name;
  const { axes, devices, inputs, collectives } = head.mesh, names = Object.keys(axes), across = axes[names[names.length - 1]];
  const each = inputs.reduce((n, v) => n + v.bytes, 0);
  $("mesh-title").textContent = `Mesh ${names.map((n) => `${n}=${axes[n]}`).join(", ")}: ${bytes(head.memory.peak_bytes || each)} at the peak on each device`;
  const cells = devices.slice(0, 512).map((d) => `<div class="device"><b>${d}</b><span>${bytes(each)}</span></div>`).join("");
  $("mesh-grid").innerHTML = `<div class="devices" style="grid-template-columns:repeat(${across}, minmax(64px, 110px))">${cells}</div>` + (devices.length > 512 ? `<p class="hint">and ${devices.length - 512} more</p>` : "");
  const mono = (c) => `<span class="mono">${escapeHtml(c.getValue())}</span>`;
  table("mesh-sends", collectives, [{ title: "kind", field: "kind", width: 150 }, { title: "axis", field: "axis", width: 110 }, number("devices", "devices", (n) => n, 90), number("count", "count", (n) => n, 80), number("bytes", "bytes", bytes, 100), { title: "reason", field: "reason", widthGrow: 2 }, { title: "op", field: "op", formatter: mono }, { title: "line", field: "at", formatter: mono, widthGrow: 2 }], { placeholder: "nothing" });
  table("mesh-inputs", inputs, [{ title: "input", field: "name", width: 120 }, { title: "type", field: "type", formatter: mono }, { title: "sharding", field: "sharding", formatter: mono }, number("bytes on each device", "bytes", bytes, 190)], { height: 360 });
}

// --- search --------------------------------------------------------------------------------------------

const MOST_RESULTS = 60;

async function search(text) {
  const wanted = text.trim().toLowerCase(), found = [];
  if (!wanted) return found;
  const add = (entry) => { if (found.length < MOST_RESULTS) found.push(entry); };
  for (const graph of page.run.graphs) if (`graph ${graph.number} ${graph.name} ${graph.cause.text}`.toLowerCase().includes(wanted)) add({ kind: "graph", graph, what: `graph ${graph.number}: ${graph.cause.text}` });
  const order = [...page.run.graphs.entries()].sort(([, a], [, b]) => (b === page.current) - (a === page.current));
  for (const [index, graph] of order) {
    const data = await part(index);
    data.ops.forEach((op, i) => {
      const place = `${(op.file || "?").split("/").pop()}:${op.line}`, source = (page.run.sources[op.file] || "").split("\n", op.line)[op.line - 1] || "";
      if (`${op.name} ${op.op} ${op.module} ${place}`.toLowerCase().includes(wanted)) add({ kind: `graph ${graph.number} op`, graph, op: i, what: `${op.name} ${op.op}  ${place}  ${op.module}` });
      else if (source.toLowerCase().includes(wanted)) add({ kind: `graph ${graph.number} line`, graph, op: i, what: `${place}  ${source.trim()}` });
    });
    const { hlo } = data.texts, at = new Map(hlo.numbers.map((n, i) => [n, i]));
    for (const [line, name, opcode, owner] of data.instructions) if (!owner && `${name} ${opcode}`.toLowerCase().includes(wanted)) add({ kind: `graph ${graph.number} HLO`, graph, hlo: at.get(line), what: `${name}  ${opcode}` });
    if (found.length >= MOST_RESULTS) break;
  }
  const seen = new Set();
  return found.filter((f) => { const key = f.kind + f.what; return seen.has(key) ? false : seen.add(key); });
}

function setUpSearch() {
  const input = $("search"), box = $("results");
  let timer = 0, results = [], on = 0, asked = 0;
  const open = async (result) => {
    box.hidden = true;
    go({ graph: result.graph.number, tab: result.kind === "graph" ? null : "code", op: result.op ?? null });
    if (result.hlo !== undefined) setTimeout(() => { const pane = page.panes.panes.hlo; page.panes.pick(pane, result.hlo); pane.list.reveal(result.hlo); }, 150);
  };
  const draw = () => {
    box.innerHTML = results.length ? results.map((r, i) => `<button role="option" class="${i === on ? "on" : ""}" data-i="${i}"><span class="kind">${escapeHtml(r.kind)}</span><span class="what">${escapeHtml(r.what)}</span></button>`).join("") : `<div class="none">nothing found</div>`;
    box.hidden = false;
    box.querySelector(".on")?.scrollIntoView({ block: "nearest" });
  };
  input.oninput = () => {
    clearTimeout(timer);
    timer = setTimeout(async () => {
      const mine = ++asked, found = await search(input.value);
      if (mine !== asked) return;
      [results, on] = [found, 0];
      if (input.value.trim()) draw(); else box.hidden = true;
    }, 120);
  };
  input.onkeydown = (event) => {
    if (event.key === "Escape") { box.hidden = true; input.blur(); }
    if (event.key === "Enter" && results[on]) open(results[on]);
    if (event.key === "ArrowDown" || event.key === "ArrowUp") { on = (on + (event.key === "ArrowDown" ? 1 : -1) + results.length) % Math.max(results.length, 1); draw(); event.preventDefault(); }
  };
  box.onclick = (event) => { const b = event.target.closest("button"); if (b) open(results[Number(b.dataset.i)]); };
  document.addEventListener("click", (event) => { if (!event.target.closest(".search")) box.hidden = true; });
  document.addEventListener("keydown", (event) => { if (event.key === "/" && !/INPUT|SELECT/.test(document.activeElement.tagName)) { event.preventDefault(); input.focus(); } });
}

// --- all together --------------------------------------------------------------------------------------

async function follow() {
  const asked = new URLSearchParams(location.hash.slice(1)), head = page.run.graphs.find((g) => g.number === Number(asked.get("graph")));
  $("overview").hidden = Boolean(head);
  $("graph").hidden = !head;
  for (const link of document.querySelectorAll("#side a")) link.classList.toggle("on", (link.dataset.number || "") === (head ? String(head.number) : ""));
  if (head) await showGraph(head, TABS.includes(asked.get("tab")) ? asked.get("tab") : "code", asked.has("op") ? Number(asked.get("op")) : null);
  else echarts.getInstanceByDom($("timeline"))?.resize();
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  if (!page.run) return;
  drawTimeline();
  $("memory-chart").dataset.of = "";
  if (page.drawing.part) page.drawing.draw();
  follow();
}

async function begin() {
  const remembered = (() => { try { return localStorage.getItem("lazytpu-theme"); } catch { return null; } })();
  setTheme(remembered || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
  page.run = await unpack("data-overview");
  page.panes = new CodePanes($("panes"), $("selection"), page.run.sources);
  page.drawing = new Drawing($("drawing"), (op) => go({ tab: "code", op }));
  showRun();
  setUpSearch();
  $("theme").onclick = () => {
    const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    try { localStorage.setItem("lazytpu-theme", next); } catch { /* a page from a file may have no storage */ }
    setTheme(next);
  };
  $("fit").onclick = () => { $("fit").setAttribute("aria-pressed", String($("fit").getAttribute("aria-pressed") !== "true")); drawTimeline(); };
  $("tabs").onclick = (event) => { if (event.target.dataset.tab) go({ tab: event.target.dataset.tab, op: null }); };
  document.querySelector(".toolbar").onclick = (event) => ({ in: () => page.drawing.expandAll(), out: () => page.drawing.foldAll(), fit: () => page.drawing.fit() })[event.target.dataset.draw]?.();
  addEventListener("hashchange", follow);
  addEventListener("resize", () => { for (const id of ["timeline", "memory-chart"]) echarts.getInstanceByDom($(id))?.resize(); });
  await follow();
  document.documentElement.dataset.ready = "yes";
}

begin();
