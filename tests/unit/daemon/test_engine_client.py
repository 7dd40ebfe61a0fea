"""Streams out of batches, every way in which one ends, and the limiter's places."""

from __future__ import annotations

import pytest
from support.worker_parts import FakeDriver, FakeFlow, FakeSink

from seedance.daemon import tokenizer
from seedance.daemon.detokenizer import Vocabulary, table_vocabulary
from seedance.daemon.doors.errors import ApiError
from seedance.daemon.engine_client import HOLD_S, EngineClient
from seedance.daemon.stop_strings import StopDetokenizer
from seedance.daemon.stream import Stream
from seedance.daemon.stream_columns import FEWEST
from seedance.engine.channel import (
    Abort,
    Batch,
    Delta,
    EngineChanged,
    ModelComing,
    ModelPrepared,
    Noted,
    QueueBound,
    Receiver,
    Refused,
    SetPaused,
    Submit,
    ToHost,
    ToWorker,
    encode,
    pack_singles,
)
from seedance.engine.failover import CONTINUED, RESTARTING
from seedance.engine.request import FinishReason, Sampling, TokenLogprobs
from seedance.qos.limiter import TenantLimiter
from seedance.qos.quota import Quota, TokenQuota

TOKENIZER = tokenizer.synthetic()
SAMPLING = Sampling(max_tokens=100)


class Scene:
    """An engine client on a fake channel, with the host's side in the test's hands."""

    def __init__(self, per_minute: int | None = None) -> None:
        self.driver = FakeDriver()
        self.limiter = TenantLimiter(Quota(tenant="acme", tokens=TokenQuota(per_minute=per_minute)))
        self.changes: list[EngineChanged] = []
        self.now = 0.0
        self.client = EngineClient(self.driver, self.limiter, lambda: self.now, self.changes.append, plain_frame)
        self.client.use_vocabulary(TOKENIZER.vocabulary.entries)
        self.client.connect(10)
        self._receiver: Receiver[ToHost] = Receiver(ToHost)

    def stream(self, stop: tuple[str, ...] = (), sampling: Sampling = SAMPLING) -> tuple[Stream, FakeSink]:
        sink = FakeSink()
        detokenizer = TOKENIZER.detokenizer()
        stream = Stream(sink, detokenizer, StopDetokenizer(detokenizer, stop) if stop else None)
        assert self.limiter.admit(0.0) is None
        self.client.submit(stream, [1, 2], sampling)
        return stream, sink

    def say(self, *messages: ToWorker) -> None:
        self.client.data_received(b"".join(map(encode, messages)))

    def heard(self) -> list[ToHost]:
        flow = self.driver.flows[-1]
        data, flow.sent = bytes(flow.sent), bytearray()
        return self._receiver.receive_data(data)

    @staticmethod
    def finished(sink: FakeSink) -> bool:
        return sink.end is not None

    @property
    def places(self) -> int:
        return self.limiter.statistics().streams


def plain_frame(text: str) -> bytes:
    return f"<{text}>".encode()


def finish(sink: FakeSink) -> tuple[str, object]:
    return sink.text, sink.end


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text)


def test_a_stream_from_submit_to_its_end() -> None:
    scene = Scene()
    stream, sink = scene.stream()
    assert scene.heard() == [Submit(stream.number, [1, 2], SAMPLING)]
    [a], [b], [c] = ids("a"), ids("b"), ids("c")
    scene.say(Batch([Delta(stream.number, [a], None, None, 16)]))
    scene.say(Batch([], pack_singles([stream.number, b])))
    assert sink.text == "ab"
    assert not scene.finished(sink)
    scene.say(Batch([Delta(stream.number, [c], FinishReason.LENGTH)]))
    assert (sink.text, sink.end) == ("abc", FinishReason.LENGTH)
    assert (stream.output_tokens, stream.cached_tokens) == (3, 16)
    assert (scene.places, len(scene.client), scene.heard()) == (0, 0, [])
    assert scene.limiter.statistics().output_tokens == 3


def test_one_batch_for_many_streams() -> None:
    scene = Scene()
    streams = [scene.stream() for _ in range(50)]
    letters = [ids(chr(ord("a") + number % 26))[0] for number in range(50)]
    flat = [x for (stream, _), letter in zip(streams, letters, strict=True) for x in (stream.number, letter)]
    scene.say(Batch([], pack_singles(flat)))
    assert [sink.text for _, sink in streams] == [chr(ord("a") + number % 26) for number in range(50)]


def test_a_character_in_pieces_is_told_when_it_is_whole() -> None:
    scene = Scene()
    stream, sink = scene.stream()
    pieces = list("é🌲".encode())  # the synthetic vocabulary's first 256 tokens are the bytes
    for piece in pieces[:-1]:
        scene.say(Batch([], pack_singles([stream.number, piece])))
    assert sink.text == "é"
    assert not stream.plain
    scene.say(Batch([], pack_singles([stream.number, pieces[-1]])))
    assert sink.text == "é🌲"
    assert stream.plain
    scene.say(Batch([], pack_singles([stream.number, pieces[0]])), Batch([Delta(stream.number, [], FinishReason.STOP)]))
    assert (sink.text, sink.end) == ("é🌲\ufffd", FinishReason.STOP)


def test_who_is_told_of_each_token_hears_of_one_that_brings_no_text() -> None:
    class EachSink(FakeSink):
        def text_arrived(self, text: str) -> None:
            deltas.append(text)

    scene, deltas = Scene(), list[str]()
    stream, _ = scene.stream()
    stream.sink, stream.tells_each = EachSink(), True
    for piece in "aé🌲".encode():
        scene.say(Batch([], pack_singles([stream.number, piece])))
    assert deltas == ["a", "", "é", "", "", "", "🌲"]
    scene.say(Batch([Delta(stream.number, [], FinishReason.LENGTH)]))
    assert len(deltas) == 7


def test_deltas_of_streams_that_are_gone_are_nobodys() -> None:
    scene = Scene()
    stream, sink = scene.stream()
    scene.client.abort([stream])
    scene.client.abort([stream])
    assert scene.heard()[1:] == [Abort([stream.number])]
    scene.say(
        Batch([Delta(stream.number, [97], FinishReason.STOP), Delta(999, [97])], pack_singles([stream.number, 97]))
    )
    assert (sink.text, sink.end, scene.places) == ("", None, 0)
    assert scene.limiter.statistics().output_tokens == 0


@pytest.mark.parametrize("single", [True, False])
def test_a_stop_string_ends_the_stream_and_the_engines_work(single: bool) -> None:
    scene = Scene()
    stream, sink = scene.stream(stop=("c",))
    scene.heard()
    tokens = ids("abcd")
    if single:
        for token in tokens:
            scene.say(Batch([], pack_singles([stream.number, token])))
    else:
        scene.say(Batch([Delta(stream.number, tokens)]))
    assert (sink.text, sink.end) == ("ab", FinishReason.STOP)
    assert scene.heard() == [Abort([stream.number])]
    assert (scene.places, stream.output_tokens) == (0, 3)


def test_a_stop_token_counts_and_has_no_text() -> None:
    scene = Scene()
    stream, sink = scene.stream()
    stream.hidden_token_ids = tuple(ids("b"))
    scene.say(Batch([Delta(stream.number, ids("ab"), FinishReason.STOP)]))
    assert (sink.text, sink.end, stream.output_tokens) == ("a", FinishReason.STOP, 2)


def test_log_probabilities_go_with_their_text() -> None:
    scene = Scene()
    stream, sink = scene.stream()
    position = TokenLogprobs([97, 98], [-0.5, -1.0], 1)
    scene.say(Batch([Delta(stream.number, [97], None, [position])]))
    assert (sink.text, sink.positions) == ("a", [position])


def test_a_used_up_quota_ends_every_stream_with_what_it_has() -> None:
    scene = Scene(per_minute=4)
    first, first_sink = scene.stream()
    second, second_sink = scene.stream()
    scene.heard()
    scene.say(Batch([], pack_singles([first.number, 97, second.number, 98])))
    assert not scene.finished(first_sink)
    scene.say(Batch([], pack_singles([first.number, 99, second.number, 0xC3])))
    assert (first_sink.text, first_sink.end) == ("ac", FinishReason.QUOTA_EXCEEDED)
    assert (second_sink.text, second_sink.end) == ("b\ufffd", FinishReason.QUOTA_EXCEEDED)
    assert scene.heard() == [Abort([first.number, second.number])]
    assert scene.places == 0


def test_a_step_brings_no_more_than_the_quota_has_left() -> None:
    scene = Scene(per_minute=5)
    gone, _ = scene.stream()
    streams = [scene.stream() for _ in range(3)]
    scene.client.abort([gone])
    (first, first_sink), (second, second_sink), (third, third_sink) = streams
    position = TokenLogprobs([99, 98], [-0.5, -1.0], 1)
    # Two tokens are nobody's, and do not count.
    scene.say(Batch([Delta(gone.number, [97])], pack_singles([gone.number, 97, first.number, 97, second.number, 98])))
    assert scene.limiter.remaining(0.0) == 3
    scene.say(
        Batch(
            [Delta(third.number, [99, 99, 99], FinishReason.LENGTH, [position] * 3)],
            pack_singles([gone.number, 97, first.number, 97, second.number, 98]),
        )
    )
    assert (first_sink.text, second_sink.text, third_sink.text) == ("aa", "bb", "c")
    assert third_sink.positions == [position]
    assert {sink.end for _, sink in streams} == {FinishReason.QUOTA_EXCEEDED}
    assert [stream.output_tokens for stream, _ in streams] == [2, 2, 1]
    assert scene.limiter.statistics().output_tokens == 5


def test_the_engine_is_told_once_of_a_pause() -> None:
    scene = Scene()
    first, _ = scene.stream()
    second, _ = scene.stream()
    scene.heard()
    scene.client.set_paused([first], True)
    scene.client.set_paused([first, second], True)
    scene.client.abort([second])
    scene.client.set_paused([first, second], False)
    scene.client.set_paused([first], False)
    assert scene.heard() == [
        SetPaused([first.number], True),
        SetPaused([second.number], True),
        Abort([second.number]),
        SetPaused([first.number], False),
    ]


def test_who_waits_for_a_first_token_is_in_the_queue() -> None:
    scene = Scene()
    assert scene.limiter.admit(0.0) is None  # its prompt is being tokenised
    streams = [scene.stream()[0] for _ in range(3)]
    assert scene.client.queue_refusal(4) is None
    refusal = scene.client.queue_refusal(3)
    assert refusal is not None
    assert (refusal.code, refusal.limit) == ("rate_limited", "requests.queue")
    scene.say(Batch([], pack_singles([streams[0].number, 97])))
    assert scene.client.queue_refusal(3) is None
    scene.client.abort(streams)
    assert scene.client.queue_refusal(1) is None
    assert scene.client.queue_refusal(0) is not None
    assert scene.client.queue_refusal(None) is None


def test_the_engines_queue_is_full_until_it_is_told_otherwise() -> None:
    scene = Scene()
    scene.stream()
    scene.say(QueueBound(2, 1.0))
    assert scene.client.queue_refusal(None) is None
    refusal = scene.client.queue_refusal(None, streams=2)
    assert refusal is not None
    assert refusal.code == "overloaded"
    scene.say(QueueBound(None, 1.0))
    assert scene.client.queue_refusal(None, streams=2) is None
    scene.say(QueueBound(0, 1.0))
    assert scene.client.queue_refusal(None) is not None
    scene.client.connect(11)  # another host's queue is another one
    assert scene.client.queue_refusal(None) is None


def test_who_the_host_refuses_is_told_when_to_come_back() -> None:
    scene = Scene()
    stream, sink = scene.stream()
    scene.say(Refused(stream.number, "overloaded", "cannot take this request", 2.5))
    assert isinstance(sink.end, ApiError)
    assert (sink.end.status, sink.end.retry_after_s) == (503, 2.5)


def test_a_prompt_that_the_host_refuses_costs_nothing() -> None:
    scene = Scene()
    (stream, _), (begun, _) = scene.stream(), scene.stream()
    for each in (stream, begun):
        scene.limiter.charge(each.charged_at, prompt_tokens=40)
        each.charged_tokens = 40
    scene.say(Refused(stream.number, "overloaded", "cannot take this request", 2.5))
    assert scene.limiter.statistics().prompt_tokens == 40
    scene.say(Batch([Delta(begun.number, [97])]), Refused(begun.number, "context_too_long", "cannot go on"))
    assert scene.limiter.statistics().prompt_tokens == 40


def test_a_refusal_and_an_engines_error_fail_one_stream() -> None:
    scene = Scene()
    (refused, refused_sink), (broken, broken_sink), (_, whole_sink) = [scene.stream() for _ in range(3)]
    scene.say(
        Refused(refused.number, "context_too_long", "cannot take so much"),
        Batch([Delta(broken.number, [], FinishReason.ERROR, None, 0, "cannot go on")]),
    )
    assert isinstance(refused_sink.end, ApiError) and refused_sink.end.code == "context_too_long"
    assert isinstance(broken_sink.end, ApiError) and broken_sink.end.message == "cannot go on"
    assert whole_sink.end is None
    assert scene.places == 1


def test_a_dead_engine_fails_every_stream_and_takes_back_what_was_asked() -> None:
    scene = Scene()
    (first, first_sink), (second, second_sink) = scene.stream(), scene.stream()
    scene.heard()
    scene.say(EngineChanged("dead", "killed", None))
    for sink in (first_sink, second_sink):
        assert isinstance(sink.end, ApiError) and sink.end.code == "engine_unavailable"
    assert scene.heard() == [Abort([first.number, second.number])]
    assert [change.state for change in scene.changes] == ["dead"]
    assert scene.places == 0


def test_streams_outlive_an_engine_and_their_clients_hear_of_it() -> None:
    scene = Scene()
    greedy, greedy_sink = scene.stream(sampling=Sampling(max_tokens=100, temperature=0.0))
    drawn, drawn_sink = scene.stream()
    scene.heard()
    scene.say(EngineChanged("recovering", "killed", None, RESTARTING), EngineChanged("ready", "", None, CONTINUED))
    assert greedy_sink.notes == [RESTARTING, CONTINUED]
    assert drawn_sink.notes == [RESTARTING, f"{CONTINUED}, what comes is drawn anew"]
    scene.say(Batch([Delta(greedy.number, [97], FinishReason.STOP), Delta(drawn.number, [98], FinishReason.STOP)]))
    assert (greedy_sink.text, drawn_sink.text) == ("a", "b")
    assert scene.heard() == []
    assert [change.state for change in scene.changes] == ["recovering", "ready"]


@pytest.mark.parametrize("how", ["junk", "eof"])
def test_a_channel_that_breaks_can_be_replaced_and_its_streams_go_on(how: str) -> None:
    scene = Scene()
    stream, sink = scene.stream()
    scene.say(Batch([], pack_singles([stream.number, 97])))
    if how == "junk":
        scene.client.data_received(b"\xff\xff\xff\xff")
    else:
        scene.client.eof_received()
    assert sink.end is None
    assert [change.state for change in scene.changes] == ["dead"]
    assert scene.places == 1
    scene.client.connect(11)
    scene.client.resume()
    assert scene.heard() == [Submit(stream.number, [1, 2], SAMPLING, emitted_token_ids=[97])]
    scene.say(Batch([Delta(stream.number, [98], FinishReason.STOP)]))
    assert finish(sink) == ("ab", FinishReason.STOP)
    assert scene.places == 0
    scene.client.resume()
    assert scene.heard() == []


def test_the_next_host_says_which_streams_go_on_with_the_same_random_numbers() -> None:
    scene = Scene()
    greedy, greedy_sink = scene.stream(sampling=Sampling(max_tokens=100, temperature=0.0))
    (same, same_sink), (anew, anew_sink) = scene.stream(), scene.stream()
    numbers = [stream.number for stream in (greedy, same, anew)]
    scene.say(Batch([], pack_singles([part for number in numbers for part in (number, 97)])))
    scene.client.eof_received()
    scene.client.connect(11)
    scene.client.resume()
    assert [sink.notes[-1] for sink in (greedy_sink, same_sink, anew_sink)] == [CONTINUED, RESTARTING, RESTARTING]
    scene.say(Noted([same.number], CONTINUED, is_same=True), Noted([anew.number], CONTINUED))
    assert same_sink.notes == [RESTARTING, CONTINUED]
    assert anew_sink.notes == [RESTARTING, f"{CONTINUED}, what comes is drawn anew"]


def test_a_fresh_channel_before_the_old_one_broke() -> None:
    scene = Scene()
    stream, sink = scene.stream()
    scene.say(Batch([Delta(stream.number, [97, 98], None)]))
    scene.client.connect(11)
    assert scene.driver.flows[0].ended == "aborted"
    scene.say(EngineChanged("dead", "it does not start", None))  # which had nothing of it yet
    scene.client.resume()
    assert sink.end is None
    assert scene.heard() == [Submit(stream.number, [1, 2], SAMPLING, emitted_token_ids=[97, 98])]


def test_what_is_held_is_told_all_that_came_and_nothing_of_others() -> None:
    scene = Scene()
    (first, _), (second, _), (gone, _) = (scene.stream() for _ in range(3))
    for token_id in ids("some words, and some more"):
        scene.say(Batch([], pack_singles([first.number, token_id, gone.number, token_id])))
        scene.say(Batch([Delta(second.number, [token_id, token_id])]))
    scene.client.set_paused([second], True)
    scene.client.abort([gone])
    scene.client.eof_received()
    scene.client.connect(11)
    scene.client.resume()
    text = ids("some words, and some more")
    assert scene.heard() == [
        Submit(first.number, [1, 2], SAMPLING, emitted_token_ids=text),
        Submit(second.number, [1, 2], SAMPLING, emitted_token_ids=[token_id for token_id in text for _ in range(2)]),
        SetPaused([second.number], True),
    ]


def test_an_engine_that_is_not_ready_yet_is_asked_again() -> None:
    scene = Scene()
    stream, sink = scene.stream()
    scene.client.eof_received()
    scene.client.connect(11)
    scene.client.resume()
    scene.say(Refused(stream.number, "overloaded", "cannot take it now", 1.0))
    assert sink.end is None
    scene.client.resume()
    assert scene.heard() == [Submit(stream.number, [1, 2], SAMPLING)] * 2
    scene.say(Refused(stream.number, "context_too_long", "cannot take it at all"))
    assert isinstance(sink.end, ApiError) and sink.end.code == "context_too_long"
    assert scene.places == 0


def test_who_no_session_keeps_does_not_wait_for_ever() -> None:
    scene = Scene()
    (kept, kept_sink), (_, sink) = scene.stream(), scene.stream()
    kept.is_kept = True
    scene.client.eof_received()
    scene.now = HOLD_S - 1
    scene.client.end_overdue()
    assert sink.end is None
    scene.now = HOLD_S
    scene.client.end_overdue()
    assert isinstance(sink.end, ApiError) and sink.end.code == "engine_unavailable"
    assert (kept_sink.end, scene.places) == (None, 1)


def test_a_stream_of_another_worker_is_the_engines_with_the_next_resume() -> None:
    scene = Scene()
    sink = FakeSink()
    stream = Stream(sink, TOKENIZER.detokenizer(), None)
    stream.prompt_token_ids.extend([1, 2])
    stream.token_ids.extend([97])
    stream.sampling = SAMPLING
    scene.limiter.stream_resumed()
    scene.client.adopt(stream)
    assert (scene.heard(), scene.places) == ([], 1)
    scene.client.resume()
    assert scene.heard() == [Submit(stream.number, [1, 2], SAMPLING, emitted_token_ids=[97])]
    scene.say(Batch([Delta(stream.number, [98], FinishReason.LENGTH)]))
    assert (sink.text, sink.end, scene.places) == ("b", FinishReason.LENGTH, 0)


def test_at_the_end_of_the_service_what_a_session_keeps_is_left() -> None:
    scene = Scene()
    (kept, kept_sink), (other, sink) = scene.stream(), scene.stream()
    kept.is_kept = True
    scene.heard()
    scene.client.end_all(ApiError("overloaded", "cannot go on"), is_kept=False)
    assert scene.heard() == [Abort([other.number])]
    assert (kept_sink.end, scene.places) == (None, 1)
    assert isinstance(sink.end, ApiError)


def test_a_sink_that_gives_up_in_mid_batch_is_left_alone() -> None:
    scene = Scene()

    class Leaving(FakeSink):
        def text_arrived(self, text: str) -> None:
            super().text_arrived(text)
            scene.client.abort([stream])

    sink = Leaving()
    stream = Stream(sink, TOKENIZER.detokenizer(), None)
    assert scene.limiter.admit(0.0) is None
    scene.client.submit(stream, [1], SAMPLING)
    scene.say(Batch([Delta(stream.number, [97], FinishReason.STOP)]))
    assert (sink.text, sink.end, scene.places) == ("a", None, 0)


def in_a_crowd(pairs: list[int]) -> Batch:
    """Return a batch with so many more tokens that it is no small one, all of streams that are over."""
    return Batch([], pack_singles([*pairs, *(value for number in range(FEWEST) for value in (50_000 + number, 0))]))


def test_plain_tokens_of_a_plain_flow_go_past_the_sink() -> None:
    scene = Scene()
    stream, sink = scene.stream()
    flow = scene.driver.open(20, scene.client)
    assert isinstance(flow, FakeFlow)
    behind: list[int] = []
    scene.client.bypass(stream, 20, behind.append)
    [a], pieces = ids("a"), list("é".encode())
    for token in (a, a, *pieces, a, TOKENIZER.vocabulary.size + 5):
        scene.say(in_a_crowd([stream.number, token]))
    # Made once by way of the sink, which frames it itself; then sent as it is.
    assert (sink.text, bytes(flow.sent)) == ("aé", b"<a><a>")
    flow.waiting_bytes = 99
    scene.say(in_a_crowd([stream.number, a]))
    assert behind == [99]
    scene.say(Batch([Delta(stream.number, [], FinishReason.LENGTH)]))
    assert (sink.end, stream.output_tokens) == (FinishReason.LENGTH, 7)


def test_tokens_past_the_sink_are_those_of_their_stream() -> None:
    scene = Scene()
    [a] = ids("a")
    behind: list[int] = []
    first, second = scene.stream()[0], scene.stream()[0]
    for stream, fd in ((first, 20), (second, 30)):
        scene.driver.open(fd, scene.client)
        scene.client.bypass(stream, fd, behind.append)
    for _ in range(3):
        scene.say(in_a_crowd([first.number, a, second.number, a]))
    scene.client.abort([first])
    scene.say(in_a_crowd([first.number, a, second.number, a]))
    third = scene.stream()[0]
    scene.client.bypass(third, 20, behind.append)
    scene.say(in_a_crowd([second.number, a, third.number, a]))
    scene.client.end_all(ApiError("internal", "over"))
    assert [stream.output_tokens for stream in (first, second, third)] == [3, 5, 1]
    assert scene.limiter.statistics().output_tokens == 9
    scene.client.bypass(third, 20, behind.append)  # it has ended
    fourth, sink = scene.stream()
    scene.client.bypass(fourth, -1, behind.append)  # its connection has
    scene.say(in_a_crowd([fourth.number, a]))
    scene.client.abort([fourth])
    assert sink.text == "a"
    # The frame is made in the first step, as its texts go to the sinks.
    assert [bytes(flow.sent) for flow in scene.driver.flows[1:]] == [b"<a><a><a>", b"<a><a><a><a>"]
    assert behind == []


# -- another model ----------------------------------------------------------------------------------------------------


def other_vocabulary() -> Vocabulary:
    """Return a vocabulary in which every token of the synthetic one has another text."""
    return table_vocabulary([f"[{number}]".encode() for number in range(TOKENIZER.vocabulary.size)])


def test_streams_of_the_last_model_keep_their_texts() -> None:
    scene = Scene()
    (old, old_sink), (held, held_sink) = scene.stream(), scene.stream()
    scene.client.bypass(old, 77, lambda _: None)
    [a], pieces = ids("a"), list("é".encode())
    scene.say(Batch([], pack_singles([old.number, a, held.number, pieces[0]])))
    vocabulary = other_vocabulary()
    scene.client.use_vocabulary(vocabulary.entries)
    new_sink = FakeSink()
    new = Stream(new_sink, vocabulary.detokenizer(), None)
    scene.limiter.admit(0.0)
    scene.client.submit(new, [1], SAMPLING)
    for _ in range(2):
        scene.say(Batch([], pack_singles([old.number, a, held.number, pieces[1], new.number, a])))
        scene.say(Batch([Delta(old.number, [a, a])], pack_singles([held.number, pieces[0]])))
    assert old_sink.text == "a" * 7
    assert held_sink.text == "éé"
    assert new_sink.text == f"[{a}]" * 2


def test_streams_of_a_model_that_comes_back_go_the_short_way_again() -> None:
    scene = Scene()
    stream, sink = scene.stream()
    scene.client.bypass(stream, 77, lambda _: None)
    [a] = ids("a")
    scene.client.use_vocabulary(other_vocabulary().entries)
    scene.say(Batch([], pack_singles([stream.number, a])))
    assert (sink.text, stream.plain) == ("a", False)
    scene.client.use_vocabulary(TOKENIZER.vocabulary.entries)
    scene.say(Batch([], pack_singles([stream.number, a])))
    assert (sink.text, stream.plain) == ("aa", True)


def test_a_model_that_is_coming_is_prepared_for() -> None:
    scene = Scene()
    scene.say(ModelComing("/m"))
    assert scene.heard() == [ModelPrepared("/m", "")]


def test_a_submit_says_what_its_ids_mean() -> None:
    scene = Scene()
    stream, _ = scene.stream()
    scene.heard()
    stream.tokens = "of b"
    scene.client.submit(stream, [1], SAMPLING)
    assert scene.heard() == [Submit(stream.number, [1], SAMPLING, tokens="of b")]
