"""The order of waiting requests: the orders of `core` on SGLang's queue."""
