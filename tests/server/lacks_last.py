"""A server whose live state lacks the last token of each prefill; for a test that must see it."""

from itertools import pairwise

from sglang_hybrid import launch_server
from sglang_hybrid.extensions.cpu.ops import mamba2
from sglang_hybrid.kernels.ssd import ssd_prefill


def without_last(*arguments, positions, **more):
    bounds = arguments[5]
    lengths = [end - begin for begin, end in pairwise(bounds)]
    before = [(sequence, length - 1) for sequence, length in enumerate(lengths)]
    done = ssd_prefill(*arguments, positions=[*positions, *before], **more)
    asked = len(positions)
    return done._replace(states_at=done.states_at[:asked], final_states=done.states_at[asked:])


mamba2.ssd_prefill = without_last  # type: ignore[attr-defined]

if __name__ == "__main__":
    launch_server.main()
