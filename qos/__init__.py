"""Quotas: from tenant files to what the kernel keeps.

`quota` reads tenant files (`toml` against a schema, `units` the quantities in them), `limiter` applies their limits on
requests and LLM tokens, `plan` says what the kernel is to hold for them. These decide and touch nothing.

`kernel` puts that into force, and is all that the daemon uses of the rest: `cgroup_site` and `cgroup` our part of the
cgroup tree; `pins`, `programs`, `netlink` and `devices`, put together by `network`, the BPF programs on our sockets and
devices; `machine` opens them all.
"""
