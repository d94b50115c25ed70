"""Local training of many clients at once: stacked parameters, one kernel for all clients.

The mathematics is that of `client_app.local`, client by client. Every client has its own permutation, its own
number of steps, its own learning rate; ragged batches are padded and masked. Clients are ordered by their
number of steps, so those that still train are always a prefix of the stack, and nobody else is touched.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from client_app.local import step_batches
from fedplat.job import Job
from fedplat.task import Examples, Task, example_losses
from simulations.stacked_mlp import Layers, Stack, is_plain_mlp, layers_of
from simulations.stacked_mlp import backward as mlp_backward
from simulations.stacked_mlp import forward as mlp_forward

Forward = Callable[[Stack, Tensor], Any]
Augment = Callable[[Tensor, torch.Generator], Tensor]


@dataclass(frozen=True)
class ClientPlan:
    """What one client trains on: its rows of the training data, its learning rate, its random stream."""

    rows: Tensor
    lr: float
    generator: torch.Generator


@dataclass
class StackResult:
    """Row i belongs to client i of the plans."""

    parameters: Stack
    steps: list[int]
    metrics: dict[str, Tensor] = field(default_factory=dict)


def stacked_forward(model: nn.Module) -> Forward:
    """A function of (stacked parameters, stacked inputs) that applies each client's model to its own batch."""
    layers = layers_of(model)
    if is_plain_mlp(layers):
        return lambda stack, inputs: mlp_forward(layers, stack, inputs)[-1]
    from torch.func import functional_call, vmap  # imports half of torch's compiler

    def one(parameters: Stack, inputs: Tensor) -> Any:
        return functional_call(model, parameters, (inputs,))

    batched: Forward = vmap(one)
    return batched


class StackTrainer:
    """Trains stacks of clients of one job, starting from the resident model's parameters."""

    def __init__(self, job: Job, task: Task, model: nn.Module, examples: Examples) -> None:
        self._job, self._task, self._examples = job, task, examples
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        layers = layers_of(model)
        self._layers = layers if is_plain_mlp(layers) else None
        self._forward = stacked_forward(model)
        self._augment = own_augment(task)

    def train(self, plans: list[ClientPlan]) -> StackResult:
        local = self._job.local
        step_size = local.batch_size * local.accumulate
        steps = [local.steps or (local.epochs or 1) * -(-len(plan.rows) // step_size) for plan in plans]
        order = sorted(range(len(plans)), key=lambda i: -steps[i])
        # Taken step by step, because permutations and augmentation draw from the client's one stream in turn.
        batches = [step_batches(len(plans[i].rows), step_size, local, plans[i].generator) for i in order]
        rates = torch.tensor([plans[i].lr for i in order])
        stack = {name: p.detach().expand(len(plans), *p.shape).clone() for name, p in self._parameters.items()}
        optimizer = StackOptimizer(self._job, stack, rates)
        means = _StackMeans(len(plans))
        for step in range(steps[order[0]]):
            active = sum(own > step for own in steps)
            rows = [plans[i].rows[next(own)] for i, own in zip(order[:active], batches, strict=False)]
            self._step(rows, [plans[i].generator for i in order[:active]], stack, optimizer, means)
        # Back into the order of the plans.
        back = torch.tensor(order).argsort()
        parameters = {name: tensor[back] for name, tensor in stack.items()}
        metrics = {name: values[back] for name, values in means.means().items()}
        return StackResult(parameters, steps, metrics)

    def _step(
        self,
        batches: list[Tensor],
        generators: list[torch.Generator],
        stack: Stack,
        optimizer: "StackOptimizer",
        means: "_StackMeans",
    ) -> None:
        sizes = torch.tensor([len(batch) for batch in batches])
        rows, mask = pad_batches(batches, sizes)
        inputs, targets = self._examples.inputs[rows], self._examples.targets[rows]
        if self._augment is not None:
            inputs = augment_stack(self._augment, inputs, sizes, generators)
        shares = mask / sizes.unsqueeze(1)
        if self._layers is not None:
            values = self._mlp_step(self._layers, stack, inputs, targets, shares, optimizer)
        else:
            values = self._autograd_step(stack, inputs, targets, shares, optimizer)
        means.add(values, mask, sizes)

    def _autograd_step(
        self, stack: Stack, inputs: Tensor, targets: Tensor, shares: Tensor, optimizer: "StackOptimizer"
    ) -> dict[str, Tensor]:
        """Any model: autograd through vmap."""
        active = len(inputs)
        leaves = {name: tensor[:active].requires_grad_() for name, tensor in stack.items()}
        outputs = self._forward(leaves, inputs)
        flat = pytree.tree_map(lambda out: out.flatten(0, 1), outputs)
        losses, parts = example_losses(self._task, flat, targets.flatten(0, 1))
        gradients = torch.autograd.grad(losses, list(leaves.values()), shares.flatten().to(losses.dtype))
        with torch.no_grad():
            optimizer.step(dict(zip(leaves, gradients, strict=True)), active)
        return {"loss": losses.detach(), **{name: part.detach() for name, part in parts.items()}}

    def _mlp_step(
        self,
        layers: Layers,
        stack: Stack,
        inputs: Tensor,
        targets: Tensor,
        shares: Tensor,
        optimizer: "StackOptimizer",
    ) -> dict[str, Tensor]:
        """A plain MLP: by hand, with autograd only for the task's loss."""
        active = len(inputs)
        views = {name: tensor[:active] for name, tensor in stack.items()}
        with torch.no_grad():
            activations = mlp_forward(layers, views, inputs)
        outputs = activations[-1].flatten(0, 1).requires_grad_()
        losses, parts = example_losses(self._task, outputs, targets.flatten(0, 1))
        # A weighted sum, not grad_outputs: those make torch import its symbolic shapes, a quarter of a second.
        (gradient,) = torch.autograd.grad(torch.dot(losses, shares.flatten().to(losses.dtype)), outputs)
        with torch.no_grad():
            gradient = gradient.reshape(activations[-1].shape)
            if optimizer.is_plain_sgd:
                mlp_backward(layers, views, activations, gradient, optimizer.accumulate)
            else:
                gradients: Stack = {}

                def keep(name: str, left: Tensor, right: Tensor) -> None:
                    gradients[name] = torch.bmm(left, right).reshape(views[name].shape)

                mlp_backward(layers, views, activations, gradient, keep)
                optimizer.step(gradients, active)
        return {"loss": losses.detach(), **{name: part.detach() for name, part in parts.items()}}


def own_augment(task: Task) -> Augment | None:
    """The task's augmentation, if it has one of its own: a task need not derive from `Task`."""
    written = getattr(type(task), "augment", None)
    return task.augment if written is not None and written is not Task.augment else None


def augment_stack(augment: Augment, inputs: Tensor, sizes: Tensor, generators: list[torch.Generator]) -> Tensor:
    """Each client augments its own batch from its own stream; padding stays as it is."""
    augmented = inputs.clone()
    for client, generator in enumerate(generators):
        real = int(sizes[client])
        if real:
            augmented[client, :real] = augment(inputs[client, :real], generator)
    return augmented


def pad_batches(batches: list[Tensor], sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Row numbers as a rectangle, padded with each client's first row, and which of them are real."""
    width = int(sizes.max())
    if int(sizes.min()) == width:
        return torch.stack(batches), torch.ones(len(batches), width)
    rows = torch.stack([torch.cat([b, b[:1].expand(width - len(b))]) for b in batches])
    return rows, (torch.arange(width) < sizes.unsqueeze(1)).float()


class StackOptimizer:
    """SGD with momentum, Adam and AdamW as torch.optim has them, for a prefix of a stack of clients."""

    def __init__(self, job: Job, stack: Stack, rates: Tensor) -> None:
        self._local, self._mu = job.local, job.proximal_mu
        self._stack = stack
        self._uniform = float(rates[0]) if bool((rates == rates[0]).all()) else None
        self._rates = rates
        self._start = {name: tensor[0].clone() for name, tensor in stack.items()} if self._mu else {}
        self._first: Stack = {}
        self._second: Stack = {}
        self._done = 0

    @property
    def is_plain_sgd(self) -> bool:
        """Nothing needs the gradient by itself: it may go straight into the parameters."""
        local = self._local
        return local.optimizer == "sgd" and not (local.momentum or local.weight_decay or local.clip_norm or self._mu)

    def accumulate(self, name: str, left: Tensor, right: Tensor) -> None:
        """Plain SGD in one matrix product: parameters += −lr · left @ right."""
        parameters = self._stack[name][: len(left)]
        if parameters.dim() == 2:
            parameters = parameters.unsqueeze(-1)
        if self._uniform is not None:
            parameters.baddbmm_(left, right, alpha=-self._uniform)
        else:
            parameters.baddbmm_(self._scaled(left), right, alpha=-1)

    def step(self, gradients: Stack, active: int) -> None:
        """Order as in client_app.local: proximal term, clip, weight decay, update."""
        if self._mu:
            for name, gradient in gradients.items():
                gradient.add_(self._stack[name][:active].detach() - self._start[name], alpha=self._mu)
        if self._local.clip_norm is not None:
            _clip(gradients, self._local.clip_norm)
        self._done += 1
        for name, gradient in gradients.items():
            parameters = self._stack[name][:active].detach()
            if self._local.optimizer == "sgd":
                self._sgd(name, parameters, gradient)
            else:
                self._adam(name, parameters, gradient)

    def _scaled(self, update: Tensor, factor: float = 1.0) -> Tensor:
        rates = self._rates[: len(update)].reshape(-1, *[1] * (update.dim() - 1)).to(update.dtype)
        return update * (rates * factor)

    def _sgd(self, name: str, parameters: Tensor, gradient: Tensor) -> None:
        local = self._local
        if local.weight_decay:
            gradient = gradient.add(parameters, alpha=local.weight_decay)
        if local.momentum:
            if name not in self._first:
                self._first[name] = gradient.clone()
            else:
                # Clients leave the stack at its end, so the buffer's prefix belongs to those still training.
                self._first[name] = self._first[name][: len(gradient)].mul_(local.momentum).add_(gradient)
            gradient = self._first[name]
        if self._uniform is not None:
            parameters.sub_(gradient, alpha=self._uniform)
        else:
            parameters.sub_(self._scaled(gradient))

    def _adam(self, name: str, parameters: Tensor, gradient: Tensor, betas: tuple[float, float] = (0.9, 0.999)) -> None:
        local = self._local
        if local.weight_decay and local.optimizer == "adam":
            gradient = gradient.add(parameters, alpha=local.weight_decay)
        elif local.weight_decay:
            parameters.sub_(self._scaled(parameters, local.weight_decay))
        first = self._first.setdefault(name, torch.zeros_like(gradient))[: len(gradient)]
        second = self._second.setdefault(name, torch.zeros_like(gradient))[: len(gradient)]
        first.lerp_(gradient, 1 - betas[0])
        second.mul_(betas[1]).addcmul_(gradient, gradient, value=1 - betas[1])
        corrections = [1 - beta**self._done for beta in betas]
        denominator = (second.sqrt() / corrections[1] ** 0.5).add_(1e-8)
        parameters.sub_(self._scaled(first / denominator, 1 / corrections[0]))


def _clip(gradients: Stack, limit: float) -> None:
    """Each client's whole gradient to an L2 norm of at most `limit`, with torch's own guard of 1e-6."""
    squares = torch.stack([gradient.flatten(1).square().sum(1) for gradient in gradients.values()])
    factors = (limit / (squares.sum(0).sqrt() + 1e-6)).clamp(max=1.0)
    for gradient in gradients.values():
        gradient.mul_(factors.reshape(-1, *[1] * (gradient.dim() - 1)))


class _StackMeans:
    """Mean of per-example values for each client, over all examples it saw."""

    def __init__(self, clients: int) -> None:
        self._sums: dict[str, Tensor] = {}
        self._counts = torch.zeros(clients, dtype=torch.float64)

    def add(self, values: Mapping[str, Tensor], mask: Tensor, sizes: Tensor) -> None:
        active = len(sizes)
        self._counts[:active] += sizes
        for name, value in values.items():
            per_client = (value.detach().reshape(mask.shape) * mask).sum(1, dtype=torch.float64)
            if name not in self._sums:
                self._sums[name] = torch.zeros_like(self._counts)
            self._sums[name][:active] += per_client

    def means(self) -> dict[str, Tensor]:
        return {name: total / self._counts for name, total in self._sums.items()}
