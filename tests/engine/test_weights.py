"""Model folders: what Hugging Face loads, byte for byte the same each time, and plain words where one is not right."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from data.tokenizer import load_markup, save_tokenizer, train_tokenizer
from engine.config import ModelConfig
from engine.model import Qwen3
from engine.weights import load_model, new_model, save_model

CONFIG = ModelConfig(hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=48)


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(train_tokenizer(["high general 7+5*3", "low coding reverse abc"] * 5, 280), folder)
    return folder


@pytest.fixture
def model(tokenizer_path: Path) -> Qwen3:
    return new_model(CONFIG, load_markup(tokenizer_path).vocab_size, 7)


@pytest.fixture
def model_path(model: Qwen3, tokenizer_path: Path, tmp_path: Path) -> Path:
    save_model(model, tmp_path / "model", tokenizer_path)
    return tmp_path / "model"


def test_new_weights_follow_the_seed_and_the_usual_initialisation() -> None:
    same, again, other = (new_model(CONFIG, 500, seed) for seed in (3, 3, 4))
    for name, parameter in same.named_parameters():
        assert torch.equal(parameter, again.get_parameter(name))
        if parameter.dim() == 1:
            assert torch.equal(parameter, torch.ones_like(parameter))
        else:
            assert not torch.equal(parameter, other.get_parameter(name))
            assert parameter.std().item() == pytest.approx(0.02, rel=0.1)


def test_transformers_loads_the_folder_with_equal_logits(model: Qwen3, model_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    reference = AutoModelForCausalLM.from_pretrained(model_path)
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    markup = load_markup(model_path)
    assert (reference.config.eos_token_id, reference.config.pad_token_id) == (markup.stop_id, markup.pad_id)
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (markup.stop_id, markup.pad_id)
    assert reference.generation_config.eos_token_id == markup.stop_id
    assert reference.config.bos_token_id is None
    assert reference.dtype == torch.float32
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "7+5*3"}], add_generation_prompt=True, return_tensors="pt", return_dict=False
    )
    with torch.no_grad():
        expected = reference(chat).logits
        found = model.logits(model(chat, torch.arange(chat.shape[1])[None]))
    assert (found - expected).abs().max() < 1e-5


def test_loading_gives_the_saved_bits(model: Qwen3, model_path: Path) -> None:
    loaded = load_model(model_path)
    assert loaded.shape == model.shape
    assert all(torch.equal(p, loaded.get_parameter(name)) for name, p in model.named_parameters())


def test_the_same_model_gives_the_same_bytes(model_path: Path, tokenizer_path: Path, tmp_path: Path) -> None:
    save_model(load_model(model_path), tmp_path / "again", model_path)
    names = sorted(path.name for path in model_path.iterdir())
    assert names == sorted(path.name for path in (tmp_path / "again").iterdir())
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= set(names)
    assert all((model_path / n).read_bytes() == (tmp_path / "again" / n).read_bytes() for n in names)


def test_the_tied_head_is_stored_once_and_accepted_twice(model: Qwen3, model_path: Path) -> None:
    weights = load_file(model_path / "model.safetensors")
    assert "lm_head.weight" not in weights
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, model_path / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(load_model(model_path).model.embed_tokens.weight, model.model.embed_tokens.weight)


def test_a_model_may_be_saved_over_itself(model: Qwen3, model_path: Path) -> None:
    with torch.no_grad():
        model.model.norm.weight.fill_(2.0)
    save_model(model, model_path, tokenizer_from=model_path)
    assert load_model(model_path).model.norm.weight.tolist() == [2.0] * 32


def edit_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def drop_a_tensor(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda f: (f / "config.json").unlink(), "has no config.json"),
        (lambda f: (f / "model.safetensors").unlink(), "has no model.safetensors"),
        (lambda f: (f / "config.json").write_text("{"), "not JSON"),
        (lambda f: (f / "config.json").write_text("[]"), "not a JSON object"),
        (lambda f: (f / "model.safetensors").write_bytes(b"\x10"), "damaged"),
        (lambda f: edit_config(f, model_type="llama"), "'llama'"),
        (lambda f: edit_config(f, tie_word_embeddings=False), "tie_word_embeddings"),
        (lambda f: edit_config(f, rope_parameters={"rope_type": "yarn"}), "rope_type"),
        (lambda f: edit_config(f, hidden_size=0), "hidden_size"),
        (lambda f: edit_config(f, hidden_size=64), "does not fit"),
        (drop_a_tensor, r"1 tensors differ, first model\.norm\.weight"),
    ],
)
def test_an_odd_folder_is_refused_with_what_is_wrong(
    model_path: Path, damage: Callable[[Path], object], words: str
) -> None:
    damage(model_path)
    with pytest.raises(ValueError, match=words):
        load_model(model_path)


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere has no config.json"):
        load_model(tmp_path / "nowhere")


def edit_tokenizer(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | changes))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda f: (f / "tokenizer.json").unlink(), "has no tokenizer.json"),
        (lambda f: edit_tokenizer(f, eos_token=None), "eos_token"),
        (lambda f: edit_tokenizer(f, pad_token="<|nothing|>"), "pad_token"),
        (lambda f: edit_tokenizer(f, pad_token="<|end|>"), "one token"),
    ],
)
def test_p9_a_tokenizer_without_its_own_end_and_padding_is_refused(
    model: Qwen3, model_path: Path, tmp_path: Path, damage: Callable[[Path], object], words: str
) -> None:
    damage(model_path)
    with pytest.raises(ValueError, match=words):
        save_model(model, tmp_path / "out", tokenizer_from=model_path)
    assert not (tmp_path / "out").exists()


def test_p15_a_tokenizer_larger_than_the_vocabulary_is_refused(tokenizer_path: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="vocabulary is 100"):
        save_model(new_model(CONFIG, 100, 0), tmp_path / "out", tokenizer_path)
