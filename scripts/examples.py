"""The worked examples of docs/reuse-index.md, docs/tuner.md and docs/explain.md, computed.

python scripts/examples.py reuse-index
python scripts/examples.py tuner
python scripts/examples.py explain
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import numpy as np

from sglang_hybrid.core.checkpoints.admission import Skip
from sglang_hybrid.core.checkpoints.checkpoint_plan import CheckpointRequest
from sglang_hybrid.core.records.nodes import Kind
from sglang_hybrid.core.returns.hazards import (
    BINS,
    CLASSES,
    FIRST_GUESS,
    PRIOR_WEIGHT,
    ClassTree,
    best_rates,
    reuse_class_of,
)
from sglang_hybrid.explain.decisions import (
    EMPTY_PREFIX_HASH,
    Decisions,
    NotTaken,
    extend_prefix_hash,
)
from sglang_hybrid.extensions.lab.simulation.tuner.regret import Regrets
from sglang_hybrid.extensions.lab.simulation.tuner.tuner import Rules
from sglang_hybrid.extensions.lab.systems import Spec

SHOWN = 5  # bins of age


def reuse_index() -> Iterator[str]:
    """Ten intervals of one class, their hazards, the best rates, and two candidates."""
    unit = 1.0
    edges = unit * 2.0 ** np.arange(1, BINS + 1)
    widths = np.diff(edges, prepend=0.0)
    ended, unended = np.zeros((1, BINS)), np.zeros((1, BINS))
    ended[0, 1], ended[0, 3], unended[0, 4] = 4, 3, 3
    at_risk = (ended + unended)[:, ::-1].cumsum(axis=1)[:, ::-1]
    chat = reuse_class_of(children=0, depth=500, turn=1)
    tree = ClassTree(np.array([chat]))
    rows, row = tree.hazards(ended, unended), tree.row
    hazard = rows[row[chat]]
    rates = best_rates(rows, widths)[row[chat]]
    assert row.shape == (CLASSES,)
    yield f"first guess {FIRST_GUESS}, weight of a coarser class {PRIOR_WEIGHT:g} intervals"
    yield "age (s)  ended  at risk  ended / at risk  hazard      G"
    for i in range(SHOWN):
        span = f"{edges[i] - widths[i]:g}-{edges[i]:g}"
        share = ended[0, i] / at_risk[0, i]
        yield (
            f"{span:<7}  {ended[0, i]:5g}  {at_risk[0, i]:7g}  {share:15.3f}"
            f"  {hazard[i]:6.3f}  {rates[i]:.4f}"
        )
    yield "candidate  age (s)  FLOPs saved per byte  G x savings"
    for name, age_bin, age, saved in (("A", 1, 3, 2_000), ("B", 3, 10, 3_000)):
        yield f"{name:<9}  {age:7}  {saved:20,}  {rates[age_bin] * saved:11.1f}"


def tuner() -> Iterator[str]:
    """Two searches over the hits of two candidates."""
    rules = Rules()
    reuse, lru = Spec("reuse"), Spec("lru")
    regrets: Regrets[Spec] = Regrets()
    searches = (
        ({reuse: [0, 900, 800, 0], lru: [0, 900, 0, 850]}),
        ({reuse: [700] * 40, lru: [650] * 40}),
    )
    for number, hits in enumerate(searches, start=1):
        regrets.learn({spec: np.array(tokens) for spec, tokens in hits.items()})
        chosen = regrets.choose(lru, rules.margin, rules.sure)
        shares = ", ".join(f"{spec} {share:.1%}" for spec, share in regrets.shares.items())
        yield f"after search {number}: missed of the best one's tokens: {shares}"
        yield f"  in force lru, chosen {chosen}"


def explain() -> Iterator[str]:
    """One decision, filed and found again by a prompt alone."""
    prompt, other = list(range(100, 140)), [*range(100, 120), 7, *range(121, 140)]
    decisions = Decisions()
    half = extend_prefix_hash(EMPTY_PREFIX_HASH, prompt, 0, 16)
    whole = extend_prefix_hash(half, prompt, 16, 32)
    yield f"hash of tokens [0, 16): {half:08x}; of [0, 32), from that: {whole:08x}"
    request = CheckpointRequest(32, Kind.BRANCH, "request-1")
    decisions.add("tenant", 32, whole, NotTaken(0, 1.0, request, Skip.NO_SLOT))
    for name, whose, tokens in (
        ("the same prompt", "tenant", prompt),
        ("another token at 20", "tenant", other),
        ("another tenant", "neighbour", prompt),
    ):
        found = [
            f"{one.skip.value} at {position}"
            for position, there in decisions.of(whose).along(tokens)
            for one in there
            if isinstance(one, NotTaken)
        ]
        yield f"{name}: {', '.join(found) or 'nothing'}"


EXAMPLES = {"reuse-index": reuse_index, "tuner": tuner, "explain": explain}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("example", choices=list(EXAMPLES))
    for line in EXAMPLES[parser.parse_args().example]():
        print(line)


if __name__ == "__main__":
    main()
