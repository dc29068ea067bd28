"""Training in several processes, one to a core, for a given time."""

from __future__ import annotations

import argparse
import math
import time
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer
from torch import Tensor, distributed, nn

from scripts.train.chats import Conversations, Sequence
from scripts.train.facts import collect
from scripts.train.model import NemotronH
from sglang_hybrid.extensions.cpu.models.architectures.nemotron_h import SIZES
from sglang_hybrid.extensions.cpu.models.tokenizer import VOCAB_SIZE, build_tokenizer
from sglang_hybrid.extensions.cpu.models.trained import keep

SHORT, LONG = (6, 256), (1, 2048)
"""Sequences and tokens of a step of one process; every fourth step is long."""
WARM_UP = 0.02


class Vocabulary:
    """The tokens that occur in what is learnt get a row each; all others are one absent token."""

    def __init__(self, tokenizer: Tokenizer, samples: list[Sequence]) -> None:
        self.ids = sorted({token for sample in samples for token in sample.tokens})
        self.rows = np.full(VOCAB_SIZE, len(self.ids))
        self.rows[self.ids] = np.arange(len(self.ids))

    def batch(self, sequences: list[Sequence]) -> tuple[Tensor, Tensor]:
        """Rows and which of them are answers, each [b, l]; answers without a row are not learnt."""
        rows = torch.from_numpy(self.rows[[each.tokens for each in sequences]])
        answered = torch.tensor([each.answered for each in sequences])
        return rows, answered & (rows < len(self.ids))


def train(rank: int, args: argparse.Namespace, meeting: Path) -> None:
    """One of the processes that train together, each on conversations of its own.

    They find each other by the file ``meeting``, which must not exist yet.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    place = f"file://{meeting}"
    distributed.init_process_group("gloo", place, rank=rank, world_size=args.processes)
    tokenizer = build_tokenizer()

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    facts = collect()
    seen = Conversations(facts, encode, seed=0, rare=False).sequences(256)
    vocabulary = Vocabulary(tokenizer, list(islice(seen, 8 * len(facts))))
    model = NemotronH(SIZES["tiny"], len(vocabulary.ids), VOCAB_SIZE - len(vocabulary.ids))
    optimizers = muon_and_adamw(model, args.rate)
    conversations = Conversations(facts, encode, seed=rank + 1)
    short, long = (conversations.sequences(length) for _, length in (SHORT, LONG))
    begin, step, tokens = time.monotonic(), 0, 0
    losses: list[float] = []
    columns = TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()
    with Progress(*columns, disable=rank > 0) as progress:
        task = progress.add_task("", total=1.0)
        while (done := _agreed((time.monotonic() - begin) / (60 * args.minutes))) < 1:
            rate = args.rate * min(1.0, done / WARM_UP, 1.02 - done)
            is_long = step % 4 == 3
            batch = list(islice(long if is_long else short, (LONG if is_long else SHORT)[0]))
            loss = model.loss(*vocabulary.batch(batch))
            loss.backward()
            _average_gradients(model)
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = rate
                optimizer.step()
                optimizer.zero_grad()
            step += 1
            tokens += sum(len(each.tokens) for each in batch) * args.processes
            losses = [*losses[-49:], loss.item()]
            if step % 50 == 0:
                text = f"{tokens / 1e6:.1f} M tokens, {sum(losses) / len(losses):.3f} nats"
                progress.update(task, completed=done, description=text)
            if step % 1000 == 0 and rank == 0:
                _write(model, vocabulary, args.output)
                print(f"{step} steps, {text}", flush=True)
    if rank == 0:
        _write(model, vocabulary, args.output)
        print(f"{step} steps, {tokens / 1e6:.1f} M tokens, {sum(losses) / len(losses):.3f} nats.")


def muon_and_adamw(model: nn.Module, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for all else."""
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.dim() == 2 and "layers" in name]
    others = [p for name, p in named if not (p.dim() == 2 and "layers" in name)]
    return [
        torch.optim.Muon(matrices, lr=rate, adjust_lr_fn="match_rms_adamw", weight_decay=0.01),
        torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def _agreed(done: float) -> float:
    """The same share of the time in every process: the largest."""
    value = torch.tensor(done)
    distributed.all_reduce(value, distributed.ReduceOp.MAX)
    return value.item()


def _average_gradients(model: NemotronH) -> None:
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    if not math.isfinite(flat.square().sum().item()):
        raise RuntimeError("The gradients are no longer finite; lower --rate.")
    distributed.all_reduce(flat)
    flat /= distributed.get_world_size()
    flat *= min(1.0, 1.0 / (flat.norm().item() + 1e-6))
    for gradient, mean in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(mean.view_as(gradient))


def _write(model: NemotronH, vocabulary: Vocabulary, file: Path) -> None:
    keep({n: value.numpy() for n, value in model.checkpoint().items()}, vocabulary.ids, file)
