"""Models to and from Hugging Face folders: what ``transformers.AutoModelForCausalLM`` and ``AutoTokenizer`` load."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load, save
from tokenizers import Tokenizer
from torch import Tensor

from engine.config import ModelConfig
from engine.model import ModelShape, Qwen3

INIT_STD = 0.02  # transformers' initializer_range
WEIGHTS, CONFIG, GENERATION_CONFIG = "model.safetensors", "config.json", "generation_config.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
)
# Our field -> its key in config.json.
CONFIG_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "intermediate_size": "intermediate_size",
    "max_position_embeddings": "max_position_embeddings",
    "rms_norm_eps": "rms_norm_eps",
}


def new_model(config: ModelConfig, vocab_size: int, seed: int) -> Qwen3:
    """Random weights: matrices and embeddings from N(0, 0.02^2), norms one. The same arguments give the same bits."""
    model = Qwen3(ModelShape(**config.model_dump(), vocab_size=vocab_size))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, INIT_STD, generator=generator)
    return model


def load_model(folder: Path) -> Qwen3:
    """The Qwen3 model of a Hugging Face folder, in fp32, in training mode.

    Raises ValueError naming what is missing or not ours: another architecture, untied or biased layers, scaled rotary
    positions, a damaged or incomplete weight file.
    """
    config = _read_config(folder)
    model = Qwen3(_shape(config, folder))
    try:
        state = load(_read(folder, WEIGHTS))
    except SafetensorError as error:
        raise ValueError(f"{folder / WEIGHTS} is damaged ({error}); make the folder again") from error
    state.pop("lm_head.weight", None)
    _check_state(state, model, folder)
    model.load_state_dict(state)
    return model


def save_model(model: Qwen3, folder: Path, tokenizer_from: Path) -> None:
    """Write the model with the tokenizer of ``tokenizer_from``; on disk (fsync) when it returns.

    The same model gives the same bytes; the tied head is stored once. Raises ValueError where the tokenizer is missing,
    names no end or padding token, uses one token for both, or is larger than the model's vocabulary.
    """
    tokenizer_files = {name: (tokenizer_from / name) for name in TOKENIZER_FILES if (tokenizer_from / name).is_file()}
    end_id, pad_id = _end_and_pad(tokenizer_from, model.shape.vocab_size)
    special = {"bos_token_id": None, "eos_token_id": end_id, "pad_token_id": pad_id}
    state = {name: tensor.detach().to("cpu", torch.float32).contiguous() for name, tensor in model.state_dict().items()}
    files = {name: path.read_bytes() for name, path in tokenizer_files.items()}
    files[CONFIG] = _json(_to_config(model.shape) | special)
    files[GENERATION_CONFIG] = _json(special)
    files[WEIGHTS] = save(state, metadata={"format": "pt"})
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        _write(folder / name, data)
    _sync(folder)


def _to_config(shape: ModelShape) -> dict[str, Any]:
    fields = shape.model_dump()
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **{key: fields[name] for name, key in CONFIG_KEYS.items()},
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": INIT_STD,
        "rope_theta": shape.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "use_cache": True,
    }


def _shape(config: dict[str, Any], folder: Path) -> ModelShape:
    if config.get("model_type") != "qwen3":
        raise ValueError(f"{folder} holds a {config.get('model_type')!r} model; only 'qwen3' is supported here")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    wanted = {
        "tie_word_embeddings": (config.get("tie_word_embeddings", False), True),
        "attention_bias": (config.get("attention_bias", False), False),
        "use_sliding_window": (config.get("use_sliding_window", False), False),
        "hidden_act": (config.get("hidden_act", "silu"), "silu"),
        "rope_type": (rope.get("rope_type", "default"), "default"),
    }
    for key, (found, supported) in wanted.items():
        if found != supported:
            raise ValueError(f"{folder / CONFIG}: {key} = {found!r} is not supported; it must be {supported!r}")
    fields = {name: config[key] for name, key in CONFIG_KEYS.items() if key in config}
    theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    try:
        return ModelShape(**fields, rope_theta=theta)
    except ValidationError as error:
        first = error.errors()[0]
        key = CONFIG_KEYS.get(str(first["loc"][0]) if first["loc"] else "", "the shape")
        raise ValueError(f"{folder / CONFIG}: {key}: {first['msg']}") from error


def _check_state(state: dict[str, Tensor], model: Qwen3, folder: Path) -> None:
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in state.items()}
    odd = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    if odd:
        name = odd[0]
        raise ValueError(
            f"{folder / WEIGHTS} does not fit {CONFIG}: {len(odd)} tensors differ, first {name}: "
            f"expected {expected.get(name, 'none')}, found {found.get(name, 'none')}"
        )


def _end_and_pad(folder: Path, vocab_size: int) -> tuple[int, int]:
    tokenizer = Tokenizer.from_str(_read(folder, "tokenizer.json").decode())
    config = json.loads(_read(folder, "tokenizer_config.json"))
    if tokenizer.get_vocab_size() > vocab_size:
        raise ValueError(f"{folder}: {tokenizer.get_vocab_size()} tokens, but the model's vocabulary is {vocab_size}")
    ids = []
    for key in ("eos_token", "pad_token"):
        token = config.get(key)
        token_id = tokenizer.token_to_id(token["content"] if isinstance(token, dict) else token or "")
        if token_id is None:
            raise ValueError(f"{folder}: {key} = {token!r} of tokenizer_config.json is no token of tokenizer.json")
        ids.append(token_id)
    if ids[0] == ids[1]:
        raise ValueError(f"{folder}: end and padding are one token ({ids[0]}); training would mask every end")
    return ids[0], ids[1]


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads(_read(folder, CONFIG))
    except json.JSONDecodeError as error:
        raise ValueError(f"{folder / CONFIG} is not JSON ({error}); make the folder again") from error
    if not isinstance(config, dict):
        raise ValueError(f"{folder / CONFIG} is not a JSON object; make the folder again")
    return config


def _read(folder: Path, name: str) -> bytes:
    path = folder / name
    if not path.is_file():
        raise ValueError(f"{folder} has no {name}; name the output folder of a stage, or a Hugging Face model folder")
    return path.read_bytes()


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
