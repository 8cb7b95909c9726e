"""The optimizer of a recipe: AdamW, or Muon for the hidden matrices with AdamW for embeddings and norms.

Legend: S matrices of one shape, R rows, C columns (R <= C after transposition).
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from engine.config import OptimizerConfig

MUON_MOMENTUM = 0.95
NEWTON_SCHULZ_STEPS = 5
NEWTON_SCHULZ_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
RMS_OF_ADAMW = 0.2


def learning_rate_factor(config: OptimizerConfig, step: int, num_steps: int) -> float:
    """Multiplier of the learning rates at ``step`` (from 0): linear warm-up, then constant or linear to 0."""
    if step < config.warmup_steps:
        return (step + 1) / (config.warmup_steps + 1)
    if config.decay == "constant":
        return 1.0
    return max(0.0, 1.0 - (step - config.warmup_steps) / max(1, num_steps - config.warmup_steps))


class Optimizer:
    """Updates a model's parameters in place from their gradients; its state is named tensors.

    With ``muon`` every matrix but the embedding goes to Muon at ``config.lr`` and the rest to AdamW at
    ``config.adam_lr``; with ``adamw`` all go to AdamW at ``config.lr``. Weight decay is decoupled and spares vectors.
    """

    def __init__(self, model: nn.Module, config: OptimizerConfig, num_steps: int) -> None:
        self._config = config
        self._num_steps = num_steps
        named = dict(model.named_parameters())
        hidden = {name for name in named if config.name == "muon" and _is_hidden_matrix(name, named[name])}
        self._muon = Muon({name: named[name] for name in sorted(hidden)}, config.weight_decay)
        self._names = [name for name in named if name not in hidden]
        self._adam_lr = config.adam_lr if config.name == "muon" else config.lr
        rest = [named[name] for name in self._names]
        self._adam = torch.optim.AdamW(
            [
                {"params": [p for p in rest if p.ndim > 1], "weight_decay": config.weight_decay},
                {"params": [p for p in rest if p.ndim <= 1], "weight_decay": 0.0},
            ],
            lr=self._adam_lr,
            betas=config.betas,
            eps=config.eps,
            fused=True,
        )
        self._parameters = named

    def step(self, step: int) -> None:
        """Applies the gradients at the learning rates of ``step`` (from 0)."""
        factor = learning_rate_factor(self._config, step, self._num_steps)
        for group in self._adam.param_groups:
            group["lr"] = self._adam_lr * factor
        self._adam.step()
        self._muon.step(self._config.lr * factor)

    def state(self) -> dict[str, Tensor]:
        """Everything but the parameters, by name: ``muon/<parameter>``, ``adam/<parameter>/<moment>``."""
        state = {f"muon/{name}": momentum for name, momentum in self._muon.momenta().items()}
        for name in self._names:
            for key, value in self._adam.state.get(self._parameters[name], {}).items():
                state[f"adam/{name}/{key}"] = value
        return state

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Takes over what ``state`` returned. Raises ValueError when it is another optimizer's or another model's."""
        expected = {f"muon/{name}" for name in self._muon.momenta()}
        given = {key for key in state if key.startswith("muon/")}
        adam = {key.rsplit("/", 1)[0].removeprefix("adam/") for key in state if key.startswith("adam/")}
        if expected != given or not adam <= set(self._names):
            raise ValueError("the optimizer's state does not fit this model and optimizer: was the recipe changed?")
        self._muon.load_momenta({key.removeprefix("muon/"): state[key] for key in given})
        for name in adam:
            moments = {key.rsplit("/", 1)[1]: state[key].clone() for key in state if key.startswith(f"adam/{name}/")}
            self._adam.state[self._parameters[name]] = moments


class Muon:
    """Momentum orthogonalised by Newton-Schulz (K. Jordan, 2024), in fp32 and batched over matrices of one shape.

    The update of an R x C matrix is scaled by 0.2 sqrt(max(R, C)), so that its root mean square is that of AdamW
    (Moonlight, arXiv 2502.16982) and learning rates carry over.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], weight_decay: float) -> None:
        self._weight_decay = weight_decay
        self._shapes: dict[tuple[int, int], list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in parameters.items():
            rows, columns = sorted(parameter.shape)
            self._shapes.setdefault((rows, columns), []).append((name, parameter))
        self._momenta_SRC = {shape: torch.zeros(len(m), *shape) for shape, m in self._shapes.items()}

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Nesterov momentum, orthogonalisation, decoupled weight decay. Every parameter must have a gradient."""
        for shape, members in self._shapes.items():
            gradients_SRC = torch.stack([_wide(_gradient(name, p)) for name, p in members])
            momentum_SRC = self._momenta_SRC[shape]
            momentum_SRC.lerp_(gradients_SRC, 1.0 - MUON_MOMENTUM)
            update_SRC = orthogonalise(torch.lerp(gradients_SRC, momentum_SRC, MUON_MOMENTUM))
            scale = lr * RMS_OF_ADAMW * max(shape) ** 0.5
            parameters = [_wide(p) for _, p in members]
            if self._weight_decay:
                torch._foreach_mul_(parameters, 1.0 - lr * self._weight_decay)
            torch._foreach_add_(parameters, list(update_SRC), alpha=-scale)

    def momenta(self) -> dict[str, Tensor]:
        """The momentum of each parameter, in the shape min x max."""
        return {
            name: self._momenta_SRC[shape][i]
            for shape, members in self._shapes.items()
            for i, (name, _) in enumerate(members)
        }

    def load_momenta(self, momenta: Mapping[str, Tensor]) -> None:
        for name, momentum in self.momenta().items():
            momentum.copy_(momenta[name])


def orthogonalise(matrices_SRC: Tensor) -> Tensor:
    """About U V^T of each matrix's singular value decomposition: singular values between 0.7 and 1.2 (R <= C)."""
    a, b, c = NEWTON_SCHULZ_COEFFICIENTS
    x_SRC: Tensor = matrices_SRC / (torch.linalg.matrix_norm(matrices_SRC, keepdim=True) + 1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram_SRR = x_SRC @ x_SRC.mT
        polynomial_SRR = torch.baddbmm(gram_SRR, gram_SRR, gram_SRR, beta=b, alpha=c)
        x_SRC = torch.baddbmm(x_SRC, polynomial_SRR, x_SRC, beta=a)
    return x_SRC


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scales all gradients so that their joint norm is at most ``max_norm``; returns the norm before."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm: Tensor = torch.nn.utils.get_total_norm(gradients)
    if norm > max_norm:
        torch._foreach_mul_(gradients, max_norm / norm)
    return norm


def _is_hidden_matrix(name: str, parameter: Tensor) -> bool:
    return parameter.ndim == 2 and "embed" not in name and "lm_head" not in name


def _wide(matrix: Tensor) -> Tensor:
    """The matrix, or its transpose: never more rows than columns."""
    return matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT


def _gradient(name: str, parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        raise ValueError(f"{name} has no gradient: it takes no part in the loss")
    return parameter.grad
