"""Prompts that a client declares: schemas as Python functions (`python.py`), in SGLang's frontend
language (`frontend.py`), and the linter's command (`python -m sglang_hybrid.prompts`).
"""
