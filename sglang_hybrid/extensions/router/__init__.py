"""Several servers: what the cache of each one holds, and which of them should get a prompt.

    python -m sglang_hybrid.replicas watch http://a:30000 http://b:30000 --admin-api-key @FILE

prints once a second what each server holds, `route` instead of `watch` sends requests on to them,
and `serve --n 2` starts servers, too. In a router of your own:

    replicas = Replicas(["http://a:30000", "http://b:30000"], admin_key=KEY)
    choice = replicas.choose(token_ids, tenant_name(extra_key, cache_salt, record_key))
    ...                                      # send the request to choice.replica
    replicas.on_answer(choice, cached_tokens)  # at its first token, or when it has failed

Servers need `--kv-events-config`. This room imports neither torch nor sglang.
"""

from sglang_hybrid.core.records.tenant_names import tenant_name
from sglang_hybrid.extensions.router.choosing import Choice, Replicas
from sglang_hybrid.extensions.router.follower import Follower
from sglang_hybrid.extensions.router.index import ReplicaIndex
from sglang_hybrid.extensions.router.resumable import Resumable

__all__ = ["Choice", "Follower", "ReplicaIndex", "Replicas", "Resumable", "tenant_name"]
