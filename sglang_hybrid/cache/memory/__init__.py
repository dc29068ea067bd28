"""One memory for KV and states: the account of its bytes, the pages behind them, and SGLang's
allocators on top.
"""
