#!/usr/bin/env bash
# Makes site/, a folder of the pages in docs/ and of the docstrings' API, or fails if a link is broken.
# Open site/index.html, or, to see changes as they are made: scripts/docs.sh serve --livereload
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/env.sh
ensure_environment test
# The theme's only fixes until May 2027 are critical ones. Zensical, its successor, takes no hooks yet.
export NO_MKDOCS_2_WARNING=1
exec "$VENV/bin/mkdocs" "${@:-build}"
