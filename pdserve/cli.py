"""The `pdserve` command.

Help and mistakes are answered at once: what is heavy is imported by the command that needs it.
Exit codes: 0 done, 1 it failed, 2 the command line or its configuration is wrong, 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn, TypeVar

from pdserve.config import (
    MODEL_HELP,
    ChatOptions,
    RouterOptions,
    RunOptions,
    ServeOptions,
    StatusOptions,
    WorkerOptions,
)
from pdserve.options import InvalidOption, Options, add_options, given_in, read_config

DESCRIPTION = "Language-model serving with prefill and decode in pools of their own."
EPILOG = """\
examples:
  pdserve run "What is the capital of France?"     one engine, in this process
  pdserve serve                                    a router, a prefill and a decode worker on this machine
  pdserve chat "What is the capital of France?"    ask a server
  pdserve status                                   workers, their load and their blocks
"""


_OptionsT = TypeVar("_OptionsT", bound=Options)


class _Parser(argparse.ArgumentParser):
    """Mistakes are one line, as all other errors are."""

    def error(self, message: str) -> NoReturn:
        raise InvalidOption(f"{message}; see '{self.prog} --help'")

    def refuse(self, unknown: str) -> NoReturn:
        """Name the option that was probably meant."""
        flags = [flag for action in self._actions for flag in action.option_strings if action.help != argparse.SUPPRESS]
        close = get_close_matches(unknown.partition("=")[0], flags, n=1)
        self.error(f"unknown: {unknown}{f'; did you mean {close[0]}?' if close else ''}")


class _Version(argparse.Action):
    """Asks the installed package only when it is wanted."""

    def __call__(self, *_: object) -> NoReturn:
        from importlib.metadata import version

        print(f"pdserve {version('pdserve')}")
        sys.exit(0)


@dataclass(frozen=True, slots=True)
class _Command:
    """A subcommand: its words for a person, its options, and what it does."""

    name: str
    summary: str
    epilog: str
    options: type[Options] | None
    run: Callable[[argparse.Namespace], int]
    positional: str = ""  # the option that has no flag
    has_config: bool = False
    add: Callable[[argparse.ArgumentParser], None] = lambda _: None  # arguments that are no options


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code."""
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # before gRPC is loaded: else each closed connection is told
    try:
        arguments, unknown = _parser().parse_known_args(argv)
        if unknown:
            arguments.parser.refuse(unknown[0])
        code: int = arguments.run(arguments)
        sys.stdout.flush()
        return code
    except InvalidOption as error:
        return _tell(error, 2)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of stdout has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        from pdserve.errors import known_errors

        if not isinstance(error, known_errors()):
            raise
        return _tell(error, 1)


def _run(arguments: argparse.Namespace) -> int:
    options = RunOptions.make(given_in(arguments, RunOptions))
    from pdserve.run import run

    return run(options, arguments.prompt, is_raw=arguments.raw)


def _serve(arguments: argparse.Namespace) -> int:
    options = _configured(arguments, ServeOptions)
    from pdserve.serve import serve

    return serve(options)


def _chat(arguments: argparse.Namespace) -> int:
    options = ChatOptions.make(given_in(arguments, ChatOptions))
    from pdserve.ask import chat

    return chat(options, arguments.prompt)


def _status(arguments: argparse.Namespace) -> int:
    options = StatusOptions.make(given_in(arguments, StatusOptions))
    from pdserve.ask import status

    return status(options)


def _worker(arguments: argparse.Namespace) -> int:
    options = _configured(arguments, WorkerOptions)
    _die_with_parent(options.die_with_parent)
    from pdserve.worker import main as worker

    return worker(options)


def _router(arguments: argparse.Namespace) -> int:
    options = _configured(arguments, RouterOptions)
    _die_with_parent(options.die_with_parent)
    from pdserve.router_process import main as router

    return router(options)


def _token(arguments: argparse.Namespace) -> int:
    from pdserve_wire.auth import make_token_file

    path: Path = arguments.file
    is_new = not path.exists()
    make_token_file(path)
    print(f"pdserve: {path}: {'written' if is_new else 'kept, it was there before'}", file=sys.stderr)
    return 0


def _models(arguments: argparse.Namespace) -> int:
    from pdserve.models import resolve_model

    print(resolve_model(arguments.model))
    return 0


def _add_prompt(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", metavar="PROMPT", help="what to ask")


def _add_prompt_and_raw(parser: argparse.ArgumentParser) -> None:
    _add_prompt(parser)
    parser.add_argument("--raw", action="store_true", help="continue PROMPT as it is, without the chat template")


def _add_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", type=Path, help="where to write it; one that exists is kept")


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", nargs="?", default="bundled", help=f"{MODEL_HELP} (default bundled)")


_COMMANDS = (
    _Command(
        "run",
        "answer one prompt with one engine in this process; no server, no pools",
        'examples:\n  pdserve run "What is the capital of France?"\n'
        '  pdserve run --raw --max-tokens 20 --temperature 0.8 --seed 7 "Once upon a time"\n'
        '  pdserve run --model ./my-model --dtype float32 "Hello"',
        RunOptions,
        _run,
        add=_add_prompt_and_raw,
    ),
    _Command(
        "serve",
        "serve a model over HTTP (OpenAI) and gRPC: a router and two pools, placed and restarted by Ray",
        "The ready line goes to stdout, everything else to stderr. Ctrl-C or SIGTERM lets running requests finish; a\n"
        "second one kills them.\n\nexamples:\n  pdserve serve\n"
        "  pdserve serve --prefill 1 --decode 2 --http 0.0.0.0:8000\n"
        "  pdserve serve ./my-model --max-model-len 4096 --kv-cache-gb 2\n"
        "  pdserve serve --config serve.yaml --decode 3     the command line wins over the file\n"
        "  pdserve serve --ray-address auto                 workers on the nodes of a Ray cluster",
        ServeOptions,
        _serve,
        positional="model",
        has_config=True,
    ),
    _Command(
        "chat",
        "ask a server, and print the answer as it comes",
        'examples:\n  pdserve chat "What is the capital of France?"\n  pdserve chat --timeline "Tell me a story"',
        ChatOptions,
        _chat,
        add=_add_prompt,
    ),
    _Command(
        "status",
        "a server's workers: role, load, KV blocks",
        "examples:\n  pdserve status\n  pdserve status --json --url http://127.0.0.1:8000",
        StatusOptions,
        _status,
    ),
    _Command(
        "worker",
        "one worker process, for other launchers than 'serve'",
        "example:\n  pdserve worker --role decode --router 127.0.0.1:9000 --cluster-token-file token",
        WorkerOptions,
        _worker,
        has_config=True,
    ),
    _Command(
        "router",
        "one router process, for other launchers than 'serve'",
        "example:\n  pdserve router --fleet 127.0.0.1:9000 --cluster-token-file token",
        RouterOptions,
        _router,
        has_config=True,
    ),
    _Command("token", "make a cluster-token file", "example:\n  pdserve token ./token", None, _token, add=_add_file),
    _Command(
        "models",
        "fetch or convert a model, and print the folder that it is in",
        "examples:\n  pdserve models\n  pdserve models ./my-model.gguf",
        None,
        _models,
        add=_add_model,
    ),
)


def _parser() -> _Parser:
    parser = _Parser(
        prog="pdserve",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in _COMMANDS:
        one = commands.add_parser(
            command.name,
            help=command.summary,
            description=command.summary[0].upper() + command.summary[1:] + ".",
            epilog=command.epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        one.set_defaults(run=command.run, parser=one)
        command.add(one)
        if command.has_config:
            one.add_argument(
                "--config",
                metavar="FILE.yaml",
                type=Path,
                help="file with these options as 'option: value' lines; the command line wins",
            )
        if command.options is not None:
            add_options(one, command.options, command.positional)
    return parser


def _configured(arguments: argparse.Namespace, options: type[_OptionsT]) -> _OptionsT:
    """The options of a command line over those of its `--config`."""
    given = read_config(arguments.config, options) if arguments.config is not None else {}
    return options.make({**given, **given_in(arguments, options)})


def _die_with_parent(is_wanted: bool) -> None:
    """Early: the imports that follow take seconds."""
    if is_wanted:
        from pdserve.lifecycle import die_with_parent

        die_with_parent()


def _tell(error: Exception, code: int) -> int:
    print(f"pdserve: {str(error) or type(error).__name__}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
