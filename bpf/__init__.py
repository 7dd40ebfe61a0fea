"""The kernel side: BPF programs and what loads them. Nothing is here yet."""
