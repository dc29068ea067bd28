// The tree on a canvas: what is too small to see is drawn as one box, so the work is bounded by the pixels.
import { KINDS, TIERS } from "./model.js";

const SMALL = 1.2; // pixels of height below which children are drawn together
const LIT = 2500; // milliseconds for which a hit stays lit
const TENANTS = ["#5b8ff9", "#61c0a0", "#e8a838", "#d3709b", "#8a7fd1", "#6bb1c9", "#a3a847", "#c98a6b"];
const TIER_COLOURS = ["#5b8ff9", "#e8a838", "#a06bc9"];

const NARROW = 0.6; // pixels of width below which an edge is not drawn

const HEAT = Array.from({ length: 65 }, (_, step) => { // from pale to strong
  const share = step / 64;
  return `hsl(${205 + 20 * share} ${45 + 30 * share}% ${90 - 52 * share}%)`;
});
const heat = (share) => HEAT[Math.round(64 * Math.min(1, Math.max(0, share)))];

export class Icicle {
  constructor(canvas, tree, { point, choose }) {
    Object.assign(this, { canvas, tree, point, choose });
    this.colour = "value";
    this.now = 0;
    this.top = null; // the node that fills the stage; null: all
    this.selected = null;
    this.path = new Set(); // of what was asked about
    this.mark = null; // [position at which its hit ends, ids of the nodes on its path]
    this.running = [];
    this.found = new Set();
    this.boxes = [];
    canvas.addEventListener("mousemove", (event) => this.hover(event));
    canvas.addEventListener("click", (event) => this.zoom(this.at(event)));
    canvas.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.draw()).observe(canvas);
  }

  get stage() { return this.top && this.tree.nodes.has(this.top.id) ? this.top : this.tree.root; }

  hit(nodes, when = performance.now()) {
    for (const node of nodes) for (const at of this.tree.path(node)) at.lit = when;
    this.litUntil = when + LIT;
  }

  zoom(node) {
    this.top = node && node !== this.tree.root && node !== this.stage ? node : null;
    if (node) {
      this.selected = node;
      this.choose(node);
    }
    this.draw();
  }

  select(node) {
    this.selected = node;
    this.choose(node);
    this.draw();
  }

  at(event) {
    const frame = this.canvas.getBoundingClientRect();
    const x = event.clientX - frame.left, y = event.clientY - frame.top;
    for (let i = this.boxes.length - 1; i >= 0; i--) {
      const box = this.boxes[i];
      if (x >= box.x && x <= box.x + box.w && y >= box.y && y <= box.y + box.h) return box.node;
    }
    return null;
  }

  hover(event) {
    const node = this.at(event);
    if (node && node !== this.selected) this.point(node);
  }

  key(event) {
    const node = this.selected && this.tree.nodes.has(this.selected.id) ? this.selected : null;
    const siblings = node?.parent ? [...node.parent.children] : [];
    const beside = (by) => siblings[(siblings.indexOf(node) + by + siblings.length) % siblings.length];
    const largest = (of) => [...(of?.children ?? [])].sort((a, b) => b.sum - a.sum)[0];
    const to = {
      ArrowRight: () => largest(node ?? this.stage), ArrowLeft: () => (node?.parent !== this.tree.root ? node?.parent : null),
      ArrowDown: () => node && beside(1), ArrowUp: () => node && beside(-1),
    }[event.key];
    if (to) {
      const next = to();
      if (next) this.select(next);
    } else if (event.key === "Enter") this.zoom(node);
    else if (event.key === "Escape") this.zoom(null);
    else return;
    event.preventDefault();
  }

  fill(node) {
    if (this.colour === "tenant") {
      const name = this.tree.tenant(node);
      let sum = 0;
      for (const letter of name) sum = (sum * 31 + letter.charCodeAt(0)) >>> 0;
      return name ? TENANTS[sum % TENANTS.length] : "#9aa7b5";
    }
    if (this.colour === "tier") return node.kvTier < 0 ? "#cfcdc7" : TIER_COLOURS[node.kvTier];
    if (this.colour === "age") return heat(1 / (1 + Math.max(0, this.now - node.used) / 30));
    return node.kind ? heat(Math.log1p(node.value) / this.strongest) : "#d7d5cf";
  }

  draw() {
    const { canvas, tree } = this, ratio = window.devicePixelRatio || 1;
    const width = canvas.clientWidth, height = canvas.clientHeight;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
    }
    const c = canvas.getContext("2d");
    c.setTransform(ratio, 0, 0, ratio, 0, 0);
    c.clearRect(0, 0, width, height);
    this.boxes = [];
    const stage = this.stage;
    if (!stage || !stage.sum) return;
    const time = performance.now();
    const scale = (width - 8) / Math.max(1, tree.depth(stage));
    this.strongest = Math.max(1e-9, Math.log1p(tree.largest));
    this.ink = getComputedStyle(document.body).color;
    this.lit = 0;
    const stack = [[stage, 2, 0, height]];
    while (stack.length) {
      const [node, x, y, h] = stack.pop();
      const w = node === tree.root ? 0 : node.tokens * scale;
      if (node !== tree.root && (w > NARROW || node.lit || node === this.selected)) {
        this.box(c, node, x, y, Math.max(w, 1.5), h, time);
      }
      const below = node.sum - node.tokens;
      let at = y, small = 0, most = 0, smallNode = null, count = 0;
      for (const child of node.children) {
        const share = below > 0 ? (h * child.sum) / below : 0;
        if (share < SMALL && !child.lit) {
          small += share; count += 1;
          if (child.tokens > most) { most = child.tokens; smallNode = child; }
        } else {
          stack.push([child, x + w, at, share]);
          at += share;
        }
      }
      if (count && small > 0.2) this.together(c, smallNode, x + w, at, Math.max(most * scale, 2), small);
    }
    this.outline(c, this.running.map((each) => tree.nodes.get(each[1])).filter(Boolean), "#2b8a3e");
    this.outline(c, [...this.path].map((id) => tree.nodes.get(id)).filter(Boolean), "#c2410c");
    this.ends(c, scale);
    canvas.dataset.boxes = this.boxes.length;
    canvas.dataset.lit = this.lit;
    canvas.setAttribute("aria-label", `Tree of ${tree.nodes.size} nodes, ${this.boxes.length} of them drawn one by one.`);
  }

  box(c, node, x, y, w, h, time) {
    const age = node.lit ? (time - node.lit) / LIT : 1;
    c.fillStyle = this.fill(node);
    c.fillRect(x, y, w, Math.max(0.5, h - (h > 4 ? 0.8 : 0)));
    if (age < 1) {
      this.lit += 1;
      c.fillStyle = `rgba(255, 196, 0, ${0.85 * (1 - age)})`;
      c.fillRect(x, y, w, Math.max(1.5, h - 0.8));
    } else node.lit = 0;
    if (node.kind) {
      c.fillStyle = KINDS[node.kind][0];
      c.fillRect(x + w - 3, y, 3, Math.max(1, h - (h > 4 ? 0.8 : 0)));
    }
    if (this.found.has(node)) this.frame(c, { x, y, w, h }, "#d6006c", 2);
    if (node === this.selected) this.frame(c, { x, y, w, h }, this.ink, 2);
    if (node.held.includes("p") && h > 6) { c.fillStyle = "#7b4fb5"; c.fillRect(x + 1, y + 1, 4, 4); }
    this.boxes.push({ node, x, y, w, h });
  }

  together(c, node, x, y, w, h) {
    c.fillStyle = "rgba(128, 126, 120, .45)";
    c.fillRect(x, y, w, h);
    this.boxes.push({ node, x, y, w, h });
  }

  frame(c, { x, y, w, h }, colour, width) {
    c.strokeStyle = colour;
    c.lineWidth = width;
    c.strokeRect(x + width / 2, y + width / 2, Math.max(1, w - width), Math.max(1, h - width));
  }

  outline(c, nodes, colour) {
    const wanted = new Set(nodes.flatMap((node) => this.tree.path(node)));
    if (!wanted.size) return;
    for (const box of this.boxes) if (wanted.has(box.node)) this.frame(c, box, colour, 1.6);
  }

  // Where a hit of the prompt that was asked about ends.
  ends(c, scale) {
    this.canvas.dataset.mark = "";
    if (!this.mark) return;
    const [position, ids] = this.mark;
    let begin = 0;
    for (const id of ids) {
      const node = this.tree.nodes.get(id);
      if (!node) return;
      const end = begin + node.tokens, box = this.boxes.find((each) => each.node === node);
      if (position > begin && position <= end) {
        this.canvas.dataset.mark = position;
        if (box) {
          const x = box.x + (position - begin) * scale;
          c.fillStyle = "#c2410c";
          c.beginPath(); c.moveTo(x, box.y); c.lineTo(x - 6, box.y - 9); c.lineTo(x + 6, box.y - 9); c.fill();
          c.fillRect(x - 1, box.y, 2, box.h);
        }
        return;
      }
      begin = end;
    }
  }
}

export function legend(colour) {
  const marks = Object.entries(KINDS).filter(([kind]) => kind !== "unknown").map(([, entry]) => entry);
  const colours = {
    value: [[heat(0), "worth little"], [heat(1), "worth most"], ["#d7d5cf", "no checkpoint"]],
    age: [[heat(1), "just used"], [heat(0), "long unused"]],
    tenant: [["#9aa7b5", "no tenant"], [TENANTS[0], "one colour a tenant"]],
    tier: TIERS.map((tier, number) => [TIER_COLOURS[number], tier]),
  }[colour];
  return [...colours, ["#ffc400", "hit just now"], ["#2b8a3e", "running (frame)"], ...marks.map(([c, name]) => [c, `checkpoint: ${name}`])];
}
