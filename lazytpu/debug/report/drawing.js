"use strict";
// The graph as boxes and arrows, folded by module: cytoscape draws, dagre finds the places.

const FIRST_BOXES = 28;
const MOST_BOXES = 400;

/** The tree of modules over the ops; a backward pass and what belongs to no module are branches of their own. */
function moduleTree(ops) {
  const root = { key: "", name: "", children: new Map(), ops: [], parent: null };
  ops.forEach((op, i) => {
    const path = op.module ? op.module.split(".") : [`${(op.file || "?").split("/").pop()}:${op.line}`];
    if (op.backward) path[0] += " (backward)";
    let node = root;
    for (const name of path) {
      const key = node.key ? `${node.key}.${name}` : name;
      if (!node.children.has(name)) node.children.set(name, { key, name, children: new Map(), ops: [], parent: node });
      node = node.children.get(name);
    }
    node.ops.push(i);
  });
  const sum = (node) => {
    node.all = [...node.ops];
    for (const child of node.children.values()) node.all.push(...sum(child));
    return node.all;
  };
  sum(root);
  return root;
}

class Drawing {
  constructor(box, pick) {
    Object.assign(this, { box, pick, cy: null, part: null });
  }

  load(part) {
    if (this.part === part) return this.cy && this.cy.resize();
    this.part = part;
    this.tree = moduleTree(part.ops);
    this.maker = new Map();
    part.ops.forEach((op, i) => op.results.forEach(([name]) => this.maker.set(name, i)));
    this.most = Math.max(1, ...part.ops.map((op) => op.flops));
    this.total = part.ops.reduce((n, op) => n + op.flops, 0) || 1;
    this.open = new Set([""]);
    this.unfold(FIRST_BOXES);
    this.draw();
  }

  /** Opens the modules with most operations while there are at most so many boxes. */
  unfold(limit) {
    const flops = (node) => node.all.reduce((n, i) => n + this.part.ops[i].flops, 0);
    const boxes = (node) => node.children.size + node.ops.length;
    const waiting = [this.tree];
    let count = boxes(this.tree);
    while (waiting.length) {
      const node = waiting.shift();
      this.open.add(node.key);
      for (const child of node.children.values()) {
        if (count + boxes(child) - 1 <= limit) { count += boxes(child) - 1; waiting.push(child); }
      }
      waiting.sort((a, b) => flops(b) - flops(a));
    }
  }

  boxes() {
    const found = [], at = new Map();
    const walk = (node) => {
      for (const child of node.children.values()) {
        if (this.open.has(child.key)) { walk(child); continue; }
        const id = `m:${child.key}`;
        const flops = child.all.reduce((n, i) => n + this.part.ops[i].flops, 0);
        found.push({ id, node: child, flops, label: `${child.key}\n${child.all.length} ops · ${amount(flops)}FLOPs` });
        child.all.forEach((i) => at.set(i, id));
      }
      for (const i of node.ops) {
        const op = this.part.ops[i], id = `o:${i}`;
        found.push({ id, op: i, flops: op.flops, label: `${op.name}  ${op.op.replace(/^aten\./, "")}\n${op.results.map((r) => r[1]).join(" ").slice(0, 40)}` });
        at.set(i, id);
      }
    };
    walk(this.tree);
    return { found, at };
  }

  draw() {
    const { found, at } = this.boxes();
    const edges = new Map();
    this.part.ops.forEach((op, i) => op.operands.forEach((name) => {
      const from = at.get(this.maker.get(name)), to = at.get(i);
      const kept = op.backward !== this.part.ops[this.maker.get(name)]?.backward;
      if (from && to && from !== to) edges.set(`${from}>${to}`, [from, to, 1 + (edges.get(`${from}>${to}`)?.[2] || 0), kept]);
    }));
    const places = this.places(found, edges);
    const style = getComputedStyle(document.documentElement), colour = (name) => style.getPropertyValue(name).trim();
    const elements = found.map((b) => ({
      data: { id: b.id, label: b.label, width: places.node(b.id).width, height: places.node(b.id).height, heat: Math.sqrt(b.flops / this.total) },
      position: { x: places.node(b.id).x, y: places.node(b.id).y },
      classes: b.node ? "module" : "op",
    }));
    for (const [id, [source, target, n, kept]] of edges) elements.push({ data: { id, source, target, n }, classes: kept ? "kept" : "" });
    if (this.cy) this.cy.destroy();
    this.cy = cytoscape({
      container: this.box, elements, layout: { name: "preset" }, minZoom: 0.02, maxZoom: 3, boxSelectionEnabled: false,
      style: [
        { selector: "node", style: { shape: "round-rectangle", width: "data(width)", height: "data(height)", label: "data(label)", "text-wrap": "wrap", "text-valign": "center", "font-size": 11, "font-family": "system-ui, sans-serif", color: colour("--ink"), "background-color": colour("--card"), "border-width": 1.2, "border-color": colour("--line") } },
        { selector: "node.module", style: { "background-color": colour("--accent-soft"), "border-color": colour("--accent"), "font-weight": 600 } },
        { selector: "node.hot", style: { "border-color": colour("--select-edge"), "border-width": 3 } },
        { selector: "node.picked", style: { "background-color": colour("--select"), "border-color": colour("--select-edge"), "border-width": 2 } },
        { selector: "edge", style: { width: 1.2, "line-color": colour("--faint"), "target-arrow-color": colour("--faint"), "target-arrow-shape": "triangle", "arrow-scale": 0.8, "curve-style": "bezier", opacity: 0.8 } },
        { selector: "edge.kept", style: { "line-style": "dashed", opacity: 0.35 } },
      ],
    });
    this.cy.nodes().filter((n) => n.data("heat") > 0.35).addClass("hot");
    this.cy.on("tap", "node", (event) => {
      const box = found.find((b) => b.id === event.target.id());
      if (box.node) this.expand(box.node); else this.pick(box.op);
    });
    this.count = found.length;
    this.lookAtTop();
  }

  /** A long graph is unreadable as a whole: begin at its top. */
  lookAtTop() {
    const box = this.cy.elements().boundingBox();
    this.cy.fit(undefined, 30);
    if (this.cy.zoom() < 0.6) {
      this.cy.zoom(Math.min(0.9, Math.max(0.5, (this.cy.width() - 40) / box.w)));
      const inView = this.cy.nodes().filter((n) => n.position("y") < box.y1 + this.cy.height() / this.cy.zoom());
      const middle = inView.reduce((sum, n) => sum + n.position("x"), 0) / inView.length;
      this.cy.pan({ x: this.cy.width() / 2 - this.cy.zoom() * middle, y: 20 - this.cy.zoom() * box.y1 });
    }
  }

  places(found, edges) {
    const graph = new dagre.graphlib.Graph();
    graph.setGraph({ rankdir: "TB", nodesep: 18, ranksep: 34, ranker: found.length > 150 ? "longest-path" : "network-simplex" });
    graph.setDefaultEdgeLabel(() => ({}));
    for (const b of found) {
      const lines = b.label.split("\n");
      graph.setNode(b.id, { width: 16 + 6.3 * longest(lines), height: 12 + 14 * lines.length });
    }
    for (const [from, to, , kept] of edges.values()) graph.setEdge(from, to, { weight: kept ? 0 : 3 });
    dagre.layout(graph);
    return graph;
  }

  expand(node) {
    const more = node.children.size + node.ops.length;
    if (this.count + more > MOST_BOXES) return this.say(`${more} boxes more would be too many to draw; fold others first`);
    this.open.add(node.key);
    this.draw();
    this.say("");
  }

  foldAll() { this.open = new Set([""]); this.draw(); }

  expandAll() {
    this.unfold(MOST_BOXES);
    this.draw();
    const hidden = this.boxes().found.filter((b) => b.node).length;
    this.say(hidden ? `${hidden} modules stay folded: more than ${MOST_BOXES} boxes cannot be read` : "");
  }

  fit() { this.cy.animate({ fit: { padding: 30 }, duration: 200 }); }

  mark(ops) {
    if (!this.cy) return;
    const { at } = this.boxes();
    this.cy.nodes().removeClass("picked");
    for (const i of ops) this.cy.getElementById(at.get(i) || "").addClass("picked");
  }

  say(text) {
    document.getElementById("drawing-hint").textContent = text || "click a module to unfold it, an op to see its code";
  }
}
