"""The configuration of an Envoy proxy that asks our picker where each request goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import urlsplit

from sglang_hybrid.replicas.choosing import divided
from sglang_hybrid.replicas.picker import DESTINATION

_FILTERS: Final = "envoy.extensions.filters.http"
_BALANCERS: Final = "envoy.extensions.load_balancing_policies"
RETRIES: Final = 3  # servers that are tried after the first one

LONGEST_BODY: Final = 272 << 20
"""Bytes of the longest request: more than a server takes (serving/requests/long_requests.py)."""


def configuration(urls: Sequence[str], listen: str, picker: str) -> dict[str, Any]:
    """Envoy's bootstrap configuration: what it listens on, the servers, and where the picker is.

    urls: of the servers, as http://host:port, or as dns://host:port for a server at each address
    of the host. listen, picker: host:port.

    Where the picker cannot be asked or chooses nobody, requests go to the servers by turns. One
    that could not be sent to its server goes to the next of the picker's list. What a client says
    of where its request goes has no effect.
    """
    asks = {
        "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}, "timeout": "60s"},
        "failure_mode_allow": True,
        "allow_mode_override": True,
        "message_timeout": "60s",
        "processing_mode": {"request_body_mode": "BUFFERED", "response_body_mode": "NONE"},
    }
    no_destination = {"mutations": {"request_mutations": [{"remove": DESTINATION}]}}
    retries = {
        "retry_on": "connect-failure,refused-stream,reset-before-request",
        "num_retries": RETRIES,
    }
    to_servers = {
        "match": {"prefix": "/"},
        "route": {"cluster": "servers", "timeout": "0s", "retry_policy": retries},
        "request_body_buffer_limit": LONGEST_BODY,
    }
    host = {"name": "all", "domains": ["*"], "routes": [to_servers]}
    connections = {
        "stat_prefix": "requests",
        "stream_idle_timeout": "0s",
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
        "per_connection_buffer_limit_bytes": LONGEST_BODY,
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
    return {"static_resources": {"listeners": [listener], "clusters": clusters}}


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
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]},
    }


def _address(address: str) -> dict[str, Any]:
    host, port = divided(address)
    return {"socket_address": {"address": host, "port_value": port}}
