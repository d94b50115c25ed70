"""Can this model be trained with per-example privacy? Asked statically of Opacus, then dynamically of the model
itself.

A layer list can't find what is written in `forward`: statistics over the batch, an augmentation that mixes examples,
a parameter that no known layer owns, rows that a layer sees in another order. So the model is run: change one example,
or leave it out, and no other example's loss or gradient may move; train one step, and no buffer may change; the clipped
sum with an infinite clip norm must be the gradient of the summed loss, and each example's norm that of its own
gradient. Metrics that are to be released are put to the same test. Inputs are drawn at random where they are
floating-point numbers, and targets differ from row to row whatever the data, so that the verdict doesn't depend on
anyone's records. What a model does only to larger batches, other inputs or other weights is not found this way.
"""

import torch
from torch import Tensor, nn

from client_app.clipping import ClippedSum
from fedplat.errors import FedplatError, UsageError
from fedplat.model import set_training
from fedplat.streams import torch_seeded
from fedplat.task import Examples, Task, example_losses

PROBES = 4
DRAWS = 8
"""Augmentation is tried with so many streams: one that mixes every second batch passes once in 256 times."""
MOST_TARGETS, MOST_CLASSES = 100_000, 64
"""Targets that are looked at to find the classes, and how many different floating-point ones count as classes."""
UNIT = "privacy.unit = 'sample'"


def require_private_model(model: nn.Module, task: Task, examples: Examples, freeze: tuple[str, ...]) -> None:
    """Refuse a model whose per-example gradients are not what they must be, naming the layer."""
    _require_valid_layers(model, freeze)
    probe = _probe(examples)
    device = next(model.parameters()).device
    inputs, targets = probe.inputs.to(device), probe.targets.to(device)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    set_training(model, freeze)
    try:
        _require_independent(model, task, inputs, targets)
        _require_same_alone(model, task, inputs, targets)
        _require_still_buffers(model, before)
        _require_complete(model, task, inputs, targets)
    finally:
        for name, buffer in model.named_buffers():
            buffer.copy_(before[name])


def require_separate_metrics(model: nn.Module, task: Task, examples: Examples) -> None:
    """Refuse a loss or metric whose value for one example depends on others: noise for one would not cover them all."""
    probe = _probe(examples)
    device = next(model.parameters()).device
    inputs, targets = probe.inputs.to(device), probe.targets.to(device)
    model.eval()
    before = _measured(model, task, inputs, targets)
    for row in range(PROBES):
        others = torch.arange(PROBES, device=device) != row
        changed = _measured(model, task, *_with_another(inputs, targets, row))
        without = _measured(model, task, inputs[others], targets[others])
        for name, values in before.items():
            if not (_close(values[others], changed[name][others]) and _close(values[others], without[name])):
                raise UsageError(
                    f"metric '{name}' of one example depends on others in its batch, so the noise that hides one "
                    "example would hide nobody: it can't be released with privacy.evaluation_noise. Measure each "
                    "example by itself, or leave evaluation.clients out"
                )


@torch.no_grad()
def _measured(model: nn.Module, task: Task, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """What `fedplat.evaluate` measures of each example."""
    with torch_seeded("probe"):
        outputs = model(inputs)
        losses, parts = example_losses(task, outputs, targets)
        return {"loss": losses, **parts, **task.metrics(outputs, targets)}


def _close(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one.double(), other.double(), rtol=1e-4, atol=1e-6, equal_nan=True)


def _probe(examples: Examples) -> Examples:
    """A few examples of the right shape, with at least two targets. One example is enough to know the shape."""
    rows = torch.arange(PROBES) * (len(examples) - 1) // (PROBES - 1)
    few = examples[rows]
    generator = torch.Generator().manual_seed(0)
    targets = _distinct_targets(examples.targets, few.targets, generator)
    if not few.inputs.is_floating_point():
        return Examples(few.inputs, targets)
    return Examples(torch.randn(few.inputs.shape, generator=generator).to(few.inputs.dtype), targets)


def _distinct_targets(all_targets: Tensor, few: Tensor, generator: torch.Generator) -> Tensor:
    """Targets that differ from row to row: of the values that the data has where these are few (classes), else random.

    Rows that happen to share a class would hide a loss that weighs classes by their share of the batch.
    """
    flat = all_targets.reshape(-1)
    seen = torch.unique(flat[:: max(1, len(flat) // MOST_TARGETS)])
    if few.is_floating_point() and not 2 <= len(seen) <= MOST_CLASSES:
        return torch.rand(few.shape, generator=generator).to(few.dtype)
    if len(seen) == 1:  # one class here, more elsewhere
        seen = torch.tensor([0, 1 if int(seen) == 0 else int(seen)], dtype=few.dtype)
    picks = seen[torch.linspace(0, len(seen) - 1, min(PROBES, len(seen))).round().long()]
    width = few[0].numel()
    order = (torch.arange(len(few)).unsqueeze(1) + torch.arange(width)) % len(picks)
    targets: Tensor = picks[order].reshape(few.shape).to(few.dtype)
    return targets


def _require_valid_layers(model: nn.Module, freeze: tuple[str, ...]) -> None:
    """Opacus's own list of layers, and layers that keep statistics even if their parameters are frozen."""
    from opacus.validators import ModuleValidator

    set_training(model, freeze)
    for name, module in model.named_modules():
        keeps = getattr(module, "track_running_stats", False) and module.training
        if keeps or (isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training):
            raise UsageError(
                f"layer '{name}' ({type(module).__name__}) mixes examples of a batch or keeps statistics of them: not "
                f"private. Set privacy.convert_model = true to replace it by GroupNorm, or freeze it with its buffers"
            )
    for error in ModuleValidator.validate(_trainable_only(model), strict=False):
        raise UsageError(f"this model can't be trained with {UNIT}: {error}. Try privacy.convert_model = true")


def _trainable_only(model: nn.Module) -> nn.Module:
    """What Opacus should judge: a frozen layer in evaluation mode is only a fixed function."""
    kept = [m for m in model.modules() if any(p.requires_grad for p in m.parameters(recurse=False))]
    return nn.ModuleList(kept).train()


def _losses(model: nn.Module, task: Task, inputs: Tensor, targets: Tensor, draw: int = 0) -> Tensor:
    """Per-example training losses, with the same randomness (dropout, augmentation) for the same draw."""
    augment = getattr(task, "augment", None)
    with torch_seeded("probe", draw):
        if augment is not None:
            inputs = augment(inputs, torch.Generator().manual_seed(draw))
        losses, _ = example_losses(task, model(inputs), targets)
    return losses


def _require_same_alone(model: nn.Module, task: Task, inputs: Tensor, targets: Tensor) -> None:
    """An example's loss is the same in a smaller batch. Without augmentation and dropout: these draw by place."""
    modes = {module: module.training for module in model.modules()}
    try:
        once, twice = (_plain_losses(model, task, inputs, targets, draw) for draw in (0, 1))
        if not torch.equal(once, twice):
            model.eval()
            once = _plain_losses(model, task, inputs, targets, 0)
        for row in range(PROBES):
            others = torch.arange(PROBES, device=inputs.device) != row
            if not _close(once[others], _plain_losses(model, task, inputs[others], targets[others], 0)):
                raise _coupled()
    finally:
        for module, training in modes.items():
            module.training = training


@torch.no_grad()
def _plain_losses(model: nn.Module, task: Task, inputs: Tensor, targets: Tensor, draw: int) -> Tensor:
    with torch_seeded("probe", draw):
        return example_losses(task, model(inputs), targets)[0]


def _coupled() -> UsageError:
    return UsageError(
        f"task or model: the loss of one example depends on others in its batch (batch statistics, class weights, "
        f"mixing augmentation?), so clipping single examples protects nobody: it can't be trained with {UNIT}"
    )


def _require_independent(model: nn.Module, task: Task, inputs: Tensor, targets: Tensor) -> None:
    """Another example must leave the others' losses, and their gradients with respect to themselves, alone."""
    for draw in range(DRAWS):
        row = draw % PROBES
        others = torch.arange(PROBES) != row
        before = _losses_and_gradients(model, task, inputs, targets, draw)
        after = _losses_and_gradients(model, task, *_with_another(inputs, targets, row), draw)
        for one, other in zip(before, after, strict=True):
            if not torch.allclose(one[others], other[others], rtol=1e-4, atol=1e-6):
                raise _coupled()


def _with_another(inputs: Tensor, targets: Tensor, row: int) -> tuple[Tensor, Tensor]:
    """The batch with another example, and the next one's target, in one row."""
    inputs, targets = inputs.clone(), targets.clone()
    follower = (row + 1) % len(inputs)
    if inputs.is_floating_point():
        inputs[row] = inputs[row] * -3 + 1
    else:
        inputs[row] = inputs[follower].flip(-1) if inputs.dim() > 1 else inputs[follower]
    targets[row] = targets[follower]
    return inputs, targets


def _losses_and_gradients(
    model: nn.Module, task: Task, inputs: Tensor, targets: Tensor, draw: int
) -> tuple[Tensor, ...]:
    if not inputs.is_floating_point():
        return (_losses(model, task, inputs, targets, draw).detach(),)
    leaf = inputs.clone().requires_grad_()
    losses = _losses(model, task, leaf, targets, draw)
    (gradient,) = torch.autograd.grad(losses.sum(), leaf, allow_unused=True)
    return losses.detach(), gradient if gradient is not None else torch.zeros_like(leaf)


def _require_still_buffers(model: nn.Module, before: dict[str, Tensor]) -> None:
    for name, buffer in model.named_buffers():
        if not torch.equal(buffer, before[name]):
            raise UsageError(
                f"buffer '{name}' changes with the data it sees: what it remembers would leave the site without noise. "
                f"Freeze it (task.freeze), or use a layer without statistics"
            )


def _require_complete(model: nn.Module, task: Task, inputs: Tensor, targets: Tensor) -> None:
    """The clipped sum with C = ∞ is the gradient of the summed loss, and every example's norm is its gradient's."""
    clipped = ClippedSum(model)
    parameters = dict(clipped.gradients())
    try:
        _compare(clipped, parameters, model, task, inputs, targets)
        _compare(clipped, parameters, model, task, inputs[:1], targets[:1])
    except FedplatError:
        raise
    except Exception as error:  # Poisson batches have any size, also one
        reason = f"{type(error).__name__}: {error}"
        raise UsageError(
            f"the model fails on a batch of one example or of {PROBES} ({reason}): not with {UNIT}"
        ) from error
    finally:
        clipped.detach()


def _compare(
    clipped: ClippedSum,
    parameters: dict[nn.Parameter, Tensor],
    model: nn.Module,
    task: Task,
    inputs: Tensor,
    targets: Tensor,
) -> None:
    clipped.reset()
    norms = clipped.add(lambda: _losses(model, task, inputs, targets), float("inf"))
    losses = _losses(model, task, inputs, targets)
    expected, true = _one_by_one(losses, list(parameters))
    scale = max([1e-6, *(float(e.abs().max()) for e in expected)])
    for (name, found), wanted in zip(clipped.named_sums().items(), expected, strict=True):
        if not torch.allclose(found.to(wanted.dtype), wanted, rtol=1e-2, atol=1e-3 * scale):
            raise UsageError(
                f"parameter '{name}' is used in a way that its layer doesn't show (outside of its own forward?), so "
                f"one example's share of its gradient can't be bounded: it can't be trained with {UNIT}"
            )
    if not torch.allclose(norms, true.to(norms.dtype), rtol=1e-2, atol=1e-6):
        raise UsageError(
            f"per-example gradient norms of this model come out wrong (does it reorder its batch?): it can't be "
            f"trained with {UNIT}"
        )


def _one_by_one(losses: Tensor, parameters: list[nn.Parameter]) -> tuple[list[Tensor], Tensor]:
    """The gradient of the summed loss, and the norm of each example's own: autograd, one example after another."""
    totals, squares = [torch.zeros_like(p) for p in parameters], []
    for loss in losses:
        own = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
        found = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, own, strict=True)]
        totals = [total + g for total, g in zip(totals, found, strict=True)]
        squares.append(torch.stack([g.square().sum() for g in found]).sum())
    return totals, torch.stack(squares).sqrt()
