"""Tokens per second of the embedded sampler against transformers' ``generate``, on one thread, in one run.

    python -m bench.sampler [--repeats 3]

Random weights of the quick start's shape. "full" samples every row to its budget; "ragged" ends rows at random, as
training does, with a mean of about half the budget. Both sides sample at temperature 1 and count sampled tokens; each
figure is the best of the repeats, prefill included. ``generate`` runs in batches of 256 rows, its best size here.
"""

import argparse
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from bench.reference import to_transformers
from engine.config import ModelConfig
from engine.embedded_sampler import EmbeddedSampler
from engine.model import Qwen3
from engine.sampler import SampleRequest, SamplingParams
from engine.weights import new_model

SHAPES = {
    "0.2M": ModelConfig(hidden_size=64, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=192),
    "0.5M": ModelConfig(hidden_size=96, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=24, intermediate_size=288),
}
VOCAB, PAD, ROWS_OF_GENERATE = 512, 0, 256


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    num_prompts: int
    num_samples: int
    prompt_lengths: tuple[int, int]
    max_new_tokens: int
    stop_token_ids: tuple[int, ...] = ()


RAGGED = tuple(range(10, VOCAB, 25))  # one token in 25 ends a row
WORKLOADS = (
    Workload("RL step, full", 64, 8, (15, 30), 36),
    Workload("RL step, ragged", 64, 8, (15, 30), 36, RAGGED),
    Workload("one sample a prompt, ragged", 256, 1, (15, 30), 36, RAGGED),
    Workload("long prompts, full", 32, 8, (30, 130), 64),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    print(f"{'model':6s}{'workload':30s}{'embedded':>12s}{'generate':>12s}{'ratio':>8s}")
    for name, config in SHAPES.items():
        model = new_model(config, VOCAB, seed=0)
        reference = to_transformers(model)
        for workload in WORKLOADS:
            prompts = _prompts(workload)
            embedded = _best(lambda w=workload, p=prompts, m=model: _embedded(m, w, p), repeats)
            generated = _best(lambda w=workload, p=prompts, r=reference: _generate(r, w, p), repeats)
            print(
                f"{name:6s}{workload.name:30s}{embedded:10,.0f}/s{generated:10,.0f}/s{embedded / generated:7.1f}x",
                flush=True,
            )


def _best(tokens_per_second: Callable[[], float], repeats: int) -> float:
    return max(tokens_per_second() for _ in range(repeats))


def _prompts(workload: Workload) -> list[tuple[int, ...]]:
    rng = random.Random(0)
    lengths = [rng.randint(*workload.prompt_lengths) for _ in range(workload.num_prompts)]
    return [tuple(rng.randrange(1, VOCAB) for _ in range(length)) for length in lengths]


def _embedded(model: Qwen3, workload: Workload, prompts: list[tuple[int, ...]]) -> float:
    sampler = EmbeddedSampler()
    requests = [SampleRequest(prompt, workload.num_samples) for prompt in prompts]
    params = SamplingParams(1.0, workload.max_new_tokens, workload.stop_token_ids, seed=0)
    started = time.perf_counter()
    sampler.load(model, 0)
    completions = sampler.sample(requests, params)
    return sum(len(c.token_ids) for group in completions for c in group) / (time.perf_counter() - started)


def _generate(reference: torch.nn.Module, workload: Workload, prompts: list[tuple[int, ...]]) -> float:
    from transformers import GenerationConfig

    generation = GenerationConfig(
        max_new_tokens=workload.max_new_tokens,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        num_return_sequences=workload.num_samples,
        eos_token_id=list(workload.stop_token_ids) or None,
        pad_token_id=PAD,
    )
    size = ROWS_OF_GENERATE // workload.num_samples
    num_tokens = 0
    started = time.perf_counter()
    for start in range(0, len(prompts), size):
        part = prompts[start : start + size]
        longest = max(map(len, part))
        ids = torch.tensor([[PAD] * (longest - len(p)) + list(p) for p in part])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in part])
        out = reference.generate(ids, attention_mask=mask, generation_config=generation)[:, longest:]
        stopped = torch.isin(out, torch.tensor(workload.stop_token_ids, dtype=torch.long)).int()
        num_tokens += int((stopped.cumsum(1) - stopped == 0).sum())
    return num_tokens / (time.perf_counter() - started)


if __name__ == "__main__":
    main()
