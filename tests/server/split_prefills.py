"""A checked server that splits prefills where they leave a state, as if its layers wrote none."""

from sglang_hybrid import launch_server  # first: its hook must see every import of SGLang

# isort: split
from sglang_hybrid.cache import factory
from tests.server import checked  # noqa: F401

factory.why_split = lambda model_runner: "a test wants it so"  # type: ignore[attr-defined]

if __name__ == "__main__":
    launch_server.command()
