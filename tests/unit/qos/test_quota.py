"""Tenant files, scheduling classes, and directories of them."""

from __future__ import annotations

import hashlib

import msgspec
import pytest

from seedance.errors import ConfigError
from seedance.qos import quota as quotas
from seedance.qos.quota import (
    BUILT_IN_CLASSES,
    CpuQuota,
    GpuQuota,
    MemoryQuota,
    NetworkQuota,
    Quota,
    RequestQuota,
    SessionQuota,
    TokenQuota,
    load,
    load_class,
    load_directory,
)


def key(name: str) -> str:
    return "sha256:" + hashlib.sha256(name.encode()).hexdigest()


FULL = f"""
keys = ["{key("a")}", "{key("b")}"]
class = "gold"
group = "free"
best_effort = true
[cpu]
max = "150%"
burst = "50ms"
cpuset = "0-2,8"
[memory]
max = "2GiB"
high = "1.5GiB"
[network]
egress = "50Mbit"
ingress = "20Mbit"
connections = 2000
[gpu]
share = "25%"
kv = "20%"
[tokens]
per_second = 1500
per_minute = 60000
per_day = 1000000
streams = 64
context = 8192
[requests]
per_minute = 600
queue = 64
[session]
resume_for = "10min"
"""


def test_full_file() -> None:
    assert load(FULL, "t/acme.toml", "acme") == Quota(
        tenant="acme",
        keys=(key("a"), key("b")),
        scheduling_class="gold",
        weight=400,
        group="free",
        best_effort=True,
        cpu=CpuQuota(max_cores=1.5, burst_s=0.05, cpuset=(0, 1, 2, 8)),
        memory=MemoryQuota(max_bytes=2 << 30, high_bytes=3 << 29),
        network=NetworkQuota(egress_bytes_per_s=6_250_000, ingress_bytes_per_s=2_500_000, connections=2000),
        gpu=GpuQuota(share=0.25, kv_share=0.2),
        tokens=TokenQuota(per_second=1500, per_minute=60000, per_day=1_000_000, streams=64, context=8192),
        requests=RequestQuota(per_minute=600, queue=64),
        session=SessionQuota(resume_for_s=600.0),
    )


def test_empty_file_has_the_defaults_of_the_default_class() -> None:
    quota = load("", "t/acme.toml", "acme")
    assert quota == Quota(tenant="acme", scheduling_class="silver", weight=200, tokens=TokenQuota(streams=64))
    assert quota.cpu.max_cores is None
    assert quota.session.resume_for_s == 600.0


def test_quota_travels_as_msgpack() -> None:
    quota = load(FULL, "t/acme.toml", "acme")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(quota), type=Quota) == quota
    assert hash(quota) == hash(load(FULL, "t/acme.toml", "acme"))


def test_file_goes_over_its_class_key_by_key() -> None:
    night = load_class({"tokens": {"streams": 4, "per_day": 1000}, "weight": 7, "priority": 2}, "night", "c")
    quota = load('class = "night"\n[tokens]\nper_day = 5', "t", "acme", {"night": night, **BUILT_IN_CLASSES})
    assert (quota.tokens.streams, quota.tokens.per_day, quota.weight, quota.priority) == (4, 5, 7, 2)
    quota = load('class = "night"\n[tokens]\nper_day = "unlimited"', "t", "acme", {"night": night})
    assert (quota.tokens.streams, quota.tokens.per_day) == (4, None)


@pytest.mark.parametrize(
    ("text", "where", "reason"),
    [
        ("[tokens]\nper_secund = 3", "tokens.per_secund", "did you mean 'per_second'?"),
        ("per_day = 3", "per_day", "did you mean 'tokens.per_day'?"),
        ("[token]\nstreams = 1", "token", "did you mean 'tokens'?"),
        ("weight = 3", "weight", "unknown key"),
        ("class = 'golden'", "class", 'cannot take "golden"; write one of gold, silver, bronze'),
        ("class = ['gold']", "class", "as a name"),
        ("group = 'A b'", "group", 'cannot take "A b" as a name'),
        ("[tokens]\nstreams = 0", "tokens.streams", "whole number from 1"),
        ("[tokens]\nstreams = -1", "tokens.streams", "cannot take -1"),
        ("[tokens]\nper_minute = '60k'", "tokens.per_minute", 'cannot take "60k"'),
        ("[tokens]\ncontext = 1", "tokens.context", "from 2"),
        ("[requests]\nper_minute = 100001", "requests.per_minute", "to 100000"),
        ("[session]\nresume_for = -1", "session.resume_for", "as a duration"),
        ("[session]\nresume_for = 'unlimited'", "session.resume_for", "as a duration"),
        ("[cpu]\nmax = 1.5", "cpu.max", 'write e.g. "25%"'),
        ("[cpu]\nmax = '0%'", "cpu.max", "above zero"),
        ("[cpu]\nmax = '0.9%'", "cpu.max", 'cannot be less than 1%, all that the kernel takes; write "1%"'),
        ("[cpu]\nburst = '1ms'", "cpu.burst", "write cpu.max too"),
        ("[cpu]\nmax = '50%'\nburst = '51ms'", "cpu.burst", 'what cpu.max grants in 100ms; write "50ms" or less'),
        ("[cpu]\ncpuset = '3-1'", "cpu.cpuset", 'write e.g. "0-3,8"'),
        ("[cpu]\ncpuset = ''", "cpu.cpuset", "set of CPUs"),
        ("[cpu]\ncpuset = 3", "cpu.cpuset", "cannot read 3 as a set of CPUs"),
        ("[memory]\nmax = 0", "memory.max", "above zero"),
        ("[memory]\nmax = '1MiB'\nhigh = '2MiB'", "memory.high", "write 1048576 bytes or less"),
        ("[network]\negress = 50", "network.egress", 'write e.g. "50Mbit"'),
        ("[gpu]\nshare = '101%'", "gpu.share", '"100%" at most'),
        ("[gpu]\nkv = '0%'", "gpu.kv", 'above "0%"'),
        ("best_effort = 'yes'", "best_effort", "true or false"),
        ("keys = 'x'", "keys", "a list of key hashes"),
        ("keys = ['sk-seed-secret']", "keys", "cannot take entry 1 as a key hash"),
        (f"keys = ['{key('a').upper()}']", "keys", "entry 1"),
        (f"keys = ['{key('a')}', '{key('a')}']", "keys", "cannot take entry 2: the same key is listed before it"),
    ],
)
def test_wrong_files_say_what_would_be_right(text: str, where: str, reason: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load(text, "t/acme.toml", "acme")
    assert (raised.value.path, raised.value.key) == ("t/acme.toml", where)
    assert reason in raised.value.reason
    assert raised.value.reason.startswith("cannot ")


def test_a_key_in_the_clear_is_not_repeated_in_the_error() -> None:
    with pytest.raises(ConfigError) as raised:
        load('keys = ["sk-seed-topsecret"]', "t", "acme")
    assert "topsecret" not in str(raised.value)


def test_a_whole_cpu_period_may_be_the_burst() -> None:
    assert load("[cpu]\nmax = '50%'\nburst = '50ms'", "t", "a").cpu.burst_s == 0.05
    assert load("[cpu]\nmax = '70%'\nburst = '70ms'", "t", "a").cpu.burst_s == 0.07
    assert load("[cpu]\nburst = 0", "t", "a").cpu.burst_s == 0
    assert load("[cpu]\nmax = '1%'", "t", "a").cpu.max_cores == 0.01


@pytest.mark.parametrize("name", ["acme", "a", "0-9_x.y", "a" * 64])
def test_tenant_names(name: str) -> None:
    assert load("", "t", name).tenant == name


@pytest.mark.parametrize("name", ["", ".", "..", "Acme", "-a", "_a", "a b", "a/b", "a" * 65, "é", "a\n"])
def test_wrong_tenant_names(name: str) -> None:
    with pytest.raises(ConfigError, match="as a name"):
        load("", "t", name)


def test_classes_extend_built_in_ones() -> None:
    gold = load_class({"requests": {"queue": 9}}, "gold", "c")
    assert (gold.weight, gold.defaults) == (400, {"tokens": {"streams": 256}, "requests": {"queue": 9}})
    assert BUILT_IN_CLASSES["gold"].defaults == {"tokens": {"streams": 256}}


@pytest.mark.parametrize(
    ("table", "name", "where"),
    [
        ({"weight": 0}, "night", "classes.night.weight"),
        ({"priority": 4}, "night", "classes.night.priority"),
        ({"keys": []}, "night", "classes.night.keys"),
        ({"class": "gold"}, "night", "classes.night.class"),
        ({"tokens": {"streems": 1}}, "night", "classes.night.tokens.streems"),
        ({"memory": {"max": 1024, "high": 2048}}, "night", "classes.night.memory.high"),
        (3, "night", "classes.night"),
        ({}, "Night", "classes.Night"),
    ],
)
def test_wrong_classes(table: object, name: str, where: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_class(table, name, "c")
    assert (raised.value.path, raised.value.key) == ("c", where)


class TestDirectory:
    def test_all_good(self) -> None:
        loaded = load_directory({"/t/b.toml": "", "/t/a.toml": f'keys = ["{key("a")}"]'})
        assert list(loaded.quotas) == ["a", "b"]
        assert loaded.quotas["a"].keys == (key("a"),)
        assert loaded.errors == []

    def test_a_bad_file_touches_no_other_tenant(self) -> None:
        unread = ConfigError("/t/c.toml", "", "cannot read it: permission denied")
        loaded = load_directory({"/t/a.toml": "nonsense", "/t/b.toml": "", "/t/c.toml": unread, "/t/D.toml": ""})
        assert list(loaded.quotas) == ["b"]
        assert sorted(error.path for error in loaded.errors) == ["/t/D.toml", "/t/a.toml", "/t/c.toml"]
        assert unread in loaded.errors

    def test_a_bad_file_leaves_the_last_good_quota(self) -> None:
        before = load_directory({"/t/a.toml": "[tokens]\nstreams = 3", "/t/b.toml": ""}).quotas
        after = load_directory({"/t/a.toml": "[tokens]\nstreams = 0", "/t/b.toml": ""}, previous=before)
        assert after.quotas == before
        assert [error.key for error in after.errors] == ["tokens.streams"]

    def test_a_removed_file_is_a_removed_tenant(self) -> None:
        before = load_directory({"/t/a.toml": "", "/t/b.toml": ""}).quotas
        assert list(load_directory({"/t/b.toml": ""}, previous=before).quotas) == ["b"]

    def test_one_key_in_two_files_stays_with_the_first_by_name(self) -> None:
        text = f'keys = ["{key("a")}"]'
        loaded = load_directory({"/t/b.toml": text, "/t/a.toml": text})
        assert list(loaded.quotas) == ["a"]
        assert [(error.path, error.key) for error in loaded.errors] == [("/t/b.toml", "keys")]
        assert "tenant 'a'" in loaded.errors[0].reason

    def test_one_key_in_two_files_stays_with_the_one_that_had_it(self) -> None:
        text = f'keys = ["{key("b")}"]'
        before = load_directory({"/t/a.toml": "", "/t/b.toml": text}).quotas
        after = load_directory({"/t/a.toml": text, "/t/b.toml": text}, previous=before)
        assert after.quotas == before
        assert [error.path for error in after.errors] == ["/t/a.toml"]

    def test_a_file_that_is_about_to_be_written_leaves_the_last_good_quota(self) -> None:
        before = load_directory({"acme.toml": 'class = "gold"', "new.toml": ""}).quotas
        after = load_directory({"acme.toml": " \n", "new.toml": ""}, previous=before)
        assert after.quotas == before
        assert [(error.path, error.reason[:25]) for error in after.errors] == [
            ("acme.toml", "cannot take an empty file")
        ]

    def test_a_bad_file_keeps_its_keys_from_others(self) -> None:
        text = f'keys = ["{key("b")}"]'
        before = load_directory({"/t/a.toml": "", "/t/b.toml": text}).quotas
        after = load_directory({"/t/a.toml": text, "/t/b.toml": "broken"}, previous=before)
        assert after.quotas == before
        assert len(after.errors) == 2

    def test_keys_can_be_swapped(self) -> None:
        one, two = f'keys = ["{key("1")}"]', f'keys = ["{key("2")}"]'
        before = load_directory({"/t/a.toml": one, "/t/b.toml": two}).quotas
        after = load_directory({"/t/a.toml": two, "/t/b.toml": one}, previous=before)
        assert after.errors == []
        assert after.quotas["a"].keys == before["b"].keys
        assert after.quotas["b"].keys == before["a"].keys

    def test_a_fall_back_takes_its_old_key_with_it(self) -> None:
        def text(*names: str) -> str:
            return f"keys = {[key(name) for name in names]}"

        before = load_directory({"/t/a.toml": text("1"), "/t/b.toml": text("2"), "/t/c.toml": text("9")}).quotas
        # b gives 2 away, but its file claims c's key too: b keeps 2, so a cannot have it.
        wanted = {"/t/a.toml": text("2"), "/t/b.toml": text("1", "9"), "/t/c.toml": text("9")}
        after = load_directory(wanted, previous=before)
        assert after.quotas == before
        assert sorted(error.path for error in after.errors) == ["/t/a.toml", "/t/b.toml"]


def test_tenant_name() -> None:
    assert quotas.tenant_name("/etc/x/acme.toml") == "acme"
    assert quotas.tenant_name("acme") == "acme"
