"""Where real traffic lies, if this machine has it: beside the repository, in ../shared/traces."""

from pathlib import Path

TRACES = Path(__file__).parents[2] / "shared" / "traces"
