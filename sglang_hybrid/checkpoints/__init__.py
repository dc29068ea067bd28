"""How states are taken inside a prefill: which, and by what kernels."""
