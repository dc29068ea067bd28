"""Several servers: what their caches hold, which of them should get a prompt, and a router in front
of them: `python -m sglang_hybrid.replicas`, and for routers of others `Replicas`
(extensions/router).
"""

import sys

from sglang_hybrid.core.extensions import needs_extra

with needs_extra("router"):
    from sglang_hybrid.extensions.router import (
        Choice,
        Follower,
        ReplicaIndex,
        Replicas,
        Resumable,
        tenant_name,
    )

__all__ = ["Choice", "Follower", "ReplicaIndex", "Replicas", "Resumable", "tenant_name"]

if __name__ == "__main__":
    with needs_extra("router"):
        from sglang_hybrid.extensions.router.program import main

    sys.exit(main())
