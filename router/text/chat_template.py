"""Messages to one prompt, by the model's own Jinja template, as `transformers` renders it.

A template comes with the model and is foreign code: it runs in jinja2's immutable sandbox and sees
plain data only.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from router.text.errors import ModelFilesError, TemplateError


class ChatTemplate:
    """A compiled template with the model's special tokens (`bos_token`, `eos_token`, ...)."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        """Raises `ModelFilesError` for a template that doesn't compile."""
        try:
            self._template = _make_environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ModelFilesError(f"the chat template doesn't compile: {error}") from error
        self._special_tokens = dict(special_tokens or {})

    @classmethod
    def load(cls, folder: Path) -> ChatTemplate | None:
        """The template of a model folder, or None where the model has none (a base model).

        It is `chat_template.jinja`, or else `chat_template` in `tokenizer_config.json`. Raises
        `ModelFilesError` for files that can't be used.
        """
        config = _read_config(folder / "tokenizer_config.json")
        file = folder / "chat_template.jinja"
        source = file.read_text(encoding="utf-8") if file.is_file() else _default_template(config.get("chat_template"))
        return None if source is None else cls(source, _special_tokens(config))

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """The prompt, special tokens written out: tokenize it without adding any.

        Each message is plain JSON data. Keys whose value is None are left out, since templates
        print them. Raises `TemplateError` with the template's own complaint, if it has one.
        """
        plain = [{key: value for key, value in message.items() if value is not None} for message in messages]
        try:
            return self._template.render(
                messages=plain,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except jinja2.TemplateError as error:
            raise TemplateError(f"the model's chat template refuses these messages: {error.message}") from error
        except Exception as error:  # whatever an expression in a template can raise
            raise TemplateError(
                f"the model's chat template can't render these messages ({type(error).__name__}: {error}); "
                "give every message a role that the model knows and a string as content"
            ) from error


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's turns for training; here it is just its body."""

    tags = {"generation"}  # noqa: RUF012 -- jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's `namespace()` without underscored names, which lead to Python's internals."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        names = dict(*args, **kwargs)
        for name in names:
            _check_name(name)
        super().__init__(names)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a template can't set {name!r} on a namespace")


def _make_environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """The environment that templates are written for (transformers, `_compile_jinja_template`)."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["namespace"] = _Namespace
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is; jinja2's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)  # local time, as transformers has it


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelFilesError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelFilesError(f"{path} must hold a JSON object")
    return config


def _default_template(value: Any) -> str | None:
    """A template, or of several named ones that with the name "default"."""
    if isinstance(value, list):
        value = {entry["name"]: entry["template"] for entry in value}.get("default")
    if value is not None and not isinstance(value, str):
        raise ModelFilesError("chat_template in tokenizer_config.json must be a string or a list of named templates")
    return value


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and its like, each a string or an object with its `content`."""
    tokens: dict[str, str] = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            tokens[name] = content
    return tokens
