"""Which waiting request runs next: the orders of `core` on SGLang's queue."""
