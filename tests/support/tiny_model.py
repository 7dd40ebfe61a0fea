"""A tiny Llama for tests: a few million random weights, and a tokenizer trained on text of the standard library.

Made once and kept: the directory's name is a digest of everything that shapes its content, so a change of the recipe,
of the seed or of the interpreter's text gives another directory. It needs `tokenizers` and neither torch nor
transformers. `python -m support.tiny_model` prints the path.
"""

from __future__ import annotations

import array
import hashlib
import importlib
import importlib.util
import json
import math
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import NormalDist
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

CACHE_ENV: Final = "SEEDANCE_TEST_CACHE"
VOCAB_SIZE: Final = 4096
MAX_MODEL_LEN: Final = 4096
BOS: Final = "<|begin|>"
EOS: Final = "<|end|>"
_TURN: Final = "<|turn|>"
_SPECIAL: Final = (BOS, EOS, _TURN)
_WEIGHT_DEVIATION: Final = 0.08
_CORPUS_BYTES: Final = 1_000_000

CHAT_TEMPLATE: Final = (
    "{{ bos_token }}{% for message in messages %}<|turn|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)

CONFIG: Final[dict[str, Any]] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": MAX_MODEL_LEN,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "vocab_size": VOCAB_SIZE,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}


def tiny_model(cache_dir: Path | None = None, *, seed: int = 0) -> Path:
    """Return the directory of the tiny model of `seed`, made now if the cache lacks it.

    The cache is `cache_dir`, else $SEEDANCE_TEST_CACHE, else `seedance-tests` in the XDG cache. Concurrent calls are
    safe: each makes its own copy and the first rename wins.
    """
    root = cache_dir or _default_cache()
    corpus = _corpus()
    model_dir = root / f"tiny-llama-{_digest(corpus, seed)}"
    if model_dir.is_dir():
        return model_dir
    root.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=".tiny-llama-", dir=root))
    try:
        made.chmod(0o755)
        _write(made, corpus, seed)
        made.rename(model_dir)
    except OSError:
        if not model_dir.is_dir():
            raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return model_dir


def _default_cache() -> Path:
    if chosen := os.environ.get(CACHE_ENV):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "seedance-tests"


def _digest(corpus: str, seed: int) -> str:
    recipe = json.dumps([CONFIG, CHAT_TEMPLATE, _SPECIAL, _WEIGHT_DEVIATION, seed], sort_keys=True)
    own_source = Path(__file__).read_bytes()
    return hashlib.sha256(recipe.encode() + own_source + corpus.encode()).hexdigest()[:16]


def _corpus() -> str:
    """Return English prose and Python code that every interpreter carries."""
    parts = list(importlib.import_module("pydoc_data.topics").topics.values())
    for name in ("argparse", "typing", "asyncio.base_events", "inspect"):
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            parts.append(Path(spec.origin).read_text(encoding="utf-8"))
    return "\n".join(parts)[:_CORPUS_BYTES]


def _write(model_dir: Path, corpus: str, seed: int) -> None:
    _write_tokenizer(model_dir, corpus)
    _write_json(model_dir / "config.json", CONFIG)
    _write_json(model_dir / "generation_config.json", {"bos_token_id": 0, "eos_token_id": [1]})
    _write_weights(model_dir / "model.safetensors", seed)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")


def _write_tokenizer(model_dir: Path, corpus: str) -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(token, special=True) for token in _SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus.splitlines(keepends=True), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise AssertionError(f"cannot train {VOCAB_SIZE} tokens: the text gave {tokenizer.get_vocab_size()}")
    tokenizer.save(str(model_dir / "tokenizer.json"))
    _write_json(
        model_dir / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": EOS,
            "model_max_length": MAX_MODEL_LEN,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def _shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner, head = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["head_dim"]
    query, key_value = CONFIG["num_attention_heads"] * head, CONFIG["num_key_value_heads"] * head
    yield "model.embed_tokens.weight", (VOCAB_SIZE, hidden)
    for layer in range(CONFIG["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        yield f"{prefix}.self_attn.q_proj.weight", (query, hidden)
        yield f"{prefix}.self_attn.k_proj.weight", (key_value, hidden)
        yield f"{prefix}.self_attn.v_proj.weight", (key_value, hidden)
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, query)
        yield f"{prefix}.mlp.gate_proj.weight", (inner, hidden)
        yield f"{prefix}.mlp.up_proj.weight", (inner, hidden)
        yield f"{prefix}.mlp.down_proj.weight", (hidden, inner)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (VOCAB_SIZE, hidden)


def _write_weights(path: Path, seed: int) -> None:
    """Write float32 tensors: each weight is one of 256 quantiles of a normal distribution, drawn by one random byte.

    The format is safetensors': the length of the header (u64, little-endian), the header as JSON, the data.
    """
    source = random.Random(seed)
    normal = NormalDist(sigma=_WEIGHT_DEVIATION)
    quantiles = [array.array("f", [normal.inv_cdf((byte + 0.5) / 256)]).tobytes() for byte in range(256)]
    one = array.array("f", [1.0]).tobytes()
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    blobs, end = [], 0
    for name, shape in _shapes():
        count = math.prod(shape)
        is_norm = len(shape) == 1
        blobs.append(one * count if is_norm else b"".join(map(quantiles.__getitem__, source.randbytes(count))))
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [end, end + 4 * count]}
        end += 4 * count
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    with path.open("wb") as file:
        file.write(len(head).to_bytes(8, "little"))
        file.write(head)
        file.writelines(blobs)


if __name__ == "__main__":
    sys.stdout.write(f"{tiny_model()}\n")
