"""Completes what a trace of whole blocks does not tell: a prompt's last tokens, and the answer.

Mooncake names the blocks of 512 tokens that a prompt is made of. The tokens of a request beyond its
last full block are seen only in the prompt that continues it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from hashlib import blake2b

import numpy as np

from sglang_hybrid.core.traffic.requests import Request, in_runs


def stitched(requests: Sequence[Request], block: int = 512) -> list[Request]:
    """`requests` [n] in order of arrival, whose unknown tokens are those of the first later prompt
    that begins with all their full blocks and is known beyond their end; where there is none, they
    stay as they are.

    Cost: a hash of every full block.
    """
    done = list(requests)
    later: dict[bytes, list[int]] = {}  # by the digest of a prefix of full blocks, latest first
    for at in range(len(done) - 1, -1, -1):
        request = done[at]
        digests = list(_digests(request, block))
        known, end = len(digests) * block, len(request.tokens)
        for follower in reversed(later.get(digests[-1], []) if digests else []):
            if done[follower].input_len // block * block >= end:
                own = done[follower].tokens[known:end]
                tokens = np.concatenate([request.tokens[:known], own])
                done[at] = replace(request, kept=in_runs(tokens))
                break
        for digest in digests:
            same = later.setdefault(digest, [])
            while same and done[same[-1]].input_len // block * block <= known:
                same.pop()  # it comes later than this one and is not known further
            same.append(at)
    return done


def _digests(request: Request, block: int) -> Iterator[bytes]:
    """The digest of each prefix of full blocks of the prompt."""
    running = blake2b(digest_size=16)
    for end in range(block, request.input_len + 1, block):
        running.update(request.tokens[end - block : end].tobytes())
        yield running.digest()
