"""Checks of requests and mends of SGLang's server that its cache does not need: a server is right
without them, and ends where SGLang alone would (`SGLANG_HYBRID_GUARD=off`).

A request that is refused gets one sentence that names the field, its value and what it may be.
These are ValueErrors: SGLang's HTTP endpoints answer them with status 400 and an `sglang.Engine`
raises them (patch 0015).
"""
