"""What the loss of a head says of errors: gradients at layers, through the network to the pivot."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dcptool.selection.chain import frozen, run_from
from dcptool.selection.features import values_at
from dcptool.selection.greedy import LossAt
from dcptool.selection.probe import Probe

# Images that the head's loss is asked about: the metric has no more columns than a layer outputs.
ASKED_IMAGES = 256


def asked(probe: Probe) -> range:
    """Batches spread evenly over the samples, with about as many images as are asked."""
    step = max(1, round(probe.samples.images / ASKED_IMAGES))
    return range(0, len(probe.samples.sizes), step)


def slopes(
    probe: Probe, names: Sequence[str], pivot: str | None, losses: Sequence[LossAt]
) -> dict[str, Tensor]:
    """Second moments of the gradients of each image's loss at the outputs of some layers.

    One walk from the present segment to the pivot and back serves them all. `losses` gives, for
    each batch, the summed loss from the value at the pivot.
    """
    chain = probe.chain
    end, last = chain.end_of(pivot)
    within = {layer for s in chain.segments[probe.place : last + 1] for layer in s.layers}
    calls = {chain.calls[name][0]: name for name in names if name in within}
    draws = {node: probe.draw() for node in calls}
    totals = {
        name: torch.zeros(2 * (len(probe.graph.sites[name].outputs),), dtype=torch.float64)
        for name in calls.values()
    }
    for number in asked(probe):
        probe.tick()
        (start,) = probe.current_features.at(number)
        with torch.enable_grad(), frozen(probe.current):
            found = run_from(
                chain, probe.place, probe.current, start, [*calls, end], starts=set(calls)
            )
            outputs = [found[node] for node in calls]
            loss = losses[number](found[end])
            gradients = torch.autograd.grad(loss, outputs, allow_unused=True)
        for (node, name), gradient in zip(calls.items(), gradients, strict=True):
            if gradient is not None:
                at = probe.positions_of(node, number, draws[node])
                slope = values_at(gradient, at, tokens=probe.has_tokens(node)).double()
                totals[name] += (slope.T @ slope).cpu()
    for total in totals.values():
        probe.add_up(total)
    return {name: total.float() for name, total in totals.items()}
