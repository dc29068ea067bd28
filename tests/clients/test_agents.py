"""Coding agents that npm installs, as their users start them: a conversation of three turns, and
two further ones in the same folder.

Each that passes has its row in the second table of docs/clients.md written anew.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.clients.conftest import NODE, ROOT
from tests.server.client import Serve, flush, hybrid_cache
from tests.tables import table

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

PAGE = ROOT / "docs" / "clients.md"
ASKED = ["Say hello 1", "Say hello 2", "Say hello 3", "Where is lantern 4?", "What is in room 5?"]
CONTINUED = (1, 2)
"""Questions of ASKED that are asked in the conversation of the one before."""

ANSWER_TOKENS = "64"


@dataclass(frozen=True)
class Agent:
    """A coding agent.

    name, command: as users know it, and what they type for a question in a new conversation.
    again: the same in the latest one. environment, files: what it is told, the latter by their
    names in its home; `SERVER` stands for the server. settled: the first turn that is compared with
    the one before; an agent may rewrite the first message once.
    """

    name: str
    command: list[str]
    again: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    settled: int = 1


_OPENCODE = {
    "model": "local/default",
    "small_model": "local/default",
    "provider": {
        "local": {
            "npm": "@ai-sdk/openai-compatible",
            "name": "local",
            "options": {"baseURL": "SERVER/v1"},
            "models": {
                "default": {
                    "name": "default",
                    "limit": {"context": 30_000, "output": int(ANSWER_TOKENS)},
                }
            },
        }
    },
}
_CODEX = """\
model = "default"
model_provider = "local"

[model_providers.local]
name = "local"
base_url = "SERVER/v1"
wire_api = "responses"
"""
AGENTS = [
    Agent(
        "Claude Code",
        ["claude", "-p"],
        ["claude", "--continue", "-p"],
        {
            "ANTHROPIC_BASE_URL": "SERVER",
            "ANTHROPIC_AUTH_TOKEN": "none",
            "ANTHROPIC_MODEL": "default",
            "ANTHROPIC_SMALL_FAST_MODEL": "default",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": ANSWER_TOKENS,
        },
    ),
    Agent(
        "Codex",
        ["codex", "exec", "--skip-git-repo-check"],
        ["codex", "exec", "resume", "--last", "--skip-git-repo-check"],
        files={".codex/config.toml": _CODEX},
    ),
    Agent(
        "opencode",
        ["opencode", "run"],
        ["opencode", "run", "--continue"],
        files={"project/opencode.json": json.dumps(_OPENCODE)},
    ),
    Agent(
        "Qwen Code",
        ["qwen", "--auth-type", "openai", "-p"],
        ["qwen", "--auth-type", "openai", "--continue", "-p"],
        {
            "OPENAI_API_KEY": "none",
            "OPENAI_BASE_URL": "SERVER/v1",
            "OPENAI_MODEL": "default",
            "QWEN_CODE_MAX_OUTPUT_TOKENS": ANSWER_TOKENS,
        },
        settled=2,
    ),
]


@pytest.fixture(scope="module")
def trained(serve: Serve) -> Iterator[str]:
    """A server of the model that ends its answers."""
    with serve("--enable-cache-report", of="trained") as server:
        yield server.url


@pytest.fixture(scope="module")
def rows() -> Iterator[dict[str, list[str]]]:
    turns = ("first turn", "second", "third", "another conversation", "a third one")
    order = [agent.name for agent in AGENTS]
    with table(PAGE, "agents", ("client", "version", *turns), order) as found:
        yield found


def at_home(agent: Agent, url: str, home: Path) -> Callable[[list[str]], str]:
    """Runs a command in a folder of its own, as a user who has nothing but the agent's settings."""
    (home / "project").mkdir()
    for name, content in agent.files.items():
        (home / name).parent.mkdir(exist_ok=True)
        (home / name).write_text(content.replace("SERVER", url))
    said = {name: value.replace("SERVER", url) for name, value in agent.environment.items()}
    path = f"{NODE / 'node_modules' / '.bin'}:{os.environ['PATH']}"
    environment = {"PATH": path, "HOME": str(home), "LANG": "C.UTF-8", **said}

    def run(command: list[str]) -> str:
        done = subprocess.run(
            command,
            cwd=home / "project",
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
        return done.stdout

    return run


@pytest.mark.usefixtures("node_clients")
@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.name)
def test_a_turn_reads_the_one_before_it(
    agent: Agent, trained: str, tmp_path: Path, rows: dict[str, list[str]]
) -> None:
    """Tokens are the server's count of all requests of a turn. Of the conversation so far nine
    tenths at least are hit, and of a new one three quarters: Claude Code repeats a fifth of its
    prompt behind the question.
    """
    run = at_home(agent, trained, tmp_path)
    found = re.search(r"\d+(\.\d+)+", run([agent.command[0], "--version"]))
    assert found is not None
    flush(trained)
    sent, hit = [], []
    for number, question in enumerate(ASKED):
        before = hybrid_cache(trained)
        run([*(agent.again if number in CONTINUED else agent.command), question])
        after = hybrid_cache(trained)
        sent.append(after["prompt_tokens"] - before["prompt_tokens"])
        hit.append(after["hit_tokens"] - before["hit_tokens"])

    for turn in range(agent.settled, len(CONTINUED) + 1):
        assert hit[turn] >= 0.9 * sent[turn - 1]
    assert hit[-1] >= 0.75 * sent[-1]
    cells = [f"{part:,} of {whole:,}" for part, whole in zip(hit, sent, strict=True)]
    rows[agent.name] = [agent.name, found[0], *cells]
