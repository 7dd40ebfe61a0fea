"""seedance: LLM token streams for many tenants of one GPU machine, within limits that the kernel keeps."""

__version__ = "0.1.0"
