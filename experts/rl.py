"""The RL loop of one expert: one domain at one effort, GRPO on verifiable rewards.

prompts -> sampler -> grade -> group advantages -> pack -> trainer -> publish weights -> metrics -> checkpoint
"""

import time
from typing import Any

from data.arrow import save_rows
from data.stage import StageRequest
from data.stages import load_tasks
from data.tokenizer import load_markup
from engine.budget import load_budgets
from engine.checkpoint import load_latest, save_checkpoint
from engine.embedded_sampler import EmbeddedSampler
from engine.episodes import run_episodes
from engine.losses import clipped_policy_gradient
from engine.metrics import MetricsLog, seed_for
from engine.supervised import batches_of
from engine.trainer import EmbeddedTrainer
from engine.weights import load_model, save_model
from experts.config import ExpertConfig
from experts.rewards import informative, rollout_metrics, to_rows, to_samples

KEPT_GROUPS = 2  # groups stored at every checkpoint, to be read


def train(request: StageRequest) -> dict[str, float]:
    """Trains the ``start`` input on the ``tasks`` input within ``budget``; writes the expert's folder.

    Killed and started again, it goes on from its last checkpoint, bit for bit.
    """
    config = ExpertConfig.model_validate(request.config)
    start = request.input("start")
    markup = load_markup(start)
    tasks = load_tasks(request.input("tasks"), "train")
    budgets = load_budgets(request.input("budget"))
    loss = clipped_policy_gradient(config.clip_low, config.clip_high)
    trainer = EmbeddedTrainer(load_model(start), config.optimizer, config.num_steps, config.tokens_per_micro_batch)
    sampler = EmbeddedSampler()
    log = MetricsLog(request.metrics_path)
    cursor = load_latest(request.checkpoint_path, trainer) or {"rollouts": []}
    log.truncate_after(trainer.step)
    batches = batches_of(len(tasks), config.prompts_per_step, seed_for(config.seed, "tasks"), start=trainer.step)
    kept: list[dict[str, Any]] = cursor["rollouts"]

    while trainer.step < config.num_steps:
        started = time.monotonic()
        prompts_P = [markup.render_prompt(tasks[i], config.effort) for i in next(batches)]
        sampler.load(trainer.model, trainer.policy_version)
        groups_P = run_episodes(
            sampler,
            markup,
            prompts_P,
            num_samples=config.group_size,
            budgets=budgets,
            temperature=1.0,
            seed=seed_for(config.seed, "sample", trainer.step),
            max_turns=config.max_turns,
        )
        sampled = time.monotonic()
        samples = [sample for group in groups_P for sample in to_samples(group, config)]
        update = trainer.update(informative(samples), loss)
        trained = time.monotonic()
        log.write(
            update.step,
            **rollout_metrics(groups_P, config),
            **update.metrics,
            loss=update.loss,
            grad_norm=update.grad_norm,
            num_tokens=update.num_tokens,
            sample_s=sampled - started,
            train_s=trained - sampled,
        )
        if update.step % config.checkpoint_every == 0 or update.step == config.num_steps:
            kept += [row for group in groups_P[:KEPT_GROUPS] for row in to_rows(markup, group, update.step, config)]
            save_checkpoint(request.checkpoint_path, update.step, trainer, {"rollouts": kept})

    save_model(trainer.model, request.output_path, tokenizer_from=start)
    save_rows(kept, request.output_path / "rollouts")
    return log.mean_of_last(5, "reward", "accuracy", "tokens")
