"""One model on one group of devices: puts the parts together.

engine = Engine.load(config)      # blocking: weights, probe, self-test, cache
engine.loop.start()               # on a running event loop
engine.loop.submit(sequence)      # then read sequence.output
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from engine.block_pool import BlockPool
from engine.config import EngineConfig
from engine.errors import EngineError
from engine.kv_cache import KvCache, KvShape
from engine.loop import EngineLoop
from engine.model_loader import LoadedModel, load_model
from engine.model_runner import ModelRunner
from engine.scheduler import Scheduler, SchedulerLimits


@dataclass(frozen=True, slots=True)
class Engine:
    loaded: LoadedModel
    cache: KvCache
    pool: BlockPool
    scheduler: Scheduler
    loop: EngineLoop

    @classmethod
    def load(cls, config: EngineConfig) -> Engine:
        """Raises `ModelRefused` for a model that would be served wrongly, `EngineError` for options
        that can't work together. Takes seconds; call it off the event loop.

        Works in a thread that is gone when it returns. libgomp keeps a team for each thread that ever
        ran an operation, and counts them all: once there are more threads than cores, teams no longer
        spin while they wait, and a decode step of the engine thread took twice as long (measured).
        """
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="load") as thread:
            return thread.submit(cls._load, config).result()

    @classmethod
    def _load(cls, config: EngineConfig) -> Engine:
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        return cls.build(load_model(config), config)

    @classmethod
    def build(cls, loaded: LoadedModel, config: EngineConfig) -> Engine:
        """An engine around a loaded model, which it takes over: one engine a model. Raises as `load`."""
        if config.max_num_batched_tokens < config.max_num_seqs:
            raise EngineError(
                f"--max-num-batched-tokens {config.max_num_batched_tokens} is less than --max-num-seqs "
                f"{config.max_num_seqs}: each running sequence needs one token a step"
            )
        shape = KvShape(
            num_layers=len(loaded.plan.cache_layers),
            num_kv_heads=max(loaded.plan.num_kv_heads.values()),
            head_dim=loaded.plan.head_dim,
            block_size=config.block_size,
            dtype=loaded.dtype,
        )
        num_blocks = config.num_blocks or int(config.kv_cache_gb * 1e9) // shape.block_nbytes
        if num_blocks < 2:
            raise EngineError(
                f"--kv-cache-gb {config.kv_cache_gb} holds {num_blocks} blocks of {shape.block_nbytes} bytes; raise it"
            )
        cache = KvCache(shape, num_blocks)
        runner = ModelRunner(loaded, cache)
        runner.self_test()
        pool = BlockPool(num_blocks, config.block_size, cache.poison if config.poison_freed_blocks else None)
        limits = SchedulerLimits(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=loaded.max_model_len,
            eos_token_ids=loaded.eos_token_ids,
        )
        if config.poison_freed_blocks:
            cache.poison(list(range(num_blocks)))
        scheduler = Scheduler(pool, limits)
        return cls(loaded, cache, pool, scheduler, EngineLoop(scheduler, runner))
