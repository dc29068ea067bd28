"""SGLang with a prefix cache that suits hybrid (attention + state-space) language models."""

__version__ = "0.1.0"

SGLANG_VERSION = "0.5.23"
"""The one release of SGLang that this package extends; any other is refused at start-up."""
