"""One memory for KV and states: SGLang's unified pool, as the cache sees it."""
