"""Options mean the same on a command line, in a file and in code, and mistakes are named."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import pytest

from engine.config import EngineConfig
from pdserve.config import (
    AskOptions,
    ChatOptions,
    EngineOptions,
    RouterOptions,
    RunOptions,
    ServeOptions,
    StatusOptions,
    WorkerOptions,
    model_name,
)
from pdserve.options import InvalidOption, Options, add_options, given_in, parse_address, read_config

ALL = (EngineOptions, WorkerOptions, RouterOptions, ServeOptions, RunOptions, ChatOptions, StatusOptions)


def from_words(options: type[Options], *words: str) -> Options:
    parser = argparse.ArgumentParser()
    add_options(parser, options)
    return options.make(given_in(parser.parse_args(words), options))


def from_yaml(options: type[Options], tmp_path: Path, text: str) -> Options:
    path = tmp_path / "options.yaml"
    path.write_text(text)
    return options.make(read_config(path, options))


def make_worker_options(**changes: object) -> WorkerOptions:
    settings: dict[str, object] = {
        "role": "decode",
        "routers": ("127.0.0.1:9000",),
        "cluster_token_file": Path("token"),
    }
    return WorkerOptions(**{**settings, **changes})  # type: ignore[arg-type]


def test_nothing_given_means_the_defaults() -> None:
    assert from_words(ServeOptions) == ServeOptions()
    assert ServeOptions().http == "127.0.0.1:8000"
    assert ServeOptions().num_workers == 2


def test_words_become_values_of_their_type() -> None:
    options = from_words(ServeOptions, "--prefill", "2", "--kv-cache-gb=1.5", "--dtype=float32", "--api-keys-file=keys")
    engine = EngineOptions(kv_cache_gb=1.5, dtype="float32")
    assert options == ServeOptions(prefill=2, engine=engine, api_keys_file=Path("keys"))


@pytest.mark.parametrize(
    "options",
    [
        ServeOptions(),
        ServeOptions(prefill=3, ray_address="auto", engine=EngineOptions(model="./m", max_model_len=100, num_blocks=9)),
        make_worker_options(),
        make_worker_options(
            engine=EngineOptions(poison_freed_blocks=True, kv_cache_gb=0.001),
            routers=("a:1", "[::1]:2"),
            beat_fd=7,
            die_with_parent=True,
            worker_id="decode 1",
        ),
        RouterOptions(cluster_token_file=Path("a b"), ready_fd=4, no_prefill_policy="refuse"),
        AskOptions(temperature=0.5, seed=7),
    ],
    ids=lambda options: type(options).__name__,
)
def test_options_make_the_words_that_make_them(options: Options) -> None:
    assert from_words(type(options), *options.arguments()) == options


def test_a_file_says_the_same_as_the_command_line(tmp_path: Path) -> None:
    text = "prefill: 2\nkv-cache-gb: 1.5\nmax_num_seqs: 8\nmodel: ./m\nmax-model-len: null\nhttp: 0.0.0.0:80\n"
    words = ("--prefill=2", "--kv-cache-gb=1.5", "--max-num-seqs=8", "--model=./m", "--http=0.0.0.0:80")
    assert from_yaml(ServeOptions, tmp_path, text) == from_words(ServeOptions, *words)


def test_a_file_may_hold_lists_and_flags(tmp_path: Path) -> None:
    text = "role: prefill\nrouter: [a:1, b:2]\ncluster-token-file: t\npoison-freed-blocks: true\n"
    options = from_yaml(WorkerOptions, tmp_path, text)
    assert isinstance(options, WorkerOptions)
    assert options.routers == ("a:1", "b:2")
    assert options.engine.poison_freed_blocks


def test_an_empty_file_is_no_mistake(tmp_path: Path) -> None:
    assert from_yaml(ServeOptions, tmp_path, "# nothing yet\n") == ServeOptions()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("prefil: 2", "prefil is not an option; did you mean prefill?"),
        ("max_num_seq: 2", "max_num_seq is not an option; did you mean max-num-seqs?"),
        ("zzz: 2", "zzz is not an option"),
        ("max-num-seqs: 2\nmax_num_seqs: 3", "max_num_seqs is there twice"),
        ("- prefill", "must hold 'option: value' lines"),
        ("prefill: [", "not valid YAML"),
        ("prefill: {a: 1}", "prefill: must be one value, or a list of values"),
        ("prefill: true", "--prefill true: must not be true or false"),
        ("prefill: 1.5", "--prefill 1.5: must be a whole number"),
        ("poison-freed-blocks: 3", "--poison-freed-blocks 3: must be true or false"),
        ("dtype: int8", "--dtype int8: must be one of auto, bfloat16, float16, float32"),
    ],
)
def test_a_mistake_in_a_file_is_named(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(InvalidOption) as caught:
        from_yaml(ServeOptions, tmp_path, text)
    assert problem in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match=r"missing\.yaml: No such file"):
        read_config(tmp_path / "missing.yaml", ServeOptions)


@pytest.mark.parametrize(
    ("options", "words", "problem"),
    [
        (ServeOptions, ["--prefill=x"], "--prefill x: must be a whole number"),
        (ServeOptions, ["--prefill=-1"], "--prefill -1: must be at least 0"),
        (ServeOptions, ["--decode=0"], "--decode 0: must be at least 1"),
        (ServeOptions, ["--kv-cache-gb=0"], "--kv-cache-gb 0: must be more than 0"),
        (ServeOptions, ["--kv-cache-gb=nan"], "--kv-cache-gb nan: must be a number"),
        (ServeOptions, ["--kv-cache-gb=inf"], "--kv-cache-gb inf: must be a number"),
        (ServeOptions, ["--max-num-seqs=600"], "--max-num-batched-tokens 512: must be at least --max-num-seqs (600)"),
        (ServeOptions, ["--http=8000"], "--http 8000: must be HOST:PORT, such as 127.0.0.1:8000"),
        (ServeOptions, ["--transport=ucx"], "not built yet (it comes with step 2); use --transport auto or tcp"),
        (WorkerOptions, ["--transport=ucx"], "--role is required"),
        (WorkerOptions, ["--role=both", "--cluster-token-file=t"], "--router is required"),
        (WorkerOptions, ["--role=both", "--cluster-token-file=t", "--router=,"], "--router: needs at least one"),
        (WorkerOptions, ["--role=main", "--cluster-token-file=t", "--router=a:1"], "--role main: must be one of"),
        (RouterOptions, [], "--cluster-token-file is required"),
    ],
)
def test_a_mistake_on_the_command_line_is_named(options: type[Options], words: list[str], problem: str) -> None:
    with pytest.raises(InvalidOption) as caught:
        from_words(options, *words)
    assert problem in str(caught.value)


def test_values_from_code_are_checked_too() -> None:
    with pytest.raises(InvalidOption, match="--block-size 0: must be at least 1"):
        EngineOptions(block_size=0)
    with pytest.raises(InvalidOption, match="not built yet"):
        make_worker_options(transport="ucx")


@pytest.mark.parametrize("address", ["127.0.0.1:0", "localhost:65535", "[::1]:80", "router.default.svc:9000"])
def test_an_address_is_a_host_and_a_port(address: str) -> None:
    assert parse_address(address) == address


@pytest.mark.parametrize("address", ["", "8000", ":8000", "host:", "host:x", "host:65536", "::1:80", "host:-1", "h:²"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="HOST:PORT"):
        parse_address(address)


def test_the_engine_is_told_every_option_of_its_own() -> None:
    options = EngineOptions(model="bundled", num_blocks=7, num_threads=3)
    config = options.engine_config(Path("/m"))
    for field in dataclasses.fields(EngineConfig):
        assert getattr(config, field.name) == (Path("/m") if field.name == "model" else getattr(options, field.name))


def test_a_model_is_named_after_where_it_comes_from() -> None:
    assert model_name("bundled", None) == "SmolLM2-135M-Instruct"
    assert model_name("org/name", None) == "name"
    assert model_name("/a/b/model.gguf", None) == "model"
    assert model_name("bundled", "smol") == "smol"


@pytest.mark.parametrize("options", ALL, ids=lambda options: options.__name__)
def test_every_option_says_what_it_changes_its_unit_and_its_default(options: type[Options]) -> None:
    parser = argparse.ArgumentParser()
    add_options(parser, options)
    helps = {action.option_strings[0]: action.help or "" for action in parser._actions[1:]}
    for flag, text in helps.items():
        assert text, flag
        if text == argparse.SUPPRESS:
            continue
        has_default = any(word in text for word in ("default", "if not set", "required"))
        assert has_default or flag in ("--json", "--timeline"), f"{flag}: {text}"
    if "--max-num-seqs" in helps:
        assert helps["--max-num-seqs"].endswith("(in requests; default 64)")
        assert helps["--num-blocks"] == argparse.SUPPRESS
