"""The kernel side: BPF programs, what loads them, and typed views of their maps."""
