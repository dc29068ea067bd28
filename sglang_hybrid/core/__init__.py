"""Decisions of a cache: costs, candidates, victims, reuse, admission. Imports neither torch nor
sglang.

Why a state was taken, and why it is kept, is in six files, to be read in this order:

1. ``checkpoints/admission.py``: which positions of a prefill get a state.
2. ``costs/cost.py``: what a hit at a position saves (FLOPs), and what its entry takes (bytes).
3. ``records/nodes.py``: what is known of a node of the cache's tree.
4. ``returns/reuse.py``: how likely a request is to resume there, while it is kept.
5. ``victims/eviction.py``: from these a score; one class for each policy.
6. ``victims/pool.py``: the lowest score of all candidates is the victim.
"""
