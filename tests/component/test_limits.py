"""A tenant's limits on requests and tokens, through the doors of the whole daemon."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.daemon import Daemon, running, wait_until
from support.raw_http import Connection, Response, events, request
from support.synthetic import MODEL, expected_text, prompt_ids
from websockets.sync.client import ClientConnection, connect

COMPLETIONS = "/v1/completions"
PROMPT = "Once"
TOKENS_PER_S = 50
# A step of an engine that was held up makes up for a quarter of a second at most.
STEP_TOKENS = 1 + TOKENS_PER_S // 4


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """An engine with a pace."""
    tables = {"engine.synthetic": {"tokens_per_s": TOKENS_PER_S, "prompt_tokens_per_s": 0}}
    with running(tmp_path_factory.mktemp("d"), "acme", tables=tables) as daemon:
        yield daemon
        daemon.stop()


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """An engine that makes one token a step as fast as it can; its workers leave soon."""
    tables = {"engine.synthetic": {"tokens_per_s": 0, "prompt_tokens_per_s": 0}}
    with running(tmp_path_factory.mktemp("d"), "acme", idle_timeout="100ms", tables=tables) as daemon:
        yield daemon
        daemon.stop()


@pytest.fixture(autouse=True)
def at_rest(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    for name in ("daemon", "fast"):
        if name in request.fixturenames:
            wait_until(request.getfixturevalue(name).is_at_rest)


def limit(daemon: Daemon, tenant: str, limits: str) -> None:
    """Give a tenant these limits from now on; it may be new."""
    daemon.add_tenant(tenant, limits)
    reloaded = daemon.reload()
    assert not reloaded.bad_files
    assert tenant in reloaded.added + reloaded.changed


def complete(daemon: Daemon, tenant: str, **fields: Any) -> Response:
    with Connection(daemon.address) as connection:
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 1, **fields}
        connection.send(request("POST", COMPLETIONS, daemon.keys[tenant], body))
        return connection.response()


def infer(daemon: Daemon, tenant: str) -> ClientConnection:
    headers = {"Authorization": f"Bearer {daemon.keys[tenant]}"}
    return connect(f"ws://{daemon.address}/v2/infer", additional_headers=headers, proxy=None)


def over(response: Response, code: str, limit: str) -> int:
    """Check a refusal; returns the seconds after which to come back."""
    assert (response.status, response.error["code"]) == (429, code)
    assert limit in response.error["message"]
    return int(response.fields["retry-after"])


@contextlib.contextmanager
def standing_still(daemon: Daemon) -> Iterator[None]:
    """Have the engine make no step meanwhile."""
    pid = daemon.child("engine host").pid
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def at_once(count: int, work: Callable[[int], Any]) -> list[Any]:
    """Do the same in so many threads; returns what each gave."""
    results: list[Any] = [None] * count

    def do(number: int) -> None:
        results[number] = work(number)

    threads = [threading.Thread(target=do, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


# -- streams at once --------------------------------------------------------------------------------------------------


def test_streams_at_once(daemon: Daemon) -> None:
    limit(daemon, "two", "[tokens]\nstreams = 2\n")
    key, body = daemon.keys["two"], {"model": MODEL, "prompt": PROMPT, "stream": True, "max_tokens": 10_000}
    with Connection(daemon.address) as first, Connection(daemon.address) as second:
        for connection in (first, second):
            connection.send(request("POST", COMPLETIONS, key, body))
            assert connection.head()[0] == 200
        refused = complete(daemon, "two")
        assert (refused.status, refused.error["code"], refused.fields["retry-after"]) == (429, "rate_limited", "1")
        with infer(daemon, "two") as socket:
            socket.send(json.dumps({"id": "x", "prompt": PROMPT}))
            received = json.loads(socket.recv(10))
            assert (received["id"], received["error"]["code"]) == ("x", "rate_limited")
            assert received["error"]["retry_after_ms"] == 1000
            first.close()
            wait_until(lambda: daemon.tenant("two").used.streams == 1)
            socket.send(json.dumps({"id": "y", "prompt": PROMPT, "max_tokens": 1}))
            assert "delta" in json.loads(socket.recv(10))
    # More for one request than there may ever be: no use in coming back.
    never = complete(daemon, "two", n=3)
    assert (never.status, never.error["code"]) == (400, "invalid_request")
    assert "retry-after" not in never.fields


def test_a_refused_request_frees_its_place(daemon: Daemon) -> None:
    limit(daemon, "one", "[tokens]\nstreams = 1\n")
    for fields in (
        {"prompt": [999_999]},
        {"prompt": ""},
        {"prompt": [300] * 40_000},
        {"prompt": " word" * 40_000},
        {"prompt": "\ud800"},
    ):
        with Connection(daemon.address) as connection:
            body = json.dumps({"model": MODEL, **fields}).encode()  # msgspec does not write half a surrogate pair
            connection.send(request("POST", COMPLETIONS, daemon.keys["one"], body))
            assert connection.response().status in (400, 413)
        assert complete(daemon, "one").status == 200
    messages: Any = [{"role": "user", "content": "\ud800"}]
    with infer(daemon, "one") as socket:
        for _ in range(3):
            socket.send(json.dumps({"messages": messages}))
            assert json.loads(socket.recv(10))["error"]["code"] == "invalid_request"
    assert complete(daemon, "one").status == 200


# -- requests per minute ----------------------------------------------------------------------------------------------


def test_requests_a_minute(daemon: Daemon) -> None:
    limit(daemon, "five", "[requests]\nper_minute = 5\n")
    statuses = [response.status for response in at_once(8, lambda _: complete(daemon, "five"))]
    assert sorted(statuses) == [200] * 5 + [429] * 3
    begun = time.monotonic()
    # Refused on what is known for nothing: the prompt is neither counted nor tokenised, or it would be a 413.
    refused = complete(daemon, "five", prompt=" word" * 100_000)
    assert 50 <= over(refused, "rate_limited", "requests.per_minute") <= 60
    assert time.monotonic() - begun < 1
    assert daemon.tenant("five").used.refused == 4
    # Who asks for what is no request at all uses none up.
    assert complete(daemon, "five", temperature=7).status == 400
    assert complete(daemon, "acme").status == 200


# -- tokens -----------------------------------------------------------------------------------------------------------


def test_ten_streams_of_four_hundred_tokens_under_a_thousand_a_minute(daemon: Daemon) -> None:
    limit(daemon, "thousand", "[tokens]\nper_minute = 1000\n")

    def sse(seed: int) -> tuple[str, dict[str, Any]]:
        response = complete(daemon, "thousand", stream=True, seed=seed, max_tokens=400)
        assert response.status == 200
        *deltas, last = events(response.body)
        assert last["choices"][0]["text"] == ""
        told = {"finish_reason": last["choices"][0]["finish_reason"], **last}
        return "".join(event["choices"][0]["text"] for event in deltas), told

    def whole(seed: int) -> tuple[str, dict[str, Any]]:
        answer = complete(daemon, "thousand", seed=seed, max_tokens=400).json()
        return answer["choices"][0]["text"], {"finish_reason": answer["choices"][0]["finish_reason"], **answer}

    def websocket(seed: int) -> tuple[str, dict[str, Any]]:
        text = ""
        with infer(daemon, "thousand") as socket:
            socket.send(json.dumps({"prompt": PROMPT, "seed": seed, "max_tokens": 400}))
            while "delta" in (received := json.loads(socket.recv(30))):
                text += received["delta"]
        return text, received

    doors = [sse] * 5 + [websocket] * 3 + [whole] * 2
    answers = at_once(10, lambda number: doors[number](number))
    used = daemon.tenant("thousand").used
    total = used.prompt_tokens + used.output_tokens
    assert 1000 <= total <= 1000 + 10 * STEP_TOKENS
    told = 0
    for seed, (text, last) in enumerate(answers):
        assert last["finish_reason"] == "quota_exceeded"
        tokens = last["usage"]["completion_tokens"]
        assert text.removesuffix("\ufffd") == expected_text(PROMPT, tokens, seed).removesuffix("\ufffd")
        assert 45_000 < last["retry_after_ms"] <= 60_001
        told += last["usage"]["total_tokens"]
    assert told == total
    retry_s = over(complete(daemon, "thousand"), "quota_exceeded", "tokens.per_minute")
    assert 45 < retry_s <= 60
    assert complete(daemon, "acme").status == 200
    print(f"ten streams under 1,000 tokens a minute used {total}")


def test_twenty_parallel_streams_overdraw_by_one_step_at_most(fast: Daemon) -> None:
    limit(fast, "twenty", "[tokens]\nper_minute = 1000\n")
    answer = complete(fast, "twenty", prompt=[PROMPT] * 20, max_tokens=1000).json()
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"quota_exceeded"}
    used = fast.tenant("twenty").used
    assert 1000 <= used.prompt_tokens + used.output_tokens <= 1020
    assert answer["usage"]["total_tokens"] == used.prompt_tokens + used.output_tokens


def test_twenty_parallel_requests_overdraw_by_one_step_at_most(fast: Daemon) -> None:
    limit(fast, "requests", "[tokens]\nper_minute = 1000\n")

    def sse() -> tuple[str, int]:
        response = complete(fast, "requests", stream=True, max_tokens=1000)
        assert response.status == 200
        last = events(response.body)[-1]
        return last["choices"][0]["finish_reason"], last["usage"]["total_tokens"]

    with ThreadPoolExecutor(20) as pool:
        with standing_still(fast):  # or the first ones have used it up before the last ones ask
            asked = [pool.submit(sse) for _ in range(20)]
            wait_until(lambda: fast.tenant("requests").used.streams == 20)
        answers = [answer.result(60) for answer in asked]
    used = fast.tenant("requests").used
    assert [reason for reason, _ in answers] == ["quota_exceeded"] * 20
    total = used.prompt_tokens + used.output_tokens
    assert 1000 <= total <= 1020
    assert sum(tokens for _, tokens in answers) == total
    counted = fast.tenant("requests").engine
    assert counted is not None
    assert (counted.running, counted.waiting, counted.kv_blocks) == (0, 0, 0)


def test_a_prompt_that_is_over_what_is_left_is_refused_unused(daemon: Daemon) -> None:
    limit(daemon, "hundred", "[tokens]\nper_minute = 100\n")
    refused = complete(daemon, "hundred", prompt=[300] * 101)
    assert (refused.status, refused.error["code"]) == (429, "quota_exceeded")
    assert daemon.tenant("hundred").used.prompt_tokens == 0
    assert complete(daemon, "hundred", prompt=[300] * 50).status == 200
    assert complete(daemon, "hundred", prompt=[300] * 60).status == 429
    assert complete(daemon, "hundred", prompt=[300] * 10).status == 200


def test_what_was_told_about_coming_back_is_true(fast: Daemon) -> None:
    """A prompt of 300 tokens at 100 a second, with a second's worth in hand, is a debt of two seconds."""
    limit(fast, "second", "[tokens]\nper_second = 100\n")
    with infer(fast, "second") as first, infer(fast, "second") as socket:
        first.send(json.dumps({"prompt": [300] * 300, "max_tokens": 1}))
        wait_until(lambda: fast.tenant("second").used.prompt_tokens == 300)
        begun = time.monotonic()
        refusals = 0
        while True:
            asked = time.monotonic()
            socket.send(json.dumps({"prompt": PROMPT, "max_tokens": 1}))
            received = json.loads(socket.recv(10))
            if "error" not in received:
                break
            assert received["error"]["code"] == "rate_limited"
            if not refusals:
                promised_s = received["error"]["retry_after_ms"] / 1000
                retry_s = over(complete(fast, "second"), "rate_limited", "tokens.per_second")
                assert promised_s - 0.5 < retry_s <= promised_s + 1
            refusals += 1
            time.sleep(0.02)
        took_s = asked - begun
        assert refusals > 5
        assert promised_s - 0.1 < took_s < promised_s + 0.5
        assert 1.0 < promised_s <= 2.1


def test_tokens_come_at_the_rate_that_the_tenant_has(fast: Daemon) -> None:
    """The engine paces them, so that a stream is slow and not cut: 50 a second, after a fifth of a second's worth."""
    limit(fast, "paced", "[tokens]\nper_second = 50\n")
    begun = time.monotonic()
    assert complete(fast, "paced", max_tokens=110).status == 200
    took_s = time.monotonic() - begun
    assert 1.9 < took_s < 4.0
    counted = fast.tenant("paced").engine
    assert counted is not None
    assert counted.output_tokens == 110
    assert counted.held_s > 1.5


def test_share_of_the_engine_is_one_of_its_time(daemon: Daemon) -> None:
    """A fifth of the steps, at 50 tokens a second for who has all of them."""
    limit(daemon, "fifth", '[gpu]\nshare = "20%"\n')
    begun = time.monotonic()
    assert complete(daemon, "fifth", max_tokens=25).status == 200
    took_s = time.monotonic() - begun
    assert 1.9 < took_s < 4.0
    counted = daemon.tenant("fifth").engine
    assert counted is not None
    assert counted.step_s == pytest.approx(25 / TOKENS_PER_S, rel=0.3)


def test_a_full_queue_refuses_at_once_and_says_when_to_come_back(daemon: Daemon) -> None:
    limit(daemon, "queued", '[gpu]\nshare = "1%"\n[requests]\nqueue = 3\n')
    with infer(daemon, "queued") as socket:
        for number in range(12):
            socket.send(json.dumps({"id": str(number), "prompt": PROMPT, "max_tokens": 1_000}))
        refused = 0
        while not refused:
            message = json.loads(socket.recv(10))
            refused += "error" in message
        assert message["error"]["code"] == "rate_limited"
        assert "requests.queue" in message["error"]["message"]
        assert message["error"]["retry_after_ms"] >= 100
        begun = time.monotonic()
        retry_s = over(complete(daemon, "queued"), "rate_limited", "requests.queue")
        assert time.monotonic() - begun < 0.5
        assert 1 <= retry_s <= 60
        assert complete(daemon, "acme").status == 200


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """An engine with two slots and a queue of eight."""
    tables = {"engine": {"max_streams": 2, "queue": 8}, "engine.synthetic": {"tokens_per_s": TOKENS_PER_S}}
    with running(tmp_path_factory.mktemp("d"), "flood", "acme", tables=tables) as daemon:
        yield daemon
        daemon.stop()


def test_a_full_engine_refuses_who_has_filled_it_and_no_one_else(small: Daemon) -> None:
    with infer(small, "flood") as flood:

        def ask(number: int) -> None:
            flood.send(json.dumps({"id": str(number), "prompt": PROMPT, "max_tokens": 2 * TOKENS_PER_S}))

        for number in range(2):
            ask(number)
        while {json.loads(flood.recv(10))["id"] for _ in range(2)} != {"0", "1"}:
            pass
        for number in range(2, 40):
            ask(number)
        refused: list[dict[str, Any]] = []
        while len(refused) < 30:
            answer = json.loads(flood.recv(10))
            assert "finish_reason" not in answer, "two run, eight wait, and thirty are refused at once"
            refused += [answer["error"]] if "error" in answer else []
        assert {error["code"] for error in refused} == {"overloaded"}
        assert all(100 <= error["retry_after_ms"] <= 60_000 for error in refused)
        times = []
        for _ in range(15):
            begun = time.monotonic()
            response = complete(small, "flood", prompt=PROMPT * 5_000)
            times.append(time.monotonic() - begun)
            assert (response.status, response.error["code"]) == (503, "overloaded")
        print(
            f"refused after {1000 * statistics.median(times):.1f} ms, connecting too; {1000 * max(times):.1f} at most"
        )
        assert statistics.median(times) < 0.05
        assert "the engine's queue is full, and 8 of yours are in it" in response.error["message"]
        assert 1 <= int(response.fields["retry-after"]) <= 60
        assert complete(small, "acme").status == 200
    wait_until(small.is_at_rest)
    assert complete(small, "flood").status == 200, "nothing is left of a full queue"


def test_the_context_of_a_tenant(daemon: Daemon) -> None:
    limit(daemon, "small", "[tokens]\ncontext = 100\n")
    answer = complete(daemon, "small", prompt=[300] * 90, max_tokens=50).json()
    assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (10, "length")
    for prompt in ([300] * 100, " word" * 120, "x" * 5000):
        refused = complete(daemon, "small", prompt=prompt)
        assert (refused.status, refused.error["code"]) == (413, "context_too_long")
    assert complete(daemon, "acme", prompt=[300] * 100).status == 200
    assert daemon.tenant("small").used.prompt_tokens == 90


# -- changes and restarts ---------------------------------------------------------------------------------------------


def test_a_limit_changed_under_load_counts_at_once(daemon: Daemon) -> None:
    limit(daemon, "live", "[tokens]\nstreams = 1\n")
    body = {"model": MODEL, "prompt": PROMPT, "stream": True, "max_tokens": 60}
    with Connection(daemon.address) as connection:
        connection.send(request("POST", COMPLETIONS, daemon.keys["live"], body))
        assert connection.head()[0] == 200
        assert complete(daemon, "live").status == 429
        worker = daemon.tenant("live").worker_pid
        limit(daemon, "live", "[tokens]\nstreams = 2\n")
        assert complete(daemon, "live").status == 200
        limit(daemon, "live", "[tokens]\nstreams = 1\n")
        assert complete(daemon, "live").status == 429
        limit(daemon, "live", "[tokens]\nstreams = 3\ncontext = 10\n")
        assert complete(daemon, "live", prompt=[300] * 10).status == 413
        # What runs goes on, with the limits of its beginning.
        assert len(events(b"".join(connection.chunks()))) > 30
        assert daemon.tenant("live").worker_pid == worker


def test_a_window_that_is_made_smaller_ends_what_runs(daemon: Daemon) -> None:
    limit(daemon, "shrinks", "[tokens]\nper_minute = 100000\n")
    body = {"model": MODEL, "prompt": PROMPT, "stream": True, "max_tokens": 10_000}
    with Connection(daemon.address) as connection:
        connection.send(request("POST", COMPLETIONS, daemon.keys["shrinks"], body))
        assert connection.head()[0] == 200
        limit(daemon, "shrinks", "[tokens]\nper_minute = 30\n")
        last = events(b"".join(connection.chunks()))[-1]
        assert last["choices"][0]["finish_reason"] == "quota_exceeded"


def test_a_key_that_is_taken_away_ends_with_the_request_at_hand(daemon: Daemon) -> None:
    limit(daemon, "rotates", "")
    body = {"model": MODEL, "prompt": PROMPT, "stream": True, "max_tokens": 30}
    old = daemon.keys.pop("rotates")
    with Connection(daemon.address) as connection:
        connection.send(request("POST", COMPLETIONS, old, body))
        assert connection.head()[0] == 200
        limit(daemon, "rotates", "")
        assert daemon.keys["rotates"] != old
        assert events(b"".join(connection.chunks()))[-1]["choices"][0]["finish_reason"] == "length"
        connection.send(request("GET", "/v1/models", daemon.keys["rotates"]))
        assert connection.response().status == 200
        connection.send(request("GET", "/v1/models", old))
        assert connection.response().status == 401


@pytest.mark.parametrize("end", ["idle", "killed"])
def test_what_was_used_stays_used_when_the_worker_goes(fast: Daemon, end: str) -> None:
    tenant = f"stays-{end}"
    limit(fast, tenant, "[tokens]\nper_minute = 50\n[requests]\nper_minute = 3\n")
    assert complete(fast, tenant, max_tokens=20).status == 200
    assert complete(fast, tenant, max_tokens=10).status == 200
    used = fast.tenant(tenant).used
    assert (used.requests, used.output_tokens) == (2, 30)
    # What a worker tells, once a second and whenever it is asked, is what its successor knows.
    worker = fast.tenant(tenant).worker_pid
    if end == "killed":
        with Connection(fast.address) as connection:
            connection.send(request("GET", "/v1/models", fast.keys[tenant]))
            assert connection.response().status == 200
            worker = fast.tenant(tenant).worker_pid
            fast.kill(worker)
    wait_until(lambda: worker not in fast.processes())
    answer = complete(fast, tenant, max_tokens=1000)
    assert fast.tenant(tenant).worker_pid != worker
    tokens = 50 - 30 - 3 * len(prompt_ids(PROMPT))
    assert answer.json()["usage"]["completion_tokens"] == tokens
    assert answer.json()["choices"][0]["finish_reason"] == "quota_exceeded"
    refused = complete(fast, tenant)
    assert refused.status == 429
    assert int(refused.fields["retry-after"]) > 30
    used = fast.tenant(tenant).used
    assert (used.requests, used.refused, used.output_tokens) == (3, 1, 30 + tokens)
