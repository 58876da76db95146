"""Options as frozen dataclasses: one declaration gives the flag, its default, its help, its check and its YAML key.

    @dataclass(frozen=True, kw_only=True)
    class ServeOptions(Options):
        prefill: int = option(1, parse=int, minimum=0, unit="workers", help="size of the prefill pool")
        engine: EngineOptions = group(EngineOptions)     # its options become options of this class, too

Values from a command line, from a YAML file and from code pass the same checks.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Self


class InvalidOption(ValueError):
    """An option has a value that can't be used, or is missing or unknown; the message names it."""


@dataclass(frozen=True, slots=True)
class _Option:
    """What a field's declaration says beside its default."""

    parse: Callable[[str], Any]
    help: str
    unit: str
    choices: tuple[str, ...]
    minimum: float | None
    is_hidden: bool
    flag: str


def option(
    default: Any = MISSING,
    *,
    help: str,
    parse: Callable[[str], Any] = str,
    unit: str = "",
    choices: tuple[str, ...] = (),
    minimum: float | None = None,
    flag: str = "",
    is_hidden: bool = False,
) -> Any:
    """A field of an `Options` class. Without a default it is required; None as default means "not set".

    `parse` turns a word of a command line into the value and raises ValueError with what it must be
    (`bool`: the flag takes no word). `flag` is the name on the command line where it isn't the field's.
    """
    declared = _Option(parse, help, unit, choices, minimum, is_hidden, flag)
    return field(default=default, metadata={"option": declared})


def group(options: type[Options]) -> Any:
    """A field that holds another `Options` class, whose options are options here, too."""
    return field(default_factory=options, metadata={"group": options})


@dataclass(frozen=True, kw_only=True)
class Options:
    """Base of all option classes. Making one raises `InvalidOption` for the first value out of bounds."""

    def __post_init__(self) -> None:
        for one in fields(self):
            declared: _Option | None = one.metadata.get("option")
            value = getattr(self, one.name)
            if declared is None or value is None:
                continue
            if declared.choices and value not in declared.choices:
                raise InvalidOption(f"{flag_of(one)} {value}: must be one of {', '.join(declared.choices)}")
            if declared.minimum is not None and value < declared.minimum:
                raise InvalidOption(f"{flag_of(one)} {value}: must be at least {declared.minimum:g}")

    @classmethod
    def make(cls, given: Mapping[str, str | bool]) -> Self:
        """From values as they were written, by field name. What is not given keeps its default."""
        values: dict[str, Any] = {}
        for one in fields(cls):
            if "group" in one.metadata:
                values[one.name] = one.metadata["group"].make(given)
            elif one.name in given:
                values[one.name] = _parse(one, given[one.name])
            elif one.default is MISSING:
                raise InvalidOption(f"{flag_of(one)} is required")
        return cls(**values)

    def arguments(self) -> list[str]:
        """The command line that makes these options again. Only what differs from the defaults."""
        words: list[str] = []
        for one in fields(self):
            value = getattr(self, one.name)
            if "group" in one.metadata:
                words += value.arguments()
            elif value is True:
                words.append(flag_of(one))
            elif value != one.default:
                words.append(f"{flag_of(one)}={','.join(value) if isinstance(value, tuple) else value}")
        return words


def add_options(parser: argparse.ArgumentParser, options: type[Options], positional: str = "") -> None:
    """Let `parser` take the options; what it finds is for `given_in`. `positional` names one without a flag."""
    for one in _flat_fields(options):
        declared: _Option = one.metadata["option"]
        settings: dict[str, Any] = {"default": argparse.SUPPRESS, "help": _help(one)}
        if declared.parse is bool:
            settings["action"] = "store_true"
        else:
            settings["metavar"] = _metavar(one)
        if one.name == positional:
            parser.add_argument(one.name, nargs="?", **settings)
        else:
            parser.add_argument(flag_of(one), dest=one.name, **settings)


def given_in(arguments: argparse.Namespace, options: type[Options]) -> dict[str, str | bool]:
    """What a command line said of these options, as it was written."""
    named = {one.name for one in _flat_fields(options)}
    return {name: value for name, value in vars(arguments).items() if name in named}


def read_config(path: Path, options: type[Options]) -> dict[str, str | bool]:
    """The options in a YAML file. A key is an option's name, with dashes or underscores.

    Raises `InvalidOption` where the file can't be read, or has a key that is no option.
    """
    import yaml  # only who gives a file waits for it

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidOption(f"--config {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InvalidOption(f"--config {path}: not valid YAML: {' '.join(str(error).split())}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise InvalidOption(f"--config {path}: must hold 'option: value' lines")
    keys: dict[str, Field[Any]] = {}
    for one in _flat_fields(options):
        keys[one.name] = keys[flag_of(one)[2:].replace("-", "_")] = one
    given: dict[str, str | bool] = {}
    for key, value in content.items():
        found = keys.get(str(key).replace("-", "_"))
        if found is None:
            raise InvalidOption(f"--config {path}: {key} is not an option{_nearest(str(key), keys)}")
        if found.name in given:
            raise InvalidOption(f"--config {path}: {key} is there twice")
        if value is not None:
            given[found.name] = _written(value, f"--config {path}: {key}")
    return given


def flag_of(one: Field[Any]) -> str:
    """`--max-num-seqs` for the field `max_num_seqs`."""
    declared: _Option = one.metadata["option"]
    return "--" + (declared.flag or one.name.replace("_", "-"))


def parse_address(text: str) -> str:
    """HOST:PORT, as it was written; an IPv6 host in brackets."""
    host, _, port = text.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    if not host or (":" in host and not is_bracketed) or not (port.isascii() and port.isdigit() and int(port) < 65536):
        raise ValueError("must be HOST:PORT, such as 127.0.0.1:8000")
    return text


def parse_addresses(text: str) -> tuple[str, ...]:
    """HOST:PORT[,HOST:PORT...]"""
    return tuple(parse_address(part.strip()) for part in text.split(",") if part.strip())


def _flat_fields(options: type[Options]) -> Iterator[Field[Any]]:
    for one in fields(options):
        if "group" in one.metadata:
            yield from _flat_fields(one.metadata["group"])
        else:
            yield one


_MUST_BE: Mapping[Callable[[str], Any], str] = {int: "must be a whole number", float: "must be a number"}


def _parse(one: Field[Any], written: str | bool) -> Any:
    declared: _Option = one.metadata["option"]
    if declared.parse is bool or isinstance(written, bool):
        if declared.parse is bool and isinstance(written, bool):
            return written
        problem = "must be true or false" if declared.parse is bool else "must not be true or false"
        raise InvalidOption(f"{flag_of(one)} {str(written).lower()}: {problem}")
    try:
        value = declared.parse(written)
    except ValueError as error:
        raise InvalidOption(f"{flag_of(one)} {written}: {_MUST_BE.get(declared.parse, str(error))}") from error
    if declared.parse is float and not abs(value) < float("inf"):
        raise InvalidOption(f"{flag_of(one)} {written}: must be a number")
    return value


def _written(value: Any, where: str) -> str | bool:
    """A YAML value as a command line would have it."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str | int | float):
        return str(value)
    if isinstance(value, list) and all(isinstance(item, str | int | float) for item in value):
        return ",".join(str(item) for item in value)
    raise InvalidOption(f"{where}: must be one value, or a list of values")


def _nearest(key: str, keys: Mapping[str, object]) -> str:
    close = get_close_matches(key.replace("-", "_"), keys, n=1)
    return f"; did you mean {close[0].replace('_', '-')}?" if close else ""


def _metavar(one: Field[Any]) -> str:
    declared: _Option = one.metadata["option"]
    if declared.choices:
        return "|".join(declared.choices)
    words = {int: "N", float: "X", Path: "FILE", parse_address: "HOST:PORT", parse_addresses: "HOST:PORT[,...]"}
    return words.get(declared.parse, flag_of(one)[2:].rpartition("-")[2].upper())


def _help(one: Field[Any]) -> str:
    declared: _Option = one.metadata["option"]
    if declared.is_hidden:
        return argparse.SUPPRESS
    notes = [f"in {declared.unit}"] if declared.unit else []
    if one.default is MISSING:
        notes.append("required")
    elif one.default is not None and declared.parse is not bool:
        notes.append(f"default {one.default}")
    return (declared.help + (f" ({'; '.join(notes)})" if notes else "")).replace("%", "%%")
