"""A server that takes every state of a prefill one token too early; for a test that must see it."""

from dataclasses import replace

from sglang_hybrid import launch_server
from sglang_hybrid.checkpoints import planner
from sglang_hybrid.checkpoints.tracks import StateTracks

right = planner._tracks


def one_too_early(tracked: list) -> StateTracks | None:
    tracks = right(tracked)
    return tracks and replace(tracks, positions=[at - 1 for at in tracks.positions])


planner._tracks = one_too_early

if __name__ == "__main__":
    launch_server.main()
