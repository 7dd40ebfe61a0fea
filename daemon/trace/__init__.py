"""Tracing tools for `seedancectl trace`: one program a file, compiled when it runs (BCC), for a look of some seconds.

What has to run always is in the BPF objects of `seedance.bpf`; these cost a compiler and kernel headers, and may
measure at every packet. A tool is a `Tool` of `_session`, which prepares the program and shows what it counts; the
program itself runs in `_bcc`, under the system's Python, because that is where BCC is installed.
"""
