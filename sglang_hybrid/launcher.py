"""The first process of `python -m sglang_hybrid.launch_server`: checks a command line, starts the
server, and ends it.
"""

import argparse
import logging
import os
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Never

import yaml

from sglang_hybrid.core.extensions import extension, guard
from sglang_hybrid.core.named_files import read_text
from sglang_hybrid.core.programs import Parser, versions
from sglang_hybrid.core.sentences import escape
from sglang_hybrid.hooks import patching
from sglang_hybrid.serving.startup import (
    STARTUP_ERROR,
    StartupError,
    cannot_start,
    fail,
    failure,
    one_line,
    private_files,
)

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

    from sglang_hybrid.serving.config import HybridConfig

PROGRAM = "sglang_hybrid"
NAME = f"python -m {PROGRAM}.launch_server"
ABOUT = """`sglang.launch_server` with what this package adds.

Takes every flag of SGLang. Without --model-path it serves the embedded default model; without an
accelerator it serves on the CPU.
"""
USAGE_ERROR = 2
CONFIG = "--config"
LONGEST_CONFIG = 1 << 16
"""Bytes of a file of flags."""
INTERRUPTED = 128 + signal.SIGINT

logger = logging.getLogger(PROGRAM)


class _Parser(Parser):
    """A parser whose errors are one line, without SGLang's hundreds of lines of usage."""

    def error(self, message: str) -> Never:
        self.exit(USAGE_ERROR, f"{PROGRAM}: {escape(message)}; --help all lists every flag.\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the server until it is stopped; returns the process's exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    _choose_device(arguments)
    from sglang_hybrid.hooks.hook import HookError
    from sglang_hybrid.hooks.sources import UnsupportedSGLang, check_sglang_version

    try:
        check_sglang_version()
        patching.verify()
        server_args = prepare(arguments)
    except (StartupError, UnsupportedSGLang, patching.PatchError, HookError) as error:
        return fail(str(error))
    except OSError as error:  # a path in a folder that this user may not enter, for example
        return fail(cannot_start(error))
    return run(server_args)


def command() -> Never:
    """`main` as a program."""
    try:
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        status = main()
    except KeyboardInterrupt:  # before there are other processes, maybe within an import
        sys.stdout.flush()
        os._exit(INTERRUPTED)
    shutdown = guard("shutdown")
    if shutdown is not None:
        shutdown.leave(status)
    sys.exit(status)


def prepare(argv: Sequence[str]) -> "ServerArgs":
    """Parse and check a command line; raises `StartupError` for what is known to fail."""
    from sglang_hybrid.serving.config import HybridConfig

    try:
        HybridConfig.from_environment()
    except ValueError as error:  # each plugin would fail at it
        raise StartupError(str(error).removeprefix(f"{PROGRAM}: ")) from None
    _check_early(argv)

    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs, prepare_server_args

    from sglang_hybrid.serving import preflight
    from sglang_hybrid.serving.backend import check_disk, choose_backend, choose_schedule
    from sglang_hybrid.serving.devices import serves_on_cpu
    from sglang_hybrid.serving.host_memory import memory_available
    from sglang_hybrid.serving.preflight import HOST_RESERVE
    from sglang_hybrid.serving.requests.secrets import SECRETS, read_key

    load_plugins()
    parser = _parser()
    ServerArgs.add_cli_args(parser)
    if CONFIG in argv:
        from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger

        try:
            argv = ConfigArgumentMerger(parser).merge_config_with_args(list(argv))
        except (OSError, ValueError) as error:
            raise StartupError(f"--config cannot be read: {error}.") from None
    argv, note = _with_default_model(list(argv))
    flags = parser.parse_args(argv)
    if note:
        print(f"{PROGRAM}: {note}", flush=True)
    options, sglang_argv = _check(flags, argv)
    if serves_on_cpu():
        extension("cpu.flags").check_flags(flags)
        extension("cpu.sizing").check_memory(
            flags.model_path, flags.dtype, flags.max_total_tokens, flags.max_mamba_cache_size
        )
    if flags.enable_hierarchical_cache and flags.hicache_size:
        ranks = max(1, flags.tp_size * flags.pp_size // flags.nnodes)
        free = (memory_available() - HOST_RESERVE) / ranks
        asked = f"--hicache-size {flags.hicache_size}"
        preflight.check_host_room(asked, flags.hicache_size * 1e9, free)
    check_disk(flags, options)
    for name, instead in options.overrides(os.environ).items():
        print(
            f"{PROGRAM}: {name}={os.environ[name]} is for sglang.Engine and has no effect on "
            f"this launcher; give {instead}.",
            flush=True,
        )
    options.to_environment()
    sglang_argv += choose_schedule(flags, options) + choose_backend(flags, options)
    try:
        server_args = prepare_server_args(sglang_argv)
        for name in SECRETS:
            setattr(server_args, name, read_key(getattr(server_args, name)))
    except (ValueError, AssertionError, OSError) as error:
        raise StartupError(cannot_start(error)) from error
    return server_args


def _check_early(argv: Sequence[str]) -> None:
    """Say what is known to be wrong, or what `--help` or `--version` print. Imports no SGLang but
    for `--help all`.
    """
    from sglang_hybrid.serving import command_line
    from sglang_hybrid.serving.config import HybridConfig
    from sglang_hybrid.serving.devices import is_ours

    early = _Parser(
        prog=NAME,
        usage=f"{NAME} [--model-path DIRECTORY] [--port PORT] [FLAG ...]",
        description=ABOUT,
        epilog="Every flag of SGLang is taken, too: --help all prints them, in some seconds.",
        formatter_class=partial(argparse.HelpFormatter, width=100, max_help_position=34),
        add_help=False,
        allow_abbrev=False,
    )
    HybridConfig.add_flags(early, brief=True)
    early.add_argument("--version", action="version", version=versions(), help="of both packages")
    early.add_argument(
        *("-h", "--help"),
        nargs="?",
        const="ours",
        choices=["ours", "all"],
        metavar="all",
        help="print this, or all flags, SGLang's too",
    )
    asked = early.parse_known_args(argv)[0].help
    if asked == "all":
        parser = _parser()
        command_line.add_sglang_flags(parser)
        parser.print_help()
        parser.exit()
    if asked:
        early.print_help()
        early.exit()
    ours = set(early._option_string_actions)
    unknown = command_line.misspelt(argv, ours, command_line.sglang_flags())
    if unknown:
        early.error(f"unrecognized arguments: {unknown}")
    for word in argv:
        name, equals, _ = word.partition("=")
        if name in ("--conf", "--confi") or (name == CONFIG and equals):
            raise StartupError(
                f"{word}: SGLang reads no file that is named so, and would leave out its flags; "
                f"write {CONFIG} FILE, the flag in full and the file as the next word."
            )
    command_line.add_checked_flags(early)
    early.allow_abbrev = True  # SGLang's parser, which knows more flags, may still refuse it
    if CONFIG in argv:  # SGLang reads that file, and it may name the model
        _check_config(argv[argv.index(CONFIG) + 1 :])
        return
    argv = _with_default_model(list(argv))[0]
    flags = early.parse_known_args(argv)[0]
    _check(flags, argv)
    if is_ours():
        extension("cpu.flags").check_flags(flags)


def _check_config(behind: Sequence[str]) -> None:
    """Raise `StartupError` if the file of flags that is named first cannot be read. Where SGLang
    reads it, a pipe would be waited for and a mistake be a traceback.
    """
    try:
        for file in behind[:1]:
            yaml.safe_load(read_text(Path(file), LONGEST_CONFIG))
    except Exception as error:  # YAML has errors of its own
        raise StartupError(f"--config cannot be read: {one_line(error)}.") from None


def _check(flags: argparse.Namespace, argv: Sequence[str]) -> tuple["HybridConfig", list[str]]:
    """Raise `StartupError` for what is known to fail whatever SGLang says; our part of a command
    line and SGLang's.

    flags: those of SGLang that are checked.
    """
    from sglang_hybrid.serving import preflight
    from sglang_hybrid.serving.backend import has_recurrent_state
    from sglang_hybrid.serving.config import HybridConfig

    preflight.check(flags)
    try:
        options, sglang_argv = HybridConfig.split(argv)
    except ValueError as error:
        raise StartupError(str(error)) from None
    preflight.check_tenants(flags, options.hybrid_tenants)
    counted = 1 if flags.disable_radix_cache else preflight.SLOTS_PER_REQUEST
    counted = options.hybrid_slots_per_request or counted
    states = has_recurrent_state(flags.model_path)
    preflight.check_pools(
        flags.max_total_tokens, flags.max_mamba_cache_size, counted if states else 0
    )
    if options.hybrid_record:
        trace_file = extension("lab.simulation.tuner.trace_file")
        try:
            trace_file.check(Path(options.hybrid_record))
        except trace_file.RecordingError as error:
            raise StartupError(f"--hybrid-record: {error}") from None
    if options.hybrid_prewarm:
        try:
            extension("schemas.endpoints.warm_file").read_lines(Path(options.hybrid_prewarm))
        except ValueError as error:
            raise StartupError(f"--hybrid-prewarm: {error}") from None
    return options, sglang_argv


def _parser() -> _Parser:
    """A parser of our flags, for SGLang's to be added."""
    from sglang_hybrid.serving.config import HybridConfig

    parser = _Parser(prog=NAME, description=ABOUT)
    parser.add_argument("--version", action="version", version=versions())
    HybridConfig.add_flags(parser)
    return parser


def run(server_args: "ServerArgs") -> int:
    """Serve until stopped, then end every process that was started.

    SIGTERM ends a server that serves with status 0, one that still starts with 143; Ctrl-C ends
    either with 130.
    """
    from sglang.launch_server import run_server

    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with private_files():
        try:
            run_server(server_args)
        except KeyboardInterrupt:
            return INTERRUPTED
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else STARTUP_ERROR
        except Exception as error:
            logger.debug("start-up failed", exc_info=True)
            return fail(cannot_start(failure() or error))
        finally:
            if (processes := guard("processes")) is not None:
                processes.end_processes()
    return 0 if (shutdown := guard("shutdown")) is None else int(shutdown.exit_status())


def _with_default_model(argv: list[str]) -> tuple[list[str], str]:
    """Add the embedded model, and what it needs to call tools, to a command line that names none;
    and the sentence that says so.
    """
    asked = _Parser(add_help=False)
    asked.add_argument("--model-path", "--model")
    if asked.parse_known_args(argv)[0].model_path is not None:
        return argv, ""
    from sglang_hybrid.serving.config import HybridConfig
    from sglang_hybrid.serving.flag_values import TRAINED

    parser = _Parser(add_help=False)
    HybridConfig.add_flags(parser)
    name = parser.parse_known_args(argv)[0].hybrid_default_model
    try:
        directory = extension("cpu.models").ensure_tiny_model(name)
    except OSError as error:
        raise StartupError(
            f"the embedded default model cannot be kept: {error}; set XDG_CACHE_HOME to a "
            "directory of your own that can be written, or give --model-path."
        ) from None
    note = f"no --model-path given, so the embedded {name} model is served; " + (
        "it knows one sentence about most names of Python's standard library, and nothing else."
        if name == TRAINED
        else "its weights are random and its answers mean nothing."
    )
    # Before what was given, which so counts more. Weights that know no JSON would write blanks
    # without end under a grammar that allows it.
    parser_of_calls = extension("cpu.models.tokenizer").TOOL_CALL_PARSER
    calls = ("--tool-call-parser", parser_of_calls, "--constrained-json-disable-any-whitespace")
    return [*calls, *argv, "--model-path", str(directory)], note


def _choose_device(argv: Sequence[str]) -> None:
    """Hide the GPUs from torch if `--device cpu` is asked for and SGLang's own engine is not."""
    asked = _Parser(add_help=False)
    asked.add_argument("--device")
    device = asked.parse_known_args(list(argv))[0].device
    if device == "cpu" and os.environ.get("SGLANG_USE_CPU_ENGINE", "0") != "1":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
