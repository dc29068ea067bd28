"""A checked server that splits prefills where they leave a state, as if its layers wrote none."""

from tests.server import checked  # first: it sees every import of SGLang

# isort: split
from sglang_hybrid.cache import factory

factory.why_split = lambda model_runner: "a test wants it so"

if __name__ == "__main__":
    checked.launch_server.command()
