"""Tenant files: what a tenant may use, from TOML text to a typed quota.

`parse` reads one file's text, `combine` lays it over the defaults of its class, `validate` checks what only the whole
can tell and builds the `Quota`. A limit of None is no limit; a file lifts a limit that its class sets with the word
"unlimited".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

import msgspec

from seedance.errors import ConfigError
from seedance.qos import units
from seedance.qos.toml import (
    Field,
    Schema,
    above_zero,
    flag,
    loads,
    one_of,
    or_unlimited,
    overlay,
    read_table,
    read_value,
    whole,
)

# cgroup v2 hands out `cpu.max` per period of this length, and refuses a `cpu.max.burst` above one period's quota.
CPU_PERIOD_S: Final = 0.1
LEAST_CPU_S: Final = 0.001
"""The least in a period that the kernel takes (min_cfs_quota_period)."""
MAX_COUNT: Final = 1_000_000_000
# The limiter remembers one time stamp per request of the last minute.
MAX_REQUESTS_PER_MINUTE: Final = 100_000
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}", re.ASCII)
_KEY_HASH: Final = re.compile(r"sha256:[0-9a-f]{64}", re.ASCII)

Raw: TypeAlias = dict[str, Any]


class CpuQuota(msgspec.Struct, frozen=True, kw_only=True):
    """Processor time: `max_cores` 1.5 is one core and a half; `burst_s` is CPU time saved up while under it.

    `cpuset` holds CPU numbers in ascending order; empty for all.
    """

    max_cores: float | None = None
    burst_s: float | None = None
    cpuset: tuple[int, ...] = ()


class MemoryQuota(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of the tenant's processes: reclaim starts at `high_bytes`, nothing is granted above `max_bytes`."""

    max_bytes: int | None = None
    high_bytes: int | None = None


class NetworkQuota(msgspec.Struct, frozen=True, kw_only=True):
    """Network rates, each way, and the connections that may be open at once."""

    egress_bytes_per_s: int | None = None
    ingress_bytes_per_s: int | None = None
    connections: int | None = None


class GpuQuota(msgspec.Struct, frozen=True, kw_only=True):
    """Fractions of engine step time and of KV blocks, above 0 and up to 1."""

    share: float | None = None
    kv_share: float | None = None


class TokenQuota(msgspec.Struct, frozen=True, kw_only=True):
    """LLM tokens, prompt and output together; `streams` at once, and `context` tokens in one of them."""

    per_second: int | None = None
    per_minute: int | None = None
    per_day: int | None = None
    streams: int | None = None
    context: int | None = None


class RequestQuota(msgspec.Struct, frozen=True, kw_only=True):
    """Requests begun in any 60 seconds, and requests that may wait for the engine at once."""

    per_minute: int | None = None
    queue: int | None = 128


class SessionQuota(msgspec.Struct, frozen=True, kw_only=True):
    """How long a stream that lost its connection is kept for its client to come back; 0 for not at all."""

    resume_for_s: float = 600.0


class Quota(msgspec.Struct, frozen=True, kw_only=True):
    """All that one tenant may use.

    `keys` are SHA-256 hashes of API keys, "sha256:" and 64 hex digits. `weight` and `priority` are those of the
    scheduling class. Tenants of one `group` share a worker; None is a worker of its own. With `best_effort` a limit
    that this kernel lacks is left out instead of being an error.
    """

    tenant: str
    keys: tuple[str, ...] = ()
    scheduling_class: str = "silver"
    weight: int = 200
    priority: int = 0
    group: str | None = None
    best_effort: bool = False
    cpu: CpuQuota = CpuQuota()
    memory: MemoryQuota = MemoryQuota()
    network: NetworkQuota = NetworkQuota()
    gpu: GpuQuota = GpuQuota()
    tokens: TokenQuota = TokenQuota()
    requests: RequestQuota = RequestQuota()
    session: SessionQuota = SessionQuota()


class SchedulingClass(msgspec.Struct, frozen=True, kw_only=True):
    """A class that tenants name: its `weight` against the other classes, and what its tenants' files leave out.

    A request of a class with a `priority` takes the slot of one of lower priority where all are taken. `defaults` has
    the shape of a parsed tenant file.
    """

    name: str
    weight: int = 200
    priority: int = 0
    defaults: Raw = {}


DEFAULT_CLASS: Final = "silver"
BUILT_IN_CLASSES: Final[Mapping[str, SchedulingClass]] = {
    "gold": SchedulingClass(name="gold", weight=400, defaults={"tokens": {"streams": 256}}),
    "silver": SchedulingClass(name="silver", weight=200, defaults={"tokens": {"streams": 64}}),
    "bronze": SchedulingClass(name="bronze", weight=100, defaults={"tokens": {"streams": 16}}),
}


def read_name(value: object) -> str:
    """Read the name of a tenant, class or group: `[a-z0-9][a-z0-9_.-]*`, 64 characters at most."""
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise ValueError(
            f"cannot take {units.shown(value)} as a name; write a lower-case letter or digit, then up to 63 of"
            " a-z 0-9 _ . -"
        )
    return value


def _read_keys(value: object) -> tuple[str, ...]:
    """Read the key hashes; a wrong entry is not quoted, as it may be a key itself."""
    if not isinstance(value, list):
        raise ValueError('cannot take anything but a list of key hashes; write e.g. ["sha256:…"]')
    for number, entry in enumerate(value, start=1):
        if not isinstance(entry, str) or not _KEY_HASH.fullmatch(entry):
            raise ValueError(
                f'cannot take entry {number} as a key hash; write "sha256:" and 64 lower-case hex digits, as'
                " `seedancectl key new TENANT` does"
            )
        if entry in value[: number - 1]:
            raise ValueError(f"cannot take entry {number}: the same key is listed before it; remove one of them")
    return tuple(value)


def _read_cpuset(value: object) -> tuple[int, ...]:
    """Read a list of CPUs as the kernel writes them: "0-3,8"."""
    cpus: set[int] = set()
    for part in value.split(",") if isinstance(value, str) else [""]:
        match = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", part.strip(), re.ASCII)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            raise ValueError(f'cannot read {units.shown(value)} as a set of CPUs; write e.g. "0-3,8"')
        cpus.update(range(first, last + 1))
    return tuple(sorted(cpus))


def _read_share(value: object) -> float:
    share = units.parse_percentage(value)
    if not 0 < share <= 1:
        raise ValueError(f'cannot take {units.shown(value)} as a share; write something above "0%", "100%" at most')
    return share


_count: Final = or_unlimited(whole(1, MAX_COUNT))
_size: Final = or_unlimited(above_zero(units.parse_size))
_rate: Final = or_unlimited(units.parse_rate)

LIMITS: Final[Schema] = {
    "cpu": {
        "max": Field("max_cores", or_unlimited(above_zero(units.parse_percentage))),
        "burst": Field("burst_s", or_unlimited(units.parse_duration)),
        "cpuset": Field("cpuset", _read_cpuset),
    },
    "memory": {"max": Field("max_bytes", _size), "high": Field("high_bytes", _size)},
    "network": {
        "egress": Field("egress_bytes_per_s", _rate),
        "ingress": Field("ingress_bytes_per_s", _rate),
        "connections": Field("connections", _count),
    },
    "gpu": {"share": Field("share", or_unlimited(_read_share)), "kv": Field("kv_share", or_unlimited(_read_share))},
    "tokens": {
        "per_second": Field("per_second", _count),
        "per_minute": Field("per_minute", _count),
        "per_day": Field("per_day", _count),
        "streams": Field("streams", _count),
        "context": Field("context", or_unlimited(whole(2, MAX_COUNT))),
    },
    "requests": {
        "per_minute": Field("per_minute", or_unlimited(whole(1, MAX_REQUESTS_PER_MINUTE))),
        "queue": Field("queue", or_unlimited(whole(0, MAX_COUNT))),
    },
    "session": {"resume_for": Field("resume_for_s", units.parse_duration)},
}
TENANT_FILE: Final[Schema] = {
    "keys": Field("keys", _read_keys),
    "class": Field("scheduling_class", read_name),
    "group": Field("group", read_name),
    "best_effort": Field("best_effort", flag),
    **LIMITS,
}
_CLASS_TABLE: Final[Schema] = {
    "weight": Field("weight", whole(1, 10_000)),
    "priority": Field("priority", whole(0, 3)),
    **LIMITS,
}


def parse(text: str, path: str) -> Raw:
    """Read a tenant file's text: known keys only, in base units. Raises ConfigError."""
    return read_table(loads(text, path), TENANT_FILE, path)


def combine(class_defaults: Raw, raw: Raw) -> Raw:
    """Return what a file says, with the defaults of its class where it says nothing."""
    return overlay(class_defaults, raw)


def validate(raw: Raw, tenant: str, scheduling_class: SchedulingClass, path: str) -> Quota:
    """Build the quota once its limits agree with each other. Raises ConfigError that names the one to change."""
    of_class = {"weight": scheduling_class.weight, "priority": scheduling_class.priority}
    quota = msgspec.convert(raw | {"tenant": tenant, "scheduling_class": scheduling_class.name} | of_class, Quota)
    _check_cpu(quota.cpu, path)
    memory = quota.memory
    if memory.high_bytes is not None and memory.max_bytes is not None and memory.high_bytes > memory.max_bytes:
        raise ConfigError(
            path, "memory.high", f"cannot be above memory.max; write {memory.max_bytes} bytes or less, or raise that"
        )
    return quota


def _check_cpu(cpu: CpuQuota, path: str) -> None:
    if cpu.max_cores is not None and round(cpu.max_cores * CPU_PERIOD_S * 1e6) < LEAST_CPU_S * 1e6:
        least = LEAST_CPU_S / CPU_PERIOD_S
        raise ConfigError(
            path, "cpu.max", f'cannot be less than {least:.0%}, all that the kernel takes; write "{least:.0%}"'
        )
    if not cpu.burst_s:
        return
    if cpu.max_cores is None:
        raise ConfigError(path, "cpu.burst", 'cannot save up under no limit; write cpu.max too, e.g. "100%"')
    most_s = cpu.max_cores * CPU_PERIOD_S
    # The kernel takes whole microseconds; so rounded, "70%" grants 70 ms and not a hair less.
    if round(cpu.burst_s * 1e6) > round(most_s * 1e6):
        raise ConfigError(
            path, "cpu.burst", f'cannot be above what cpu.max grants in 100ms; write "{most_s * 1000:g}ms" or less'
        )


def load(text: str, path: str, tenant: str, classes: Mapping[str, SchedulingClass] = BUILT_IN_CLASSES) -> Quota:
    """Return the quota of one tenant file's text. Raises ConfigError."""
    tenant = read_value(tenant, read_name, path, "")
    raw = parse(text, path)
    name = raw.get("scheduling_class", DEFAULT_CLASS)
    scheduling_class = classes[read_value(name, one_of(classes), path, "class")]
    return validate(combine(scheduling_class.defaults, raw), tenant, scheduling_class, path)


def load_class(
    table: object, name: str, path: str, known: Mapping[str, SchedulingClass] = BUILT_IN_CLASSES
) -> SchedulingClass:
    """Return the class that a `[classes.NAME]` table defines, laid over the known one of that name if there is one.

    Raises ConfigError, also for limits that contradict each other.
    """
    key = f"classes.{name}"
    read_value(name, read_name, path, key)
    raw = read_table(table, _CLASS_TABLE, path, key)
    base = known.get(name, SchedulingClass(name=name))
    weight, priority = raw.pop("weight", base.weight), raw.pop("priority", base.priority)
    made = SchedulingClass(name=name, weight=weight, priority=priority, defaults=combine(base.defaults, raw))
    try:
        validate(made.defaults, "any", made, path)
    except ConfigError as exc:
        raise ConfigError(path, f"{key}.{exc.key}", exc.reason) from exc
    return made


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """What a directory of tenant files gave: quotas by tenant, and an error for each file that is not in force."""

    quotas: dict[str, Quota]
    errors: list[ConfigError]


def load_directory(
    files: Mapping[str, str | ConfigError],
    classes: Mapping[str, SchedulingClass] = BUILT_IN_CLASSES,
    previous: Mapping[str, Quota] | None = None,
    check: Callable[[Quota, str], None] = lambda quota, path: None,
) -> Loaded:
    """Return the quotas of all tenant files, given as path to text, or to the error that reading it gave.

    `check(quota, path)` raises ConfigError on a quota that cannot be kept here, which makes its file a bad one. So is
    an empty file of a tenant that has limits: somebody is about to write it. A bad file leaves its tenant with the
    quota it had in `previous`, if any, and touches no other tenant. A key that two tenants claim stays with the one
    that had it before, or else with the first by name; the other file is bad.
    """
    previous = previous or {}
    wanted: dict[str, Quota] = {}
    kept: dict[str, Quota] = {}
    paths: dict[str, str] = {}
    errors: list[ConfigError] = []
    for path, text in sorted(files.items(), key=lambda item: tenant_name(item[0])):
        tenant = tenant_name(path)
        paths[tenant] = path
        try:
            if isinstance(text, ConfigError):
                raise text
            quota = load(text, path, tenant, classes)
            if not text.strip() and quota != previous.get(tenant, quota):
                reason = "cannot take an empty file for a tenant that has limits; write them, or remove the file"
                raise ConfigError(path, "", reason)
            check(quota, path)
            wanted[tenant] = quota
        except ConfigError as exc:
            errors.append(exc)
            if tenant in previous:
                kept[tenant] = previous[tenant]
    quotas = _settle_keys(wanted, kept, previous, paths, errors)
    return Loaded(quotas=dict(sorted(quotas.items())), errors=errors)


def tenant_name(path: str) -> str:
    """Return the tenant that a file is about, unchecked: its file name without `.toml`."""
    return path.rpartition("/")[2].removesuffix(".toml")


def _settle_keys(
    wanted: dict[str, Quota],
    kept: dict[str, Quota],
    previous: Mapping[str, Quota],
    paths: Mapping[str, str],
    errors: list[ConfigError],
) -> dict[str, Quota]:
    """Give each key to one tenant; whoever loses one falls back to its previous quota, which starts the deal anew.

    Previous quotas share no key, so this ends with all of them at worst.
    """
    while True:
        quotas, owners, loser = _deal(wanted, kept, previous)
        if loser is None:
            return quotas
        key = next(key for key in loser.keys if key in owners)
        reason = f"cannot share a key with tenant '{owners[key]}' ({key[:15]}…); remove it from one of the two files"
        errors.append(ConfigError(paths[loser.tenant], "keys", reason))
        del wanted[loser.tenant]
        if loser.tenant in previous:
            kept[loser.tenant] = previous[loser.tenant]


def _deal(
    wanted: Mapping[str, Quota], kept: Mapping[str, Quota], previous: Mapping[str, Quota]
) -> tuple[dict[str, Quota], dict[str, str], Quota | None]:
    """Place tenants that gain no key before those that do; stop at the first that claims another's key."""
    quotas = dict(kept)
    owners = {key: quota.tenant for quota in kept.values() for key in quota.keys}

    def order(quota: Quota) -> tuple[bool, str]:
        before = previous.get(quota.tenant)
        return not set(quota.keys) <= set(before.keys if before else ()), quota.tenant

    for quota in sorted(wanted.values(), key=order):
        if not owners.keys().isdisjoint(quota.keys):
            return quotas, owners, quota
        quotas[quota.tenant] = quota
        owners.update(dict.fromkeys(quota.keys, quota.tenant))
    return quotas, owners, None
