"""The options of every command: names, defaults, units and help texts are here and nowhere else."""

# ruff: noqa: RUF009  # `option` and `group` declare fields, as `dataclasses.field` does

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from pdserve.models import BUNDLED
from pdserve.options import InvalidOption, Options, group, option, parse_address, parse_addresses

DTYPES = ("auto", "bfloat16", "float16", "float32")
ROLES = ("prefill", "decode", "both")
TRANSPORTS = ("auto", "tcp", "ucx")
MODEL_HELP = "the model: 'bundled', a folder in Hugging Face form, a .gguf file, or a hub id (org/name)"


def _max_model_len() -> Any:
    return option(
        None,
        parse=int,
        minimum=2,
        unit="tokens",
        help="most tokens that prompt and reply may have together; the model's own limit if not set",
    )


def _served_model_name() -> Any:
    return option(None, help="the model's name for clients; its own name if not set")


def _transport() -> Any:
    return option("auto", choices=TRANSPORTS, help="how KV blocks move between workers; auto is tcp until ucx is built")


def _max_waiting() -> Any:
    return option(
        256, parse=int, minimum=1, unit="requests", help="most requests that may wait in one worker before it says busy"
    )


def _cluster_token_file() -> Any:
    return option(
        parse=Path, help="file with the secret that router and workers share ('pdserve token FILE' makes one)"
    )


@dataclass(frozen=True, kw_only=True)
class EngineOptions(Options):
    """One model on one group of devices."""

    model: str = option(
        "bundled",
        help=MODEL_HELP,
    )
    dtype: str = option(
        "auto",
        choices=DTYPES,
        help="number format of weights and KV cache; auto is bfloat16 where the processor multiplies it, else float32",
    )
    max_model_len: int | None = _max_model_len()
    max_num_seqs: int = option(
        64, parse=int, minimum=1, unit="requests", help="most requests that one worker computes in the same step"
    )
    max_num_batched_tokens: int = option(
        512,
        parse=int,
        minimum=1,
        unit="tokens",
        help="most tokens in one step: a longer prompt is read in chunks; smaller is smoother, larger reads faster",
    )
    kv_cache_gb: float = option(
        0.5,
        parse=float,
        unit="GB of 10^9 bytes",
        help="memory for the KV blocks of one worker; more holds more requests",
    )
    block_size: int = option(
        16,
        parse=int,
        minimum=1,
        unit="tokens",
        help="tokens in a KV block, the unit that is allocated, cached and moved",
    )
    num_threads: int | None = option(
        None,
        parse=int,
        minimum=1,
        unit="threads",
        help="threads that one worker computes with; its share of the machine's cores if not set",
    )
    num_blocks: int | None = option(
        None,
        parse=int,
        minimum=2,
        unit="blocks",
        is_hidden=True,
        help="KV blocks of one worker, whatever --kv-cache-gb says",
    )
    poison_freed_blocks: bool = option(
        False, parse=bool, is_hidden=True, help="fill freed blocks with NaN: a test's proof that nobody reads them"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kv_cache_gb <= 0:
            raise InvalidOption(f"--kv-cache-gb {self.kv_cache_gb:g}: must be more than 0")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise InvalidOption(
                f"--max-num-batched-tokens {self.max_num_batched_tokens}: must be at least --max-num-seqs "
                f"({self.max_num_seqs}): each running request needs one token a step"
            )

    def with_model(self, model: str, num_threads: int) -> EngineOptions:
        """These options for a worker whose model and number of threads are settled."""
        return replace(self, model=model, num_threads=num_threads)

    def engine_config(self, folder: Path) -> EngineConfig:
        """What the engine is told; `folder` is what `resolve_model(self.model)` gave."""
        return EngineConfig(
            model=folder,
            dtype=self.dtype,
            block_size=self.block_size,
            kv_cache_gb=self.kv_cache_gb,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            num_threads=self.num_threads,
            num_blocks=self.num_blocks,
            poison_freed_blocks=self.poison_freed_blocks,
        )


@dataclass(frozen=True, kw_only=True)
class ProcessOptions(Options):
    """What a parent process tells a child; nobody types these."""

    beat_fd: int | None = option(
        None, parse=int, minimum=0, is_hidden=True, help="file descriptor that gets a byte each second; closed: exit"
    )
    die_with_parent: bool = option(
        False, parse=bool, is_hidden=True, help="end at once when the thread that started this process ends (Linux)"
    )


@dataclass(frozen=True, kw_only=True)
class WorkerOptions(ProcessOptions):
    """One worker process."""

    engine: EngineOptions = group(EngineOptions)
    role: str = option(
        choices=ROLES, help="prefill reads prompts and hands their KV over, decode writes replies, both does both"
    )
    routers: tuple[str, ...] = option(
        flag="router",
        parse=parse_addresses,
        help="the routers' fleet addresses to join; a DNS name is looked up again as it changes",
    )
    cluster_token_file: Path = _cluster_token_file()
    grpc: str = option("127.0.0.1:0", parse=parse_address, help="where routers call this worker; port 0: any free one")
    transfer: str = option(
        "127.0.0.1:0", parse=parse_address, help="where decode workers fetch KV blocks; port 0: any free one"
    )
    metrics: str = option("127.0.0.1:0", parse=parse_address, help="where /metrics is served; port 0: any free one")
    advertise: str = option(
        "127.0.0.1", help="host name or address that routers and other workers reach this worker by"
    )
    transport: str = _transport()
    served_model_name: str | None = _served_model_name()
    worker_id: str | None = option(None, help="the worker's name in logs and in 'pdserve status'; made up if not set")
    max_waiting: int = _max_waiting()

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_transport(self.transport)
        if not self.routers:
            raise InvalidOption("--router: needs at least one HOST:PORT")


@dataclass(frozen=True, kw_only=True)
class FrontOptions(Options):
    """What clients meet: the same for the router and for `serve`."""

    http: str = option(
        "127.0.0.1:8000", parse=parse_address, help="where the OpenAI API is served; port 0: any free one"
    )
    grpc: str = option(
        "127.0.0.1:8001", parse=parse_address, help="where the gRPC Generation service is served; port 0: any free one"
    )
    api_keys_file: Path | None = option(
        None, parse=Path, help="file with the keys that clients may use, one a line; anybody may call if not set"
    )
    max_requests: int = option(
        512, parse=int, minimum=1, unit="requests", help="most requests in flight; one more is answered 429"
    )
    no_prefill_policy: str = option(
        "local",
        choices=("local", "refuse"),
        help="with no prefill worker left: local lets decode workers read prompts, refuse answers 503",
    )


@dataclass(frozen=True, kw_only=True)
class RouterOptions(FrontOptions, ProcessOptions):
    """One router process."""

    model: str = option(
        "bundled", help="the model whose tokenizer and chat template are used: as for a worker; weights are not loaded"
    )
    served_model_name: str | None = _served_model_name()
    max_model_len: int | None = _max_model_len()
    cluster_token_file: Path = _cluster_token_file()
    fleet: str = option("127.0.0.1:0", parse=parse_address, help="where workers report; port 0: any free one")
    ready_fd: int | None = option(
        None,
        parse=int,
        minimum=0,
        is_hidden=True,
        help="file descriptor that gets the bound addresses as a line of JSON",
    )


@dataclass(frozen=True, kw_only=True)
class ServeOptions(FrontOptions):
    """A router and both pools, placed by Ray."""

    engine: EngineOptions = group(EngineOptions)
    prefill: int = option(1, parse=int, minimum=0, unit="workers", help="size of the prefill pool, which reads prompts")
    decode: int = option(1, parse=int, minimum=1, unit="workers", help="size of the decode pool, which writes replies")
    transport: str = _transport()
    served_model_name: str | None = _served_model_name()
    max_waiting: int = _max_waiting()
    cluster_token_file: Path | None = option(
        None, parse=Path, help="file with the secret that router and workers share; a fresh one for this run if not set"
    )
    ray_address: str | None = option(
        None, help="Ray cluster to place the workers on (HOST:PORT or auto); Ray is started on this machine if not set"
    )
    advertise: str | None = option(
        None, help="host name or address that workers on other machines reach the router by; this node's own if not set"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_transport(self.transport)

    @property
    def num_workers(self) -> int:
        return self.prefill + self.decode


@dataclass(frozen=True, kw_only=True)
class AskOptions(Options):
    """How `run` and `chat` ask."""

    max_tokens: int = option(256, parse=int, minimum=1, unit="tokens", help="most tokens in the answer")
    temperature: float = option(
        0.0,
        parse=float,
        minimum=0,
        help="how freely each token is drawn; 0: always the likeliest, 1: as the model has it",
    )
    seed: int | None = option(
        None, parse=int, minimum=0, help="makes a drawn answer the same each time; a fresh one if not set"
    )


@dataclass(frozen=True, kw_only=True)
class RunOptions(AskOptions):
    """One engine in this process."""

    engine: EngineOptions = group(EngineOptions)


@dataclass(frozen=True, kw_only=True)
class ServerOptions(Options):
    """Which server to talk to."""

    url: str = option("http://127.0.0.1:8000", help="the server's address")
    cluster_token_file: Path | None = option(
        None, parse=Path, help="file with the cluster token, for /debug of a server elsewhere; none is sent if not set"
    )


@dataclass(frozen=True, kw_only=True)
class ChatOptions(AskOptions, ServerOptions):
    """A question to a server."""

    model: str | None = option(None, help="the model's name; the one that is served if not set")
    api_key: str | None = option(None, help="key that the server asks for; $PDSERVE_API_KEY if not set")
    timeline: bool = option(
        False, parse=bool, help="afterwards, draw where the request's time went, in ms, and what was moved"
    )


@dataclass(frozen=True, kw_only=True)
class StatusOptions(ServerOptions):
    """A look at a server."""

    json: bool = option(False, parse=bool, help="print the server's answer as it is")


def model_name(model: str, served_model_name: str | None) -> str:
    """The name that clients use for `model`."""
    if served_model_name:
        return served_model_name
    return BUNDLED if model == "bundled" else Path(model).name.removesuffix(".gguf")


def _check_transport(transport: str) -> None:
    if transport == "ucx":
        raise InvalidOption("--transport ucx: not built yet (it comes with step 2); use --transport auto or tcp")
