"""Engine and text in one process: the reference that the pools are compared with.

`LocalGenerator` is a `Generator` as the dispatcher is, over one engine and with no wire in between, so
that all that lies above it (checks, templates, stop strings) is the very same code.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Self

from engine.engine import Engine
from engine.errors import EngineError, RequestRefused
from engine.sampling import SamplingParams
from engine.sequence import Sequence as EngineSequence
from pdserve.config import EngineOptions, model_name
from pdserve.models import Progress, print_progress, resolve_model
from pdserve_wire.errors import Reason, Refused, Unavailable
from pdserve_wire.messages import PrefillTimings, Token, make_token
from pdserve_wire.timeline import RequestTimeline
from router.generation import GenerationRequest
from router.intake import Ask, ChatPrompt, Intake
from router.reply import open_reply
from router.served_model import ServedModel


class LocalGenerator:
    """`Generator` over one engine whose loop runs on this event loop."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def generate(
        self, request: GenerationRequest, timeline: RequestTimeline
    ) -> AsyncGenerator[tuple[Token, ...], None]:
        sequence = EngineSequence(request.request_id, list(request.token_ids), len(request.token_ids), request.sampling)
        timeline.decision = "local"
        timeline.admitted_at = time.monotonic()
        try:
            self._engine.loop.submit(sequence)
        except RequestRefused as error:
            raise Refused(str(error)) from error
        index = 0
        try:
            while True:
                for output in await sequence.output.get():
                    if not output.tokens:
                        continue
                    if timeline.prefill is None:
                        started_at = sequence.output.started_at
                        timeline.prefill = PrefillTimings(
                            started_at - timeline.admitted_at, output.ended_at - started_at
                        )
                    timeline.token_times += [time.monotonic()] * len(output.tokens)
                    tokens = tuple(
                        make_token(
                            index + place,
                            sampled.token_id,
                            generation=0,
                            logprob=sampled.logprob,
                            top_logprobs=sampled.top_logprobs,
                            finish_reason=output.finish_reason if place + 1 == len(output.tokens) else None,
                        )
                        for place, sampled in enumerate(output.tokens)
                    )
                    index += len(tokens)
                    yield tokens
                    if output.finish_reason is not None:
                        return
        except EngineError as error:
            raise Unavailable(Reason.INTERNAL, str(error)) from error
        finally:
            self._engine.loop.abort(sequence)


class LocalModel:
    """A model to talk to from Python, on one engine in this process.

    async with LocalModel.load(options) as model:
        async for text in model.complete("Once upon a time", SamplingParams(max_tokens=32)):
            print(text, end="")
    """

    def __init__(self, engine: Engine, served: ServedModel) -> None:
        self.engine = engine
        self.served = served
        self.generator = LocalGenerator(engine)
        self._intake = Intake(served)

    @classmethod
    def load(cls, options: EngineOptions, progress: Progress = print_progress) -> Self:
        """Blocks while weights load. Raises `ModelNotFound`, `EngineError` or `ModelFilesError`."""
        folder = resolve_model(options.model, progress)
        engine = Engine.load(options.engine_config(folder))
        return cls(engine, ServedModel.load(folder, model_name(options.model, None), engine.loaded.max_model_len))

    async def __aenter__(self) -> Self:
        self.engine.loop.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.engine.loop.stop()

    def chat(self, messages: Sequence[Mapping[str, Any]], sampling: SamplingParams) -> AsyncGenerator[str, None]:
        """Pieces of the assistant's reply. Raises `router.intake.RequestError` and `PdserveError`."""
        return self._stream(ChatPrompt(tuple(messages)), sampling)

    def complete(self, prompt: str | tuple[int, ...], sampling: SamplingParams) -> AsyncGenerator[str, None]:
        """Pieces of the prompt's continuation. Raises as `chat` does."""
        return self._stream(prompt, sampling)

    async def _stream(
        self, prompt: str | tuple[int, ...] | ChatPrompt, sampling: SamplingParams
    ) -> AsyncGenerator[str, None]:
        request_id = f"local-{secrets.token_hex(8)}"
        ask = Ask(self.served.name, prompt, sampling, max_tokens=sampling.max_tokens, seed=sampling.seed)
        prepared = await self._intake.prepare(ask, request_id)
        timeline = RequestTimeline(request_id)
        async with aclosing(open_reply(self.generator, prepared, timeline, self.served.tokenizer)) as pieces:
            async for piece in pieces:
                yield piece.text
