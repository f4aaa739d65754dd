"""Discrimination-aware heads: BN, ReLU, global average pool, linear, on a pivot's output.

A head is attached by a hook for as long as a block runs, and gone afterwards. While only the
head's loss is wanted, the forward stops at the pivot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcptool.training.angular import ANNEALING, Annealing, angular_logits, check_targets, settle
from dcptool.training.dist import SINGLE, Dist
from dcptool.training.losses import Loss, Outcome, tell_step

# A head that is fitted alone: batches for the statistics of its norm, steps of the solver, and the
# pull towards zero without which few images would be learnt by heart and their loss say nothing.
NORM_BATCHES, HEAD_STEPS, HEAD_DECAY = 4, 200, 1e-3


class Head(nn.Module):
    """Class scores from a feature map (or tokens, or a vector)."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(channels)
        self.linear = nn.Linear(channels, classes)

    def forward(self, features: Tensor) -> Tensor:
        """Scores (images x classes)."""
        scores: Tensor = self.linear(self.pooled(features))
        return scores

    def pooled(self, features: Tensor) -> Tensor:
        """What the linear layer reads (images x channels)."""
        return F.relu(self.norm(self.places(features))).mean(-1)

    def places(self, features: Tensor) -> Tensor:
        """The value at the pivot as images x channels x places; tokens have their channels last."""
        if features.dim() == 2:
            return features.unsqueeze(-1)
        if features.dim() == 3 or features.shape[1] != self.norm.num_features:
            features = features.movedim(-1, 1)
        return features.flatten(2)


class _Reached(Exception):
    """The forward pass has come to the pivot."""


class WithHead(nn.Module):
    """A network and a head on one of its modules; `fit` trains both."""

    def __init__(self, network: nn.Module, pivot: str, head: Head) -> None:
        super().__init__()
        self.network = network
        self.head = head
        self._pivot = pivot
        self._seen: Tensor | None = None
        self._stop = False

    def forward(self, images: Tensor) -> Tensor:
        """The network's own scores."""
        scores: Tensor = self.network(images)
        return scores

    def head_scores(self, images: Tensor) -> Tensor:
        """The head's scores; the network runs no further than the pivot."""
        scores: Tensor = self.head(self.seen(images))
        return scores

    def seen(self, images: Tensor) -> Tensor:
        """The value at the pivot; the network runs no further."""
        self._stop = True
        try:
            self.network(images)
        except _Reached:
            pass
        finally:
            self._stop = False
        assert self._seen is not None
        seen, self._seen = self._seen, None
        return seen

    @contextmanager
    def attached(self) -> Iterator[WithHead]:
        """Hook the pivot while the block runs."""

        def see(_module: nn.Module, _inputs: object, output: Tensor) -> None:
            if self._stop:
                self._seen = output
                raise _Reached

        hook = self.network.get_submodule(self._pivot).register_forward_hook(see)
        try:
            yield self
        finally:
            hook.remove()


def head_loss(model: nn.Module, images: Tensor, targets: Tensor) -> Outcome:
    """Cross-entropy of the head, for `fit`."""
    assert isinstance(model, WithHead)
    scores = model.head_scores(images)
    return Outcome(F.cross_entropy(scores, targets), scores)


class AngularHeadLoss:
    """Angular softmax of the head, for `fit`, which tells it the step."""

    def __init__(self, annealing: Annealing = ANNEALING) -> None:
        self.annealing, self.step = annealing, 0

    def at_step(self, step: int) -> None:
        """Where the training stands."""
        self.step = step

    def __call__(self, model: nn.Module, images: Tensor, targets: Tensor) -> Outcome:
        """Loss and plain scores of a batch."""
        assert isinstance(model, WithHead)
        check_targets(targets)
        settle(model.head.linear)
        pooled = model.head.pooled(model.seen(images))
        blend = self.annealing.at(self.step)
        logits = angular_logits(pooled, model.head.linear.weight, targets, blend)
        return Outcome(F.cross_entropy(logits, targets), model.head.linear(pooled))


def summed(
    head: Head | None, wanted: Tensor, kind: str = "cross-entropy"
) -> Callable[[Tensor], Tensor]:
    """The summed loss from the value at the pivot, or from the network's own scores.

    An angular head has its full margin; of plain scores the length of the features cannot be told,
    so that there the margin is left out.
    """

    def loss(value: Tensor) -> Tensor:
        if head is None or kind != "angular":
            scores = value if head is None else head(value)
            return F.cross_entropy(scores, wanted, reduction="sum")
        logits = angular_logits(head.pooled(value), head.linear.weight, wanted, ANNEALING.least)
        return F.cross_entropy(logits, wanted, reduction="sum")

    return loss


class WithHeads(nn.Module):
    """A network and heads on several of its modules, all trained at once."""

    def __init__(self, network: nn.Module, heads: Mapping[str, Head]) -> None:
        super().__init__()
        self.network = network
        self.heads = nn.ModuleList(heads.values())
        self.pivots = tuple(heads)
        self.values: list[Tensor] = []

    def forward(self, images: Tensor) -> Tensor:
        """The network's own scores."""
        scores: Tensor = self.network(images)
        return scores

    @contextmanager
    def attached(self) -> Iterator[WithHeads]:
        """Hook the pivots while the block runs."""

        def see(_module: nn.Module, _inputs: object, output: Tensor) -> None:
            self.values.append(output)

        def begin(_module: nn.Module, _inputs: object) -> None:
            # Here and not in `forward`: a copy of this module keeps the hooks, which see for us.
            self.values.clear()

        hooks = [self.network.register_forward_pre_hook(begin)]
        hooks += [
            self.network.get_submodule(pivot).register_forward_hook(see) for pivot in self.pivots
        ]
        try:
            yield self
        finally:
            self.values.clear()
            for hook in hooks:
                hook.remove()


def with_head_losses(own: Loss, kind: str = "cross-entropy") -> Loss:
    """A network's own loss and those of all its heads, summed, for `fit` on `WithHeads`."""
    now = {"step": 0}

    def loss(model: nn.Module, images: Tensor, targets: Tensor) -> Outcome:
        assert isinstance(model, WithHeads)
        outcome = own(model, images, targets)
        total = outcome.loss
        for head, value in zip(model.heads, list(model.values), strict=True):
            assert isinstance(head, Head)
            if kind == "angular":
                settle(head.linear)
                blend = ANNEALING.at(now["step"])
                logits = angular_logits(head.pooled(value), head.linear.weight, targets, blend)
            else:
                logits = head(value)
            total = total + F.cross_entropy(logits, targets)
        return Outcome(total, outcome.scores)

    def at_step(step: int) -> None:
        now["step"] = step
        tell_step(own, step)

    loss.at_step = at_step  # type: ignore[attr-defined]
    return loss


def fit_alone(
    both: WithHead,
    images: Sequence[Tensor],
    labels: Sequence[Tensor],
    tick: Callable[[], None],
    dist: Dist = SINGLE,
) -> None:
    """Fit the head of an attached network to labels; the network keeps its weights.

    The norm takes the statistics of the first batches, the linear layer is solved for. Every
    process has its rows of each batch and ends with the same head.
    """
    head = both.head
    both.network.eval()
    device = head.linear.weight.device
    with torch.no_grad():
        _take_statistics(both, images[:NORM_BATCHES], tick, dist)
        head.eval()
        pooled = []
        for batch in images:
            tick()
            pooled.append(head.pooled(both.seen(batch.to(device))))
    rows = _of_all(torch.cat(pooled).double(), dist)
    wanted = _of_all(torch.cat(list(labels)).to(device).double().unsqueeze(1), dist)[:, 0].long()
    # To the minimum and in double precision, so that the order of the rows plays no part.
    weight, bias = (
        torch.zeros_like(each, dtype=torch.float64, requires_grad=True)
        for each in (head.linear.weight, head.linear.bias)
    )
    solver = torch.optim.LBFGS(
        [weight, bias],
        max_iter=HEAD_STEPS,
        tolerance_grad=1e-6,
        history_size=10,
        line_search_fn="strong_wolfe",
    )

    def loss() -> Tensor:
        solver.zero_grad()
        found = F.cross_entropy(F.linear(rows, weight, bias), wanted)
        found = found + HEAD_DECAY * weight.square().sum()
        torch.autograd.backward(found)
        return found

    with torch.enable_grad():
        solver.step(loss)  # type: ignore[no-untyped-call]
    head.linear.load_state_dict({"weight": weight.detach(), "bias": bias.detach()})
    dist.broadcast_tensors([head.linear.weight, head.linear.bias])


def _take_statistics(
    both: WithHead, images: Sequence[Tensor], tick: Callable[[], None], dist: Dist
) -> None:
    """Set the head's norm to what it would see of these images, whoever holds them."""
    norm = both.head.norm
    sums = torch.zeros(3, norm.num_features, dtype=torch.float64, device=norm.weight.device)
    for batch in images:
        tick()
        seen = both.head.places(both.seen(batch.to(sums.device)))
        sums[0] += seen.sum((0, 2), dtype=torch.float64)
        sums[1] += seen.square().sum((0, 2), dtype=torch.float64)
        sums[2] += seen.numel() / seen.shape[1]
    mean, square = (dist.sum(sums) / sums[2])[:2]
    norm.load_state_dict({"running_mean": mean, "running_var": square - mean**2}, strict=False)


def _of_all(rows: Tensor, dist: Dist) -> Tensor:
    """The rows of all processes, one process after the other."""
    counts = torch.zeros(dist.world, dtype=torch.float64, device=rows.device)
    counts[dist.rank] = len(rows)
    ends = dist.sum(counts).cumsum(0).long()
    whole = rows.new_zeros(int(ends[-1]), rows.shape[1])
    whole[int(ends[dist.rank]) - len(rows) : int(ends[dist.rank])] = rows
    return dist.sum(whole)


def width_at(module: nn.Module, pivot: str, size: Sequence[int]) -> int:
    """Channels of what a module returns: they come first, or last as in tokens.

    Of a square map the two sides are alike; what is left over are the channels.
    """
    found: list[int] = []

    def see(_module: nn.Module, _inputs: object, output: Tensor) -> None:
        shape = output.shape
        is_last = len(shape) == 3 or (len(shape) == 4 and shape[1] == shape[2] != shape[3])
        found.append(shape[-1] if is_last else shape[1])

    hook = module.get_submodule(pivot).register_forward_hook(see)
    try:
        with torch.no_grad():
            module.eval()(torch.zeros(1, *size))
    finally:
        hook.remove()
    return found[0]


def new_head(channels: int, classes: int, seed: int) -> Head:
    """A head with seeded weights, without moving the caller's random state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Head(channels, classes)
