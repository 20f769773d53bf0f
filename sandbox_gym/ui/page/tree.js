"use strict";
// The tree on the left: one row a sandbox or snapshot, lines between them.

const at = id => document.getElementById(id);

function make(kind, className, text) {
  const element = document.createElement(kind);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

// Only what changes is written: unchanged rows cost the browser nothing.
function put(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function mark(element, name, value) {
  if (element.getAttribute(name) !== value) element.setAttribute(name, value);
}

function size(bytes) {
  if (bytes === null) return "";
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (bytes < 1024) return `${unit === "B" ? bytes : bytes.toFixed(1)} ${unit}`;
    bytes /= 1024;
  }
  return `${bytes.toFixed(1)} TiB`;
}

function span(seconds) {
  seconds = Math.max(0, seconds);
  if (seconds < 120) return `${Math.floor(seconds)} s`;
  if (seconds < 7200) return `${Math.floor(seconds / 60)} min`;
  return seconds < 172800 ? `${Math.floor(seconds / 3600)} h` : `${Math.floor(seconds / 86400)} d`;
}

class Tree {
  static ROW = 26;
  static STEP = 17; // pixels to the right for each level
  static DEEPEST = 24; // levels that are set to the right
  static MOST = 2000; // rows drawn

  constructor(choose) {
    this.choose = choose;
    this.nodes = new Map();
    this.rows = new Map(); // by node
    this.heads = new Map(); // by client
    this.folded = new Set();
    this.order = [];
    this.places = "";
    this.selected = null;
    at("tree").addEventListener("keydown", event => this.key(event));
    at("filter").addEventListener("input", () => this.lay());
    at("ended").addEventListener("change", () => this.lay());
  }

  show(nodes) {
    this.nodes = new Map(nodes.map(node => [node.id, node]));
    for (const id of this.rows.keys()) if (!this.nodes.has(id)) this.rows.delete(id);
    this.lay();
  }

  // Which are shown: those that match, and all above them.
  visible() {
    const words = at("filter").value.toLowerCase().split(/\s+/);
    const nodes = [...this.nodes.values()];
    const all = at("ended").checked || !nodes.some(node => this.isLive(node));
    const shown = new Set();
    for (const node of nodes) {
      const text = `${node.name} ${node.id} ${node.state} client:${node.client}`.toLowerCase();
      const wanted = (all || this.isLive(node) || node.id === this.selected) && words.every(word => text.includes(word));
      for (let each = node; wanted && each && !shown.has(each.id); each = this.nodes.get(each.above)) shown.add(each.id);
    }
    return shown;
  }

  isLive(node) {
    return !["terminated", "dead", "gone"].includes(node.state);
  }

  lay() {
    const shown = this.visible();
    const below = new Map();
    const roots = new Map(); // by client
    for (const node of [...this.nodes.values()].sort((a, b) => a.made - b.made)) {
      if (!shown.has(node.id)) continue;
      const [map, key] = shown.has(node.above) ? [below, node.above] : [roots, node.client];
      if (!map.has(key)) map.set(key, []);
      map.get(key).push(node);
    }
    this.order = [];
    const elements = [], lines = [];
    let left = 0;
    for (const [client, trees] of [...roots].sort((a, b) => a[1][0].made - b[1][0].made)) {
      elements.push(this.head(client));
      // By hand, not by recursion: chains may be thousands deep.
      const stack = trees.map(node => ({ node, level: 0, from: null })).reverse();
      while (stack.length) {
        const { node, level, from } = stack.pop();
        if (this.order.length >= Tree.MOST) { left += 1; continue; }
        const children = below.get(node.id) || [];
        const x = 20 + Tree.STEP * Math.min(level, Tree.DEEPEST);
        const y = Tree.ROW * (elements.length + .5);
        if (from) lines.push(from.x === x ? `M${x} ${from.y + 8}V${y - 8}` : `M${from.x} ${from.y + 8}V${y - 7}Q${from.x} ${y} ${from.x + 7} ${y}H${x - 8}`);
        elements.push(this.row(node, x, children.length));
        this.order.push(node.id);
        if (this.folded.has(node.id)) continue;
        const next = level + (children.length > 1 ? 1 : 0); // an only child stands below its parent
        for (const child of [...children].reverse()) stack.push({ node: child, level: next, from: { x, y } });
      }
    }
    this.draw(elements, lines.join(""));
    const words = at("filter").value.trim();
    at("nothing").hidden = this.order.length > 0 && !left;
    put(at("nothing"), left ? `${left} more: filter to find them` : words ? "None matches." : "No sandboxes are live.");
  }

  draw(elements, path) {
    const places = elements.map(element => element.dataset.id).join(" ");
    if (places !== this.places) {
      at("tree").replaceChildren(at("edges"), ...elements);
      this.places = places;
    }
    mark(at("edges"), "height", String(Tree.ROW * elements.length));
    mark(at("edges").firstElementChild, "d", path);
  }

  head(client) {
    if (!this.heads.has(client)) {
      const row = make("div", "row client", `client ${client}`);
      row.dataset.id = `client:${client}`;
      this.heads.set(client, row);
    }
    return this.heads.get(client);
  }

  row(node, x, children) {
    let row = this.rows.get(node.id);
    if (!row) {
      row = make("div", "row");
      row.dataset.id = node.id;
      row.setAttribute("role", "treeitem");
      row.append(make("i", "dot"), make("span", "name"), make("button", "fold"), make("span", "denied"), make("span", "numbers"));
      row.lastElementChild.append(make("span"), make("span"));
      row.addEventListener("click", () => this.choose(node.id));
      row.children[2].addEventListener("click", event => { event.stopPropagation(); this.fold(node.id); });
      row.children[2].tabIndex = -1;
      this.rows.set(node.id, row);
    }
    const [dot, name, fold, denied, numbers] = row.children;
    const indent = `${x - 5.5}px`;
    if (row.style.paddingLeft !== indent) row.style.paddingLeft = indent;
    mark(row, "aria-selected", String(node.id === this.selected));
    mark(row, "data-over", this.isLive(node) ? "no" : "yes");
    mark(dot, "data-state", node.state);
    mark(row, "title", `${node.name} (${node.id}), ${node.state}`);
    put(name, node.name);
    fold.hidden = !children;
    put(fold, this.folded.has(node.id) ? `\u25b8 ${children}` : "\u25be");
    put(denied, node.denied ? `${node.denied} denied` : "");
    put(numbers.firstElementChild, size(node.memory_bytes));
    this.age(node);
    return row;
  }

  age(node) {
    put(this.rows.get(node.id).lastElementChild.lastElementChild, span((node.ended || now()) - node.made));
  }

  tick() {
    for (const id of this.order) this.age(this.nodes.get(id));
  }

  fold(id) {
    if (!this.folded.delete(id)) this.folded.add(id);
    this.lay();
  }

  select(id) {
    this.selected = id;
    this.lay();
    const row = this.rows.get(id);
    if (row) row.scrollIntoView({ block: "nearest" });
  }

  key(event) {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step) {
      const next = this.order[this.order.indexOf(this.selected) + step];
      if (next !== undefined) this.choose(next);
    } else if ((event.key === "ArrowLeft" || event.key === "ArrowRight") && this.selected !== null) {
      if (this.folded.has(this.selected) === (event.key === "ArrowRight")) this.fold(this.selected);
    } else return;
    event.preventDefault();
  }
}
