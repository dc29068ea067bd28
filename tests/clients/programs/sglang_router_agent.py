"""sglang-router in front: what openai's client asks, through it; and two tenants."""

import sys
import uuid
from typing import Any

import openai
import openai_agent
from common import QUESTIONS, RULES, main
from litellm_proxy import free_port, running


def check_tenants(url: str) -> None:
    """The router's chat route drops fields that it does not know, and keeps this header."""
    client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
    first, second = uuid.uuid4().hex, uuid.uuid4().hex
    cached = []
    for tenant in (first, first, second):
        usage = client.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": RULES + QUESTIONS[0]}],
            max_tokens=1,
            extra_headers={"X-Request-Id-Hybrid-Tenant": tenant},
        ).usage
        cached.append(usage.prompt_tokens_details.cached_tokens)
    assert cached == [0, usage.prompt_tokens - 1, 0], cached


def ask_through_router(url: str) -> dict[str, Any]:
    port = free_port()
    command = [
        *(sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1"),
        *("--port", str(port), "--worker-urls", url, "--policy", "cache_aware"),
        *("--prometheus-port", str(free_port())),
    ]
    # It is healthy before it has a server to ask, and ready after.
    with running(command, port, "/readiness") as router:
        check_tenants(router)
        return openai_agent.run(router)


if __name__ == "__main__":
    main("sglang-router", ask_through_router)
