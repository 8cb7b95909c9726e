"""The exported student: plain transformers loads it and speaks its words; what reads differently is refused."""

import json
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from data.stages import load_tasks
from data.tokenizer import load_markup
from engine.embedded_sampler import EmbeddedSampler
from engine.export import TOLERANCE, count_parameters, export, largest_difference
from engine.sampler import SampleRequest, SamplingParams
from engine.weights import load_model, save_model

SCORES = {"accuracy": 0.7512, "low": 0.7, "high": 0.8, "tokens": 9.14}
CELLS = {cell: {"sampled": SCORES, "greedy": SCORES | {"accuracy": 0.8125}} for cell in ("general/max", "research/max")}


@pytest.fixture(scope="module")
def evaluation_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluation")
    (folder / "cells.json").write_text(json.dumps(CELLS))
    return folder


@pytest.fixture(scope="module")
def exported(new_request: Any, base_path: Path, evaluation_path: Path) -> Path:
    request = new_request("export", {"name": "tiny-student"}, {"model": base_path, "evaluation": evaluation_path})
    metrics = export(request)
    assert metrics["max_logprob_difference"] < 1e-5
    assert metrics["num_parameters"] == count_parameters(load_model(base_path))
    return request.output_path


def test_transformers_generates_what_our_sampler_does(exported: Path, task_paths: dict[str, Path]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    theirs, tokenizer = AutoModelForCausalLM.from_pretrained(exported), AutoTokenizer.from_pretrained(exported)
    markup, sampler = load_markup(exported), EmbeddedSampler()
    sampler.load(load_model(exported), policy_version=0)
    endings = set()
    for task, effort in product(load_tasks(task_paths["tasks/general"], "test")[:4], ("low", "max")):
        messages = [{"role": m.role, "content": m.text} for m in task.messages]
        inputs = tokenizer.apply_chat_template(
            messages, effort=effort, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        prompt_ids = tuple(inputs["input_ids"][0].tolist())
        assert prompt_ids == markup.render_prompt(task, effort).token_ids_T
        params = SamplingParams(0.0, 24, (markup.stop_id,), seed=0)
        ((ours,),) = sampler.sample([SampleRequest(prompt_ids, 1)], params)
        generated = theirs.generate(**inputs, max_new_tokens=24, do_sample=False)[0, len(prompt_ids) :]
        assert tuple(generated.tolist()) == ours.token_ids
        endings.add(tokenizer.decode(generated[-1:]))
    assert "<|end|>" in endings


def test_the_folder_holds_the_models_bits_and_a_card(exported: Path, base_path: Path) -> None:
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (exported / name).read_bytes() == (base_path / name).read_bytes()
    card = (exported / "README.md").read_text()
    assert "# tiny-student" in card
    assert "| general/max | 0.751 | 0.700–0.800 | 0.812 | 9.1 |" in card
    assert f"{count_parameters(load_model(base_path)):,} parameters" in card
    assert not list(exported.glob("*.bin")) + list(exported.glob("*.pt")) + list(exported.glob("*.pkl"))


def test_other_weights_are_told_from_the_models_own(exported: Path, base_path: Path, tmp_path: Path) -> None:
    model, markup = load_model(base_path), load_markup(base_path)
    assert largest_difference(model, markup, exported, ["general", "research"]) < 1e-5
    with torch.no_grad():
        model.get_parameter("model.layers.1.mlp.down_proj.weight")[0, 0] += 0.5
    assert largest_difference(model, markup, exported, ["general", "research"]) > TOLERANCE


def check_refused(new_request: Any, model_path: Path, evaluation_path: Path, match: str) -> None:
    request = new_request("export", {"name": "x"}, {"model": model_path, "evaluation": evaluation_path})
    with pytest.raises(ValueError, match=match):
        export(request)


def test_a_template_that_renders_other_tokens_is_refused(
    new_request: Any, base_path: Path, evaluation_path: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(base_path, tmp_path / "model")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = config["chat_template"].replace("<|user|>", "<|user|> ")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    check_refused(new_request, folder, evaluation_path, "the exported chat template renders")


def test_weights_that_are_not_numbers_are_refused(
    new_request: Any, base_path: Path, evaluation_path: Path, tmp_path: Path
) -> None:
    model = load_model(base_path)
    with torch.no_grad():
        model.get_parameter("model.norm.weight")[0] = float("nan")
    save_model(model, tmp_path / "model", tokenizer_from=base_path)
    check_refused(new_request, tmp_path / "model", evaluation_path, "log-probabilities differ by nan")


def test_a_model_that_transformers_reads_differently_is_refused(
    new_request: Any, base_path: Path, evaluation_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    class Shifted:
        """Loads the folder, but as weights that were never trained."""

        @staticmethod
        def from_pretrained(folder: Path) -> Any:
            return transformers.Qwen3ForCausalLM(transformers.AutoConfig.from_pretrained(folder))

    monkeypatch.setattr(transformers, "AutoModelForCausalLM", Shifted)
    check_refused(new_request, base_path, evaluation_path, "transformers reads .* differently")
