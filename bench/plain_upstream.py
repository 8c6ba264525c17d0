"""What the pipeline is compared with: the simulated engine alone, and behind a plain FastAPI endpoint.

``BENCH_TPOT_MS`` sets the time per token of the endpoint's engine.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import orjson
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

from contracts.records import Sampling
from contracts.sim_tokens import sim_token_ids
from infra.settings import SimSettings
from workers.assembler import Assembler
from workers.engine_sim import SimEngine
from workers.protocols import EngineRequest

from .measure import Timeline

MAX_SEQS = 256


async def start_engine(settings: SimSettings) -> SimEngine:
    """A running simulated engine."""
    engine = SimEngine(settings, MAX_SEQS)
    await engine.start()
    return engine


async def texts(engine: SimEngine, prompt: str, name: str, max_tokens: int) -> AsyncIterator[str]:
    """The text deltas of one reply."""
    sampling = Sampling(max_tokens=max_tokens)
    request = EngineRequest(name, sim_token_ids(prompt), (), sampling, 0, "bench")
    assembler = Assembler(engine.detokenizer(request), stop=[], min_tokens=0, emitted_tokens=0)
    async with aclosing(engine.generate(request)) as deltas:
        async for delta in deltas:
            for token in delta.token_ids:
                piece = assembler.push([token], None)
                if piece is not None:
                    yield piece.text


async def engine_timeline(engine: SimEngine, number: int, max_tokens: int) -> Timeline:
    """One reply of the engine alone."""
    timeline = Timeline()
    async for _ in texts(engine, f"Say hello. ({number})", str(number), max_tokens):
        timeline.chunk()
    return timeline


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    tpot_ms = float(os.environ.get("BENCH_TPOT_MS", "5"))
    app.state.engine = await start_engine(SimSettings(ttft_ms=0, tpot_ms=tpot_ms))
    app.state.count = 0
    yield
    await app.state.engine.close()


app = FastAPI(lifespan=_lifespan)


@app.get("/healthz")
async def healthz() -> dict[str, str]:
    """Whether it serves."""
    return {}


@app.post("/v1/chat/completions")
async def chat(request: Request) -> StreamingResponse:
    """A streamed completion, the way a minimal server would do it."""
    body = orjson.loads(await request.body())
    app.state.count += 1
    name, prompt = str(app.state.count), body["messages"][-1]["content"]

    async def events() -> AsyncIterator[bytes]:
        async for text in texts(app.state.engine, prompt, name, body["max_tokens"]):
            choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
            yield b"data: " + orjson.dumps({"id": name, "choices": [choice]}) + b"\n\n"
        yield b"data: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")
