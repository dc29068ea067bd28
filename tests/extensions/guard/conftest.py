"""The import hook, before anything of SGLang's is imported."""

from sglang_hybrid.hooks import patching

patching.install()
