"""One memory for KV and states: the pages behind it, and SGLang's allocators on top."""
