"""The answers of kept streams whose worker has died: made anew from what the journal has of the requests."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

from seedance.daemon import openai_door
from seedance.daemon.doors import infer
from seedance.daemon.doors.parameters import Parameters
from seedance.daemon.event_streams import KeptEvents
from seedance.daemon.infer_answers import KeptAnswer
from seedance.daemon.journal_records import KeptRecord, token_list
from seedance.daemon.kept_request import INFER, KeptRequest
from seedance.daemon.kept_stream import KeptStream
from seedance.daemon.service import Answer, Service


class Again(NamedTuple):
    """A request that another worker had, and its answer; it takes so many `places` of the limits.

    `begin` serves it where the engine had not been given it.
    """

    request: Parameters
    answer: Answer
    places: int
    begin: Callable[[], None]


def again(service: Service, stream: KeptStream, record: KeptRecord) -> Again:
    """Return the request of a stream that is not over. Raises ApiError when it cannot be read any more."""
    kept = KeptRequest(record.kind, record.body, record.answer_id, record.created)
    made = _infer(service, stream, record) if record.kind == INFER else _openai(service, stream, kept, record)
    stream.accepted_before(made.answer, kept)
    if record.streams:
        made = made._replace(places=sum(choice.ended_tokens is None for choice in record.streams))
    return made


def _infer(service: Service, stream: KeptStream, record: KeptRecord) -> Again:
    request, answer = infer.read(record.body), KeptAnswer(stream, service)
    answer.prompt_tokens = sum(len(token_list(choice.prompt_token_ids)) for choice in record.streams)
    return Again(request, answer, 1, functools.partial(service.begin_infer, request, answer))


def _openai(service: Service, stream: KeptStream, kept: KeptRequest, record: KeptRecord) -> Again:
    request = openai_door.parse(kept.kind, kept.body)
    answer = openai_door.kept_answer(service, KeptEvents(stream), request)
    answer.restore(kept.answer_id, kept.created, record.streams)
    return Again(
        request, answer, openai_door.places(request), functools.partial(openai_door.begin, service, request, answer)
    )
