"""A model as a server's scheduler runs it, without the server."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def load(directory: Path, flags: Sequence[str]) -> Any:
    """SGLang's runner of a model, without prefix cache and scheduler."""
    from sglang.benchmark import one_batch
    from sglang.srt.plugins import load_plugins
    from sglang.srt.runtime_context import SpawnRanks, publish, spawn_world_rank
    from sglang.srt.server_args import PortArgs, prepare_server_args

    load_plugins()
    arguments = prepare_server_args(
        [
            *("--model-path", str(directory), "--disable-radix-cache", "--log-level", "error"),
            *("--disable-overlap-schedule", "--mamba-radix-cache-strategy", "no_buffer", *flags),
        ]
    )
    arguments.resolve_once()
    rank = spawn_world_rank(arguments, tp_rank=0, pp_rank=0)
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=rank, gpu_id=0))
    one_batch._init_process_global_configs()
    runner, _ = one_batch.load_model(arguments, PortArgs.init_new(arguments), 0, 0)
    logging.disable(logging.INFO)
    return runner


def requests(count: int, length: int) -> list[Any]:
    """Requests of random tokens."""
    import torch
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    greedy = SamplingParams(temperature=0, max_new_tokens=1000)
    found = []
    for index in range(count):
        ids = array("q", torch.randint(300, 30000, (length,)).tolist())
        request = Req(str(index), "", ids, greedy)
        request.full_untruncated_fill_ids = request.origin_input_ids
        request.logprob_start_len = -1
        request.extend_end = length
        found.append(request)
    return found
