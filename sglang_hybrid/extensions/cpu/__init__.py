"""Serving on the CPU, without Intel's own kernels: a platform of SGLang, and models to serve."""
