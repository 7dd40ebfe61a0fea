"""Every exception of seedance, by what a caller can do about it.

SeedanceError
├─ ConfigError(path, key, reason)      a file that the operator wrote; the process exits with 78
├─ ProtocolError                       abstract: whose fault it was is the class below
│   ├─ LocalProtocolError              our misuse of a protocol object: a bug
│   └─ RemoteProtocolError(code)       the peer's fault; the code goes on the wire
├─ QuotaExceeded(tenant, retry_after_s)  policy said no; normal, never logged as an error
├─ KernelError(what, errno)            built from OSError at the edge
│   ├─ TenantRefused(tenant)           it did not take one tenant's limits; those of others are not the matter
│   └─ BpfLoadError(program, verifier_tail)
├─ EngineError(code)                   one request fails
│   └─ EngineDead                      every request of that engine fails
├─ ResourceClosed                      we closed it
└─ ResourceBroken                      the other side, or the kernel, did
"""

from __future__ import annotations

import os


class SeedanceError(Exception):
    """Base of all errors that seedance raises on purpose."""


class ConfigError(SeedanceError):
    """A configuration or quota file is wrong: names the file, the key, why, and what would be right."""

    def __init__(self, path: str, key: str, reason: str) -> None:
        super().__init__(path, key, reason)
        self.path = path
        self.key = key
        self.reason = reason

    def __str__(self) -> str:
        where = f"'{self.path}'" + (f", key '{self.key}'" if self.key else "")
        return f"cannot use {where}: {self.reason}"


class ProtocolError(SeedanceError):
    """A protocol was not kept; raised only as one of its subclasses."""


class LocalProtocolError(ProtocolError):
    """We used a protocol object in a way that its state forbids: a bug on our side."""


class RemoteProtocolError(ProtocolError):
    """The peer sent what the protocol forbids; `code` is the status or close code to answer with."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class QuotaExceeded(SeedanceError):
    """A tenant asked for more than its quota; it may come back after `retry_after_s` seconds."""

    def __init__(self, tenant: str, limit: str, retry_after_s: float) -> None:
        super().__init__(tenant, limit, retry_after_s)
        self.tenant = tenant
        self.limit = limit
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return f"tenant '{self.tenant}' is over its limit '{self.limit}'"


class KernelError(SeedanceError):
    """The kernel refused an operation; `errno` says why."""

    def __init__(self, what: str, errno: int) -> None:
        super().__init__(what, errno)
        self.what = what
        self.errno = errno

    def __str__(self) -> str:
        return f"cannot {self.what}: {os.strerror(self.errno)} (errno {self.errno})"


class TenantRefused(KernelError):
    """The kernel did not take what is to be set for one tenant."""

    def __init__(self, tenant: str, what: str, errno: int) -> None:
        super().__init__(what, errno)
        self.args = (tenant, what, errno)
        self.tenant = tenant


class BpfLoadError(KernelError):
    """The verifier refused a program; `verifier_tail` holds the last lines of its log."""

    def __init__(self, program: str, errno: int, verifier_tail: str) -> None:
        super().__init__(f"load BPF program '{program}'", errno)
        self.args = (program, errno, verifier_tail)
        self.program = program
        self.verifier_tail = verifier_tail


class EngineError(SeedanceError):
    """The engine refused or failed one request; `code` is one of the protocol's stable error codes."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(code, message)
        self.code = code
        self.message = message

    def __str__(self) -> str:
        return self.message


class EngineDead(EngineError):
    """The engine is gone, and with it every request that it had."""

    def __init__(self, message: str) -> None:
        super().__init__("engine_unavailable", message)
        self.args = (message,)


class ResourceClosed(SeedanceError):
    """The object was closed on our side and cannot be used any more."""


class ResourceBroken(SeedanceError):
    """The object was closed or broken by the other side or by the kernel."""
