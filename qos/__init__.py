"""Quotas: tenant files to typed quotas (`quota`), and their use (`limiter`).

`toml` reads documents against a schema, `units` the quantities in them.

Everything here decides and touches nothing: no file, no clock, no kernel.
"""
