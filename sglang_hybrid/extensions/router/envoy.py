"""The configuration of an Envoy proxy that asks our picker where each request goes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import psutil

from sglang_hybrid.extensions.router.choosing import divided
from sglang_hybrid.extensions.router.exchange import DESTINATION, MOST_BODY
from sglang_hybrid.extensions.router.picker import BODY_SECONDS, NOT_NORMAL, PATH

_FILTERS: Final = "envoy.extensions.filters.http"
_BALANCERS: Final = "envoy.extensions.load_balancing_policies"
_MONITORS: Final = "envoy.extensions.resource_monitors"
RETRIES: Final = 3  # servers that are tried after the first one
HEADER_SECONDS: Final = 10  # in which the headers of a request must have come
CONNECTIONS: Final = 10_000  # of clients at a time
STREAMS: Final = 100  # requests of a client at a time on one connection (HTTP/2)
NO_BOUND: Final = 1_000_000
"""Requests at a time to the picker and to the servers, beyond Envoy's own 1,024: clients that begin
requests and do not go on must not take the place of others. CONNECTIONS bounds them.
"""

_BREAKERS: Final = ("max_connections", "max_pending_requests", "max_requests", "max_retries")


def configuration(urls: Sequence[str], listen: str, picker: str) -> dict[str, Any]:
    """Envoy's bootstrap configuration: what it listens on, the servers, and where the picker is.

    urls: of the servers, as http://host:port, or as dns://host:port for a server at each address
    of the host. listen, picker: host:port.

    Where the picker cannot be asked or chooses nobody, requests go to the servers by turns. One
    that could not be sent to its server, or that got an answer with a header Retry-After, as those
    of a server that ends have it, goes to the next of the picker's list. A client cannot choose
    where its request goes, or how often Envoy tries. A request must come in time, and Envoy keeps
    no more of its body than MOST_BODY bytes.
    """
    asks = {
        "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}, "timeout": "60s"},
        "failure_mode_allow": True,
        "allow_mode_override": True,
        "message_timeout": "60s",
        "processing_mode": {"request_body_mode": "BUFFERED_PARTIAL", "response_body_mode": "NONE"},
    }
    no_destination = {"mutations": {"request_mutations": [{"remove": DESTINATION}]}}
    retries = {
        "retry_on": "connect-failure,refused-stream,reset-before-request,retriable-headers",
        "retriable_headers": [{"name": "retry-after", "present_match": True}],
        "num_retries": RETRIES,
    }
    to_servers = {
        "match": {"safe_regex": {"regex": PATH}},
        "route": {"cluster": "servers", "timeout": "0s", "retry_policy": retries},
        "request_body_buffer_limit": MOST_BODY,
    }
    refused = {
        "match": {"prefix": ""},
        "direct_response": {"status": 400, "body": {"inline_string": NOT_NORMAL}},
    }
    host = {"name": "all", "domains": ["*"], "routes": [to_servers, refused]}
    connections = {
        "stat_prefix": "requests",
        "use_remote_address": True,  # which also removes clients' instructions (x-envoy-...)
        "preserve_external_request_id": True,
        "path_with_escaped_slashes_action": "REJECT_REQUEST",
        "request_headers_timeout": f"{HEADER_SECONDS}s",
        "request_timeout": f"{BODY_SECONDS:.0f}s",
        "stream_idle_timeout": "0s",
        "http2_protocol_options": {"max_concurrent_streams": STREAMS},
        "route_config": {"virtual_hosts": [host]},
        "http_filters": [
            _typed("destination", f"{_FILTERS}.header_mutation.v3.HeaderMutation", no_destination),
            _typed("ext_proc", f"{_FILTERS}.ext_proc.v3.ExternalProcessor", asks),
            _typed("router", f"{_FILTERS}.router.v3.Router"),
        ],
    }
    manager = "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
    listener = {
        "name": "requests",
        "address": _address(listen),
        "enable_reuse_port": False,
        "filter_chains": [{"filters": [_typed("http", manager, connections)]}],
    }
    by_turns = _typed("round_robin", f"{_BALANCERS}.round_robin.v3.RoundRobin")
    as_picked = {
        "override_host_sources": [{"header": DESTINATION}],
        "fallback_policy": {"policies": [{"typed_extension_config": by_turns}]},
    }
    balancer = _typed("override_host", f"{_BALANCERS}.override_host.v3.OverrideHost", as_picked)
    servers = {
        **_cluster("servers", [urlsplit(url).netloc for url in urls]),
        "load_balancing_policy": {"policies": [{"typed_extension_config": balancer}]},
        "health_checks": [
            {
                "timeout": "5s",
                "interval": "2s",
                "unhealthy_threshold": 3,
                "healthy_threshold": 1,
                "http_health_check": {"path": "/health"},
            }
        ],
    }
    http2: dict[str, Any] = {"explicit_http_config": {"http2_protocol_options": {}}}
    options = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
    protocol = {options: {"@type": f"type.googleapis.com/{options}", **http2}}
    clusters = [
        servers,
        {**_cluster("picker", [picker]), "typed_extension_protocol_options": protocol},
    ]
    return {
        "static_resources": {"listeners": [listener], "clusters": clusters},
        "overload_manager": _overload(),
    }


def _overload() -> dict[str, Any]:
    """The actions of Envoy before it takes more than half of the memory: it gives back what is
    free, resets the largest requests (HTTP/2), and at last takes no new ones.
    """
    heap, clients = "envoy.resource_monitors.fixed_heap", "global_downstream_max_connections"

    def action(name: str, **trigger: Any) -> dict[str, Any]:
        return {"name": f"envoy.overload_actions.{name}", "triggers": [{"name": heap, **trigger}]}

    scaled = {"scaling_threshold": 0.85, "saturation_threshold": 0.95}
    return {
        "refresh_interval": "0.25s",
        "buffer_factory_config": {"minimum_account_to_track_power_of_two": 20},
        "resource_monitors": [
            _typed(
                heap,
                f"{_MONITORS}.fixed_heap.v3.FixedHeapConfig",
                {"max_heap_size_bytes": _memory() // 2},
            ),
            _typed(
                f"envoy.resource_monitors.{clients}",
                f"{_MONITORS}.downstream_connections.v3.DownstreamConnectionsConfig",
                {"max_active_downstream_connections": CONNECTIONS},
            ),
        ],
        "actions": [
            action("shrink_heap", threshold={"value": 0.8}),
            action("reset_high_memory_stream", scaled=scaled),
            action("stop_accepting_requests", threshold={"value": 0.98}),
        ],
    }


def _memory() -> int:
    """Bytes of the machine or, if that is less, of this container (cgroup v2)."""
    total = int(psutil.virtual_memory().total)
    with suppress(OSError, ValueError):  # there is no limit
        return min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return total


def _typed(name: str, kind: str, fields: dict[str, Any] | None = None) -> dict[str, Any]:
    """One of Envoy's extensions, with its configuration."""
    content = {"@type": f"type.googleapis.com/{kind}", **(fields or {})}
    return {"name": name, "typed_config": content}


def _cluster(name: str, hosts: Sequence[str]) -> dict[str, Any]:
    endpoints = [{"endpoint": {"address": _address(host)}} for host in hosts]
    return {
        "name": name,
        "type": "STRICT_DNS",
        "connect_timeout": "2s",
        "circuit_breakers": {"thresholds": [dict.fromkeys(_BREAKERS, NO_BOUND)]},
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]},
    }


def _address(address: str) -> dict[str, Any]:
    host, port = divided(address)
    return {"socket_address": {"address": host, "port_value": port}}
