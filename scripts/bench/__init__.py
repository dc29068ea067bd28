"""The benchmarks. A module is a subcommand of scripts/bench.py, or what several of them share.

A subcommand has `arguments(parser)`, which adds its options, and `run(options)`, which measures and
prints Markdown. It returns an exit status, or None for success.

Shared: `report` (tables, and the line above them), `servers` (starting and asking servers),
`traffic` (sending a trace to a server, and what is measured beside it), `measured` (one server's
result on a trace), `traces` (reading and making traces, and the options for it), `results` (the
pages of docs/results, and the subcommand that makes them again).
"""
