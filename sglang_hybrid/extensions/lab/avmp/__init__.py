"""The allocators of the AVMP paper (arXiv 2605.22416) on its four workloads, beside ours.

They count memory of *running* requests: nothing is cached, and an eviction takes what a running
request needs. Workloads, allocators and counting follow the authors' simulator, cachepawl
0.2.0a2; times are ticks of one decoding step.
"""
