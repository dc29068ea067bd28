"""The description that a package index shows: README.md, with links that lead somewhere there.

pyproject.toml has everything else. An index knows no files beside the description. Where
`Repository` in `[project.urls]` says where this repository is published, relative links and
pictures of README.md lead there, to the tag of this version; without it pictures are left out, and
a link is its text.
"""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
PICTURE = re.compile(r"!\[([^\]]*)\]\((?![a-z]+:)([^)]+)\)")
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?![a-z]+:|#)([^)]+)\)")
VERSION = re.compile(r'^__version__ = "(.+)"$', re.MULTILINE)


def description(readme: str, repository: str | None, version: str) -> str:
    """The text of README.md with absolute links and pictures, or without any relative one."""
    if repository is None:
        return LINK.sub(r"\1", PICTURE.sub("", readme))
    files = f"{repository.rstrip('/')}/%s/v{version}/"
    readme = PICTURE.sub(rf"![\1]({files % 'raw'}\2)", readme)
    return LINK.sub(rf"[\1]({files % 'blob'}\2)", readme)


if __name__ == "__main__":
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (version,) = VERSION.findall((ROOT / "sglang_hybrid" / "__init__.py").read_text())
    setup(
        long_description=description(
            (ROOT / "README.md").read_text(), project.get("urls", {}).get("Repository"), version
        ),
        long_description_content_type="text/markdown",
    )
