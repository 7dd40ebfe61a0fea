"""Other weights for an EngineCore that runs, between two of its steps: vLLM's `reload_weights`, made safe to fail.

vLLM takes the layers apart, loads, and copies what it has loaded into the tensors that were there: graphs and kernels
go on using those, and no more memory is taken than for a layer. When that fails halfway, layers that were taken apart
would stay so, and count at the next attempt what had come for them. So they are put together again here. What they say
is then of both models; the caller loads one of them whole.

What was computed with the old weights is emptied out to the last bit. A model whose weights are no numbers leaves none
in the blocks of the KV cache, and a kernel that reads a block to its end, and takes what is behind the text nought
times, makes of that no number again.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any


def load_weights(core: Any, model_dir: str) -> None:
    """Load the weights in a directory. Raises what vLLM does, and RuntimeError when the core has not come to rest."""
    if core.scheduler.requests or core.has_work():
        raise RuntimeError("it still has requests")
    for config in (core.vllm_config.model_config, _worker(core).vllm_config.model_config):
        config.model = config.tokenizer = model_dir
    try:
        core.model_executor.collective_rpc("reload_weights", kwargs={"weights_path": model_dir})
    except BaseException:
        _put_together(_worker(core).get_model())
        raise
    finally:
        core._reset_caches()
        for cache in _tensors(_worker(core).model_runner.kv_caches):
            cache.zero_()


def _worker(core: Any) -> Any:
    return core.model_executor.driver_worker.worker


def _tensors(caches: Any) -> Iterator[Any]:
    """Yield the tensors of a KV cache, of which a layer may have several."""
    for cache in caches:
        if isinstance(cache, list | tuple):
            yield from _tensors(cache)
        else:
            yield cache


def _put_together(model: Any) -> None:
    """Give layers that wait for weights the tensors back that they had."""
    layerwise: Any = importlib.import_module("vllm.model_executor.model_loader.reload.layerwise")
    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load() and info.kernel_tensors is not None:
            layerwise._place_kernel_tensors(layer, info)
        info.reset()
    layerwise.LOADING_LAYERS.clear()
