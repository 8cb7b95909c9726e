"""Losses: pure functions from the logits of the states that predict trained tokens to a sum over tokens.

Legend: N trained tokens of a micro-batch, U states that predict them (``batch.state_N`` says which; tokens after a
common prefix share one), V vocabulary. ``pi`` is the live policy, ``mu`` the policy that sampled, ``pi_T`` a teacher.
Every loss returns the *sum* over its tokens, and metrics that are detached sums too: the trainer divides both once, by
the global number of trained tokens. Arithmetic is fp32 (fp64 logits stay fp64).
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from engine.batches import Batch

Loss = Callable[[Tensor, Batch], tuple[Tensor, dict[str, Tensor]]]

# Sampler log-probabilities that are all 0 say that the policy was certain of every token. When the live policy is far
# from it, over this many tokens, they are missing instead.
MIN_TOKENS_TO_TELL, MAX_MEAN_LOGPROB_TO_TELL = 4, -0.1


def log_softmax(logits_NV: Float[Tensor, "n v"]) -> Float[Tensor, "n v"]:
    """Log-probabilities in fp32 or better."""
    return torch.log_softmax(logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32)), dim=-1)


def sharpen(logprobs_NV: Float[Tensor, "n v"], temperature: float) -> Float[Tensor, "n v"]:
    """log softmax(logprobs / temperature): a target below 1 is sharper; 1 returns the argument itself."""
    return logprobs_NV if temperature == 1.0 else torch.log_softmax(logprobs_NV / temperature, dim=-1)


def reverse_kl(
    student_logprobs_NV: Float[Tensor, "n v"], teacher_logprobs_NV: Float[Tensor, "n v"]
) -> Float[Tensor, " n"]:
    """KL(student || teacher) per token, nats; its gradient in the student's logits is p_a (log(p_a/q_a) - KL)."""
    return (student_logprobs_NV.exp() * (student_logprobs_NV - teacher_logprobs_NV)).sum(-1)


def forward_kl(
    student_logprobs_NV: Float[Tensor, "n v"], teacher_logprobs_NV: Float[Tensor, "n v"]
) -> Float[Tensor, " n"]:
    """KL(teacher || student) per token, nats; its gradient in the student's logits is p - q."""
    return (teacher_logprobs_NV.exp() * (teacher_logprobs_NV - student_logprobs_NV)).sum(-1)


def jensen_shannon(
    student_logprobs_NV: Float[Tensor, "n v"], teacher_logprobs_NV: Float[Tensor, "n v"], beta: float
) -> Float[Tensor, " n"]:
    """beta KL(pi_T || M) + (1 - beta) KL(pi_S || M) per token, M = beta pi_T + (1 - beta) pi_S (GKD, arXiv 2306.13649).

    beta = 0 is the exact forward KL and beta = 1 the exact reverse KL (the limits of JSD divided by beta, 1 - beta).
    """
    if not 0.0 <= beta <= 1.0:
        raise ValueError(f"beta must lie in [0, 1]: {beta}")
    if beta == 0.0:
        return forward_kl(student_logprobs_NV, teacher_logprobs_NV)
    if beta == 1.0:
        return reverse_kl(student_logprobs_NV, teacher_logprobs_NV)
    weights = torch.tensor([beta, 1.0 - beta], dtype=student_logprobs_NV.dtype).log()
    mixture_NV = torch.logaddexp(teacher_logprobs_NV + weights[0], student_logprobs_NV + weights[1])
    return beta * forward_kl(mixture_NV, teacher_logprobs_NV) + (1 - beta) * reverse_kl(student_logprobs_NV, mixture_NV)


def cross_entropy(logits_UV: Float[Tensor, "u v"], batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Negative log-likelihood of the trained tokens; metric ``token_accuracy`` (greedy)."""
    logprobs_UV = log_softmax(logits_UV)
    hits = (_of_tokens(logprobs_UV.detach().argmax(-1), batch) == batch.target_ids_N).sum()
    return -_chosen(logprobs_UV, batch).sum(), {"token_accuracy": hits.to(logprobs_UV.dtype)}


def clipped_policy_gradient(clip_low: float, clip_high: float) -> Loss:
    """-min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A), rho = pi/mu a token (PPO; asymmetric as in DAPO).

    On policy its gradient is -A grad log pi. Metrics: ``ratio``, ``clipped`` (share of tokens whose gradient the clip
    took away), ``entropy`` (nats), ``sampler_kl`` (k3 estimate of KL(mu || pi)). Raises ValueError when the sampler's
    log-probabilities are missing.
    """

    def loss(logits_UV: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        logprobs_UV = log_softmax(logits_UV)
        logprobs_N = _chosen(logprobs_UV, batch)
        _require_sampler(logprobs_N.detach(), batch)
        log_ratio_N = logprobs_N - batch.sampler_logprobs_N
        ratio_N = log_ratio_N.exp()
        free_N = ratio_N * batch.advantages_N
        held_N = ratio_N.clamp(1.0 - clip_low, 1.0 + clip_high) * batch.advantages_N
        with torch.no_grad():
            metrics = {
                "ratio": ratio_N.sum(),
                "clipped": (held_N < free_N).sum().to(ratio_N.dtype),
            } | _watch(logprobs_UV, logprobs_N, batch)
        return -torch.minimum(free_N, held_N).sum(), metrics

    return loss


def sampled_token_reverse_kl(teacher_temperature: float = 1.0) -> Loss:
    """Policy gradient of the reverse KL on the sampled tokens: A = sg[log pi_T(y) - log pi(y)], loss -A log pi(y).

    The teacher's log-probabilities come from ``batch.teacher_logprobs_NV``, sharpened by ``teacher_temperature``; the
    batch's own advantages play no part. Unbiased for y ~ pi (ALGORITHMS 1.1; MOPD). Metrics: ``reverse_kl`` (the
    sampled estimate, nats), ``entropy``, ``sampler_kl``. Raises ValueError when either side's log-probabilities miss.
    """

    def loss(logits_UV: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        logprobs_UV = log_softmax(logits_UV)
        logprobs_N = _chosen(logprobs_UV, batch)
        _require_sampler(logprobs_N.detach(), batch)
        target_NV = sharpen(_teacher(batch, logprobs_UV), teacher_temperature)
        advantages_N = target_NV.gather(-1, batch.target_ids_N[:, None]).squeeze(-1) - logprobs_N.detach()
        metrics = {"reverse_kl": -advantages_N.sum()} | _watch(logprobs_UV.detach(), logprobs_N.detach(), batch)
        return -(advantages_N * logprobs_N).sum(), metrics

    return loss


def full_vocabulary_divergence(forward_share: float, teacher_temperature: float = 1.0) -> Loss:
    """(1 - forward_share) KL(pi || pi_T) + forward_share KL(pi_T || pi) over the whole vocabulary, teacher sharpened.

    Metrics: ``reverse_kl`` and ``forward_kl`` (nats, to the sharpened teacher), ``entropy``, ``sampler_kl``. Raises
    ValueError when the teacher's log-probabilities are missing, or at a share outside [0, 1].
    """
    if not 0.0 <= forward_share <= 1.0:
        raise ValueError(f"forward_share must lie in [0, 1]: {forward_share}")

    def loss(logits_UV: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        logprobs_UV = log_softmax(logits_UV)
        target_NV = sharpen(_teacher(batch, logprobs_UV), teacher_temperature)
        logprobs_NV = _of_tokens(logprobs_UV, batch)
        with torch.set_grad_enabled(forward_share < 1.0 and logprobs_NV.requires_grad):
            reverse = reverse_kl(logprobs_NV, target_NV).sum()
        with torch.set_grad_enabled(forward_share > 0.0 and logprobs_NV.requires_grad):
            forward = forward_kl(logprobs_NV, target_NV).sum()
        metrics = {"reverse_kl": reverse.detach(), "forward_kl": forward.detach()}
        total = (1.0 - forward_share) * reverse + forward_share * forward
        return total, metrics | _watch(logprobs_UV.detach(), _chosen(logprobs_UV.detach(), batch), batch)

    return loss


def jensen_shannon_divergence(beta: float, teacher_temperature: float = 1.0) -> Loss:
    """JSD_beta of teacher and student over the whole vocabulary (GKD), the teacher sharpened.

    Metrics and errors as of ``full_vocabulary_divergence``; beta outside [0, 1] raises ValueError.
    """

    def loss(logits_UV: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        logprobs_UV = log_softmax(logits_UV)
        target_NV = sharpen(_teacher(batch, logprobs_UV), teacher_temperature)
        logprobs_NV = _of_tokens(logprobs_UV, batch)
        metrics = {
            "reverse_kl": reverse_kl(logprobs_NV.detach(), target_NV).sum(),
            "forward_kl": forward_kl(logprobs_NV.detach(), target_NV).sum(),
        }
        watched = _watch(logprobs_UV.detach(), _chosen(logprobs_UV.detach(), batch), batch)
        return jensen_shannon(logprobs_NV, target_NV, beta).sum(), metrics | watched

    return loss


def _of_tokens(values_U: Tensor, batch: Batch) -> Tensor:
    """Values of the states, (U, ...), as values of the trained tokens, (N, ...)."""
    return values_U if len(values_U) == len(batch.state_N) else values_U.index_select(0, batch.state_N)


def _chosen(logprobs_UV: Float[Tensor, "u v"], batch: Batch) -> Float[Tensor, " n"]:
    """The log-probability of each trained token."""
    return logprobs_UV.flatten().index_select(0, batch.state_N * logprobs_UV.shape[1] + batch.target_ids_N)


def _watch(logprobs_UV: Float[Tensor, "u v"], logprobs_N: Float[Tensor, " n"], batch: Batch) -> dict[str, Tensor]:
    """``entropy`` of the policy and ``sampler_kl``, the k3 estimate of KL(mu || pi) from tokens of mu."""
    entropy_U = -(logprobs_UV.exp() * logprobs_UV).sum(-1)
    log_ratio_N = logprobs_N - batch.sampler_logprobs_N
    return {"entropy": _of_tokens(entropy_U, batch).sum(), "sampler_kl": (log_ratio_N.exp() - 1.0 - log_ratio_N).sum()}


def _teacher(batch: Batch, logprobs_UV: Float[Tensor, "u v"]) -> Float[Tensor, "n v"]:
    if batch.teacher_logprobs_NV is None:
        raise ValueError("the loss needs the teacher's log-probabilities: score the samples before the update")
    theirs, ours = tuple(batch.teacher_logprobs_NV.shape), (len(batch.state_N), logprobs_UV.shape[1])
    if theirs != ours:
        raise ValueError(f"teacher log-probabilities have shape {theirs}, the student's {ours}: check the vocabularies")
    return batch.teacher_logprobs_NV.detach()


def _require_sampler(logprobs_N: Float[Tensor, " n"], batch: Batch) -> None:
    if len(logprobs_N) < MIN_TOKENS_TO_TELL or batch.sampler_logprobs_N.any():
        return
    if logprobs_N.mean() < MAX_MEAN_LOGPROB_TO_TELL:
        raise ValueError("the sampler's log-probabilities are missing (all are 0): store them with the rollouts")
