"""Checks of what a request asks for, before it reaches a scheduler, which it could end.

A request that is refused gets one sentence that names the field, its value and what it may be.
These are ValueErrors: SGLang's HTTP endpoints answer them with status 400 and an `sglang.Engine`
raises them (patch 0015).
"""
