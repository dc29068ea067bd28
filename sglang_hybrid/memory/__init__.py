"""One memory for KV and states: the account of its bytes, the pages behind them, SGLang's allocators
on top."""
