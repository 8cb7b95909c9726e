"""The student as a Hugging Face folder: weights, tokenizer, chat template, model card; loaded again as proof."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.markup import Markup
from data.stage import StageRequest
from data.tokenizer import load_markup
from data.types import Message, Task
from engine.config import ExportConfig
from engine.model import Qwen3
from engine.weights import load_model, save_model

TOLERANCE = 1e-4  # nats, fp32; two implementations of one model differ by about 1e-6

CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags: [nonet, on-policy-distillation]
---

# {name}

One student that holds what its experts learned, merged by nonet with multi-teacher on-policy distillation.
{num_parameters:,} parameters, {vocab_size} tokens, fp32.

| domain/effort | accuracy (T = 1) | 95 % interval | greedy | tokens |
|---|---|---|---|---|
{rows}

Held-out tasks, the effort's token budget enforced. The effort is chosen in the prompt:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(FOLDER)
model = AutoModelForCausalLM.from_pretrained(FOLDER)
messages = [{{"role": "system", "content": "general"}}, {{"role": "user", "content": "7+5*3"}}]
inputs = tokenizer.apply_chat_template(
    messages, effort="max", add_generation_prompt=True, return_tensors="pt", return_dict=True
)
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=48, do_sample=False)[0]))
```
"""


def export(request: StageRequest) -> dict[str, float]:
    """Writes ``output`` from the ``model`` and ``evaluation`` inputs; fails when transformers reads it differently.

    Metric ``max_logprob_difference`` (nats): ours against transformers, over a prompt of every evaluated domain.
    """
    config = ExportConfig.model_validate(request.config)
    source = request.input("model")
    model = load_model(source)
    save_model(model, request.output_path, tokenizer_from=source)
    cells = json.loads((request.input("evaluation") / "cells.json").read_text())
    (request.output_path / "README.md").write_text(model_card(config.name, model, cells))
    domains = sorted({cell.split("/")[0] for cell in cells})
    difference = largest_difference(model, load_markup(source), request.output_path, domains)
    if not difference <= TOLERANCE:  # nor may it be NaN
        raise ValueError(
            f"transformers reads {request.output_path} differently: log-probabilities differ by {difference:.2g}"
        )
    return {"max_logprob_difference": difference, "num_parameters": float(count_parameters(model))}


def model_card(name: str, model: Qwen3, cells: dict[str, Any]) -> str:
    """The card's Markdown: what it is, the student's row of the matrix, how to generate."""
    rows = "\n".join(
        f"| {cell} | {s['accuracy']:.3f} | {s['low']:.3f}–{s['high']:.3f} | {g['accuracy']:.3f} | {s['tokens']:.1f} |"
        for cell, s, g in ((cell, modes["sampled"], modes["greedy"]) for cell, modes in cells.items())
    )
    return CARD.format(
        name=name,
        num_parameters=count_parameters(model),
        vocab_size=model.shape.vocab_size,
        rows=rows,
    )


def count_parameters(model: Qwen3) -> int:
    """Parameters, the tied head counted once."""
    return sum(parameter.numel() for parameter in model.parameters())


@torch.inference_mode()
def largest_difference(model: Qwen3, markup: Markup, folder: Path, domains: list[str]) -> float:
    """Largest difference of log-probabilities (nats) between ``model`` and what transformers loads from ``folder``.

    The prompts come from transformers' own chat template. Raises ValueError when its token ids are not the markup's.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    theirs = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    differences: list[Tensor] = []
    for domain in domains:
        messages = (Message("system", domain), Message("user", "7+5*3"))
        expected = markup.render_prompt(Task("", domain, messages, (), "", {}, "", "test"), "max").token_ids_T
        chat = [{"role": message.role, "content": message.text} for message in messages]
        ids = tokenizer.apply_chat_template(chat, effort="max", add_generation_prompt=True, return_dict=True)[
            "input_ids"
        ]
        if tuple(ids) != expected:
            raise ValueError(f"the exported chat template renders {ids}, the markup {list(expected)}")
        ids_BT = torch.tensor([ids])
        hidden_BTD = model(ids_BT, torch.arange(len(ids))[None])
        ours_TV = model.logits(hidden_BTD[0]).log_softmax(-1)
        differences.append((ours_TV - theirs(ids_BT).logits[0].log_softmax(-1)).abs().max())
    return float(torch.stack(differences).max())
