// The tree as the server tells it: rows by id, and sums over what is below each.

export const KINDS = {
  declared: ["#7b4fb5", "declared position"], branch: ["#c2410c", "branch point"],
  message: ["#0b7285", "message start"], prompt_end: ["#1d6fb8", "prompt's end"],
  tail: ["#2b8a3e", "answer's end"], chunk: ["#868e96", "chunk's end"],
  composed: ["#a61e4d", "modules' end"], unknown: ["#868e96", "where SGLang tracks"],
};
export const TIERS = ["device", "host", "disk"];

export class Tree {
  constructor() { this.clear(); }

  clear() {
    this.nodes = new Map();
    this.root = null;
    this.largest = 0; // value
  }

  // Rows as extensions/page/follower.py lists them. Returns the nodes that were hit since they were told last.
  take(rows, told) {
    const hit = [];
    for (const [id, parent, tokens, kind, held, hits, used, worth, kvTier, stateTier, tenant] of rows) {
      const node = this.nodes.get(id) ?? this.add(id), value = worth ?? node.value;
      if (told && node.known && hits > node.hits) hit.push(node);
      if (node.parentId !== parent) this.move(node, parent);
      const more = tokens - node.tokens, own = tenant === null ? {} : { tenant };
      Object.assign(node, { known: true, tokens, kind, held, hits, used, value, kvTier, stateTier }, own);
      if (more) this.count(node, more);
      if (value > this.largest) this.largest = value;
      if (parent === -1) this.root = node;
    }
    return hit;
  }

  drop(ids) {
    for (const id of ids) {
      const node = this.nodes.get(id);
      if (!node) continue;
      this.move(node, null);
      for (const child of node.children) child.parentId = undefined; // it will be told anew
      this.nodes.delete(id);
    }
  }

  add(id) {
    const node = { id, parentId: undefined, parent: null, children: new Set(), tokens: 0, sum: 0, deep: -1, known: false,
                   hits: 0, kind: "", held: "", used: 0, value: 0, kvTier: 0, stateTier: -1, tenant: null, lit: 0 };
    this.nodes.set(id, node);
    return node;
  }

  move(node, parentId) {
    if (node.parent) {
      node.parent.children.delete(node);
      this.count(node.parent, -node.sum);
    }
    node.parentId = parentId;
    node.parent = parentId === null || parentId === -1 ? null : this.nodes.get(parentId) ?? this.add(parentId);
    if (node.parent) {
      node.parent.children.add(node);
      this.count(node.parent, node.sum);
    }
  }

  count(node, by) {
    for (let at = node; at; at = at.parent) {
      at.sum += by;
      at.deep = -1;
    }
  }

  path(node) {
    const path = [];
    for (let at = node; at && at !== this.root; at = at.parent) path.unshift(at);
    return path;
  }

  tenant(node) {
    for (let at = node; at; at = at.parent) if (at.tenant !== null) return at.tenant;
    return "";
  }

  // Tokens on the longest way down from `node`, its own included; kept until something below changes.
  depth(node) {
    const stack = [node];
    while (node.deep < 0) {
      const at = stack.at(-1);
      let most = 0, unknown = 0;
      for (const child of at.children) {
        if (child.deep < 0) unknown = stack.push(child);
        else if (child.deep > most) most = child.deep;
      }
      if (!unknown) {
        at.deep = at.tokens + most;
        stack.pop();
      }
    }
    return node.deep;
  }
}
