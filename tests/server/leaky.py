"""A server whose kept states have read one drafted token too many, for a test that must see it.

`LEAK` in the environment says where: `kept`, the states that a decode leaves on its way, or `live`,
those that requests go on from.
"""

import os

import sglang.srt.platforms  # noqa: F401 (registers what the platform binds, before the leak)
import torch
import wrapt

from sglang_hybrid import launch_server
from sglang_hybrid.extensions.cpu.ops import draft_steps

right = draft_steps.scatter_accepted_states
LEAK = os.environ["LEAK"]


def one_too_many(caches, slots, nodes, tracked, steps, **more):
    last = caches.temporal.new_tensor(caches.intermediate_ssm.shape[2] - 1).long()
    if LEAK == "live":
        nodes = torch.minimum(nodes.long() + 1, last)
    elif steps is not None:
        steps = torch.where(steps >= 0, torch.minimum(steps.long() + 1, last), steps.long())
    right(caches, slots, nodes, tracked, steps, **more)


def leak(module):
    module.scatter_mamba_states_after_mtp_verify = one_too_many


wrapt.register_post_import_hook(leak, "sglang.kernels.ops.mamba.mamba_state_scatter_triton")

if __name__ == "__main__":
    launch_server.main()
