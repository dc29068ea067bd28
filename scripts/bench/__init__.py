"""The benchmarks: what `commands.COMMANDS` names, and what several of them share.

A subcommand of scripts/bench.py is a function that measures and prints Markdown. `commands` makes
its options and its help of its signature and its docstring.

Shared: `report` (tables, and the line above them), `servers` (starting and asking servers),
`traffic` (sending a trace to a server), `measured` (servers on a trace, and the bytes that they
have), `traces` (reading and making traces, and rules of replays), `results` (the pages of
docs/results, and the subcommand that makes them again), `figure` (README's figure of them).
"""
