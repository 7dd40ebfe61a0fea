"""Messages between the processes: every one survives its link, and none is mistaken for another."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from seedance.daemon import links
from seedance.daemon.config import HttpConfig, WorkerConfig
from seedance.engine.channel import EngineChanged
from seedance.engine.packets import MAX_PACKET_BYTES, Codec
from seedance.engine.request import ModelInfo
from seedance.errors import RemoteProtocolError
from seedance.qos.limiter import MAX_EXACT_REQUESTS, LimiterSnapshot, RequestGroup, WindowSnapshot
from seedance.qos.quota import Quota, TokenQuota

QUOTA = Quota(tenant="acme", keys=("sha256:" + "0" * 64,), tokens=TokenQuota(streams=3))
SNAPSHOT = LimiterSnapshot(
    wall=1.5, request_ages_s=[RequestGroup(3.0, 2), RequestGroup(2.0, 1)], credits=1.0, minute=WindowSnapshot(1.0, 2)
)
MODEL = ModelInfo(
    name="m", tokenizer_dir="", max_model_len=9, vocab_size=9, eos_token_ids=(1,), created=1, engine="synthetic"
)
SETTINGS = links.WorkerSettings(
    quota=QUOTA,
    worker=WorkerConfig(),
    http=HttpConfig(),
    log_level="info",
    session_key=bytes(range(32)),
    engine=EngineChanged("ready", "", MODEL),
    limiter=SNAPSHOT,
    test_echo=True,
)

MESSAGES: list[tuple[Codec[Any], Any]] = [
    (links.TO_WORKER, links.Handover("127.0.0.1:1", "l", b"GET")),
    (links.TO_GATEWAY, links.HandBack("", "l", b"GET")),
    (links.TO_GATEWAY, links.Released(3)),
    (links.TO_GATEWAY, links.Taken()),
    (links.WORKER_ORDERS, links.QuotaChanged(QUOTA)),
    (links.WORKER_ORDERS, links.Query()),
    (links.WORKER_ORDERS, links.Drain(1.5)),
    (links.WORKER_ORDERS, links.EngineChannel()),
    (links.WORKER_REPORTS, links.WorkerReady("epoll")),
    (links.WORKER_REPORTS, links.WorkerIdle()),
    (links.WORKER_REPORTS, links.LimiterState(SNAPSHOT)),
    (links.GATEWAY_ORDERS, links.GatewaySettings(["a"], "auto", 1.0, 2.0, 3, 4, 5, 6)),
    (links.GATEWAY_ORDERS, links.Query()),
    (links.GATEWAY_ORDERS, links.Tenants([links.TenantEntry("acme", 1, None, ["sha256:"])], True)),
    (links.GATEWAY_ORDERS, links.EngineStatus("ready")),
    (links.GATEWAY_ORDERS, links.WorkerAttached("acme", 3)),
    (links.GATEWAY_ORDERS, links.WorkerDetached("acme")),
    (links.GATEWAY_ORDERS, links.WorkerFailed("acme", "why")),
    (links.GATEWAY_ORDERS, links.StopAccepting()),
    (links.GATEWAY_REPORTS, links.GatewayReady("epoll", "")),
    (links.GATEWAY_REPORTS, links.WorkerWanted("acme")),
    (links.GATEWAY_REPORTS, links.GatewayStatistics(1, 2, 3, 4, 5)),
    (links.ZYGOTE_ORDERS, links.Spawn(1, SETTINGS)),
    (links.ZYGOTE_ORDERS, links.Query()),
    (links.ZYGOTE_ORDERS, links.Preload("/m")),
    (links.ZYGOTE_REPORTS, links.ZygoteReady()),
    (links.ZYGOTE_REPORTS, links.Preloaded("/m", "why")),
    (links.ZYGOTE_REPORTS, links.Spawned(1, 2)),
    (links.ZYGOTE_REPORTS, links.Exited(1, -9)),
    (links.ZYGOTE_REPORTS, links.SpawnFailed(1, "why")),
]


@pytest.mark.parametrize(("codec", "message"), MESSAGES, ids=lambda value: type(value).__name__)
def test_a_message_arrives_as_it_was_sent(codec: Codec[Any], message: Any) -> None:
    assert codec.decode(codec.encode(message)) == message


def test_what_is_no_message_of_a_link_is_refused() -> None:
    with pytest.raises(RemoteProtocolError):
        links.TO_WORKER.decode(links.TO_GATEWAY.encode(links.Released(3)))


def test_the_largest_order_to_fork_a_worker_fits_into_a_packet() -> None:
    # As many keys as a tenant file of the greatest length holds.
    quota = Quota(tenant="a" * 64, keys=tuple(f"sha256:{number:064x}" for number in range(880)))
    # The limiter tells at most so many groups, and one for the rest.
    groups = [RequestGroup(59.123456789, 1 << 30)] * (MAX_EXACT_REQUESTS + 1)
    snapshot = LimiterSnapshot(wall=1e9, request_ages_s=groups)
    settings = msgspec.structs.replace(SETTINGS, quota=quota, limiter=snapshot)
    assert len(links.ZYGOTE_ORDERS.encode(links.Spawn(1 << 40, settings))) < MAX_PACKET_BYTES


def test_the_largest_handover_fits_into_a_packet() -> None:
    message = links.Handover("[" + "f" * 39 + "]:65535", "unix:" + "x" * 107, bytes(links.MAX_HANDOVER_BYTES))
    assert len(links.TO_WORKER.encode(message)) < MAX_PACKET_BYTES
