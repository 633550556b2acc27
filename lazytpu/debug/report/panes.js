"use strict";
// Long texts, of which only the lines in view are in the document, and the colours of code.

const LINE_PX = 18;
const MARGIN_LINES = 20;

const escapeHtml = (text) => text.replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);

const TOKENS = /(#.*$|\/\/.*$)|(%[\w.#-]+|@\w+)|((?:[a-z]+\d+\w*|pred|i1)\[[^\]]*\](?:\{[^}]*\})?|tensor<[^>]*>)|(\b-?\d[\d.e+-]*\b)|(\baten\.[\w.]+|\bstablehlo\.\w+|\bROOT\b|\bENTRY\b|\breturn\b|\bdonate\b|\bfunc\.func\b)/g;
const PYTHON = /(#.*$)|("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|(\b(?:self|None|True|False)\b)|(\b\d[\d.e_]*\b)|(\b(?:def|class|return|for|in|if|elif|else|while|with|import|from|as|not|and|or|lambda|yield|raise|try|except|finally|pass|break|continue|is|del|global|async|await)\b)/g;
const KINDS = ["c-c", "c-v", "c-t", "c-n", "c-k"];

/** A line of code as HTML with coloured words. */
function coloured(line, pattern) {
  let html = "", last = 0;
  for (const match of line.matchAll(pattern)) {
    const kind = KINDS[match.slice(1).findIndex((group) => group !== undefined)];
    html += escapeHtml(line.slice(last, match.index)) + `<span class="${kind}">${escapeHtml(match[0])}</span>`;
    last = match.index + match[0].length;
  }
  return html + escapeHtml(line.slice(last));
}

/** A list of lines in a box that scrolls; asks `paint(index)` for the class and `html(index)` for the content. */
class LineList {
  constructor(box, { html, number, paint = () => "", pick = null }) {
    Object.assign(this, { box, html, number, paint, count: 0, columns: 0 });
    box.classList.add("lines");
    box.replaceChildren();
    this.room = box.appendChild(document.createElement("div"));
    this.room.className = "room";
    this.at = this.room.appendChild(document.createElement("div"));
    this.at.className = "at";
    box.onscroll = () => requestAnimationFrame(() => this.draw());
    this.at.onclick = (event) => {
      const line = event.target.closest(".ln");
      if (line && pick && !String(getSelection())) pick(Number(line.dataset.i));
    };
    new ResizeObserver(() => this.draw(true)).observe(box);
  }

  show(count, columns) {
    this.count = count;
    this.room.style.height = `${count * LINE_PX + 8}px`;
    this.room.style.width = `calc(${Math.min(columns, 4000)}ch + 80px)`;
    this.box.scrollTop = 0;
    this.draw(true);
  }

  draw(force = false) {
    const first = Math.max(0, Math.floor(this.box.scrollTop / LINE_PX) - MARGIN_LINES);
    const last = Math.min(this.count, Math.ceil((this.box.scrollTop + this.box.clientHeight) / LINE_PX) + MARGIN_LINES);
    if (!force && first >= this.first && last <= this.last && last - first <= this.last - this.first) return;
    [this.first, this.last] = [first, last];
    let html = "";
    for (let i = first; i < last; i++) {
      html += `<div class="ln ${this.paint(i)}" data-i="${i}"><span class="no">${this.number(i)}</span><span>${this.html(i)}</span></div>`;
    }
    this.at.style.top = `${first * LINE_PX}px`;
    this.at.innerHTML = html;
  }

  reveal(index) {
    const top = index * LINE_PX, height = this.box.clientHeight;
    if (top < this.box.scrollTop + LINE_PX || top > this.box.scrollTop + height - 2 * LINE_PX) {
      this.box.scrollTop = Math.max(0, top - height / 3);
    }
    this.draw(true);
  }
}

const longest = (lines) => lines.reduce((n, line) => Math.max(n, line.length), 0);

/** The four panes of a graph: source, IR, StableHLO, HLO; a line picked in one shows what became of it in the others. */
class CodePanes {
  constructor(box, summary, sources) {
    Object.assign(this, { box, summary, sources, hlo: new Map(), below: new Map(), picked: 0, file: "", onselect: () => {} });
    box.replaceChildren();
    this.panes = {};
    const titles = { source: "Source", ir: "IR", stablehlo: "StableHLO", hlo: "HLO after optimization" };
    for (const [key, title] of Object.entries(titles)) this.panes[key] = this.pane(key, title);
  }

  pane(key, title) {
    const made = { key, lines: [], numbers: [], ops: [], marks: new Map(), shown: 0 };
    const element = this.box.appendChild(document.createElement("div"));
    element.className = "pane";
    element.dataset.pane = key;
    element.innerHTML = `<div class="pane-head"><b>${title}</b><span class="extra"></span><span class="hint"></span>` +
      `<button title="Previous" aria-label="Previous">↑</button><button title="Next" aria-label="Next">↓</button></div><div></div>`;
    const [up, down] = element.querySelectorAll("button");
    up.onclick = () => this.turn(made, -1);
    down.onclick = () => this.turn(made, 1);
    made.hint = element.querySelector(".hint");
    made.extra = element.querySelector(".extra");
    made.list = new LineList(element.lastElementChild, {
      html: (i) => coloured(made.lines[i], key === "source" ? PYTHON : TOKENS),
      number: (i) => (key === "source" && (made.ops[i].length || this.below.has(made.numbers[i])) ? `<span class="has">${made.numbers[i]}</span>` : made.numbers[i]),
      paint: (i) => made.marks.get(i) || "",
      pick: (i) => this.pick(made, i),
    });
    return made;
  }

  load(part) {
    this.part = part;
    for (const key of ["ir", "stablehlo", "hlo"]) this.fill(this.panes[key], part.texts[key]);
    this.hlo = new Map(part.texts.hlo.numbers.map((number, i) => [number, i]));
    this.instructions = new Map(part.instructions.map((row) => [row[0], row]));
    const called = part.stacks.flatMap((stack) => stack.map(([file]) => file));
    const files = [...new Set([...part.ops.map((op) => op.file), ...called].filter((file) => file in this.sources))];
    const extra = this.panes.source.extra;
    extra.replaceChildren();
    if (files.length > 1) {
      const choice = extra.appendChild(document.createElement("select"));
      for (const file of files) choice.add(new Option(file.split("/").pop(), file));
      choice.onchange = () => { this.open(choice.value); this.select([...this.selected]); };
      this.choice = choice;
    } else {
      extra.textContent = files.length ? files[0].split("/").pop() : "not kept";
      extra.className = "extra hint";
      this.choice = null;
    }
    this.open(files[0] || "");
    this.select([]);
  }

  fill(pane, text) {
    Object.assign(pane, text, { marks: new Map() });
    pane.list.show(pane.lines.length, longest(pane.lines));
  }

  open(file) {
    Object.assign(this, { file, picked: 0 });
    if (this.choice) this.choice.value = file;
    const lines = (this.sources[file] || "").split("\n");
    const ops = lines.map(() => []);
    this.part.ops.forEach((op, i) => { if (op.file === file && ops[op.line - 1]) ops[op.line - 1].push(i); });
    this.below = new Map();
    const called = this.part.stacks.map((stack) => stack.filter(([of]) => of === file).map(([, line]) => line));
    this.part.ops.forEach((op, i) => {
      for (const line of called[op.stack] || []) this.below.has(line) ? this.below.get(line).push(i) : this.below.set(line, [i]);
    });
    this.fill(this.panes.source, { lines, numbers: lines.map((_, i) => i + 1), ops });
  }

  pick(pane, i) {
    let ops = pane.ops[i];
    if (pane.key === "hlo") {
      const fused = this.part.instructions.filter((row) => row[3] === pane.numbers[i]);
      const inside = fused.flatMap((row) => pane.ops[this.hlo.get(row[0])] || []);
      ops = [...new Set([...ops, ...inside])];
    }
    this.picked = pane.key === "source" ? pane.numbers[i] : 0;
    const below = ops.length ? [] : this.below.get(this.picked) || [];
    if (below.length) this.select([...new Set(below)], pane.key, i);
    else this.select(ops, pane.key);
  }

  /** Marks everything that belongs to some ops; `caller` is the line of the source that calls what recorded them. */
  select(ops, from = "", caller = null) {
    if (from !== "source") this.picked = 0;
    this.selected = new Set(ops);
    this.caller = caller;
    if (ops.length && from !== "source") {
      const file = this.part.ops[ops[0]].file;
      if (file !== this.file && file in this.sources) this.open(file);
    }
    this.into = [];
    const fusions = new Map();
    for (const pane of Object.values(this.panes)) {
      pane.marks = new Map();
      if (ops.length) pane.ops.forEach((own, i) => {
        if (!own.some((op) => this.selected.has(op))) return;
        const row = pane.key === "hlo" ? this.instructions.get(pane.numbers[i]) : null;
        pane.marks.set(i, row && row[4] !== "metadata" ? "weak" : "sel");
        if (row && row[3]) fusions.set(row[3], (fusions.get(row[3]) || 0) + 1);
      });
      if (pane.key === "source" && caller !== null) pane.marks.set(caller, "sel");
      if (pane.key === "hlo" && !pane.marks.size) this.markFolded(pane);
      if (pane.key === "hlo") for (const line of fusions.keys()) pane.marks.set(this.hlo.get(line), "fus");
      pane.places = [...pane.marks.keys()].sort((a, b) => a - b);
      pane.hint.textContent = ops.length ? `${pane.places.length} of ${pane.lines.length} lines` : `${pane.lines.length} lines`;
      pane.shown = 0;
      const strong = pane.places.find((i) => pane.marks.get(i) === "fus") ?? pane.places.find((i) => pane.marks.get(i) === "sel") ?? pane.places[0];
      if (strong !== undefined && pane.key !== from) { pane.shown = pane.places.indexOf(strong); pane.list.reveal(strong); }
      else pane.list.draw(true);
    }
    this.describe(fusions);
    this.onselect([...this.selected]);
  }

  /** Where XLA made no instruction of the ops: marks those of what uses them. */
  markFolded(pane) {
    const into = new Set([...this.selected].flatMap((op) => this.part.folded[op] || []));
    pane.ops.forEach((own, i) => { if (own.some((op) => into.has(op))) pane.marks.set(i, "weak"); });
    this.into = [...into];
  }

  turn(pane, by) {
    if (!pane.places || !pane.places.length) return;
    pane.shown = (pane.shown + by + pane.places.length) % pane.places.length;
    pane.list.reveal(pane.places[pane.shown]);
  }

  describe(fusions) {
    const ops = [...this.selected].map((i) => this.part.ops[i]);
    if (!ops.length) {
      this.summary.textContent = this.picked
        ? "No op was recorded at this line. A view is recorded by the line that reads it."
        : "Click a line: everything it came from and everything it became is marked in the other panes.";
      return;
    }
    const places = [...new Set(ops.map((op) => `${(op.file || "?").split("/").pop()}:${op.line}${op.module ? "  " + op.module : ""}${op.backward ? " (backward)" : ""}`))];
    const flops = ops.reduce((n, op) => n + op.flops, 0);
    const shown = places.slice(0, 2).map((place) => `<span class="chip">${escapeHtml(place)}</span>`);
    if (places.length > 2) shown.push(`and ${places.length - 2} more places`);
    const into = [...fusions].map(([line, n]) => {
      const row = this.instructions.get(line);
      return `<span class="chip fusion" data-line="${line}" title="${n} of its instructions">${escapeHtml(row[1])}</span>`;
    });
    const names = ops.slice(0, 2).map((op) => `<span class="chip">${escapeHtml(op.name + " " + op.op)}</span>`);
    if (ops.length > 2) names.push(`and ${ops.length - 2} more ops`);
    const chip = (op) => `<span class="chip folded" data-op="${op}">${escapeHtml(this.part.ops[op].name + " " + this.part.ops[op].op)}</span>`;
    const folded = ` → no instruction of its own: folded into ${this.into.slice(0, 4).map(chip).join(" ")}${this.into.length > 4 ? ` and ${this.into.length - 4} more` : ""}`;
    const left = this.into.length ? folded : this.panes.hlo.places.length ? " → not fused" : " → nothing is left of it after optimization";
    const below = this.below.get(this.picked) || [];
    const made = this.caller === null ? "" : `<span class="chip">${escapeHtml(this.file.split("/").pop())}:${this.caller + 1}</span> calls what is recorded at `;
    const more = this.caller === null ? below.filter((op) => !this.selected.has(op)) : [];
    const called = more.length ? ` <button class="chip below" title="Select these too">+ ${more.length} op${more.length > 1 ? "s" : ""} in what it calls</button>` : "";
    this.summary.innerHTML = `${made}${shown.join(" ")} → ${names.join(" ")} <span class="hint">${amount(flops)}FLOPs</span>` +
      (into.length ? ` → fused into ${into.slice(0, 4).join(" ")}${into.length > 4 ? ` and ${into.length - 4} more` : ""}` : left) + called;
    const button = this.summary.querySelector(".below");
    if (button) button.onclick = () => this.select([...this.selected, ...more], "source", this.picked - 1);
    for (const chip of this.summary.querySelectorAll("[data-line]")) {
      chip.onclick = () => this.panes.hlo.list.reveal(this.hlo.get(Number(chip.dataset.line)));
    }
    for (const chip of this.summary.querySelectorAll("[data-op]")) chip.onclick = () => this.select([Number(chip.dataset.op)]);
  }
}

/** `1.23 M` with a trailing space for a unit. */
function amount(number) {
  if (number === null || number === undefined) return "– ";
  for (const unit of ["", "K", "M", "G", "T"]) {
    if (Math.abs(number) < 999.5) return `${unit ? Number(Number(number).toPrecision(3)) : Math.round(number)} ${unit}`;
    number /= 1000;
  }
  return `${Number(number).toPrecision(3)} P`;
}
