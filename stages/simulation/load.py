"""Turns a load specification into requests, one after the other; equal seeds give equal requests."""

from __future__ import annotations

import heapq
import math
from bisect import bisect
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate, count
from random import Random

from kv.layout import CHUNK_TOKENS

from .load_spec import Lengths, LoadSpec, TierLoad
from .requests import SimRequest
from .worker_model import WorkerModel

DAY_SECONDS = 86_400
#: Conversations that are drawn to learn the mean work of one.
PROBED_CONVERSATIONS = 4_000
#: Conversations begin so many times their mean length before the window, so that the rate is steady in it.
WARM_UP_LENGTHS = 3.0


def draw(lengths: Lengths, rng: Random) -> int:
    """One length, tokens."""
    value = lengths.median * math.exp(rng.gauss(0.0, lengths.sigma)) if lengths.sigma else lengths.median
    return max(1, min(lengths.most, int(value)))


def tenant_weights(tier: TierLoad) -> list[float]:
    """Part of the tier's load that each of its tenants sends; they add up to 1."""
    weights = [(k + 1) ** -tier.zipf for k in range(tier.tenants)]
    if tier.flood_share and tier.tenants > 1:
        others = sum(weights[1:])
        return [tier.flood_share, *(w * (1 - tier.flood_share) / others for w in weights[1:])]
    return [w / sum(weights) for w in weights]


@dataclass(slots=True)
class _Conversation:
    """One that is under way.

    Attributes:
        context: tokens of all its turns so far, with the system prompt.
        chunks: names of the full chunks of that.
    """

    name: str
    tier: str
    tenant: str
    turns_left: int
    context: int
    chunks: list[str] = field(default_factory=list)

    def name_chunks(self, tokens: int) -> None:
        """Name the chunks that are full at so many tokens."""
        while (len(self.chunks) + 1) * CHUNK_TOKENS <= tokens:
            self.chunks.append(f"{self.name}.{len(self.chunks)}")


class LoadMaker:
    """Draws requests of a load."""

    def __init__(self, spec: LoadSpec, seed: int) -> None:
        """Make one.

        Args:
            seed: equal ones give equal requests.
        """
        self._spec = spec
        self._rng = Random(seed)  # noqa: S311
        self._tiers = list(spec.tiers.items())
        self._shares = list(accumulate(tier.share for _, tier in self._tiers))
        self._tenants = [list(accumulate(tenant_weights(tier))) for _, tier in self._tiers]
        self._named = spec.conversations.turns > 1 or spec.conversations.system_tokens > 0
        self._numbers = count(1)
        # A reply takes so long at least that its next turn is not asked for before it has ended.
        self._token_seconds = (
            spec.workers.step_ms + spec.workers.decode_ms * spec.workers.max_seqs
        ) / 1000

    def requests(self, per_second: float, work: ConversationWork) -> Iterator[SimRequest]:
        """The requests of the window, in order of arrival.

        Args:
            per_second: requests per second, on average over a day.
            work: means of this load (:meth:`mean_conversation` of another maker).
        """
        spec, rng = self._spec, self._rng
        talk = spec.conversations
        ids = count(1)
        later: list[tuple[float, int, _Conversation]] = []
        conversations_per_second = per_second / work.turns
        turn_seconds = talk.think_seconds + work.output_tokens * self._token_seconds
        new_at = -WARM_UP_LENGTHS * (talk.turns - 1) * turn_seconds
        new_at = self._next_start(new_at, conversations_per_second)
        while True:
            if later and later[0][0] <= new_at:
                at, number, talking = heapq.heappop(later)
            else:
                at, number, talking = new_at, next(self._numbers), self._begin()
                new_at = self._next_start(new_at, conversations_per_second)
            if at >= spec.seconds:
                return
            request = self._turn(talking, at, f"r{next(ids)}" if at >= 0 else "")
            if request is None:
                continue
            if at >= 0:
                yield request
            if talking.turns_left:
                pause = rng.expovariate(1 / talk.think_seconds) if talk.think_seconds else 0.0
                pause += request.output_tokens * self._token_seconds
                heapq.heappush(later, (at + pause, number, talking))

    def _next_start(self, after: float, per_second: float) -> float:
        """When the next conversation begins: a Poisson process whose rate follows the day (thinning)."""
        day, rng = self._spec.day, self._rng
        highest = per_second * (1 + day)
        while True:
            after += rng.expovariate(highest)
            if not day:
                return after
            rate = per_second * (1 - day * math.cos(2 * math.pi * after / DAY_SECONDS))
            if rng.random() * highest < rate:
                return after

    def _begin(self) -> _Conversation:
        rng, talk = self._rng, self._spec.conversations
        index = bisect(self._shares, rng.random() * self._shares[-1])
        name, tier = self._tiers[index]
        place = min(bisect(self._tenants[index], rng.random()), tier.tenants - 1)
        tenant = f"{name}-flood" if tier.flood_share and place == 0 else f"{name}-{place}"
        turns = 1
        if talk.turns > 1:
            # Geometric with mean ``turns``, by inversion.
            turns += int(math.log(1 - rng.random()) / math.log(1 - 1 / talk.turns))
        talking = _Conversation(f"c{next(self._numbers)}", name, tenant, turns, 0)
        if self._named:
            talking.chunks = [f"{tenant}.{i}" for i in range(talk.system_tokens // CHUNK_TOKENS)]
        talking.context = talk.system_tokens
        return talking

    def _turn(self, talking: _Conversation, at: float, request_id: str) -> SimRequest | None:
        """The next request of a conversation; None if its context has no room for it."""
        rng, spec = self._rng, self._spec
        tier = spec.tiers[talking.tier]
        first = talking.context <= spec.conversations.system_tokens
        message = draw(tier.long_prompt if rng.random() < tier.long_share else tier.prompt, rng)
        reply = draw(tier.reply, rng)
        prompt = talking.context + message
        if not first and prompt > spec.conversations.context_tokens:
            talking.turns_left = 0
            return None
        talking.turns_left -= 1
        kept = spec.conversations.kept_reply
        talking.context = prompt + int(reply * kept)
        if self._named:
            talking.name_chunks(prompt + reply if kept == 1 else prompt)
        return SimRequest(
            at_ms=at * 1000,
            request_id=request_id,
            tier=talking.tier,
            tenant=talking.tenant,
            prompt_tokens=prompt,
            output_tokens=reply,
            max_tokens=tier.max_tokens or tier.reply.most,
            chunks=tuple(talking.chunks),
            conversation_id=talking.name if spec.conversations.turns > 1 else None,
        )

    def mean_conversation(self) -> ConversationWork:
        """What a conversation costs on average, from a sample."""
        turns = fresh = held = output = 0
        kept_reply = self._spec.conversations.kept_reply
        for _ in range(PROBED_CONVERSATIONS):
            talking = self._begin()
            cached = talking.context
            while talking.turns_left:
                request = self._turn(talking, 0.0, "")
                if request is None:
                    break
                turns += 1
                fresh += request.prompt_tokens - cached // CHUNK_TOKENS * CHUNK_TOKENS
                held += request.prompt_tokens
                output += request.output_tokens
                cached = talking.context if kept_reply == 1 else request.prompt_tokens
        n = PROBED_CONVERSATIONS
        return ConversationWork(turns / n, fresh / turns, held / turns, output / turns)


@dataclass(frozen=True, slots=True)
class ConversationWork:
    """Means of a load.

    Attributes:
        turns: requests of a conversation.
        fresh_tokens: prompt tokens of a request to compute, if all that can be cached is.
        prompt_tokens / output_tokens: of a request.
    """

    turns: float
    fresh_tokens: float
    prompt_tokens: float
    output_tokens: float


def requests_per_second_at_full(model: WorkerModel, work: ConversationWork) -> float:
    """What one worker can do when its batch is full, requests per second.

    A request's share of a full batch's decode steps, and its own prefill.
    """
    by_room = model.kv_tokens / (work.prompt_tokens + work.output_tokens / 2)
    batch = max(1.0, min(model.max_seqs, by_room))
    decode_ms = work.output_tokens * (model.step_ms + model.decode_ms * batch) / batch
    return 1000 / (decode_ms + work.fresh_tokens * model.prefill_ms)


def make_requests(spec: LoadSpec, seed: int) -> Iterator[SimRequest]:
    """The requests of a load, in order of arrival."""
    # The sample has a seed of its own, so that another rate does not change who asks for what.
    work = LoadMaker(spec, 0).mean_conversation()
    if spec.load is not None:
        full = requests_per_second_at_full(spec.workers, work) * spec.workers.count
        per_second = spec.load * full
    else:
        assert spec.per_second is not None
        per_second = spec.per_second
    return LoadMaker(spec, seed).requests(per_second, work)
