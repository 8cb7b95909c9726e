"""The merge loop: multi-teacher on-policy distillation of one student.

prompts -> sampler -> teachers -> divergence to teacher -> pack -> trainer -> publish weights -> metrics -> checkpoint
"""

import time
from collections.abc import Iterator, Mapping, Sequence

from data.markup import Markup
from data.stage import StageRequest
from data.stages import load_tasks
from data.tokenizer import load_markup
from data.types import Group, Prompt, Sample, Task
from distill.config import DistillConfig
from distill.objective import loss_of, rollout_metrics, teacher_kl
from distill.teachers import Teachers
from engine.budget import load_budgets
from engine.checkpoint import load_latest, save_checkpoint
from engine.embedded_sampler import EmbeddedSampler
from engine.episodes import run_episodes
from engine.metrics import MetricsLog, seed_for
from engine.supervised import batches_of
from engine.trainer import EmbeddedTrainer
from engine.weights import load_model, save_model


def train(request: StageRequest) -> dict[str, float]:
    """Merges every ``teacher/<cell>`` input into the ``start`` input; writes the student's folder.

    Killed and started again, it goes on from its last checkpoint, bit for bit.
    """
    config = DistillConfig.model_validate(request.config)
    start = request.input("start")
    markup = load_markup(start)
    tasks = {d: load_tasks(request.input(f"tasks/{d}"), "train") for d in {c.split("/")[0] for c in config.cells}}
    budgets = load_budgets(request.input("budget"))
    folders = {
        role.removeprefix("teacher/"): path for role, path in request.inputs.items() if role.startswith("teacher/")
    }
    trainer = EmbeddedTrainer(load_model(start), config.optimizer, config.num_steps, config.tokens_per_micro_batch)
    teachers = Teachers(folders, config.cells, markup.vocab_size, config.tokens_per_micro_batch)
    loss = loss_of(config)
    sampler = EmbeddedSampler()
    log = MetricsLog(request.metrics_path)
    load_latest(request.checkpoint_path, trainer)
    log.truncate_after(trainer.step)
    batches = prompts_of(config, markup, tasks, start=trainer.step)

    while trainer.step < config.num_steps:
        started = time.monotonic()
        prompts_P = next(batches)
        sampler.load(trainer.model, trainer.policy_version)
        groups_P = run_episodes(
            sampler,
            markup,
            prompts_P,
            num_samples=config.samples_per_prompt,
            budgets=budgets,
            temperature=1.0,
            seed=seed_for(config.seed, "sample", trainer.step),
            max_turns=config.max_turns,
        )
        sampled = time.monotonic()
        samples = teachers.score([sample for group in groups_P for sample in to_samples(group)])
        scored = time.monotonic()
        update = trainer.update(samples, loss)
        trained = time.monotonic()
        log.write(
            update.step,
            **rollout_metrics(groups_P),
            **teacher_kl(samples),
            **update.metrics,
            loss=update.loss,
            grad_norm=update.grad_norm,
            num_tokens=update.num_tokens,
            sample_s=sampled - started,
            score_s=scored - sampled,
            train_s=trained - scored,
        )
        if update.step % config.checkpoint_every == 0 or update.step == config.num_steps:
            save_checkpoint(request.checkpoint_path, update.step, trainer, {})

    save_model(trainer.model, request.output_path, tokenizer_from=start)
    return log.mean_of_last(5, "teacher_kl", "accuracy", "tokens")


def prompts_of(
    config: DistillConfig, markup: Markup, tasks: Mapping[str, Sequence[Task]], start: int
) -> Iterator[list[Prompt]]:
    """Every step the same number of prompts of every cell, so that no teacher is away for long."""
    streams = {
        cell: batches_of(
            len(tasks[cell.split("/")[0]]), config.prompts_per_cell, seed_for(config.seed, "tasks", cell), start
        )
        for cell in config.cells
    }
    while True:
        prompts: list[Prompt] = []
        for cell, stream in streams.items():
            domain, effort = cell.split("/")
            prompts += [markup.render_prompt(tasks[domain][i], effort) for i in next(stream)]
        yield prompts


def to_samples(group: Group) -> list[Sample]:
    """The group's rollouts as samples without an advantage: the teacher's word is all that counts."""
    return [
        Sample(
            token_ids_T=rollout.token_ids_T,
            loss_mask_T=rollout.loss_mask_T,
            sampler_logprobs_T=rollout.sampler_logprobs_T,
            advantages_T=(0.0,) * len(rollout.token_ids_T),
            domain=group.prompt.task.domain,
            effort=group.prompt.effort,
        )
        for rollout in group.rollouts_G
    ]
