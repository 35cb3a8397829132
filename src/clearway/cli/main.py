"""The `clearway` command: finds the sub-command, turns errors into sentences and exit codes."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import errno
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

from clearway import __version__
from clearway.cli import bench, doctor, generate, info, models, ops, profile, report, samplers, select, warmup
from clearway.cli.output import prepare_streams, say
from clearway.errors import ClearwayError, RequestError
from clearway.ops import workarounds

COMMANDS = (generate, models, samplers, info, doctor, warmup, ops, profile, bench, report, select)
INTERRUPTED = 130
SPIN_COUNT = "5000"  # measured in bench/results/cpu/spin_count.jsonl

EPILOG = (
    'A bare prompt draws: clearway "a red apple". Every command explains itself: clearway generate --help.'
)


class Parser(argparse.ArgumentParser):
    """argparse whose errors are ours: one sentence, exit code 2."""

    def error(self, message: str) -> NoReturn:
        raise RequestError(f"{message} (see: {self.prog} --help)")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """What argparse gives; what is left over is an error here, of the command that it was said to."""
        found, left = super().parse_known_args(args, namespace)
        if left:
            near = difflib.get_close_matches(left[0].partition("=")[0], self._option_string_actions, n=1)
            hint = f"; nearest: {near[0]}" if near else ""
            if self.prog.endswith((" generate", " profile")) and not any(one.startswith("-") for one in left):
                hint = "; several words are one prompt in quotes"
            self.error(f"{' '.join(left)!r:.80} is not understood by {self.prog}{hint}")
        return found, left


def build_parser() -> argparse.ArgumentParser:
    """The whole command line; `docs` and tests read it too."""
    parser = Parser(prog="clearway", description="Draws pictures from words, fast.", epilog=EPILOG)
    parser.add_argument("--version", action="version", version=f"clearway {__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", parser_class=Parser)
    for command in COMMANDS:
        command.add(commands)
    return parser


def command_names() -> tuple[str, ...]:
    """The names of all sub-commands."""
    return tuple(name for command in COMMANDS for name in command.NAMES)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line; returns the exit code (0, 2 asked wrongly, 3 not possible here, 130 stopped)."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    prepare_streams()
    try:
        args = build_parser().parse_args(_with_command(given))
        if args.command is None:
            build_parser().print_help()
            return 0
        _prepare_libraries()
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except ClearwayError as error:
        say(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        say("stopped")
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output has gone: `clearway samplers | head -1`
        _discard_output()
        return 0
    except MemoryError:
        say("this machine ran out of memory; a smaller size would need less")
        return 3
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        _discard_output()
        say("standard output cannot be written: no space is left on its device")
        return 3


def _discard_output() -> None:
    """Sends what is left in standard output's buffer nowhere, so that the interpreter's end is quiet."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _with_command(given: list[str]) -> list[str]:
    """`generate` put in front of a bare prompt, also where its options come first."""
    if not given or given[0] in (*command_names(), "-h", "--help", "--version"):
        return given
    word = given[0]
    near = difflib.get_close_matches(word, command_names(), n=1, cutoff=0.75)
    if near and not word.startswith("-"):
        raise RequestError(
            f"{word!r} is no command; nearest: {near[0]} (to draw it: clearway generate {word!r})"
        )
    return ["generate", *given]


def _prepare_libraries() -> None:
    """Settings that must stand before torch starts, none of which overrides the user's own.

    GNU OpenMP's threads spin at barriers until they are needed, which makes a shared machine crawl: the spin
    is bounded here. The libraries' advice stays off the terminal unless CLEARWAY_DEBUG is set. No kernels are
    built for sizes that nobody asked for: a command's process ends with what it was asked for.
    """
    os.environ.setdefault("CLEARWAY_OTHER_SIZES", "0")
    if sys.platform == "linux" and "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    workarounds.prepare_environment()
    if os.environ.get("CLEARWAY_DEBUG"):
        return
    warnings.simplefilter("ignore")
    for name in ("TRANSFORMERS_VERBOSITY", "DIFFUSERS_VERBOSITY"):
        os.environ.setdefault(name, "error")
