"""The import hook, before anything of SGLang's is imported."""

from sglang_hybrid.serving import patching

patching.install()
