"""The root span of a chat call: started and ended explicitly, never current across an await."""

from __future__ import annotations

from opentelemetry.trace import SpanKind

from contracts.entries import Terminal
from contracts.tiers import Status
from infra.telemetry import end_span, start_span, traceparent_of

_OUTCOME = "headrace.outcome"


class ChatSpan:
    """One span a call; the first ``end`` counts, whichever way out it is.

    Args:
        name: ``chat`` or ``resume``.
        model: canonical name of the model.
        traceparent: the caller's trace context.
    """

    def __init__(self, name: str, model: str, traceparent: str | None, *, stream: bool) -> None:
        self._span = start_span(
            f"{name} {model}",
            traceparent,
            kind=SpanKind.SERVER,
            attributes={
                "gen_ai.operation.name": "chat",
                "gen_ai.request.model": model,
                "headrace.stream": stream,
            },
        )
        self._ended = False

    @property
    def traceparent(self) -> str | None:
        """The context for the other roles' spans."""
        return traceparent_of(self._span)

    def name_request(self, request_id: str) -> None:
        """The request was accepted."""
        self._span.set_attribute("gen_ai.response.id", request_id)

    def end(self, outcome: str, error: str | None = None) -> None:
        """End with an outcome; ``error`` is set where it is a failure of ours."""
        if self._ended:
            return
        self._ended = True
        self._span.set_attribute(_OUTCOME, outcome)
        end_span(self._span, error)

    def end_reply(self, terminal: Terminal) -> None:
        """End with what the request came to."""
        if terminal.usage is not None:
            self._span.set_attribute("gen_ai.usage.input_tokens", terminal.usage.prompt_tokens)
            self._span.set_attribute("gen_ai.usage.output_tokens", terminal.usage.completion_tokens)
        reasons = [reason.value for reason in terminal.finish_reasons]
        self._span.set_attribute("gen_ai.response.finish_reasons", reasons)
        failed = terminal.status is Status.FAILED
        code = terminal.error.code if terminal.error is not None else None
        self.end(terminal.status.value, (code or "failed") if failed else None)
