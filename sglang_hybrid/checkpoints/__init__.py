"""States that are taken inside a prefill, and the kernels that take them."""
