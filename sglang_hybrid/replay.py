"""`python -m sglang_hybrid.replay`: what each policy would have been worth on a trace of requests
(extensions/lab).
"""

import sys

from sglang_hybrid.core.extensions import needs_extra

with needs_extra("lab"):
    from sglang_hybrid.extensions.lab.program import main

if __name__ == "__main__":
    sys.exit(main())
