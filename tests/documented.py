"""The commands that README and the other pages show."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "patches/README.md", "docker/README.md"]
PAGES += sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))

_FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_COMMAND = re.compile(
    r"(?:[A-Z_]+=\S+ +)*(?:python3? |pip |curl |docker |source |scripts/\w+\.(?:py|sh)\b)"
)


def commands() -> dict[str, str]:
    """Every command, of a block or within a sentence, and the page that shows it."""
    found: dict[str, str] = {}
    for page in PAGES:
        text = (ROOT / page).read_text()
        shown = [
            line.removeprefix("$ ")
            for language, block in _FENCED.findall(text)
            if language != "python"
            for line in re.sub(r"\\\n\s*", "", block).splitlines()
        ]
        shown += re.findall(r"`([^`]+)`", _FENCED.sub("", text))
        for one in shown:
            command = " ".join(re.sub(r"\s+# .*", "", one).split())
            if _COMMAND.match(command):
                found.setdefault(command, page)
    return found


def python_blocks(page: str) -> list[str]:
    """The Python programs of a page."""
    blocks = _FENCED.findall((ROOT / page).read_text())
    return [block for language, block in blocks if language == "python"]
