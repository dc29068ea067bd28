"""SGLang with a prefix cache that suits hybrid (attention + state-space) language models."""

__version__ = "0.1.0"

SGLANG_VERSION = "0.5.23"
"""The release of SGLang that this package is made for: patches are cut from it."""

SGLANG_VERSIONS = (SGLANG_VERSION, "0.5.22")
"""All releases that this package extends; any other is refused at start-up."""
