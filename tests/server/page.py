"""A large tree for the page, and what is timed on it in a browser."""

from __future__ import annotations

import random
from typing import Any


def large_tree(nodes: int) -> list[list[Any]]:
    """Rows (page/follower.py) of a tree of so many nodes below the root: conversations of several
    tenants that fork.
    """
    source = random.Random(0)
    rows: list[list[Any]] = [[0, -1, 0, "", "", 0, 0.0, 0.0, 0, -1, None]]
    for node in range(1, nodes + 1):
        new = node == 1 or source.random() < 0.02
        parent = 0 if new else source.randrange(max(1, node - 400), node)
        kind = source.choice(["", "branch", "tail", "prompt_end", "message"])
        tenant = f"{source.randrange(8):x}" * 16 if parent == 0 else None
        value = source.random() * 1e4 if kind else 0.0
        edge = [node, parent, source.randrange(1, 900), kind, ""]
        rows.append([*edge, node % 7, float(node), value, 0, 0, tenant])
    return rows


LARGE = """(rows) => {
  const { icicle, receive } = hybrid, frame = icicle.canvas.getBoundingClientRect();
  const now = () => performance.now();
  const time = (work) => { const begin = now(); work(); return now() - begin; };
  const often = (work) => Array.from({ length: 9 }, () => time(work)).sort((a, b) => a - b)[4];
  const took = {};
  took.paint = time(() => { receive({ rank: 0, start: true, nodes: rows }); icicle.draw(); });
  took.nodes = hybrid.ranks[0].tree.nodes.size;
  took.hover = often(() => icicle.hover({ clientX: frame.x + 300, clientY: frame.y + 200 }));
  const node = icicle.boxes[Math.floor(icicle.boxes.length / 2)].node;
  took.zoom = often(() => { icicle.zoom(node); icicle.zoom(null); });
  const changed = rows.slice(5000, 5200).map((row) => row.with(5, row[5] + 1));
  took.step = often(() => { receive({ rank: 0, nodes: changed }); icicle.draw(); });
  return took;
}"""
"""Milliseconds of a first picture; and medians of interactions and of a change of 200 nodes."""
