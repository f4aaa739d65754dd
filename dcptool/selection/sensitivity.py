"""What an error of one group does to the network's scores, tried out.

How much an error counts differs from place to place: later layers mend some, and make others
worse. A group is cut to a few widths, alone, its readers are solved for on one half of the images,
and the scores of the other half are compared with the dense network's; then the weights are put
back. The half that was solved on would not do: few positions of few images are learnt by heart, and
the last layers of a network would look free.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dcptool.network.graph import Group
from dcptool.selection.chain import run_from
from dcptool.selection.gram import Moments, Ranking, best_ridge, refit
from dcptool.selection.stage import Stage
from dcptool.selection.widths import Curve

# Widths that are tried, as shares of a group's. Three of them and twice the images gave no
# clearly better networks (ResNet-56 at 0.5 and 0.7, MobileNetV2 at 0.3).
SHARES = (0.7, 0.35)
# Images whose scores are compared, and how many of them at once.
IMAGES, AT_ONCE = 64, 32


@dataclass(frozen=True)
class Seen:
    """A reader on the dense network: the problem it poses, moments as they are, output weights."""

    problem: Moments
    moments: Moments
    scale: Tensor


class Sensitivity:
    """Tries cuts of a stage whose current network is the dense one."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.last = stage.chain.segments[-1].output
        samples = stage.probe.samples
        step = max(1, samples.images // 2 // IMAGES)
        self.batches = range(0, len(samples.sizes), step)
        self.answers = list(self._scores(0, from_images=True))
        self.energy = self._mean(float(_centred(a).square().sum()) for a in self.answers)

    def curve(self, group: Group, ranking: Ranking, seen: Mapping[str, Seen]) -> Curve:
        """The error of the scores at every width, as a share of their energy.

        Measured at some, between them it follows the error of the readers.
        """
        units, errors = len(group.units), ranking.losses
        widths = sorted({max(1, round(share * units)) for share in SHARES})
        factors = []
        for width in widths:
            gone = [group.units[i] for i in ranking.order[width:]]
            found = self._tried(group, gone, seen) / self.energy
            factors.append(math.log(max(found, 1e-12) / max(errors[width], 1e-12)))
        between = np.exp(np.interp(np.arange(units + 1), widths, factors))
        # Chance may make a wider group err more; it never has to.
        falling = np.maximum.accumulate((np.array(errors) * between)[::-1])[::-1]
        return tuple(falling.tolist())

    def _tried(self, group: Group, gone: list[int], seen: Mapping[str, Seen]) -> float:
        """Mean squared error of the scores without some units of a group."""
        readers = [name for name in group.consumers if name in seen]
        probe, chain = self.stage.probe, self.stage.chain
        with self._put_back(readers):
            for name in readers:
                kept = self.stage.columns_without(name, gone)
                kept[-1] = probe.has_bias(name)
                toward, moments, scale = probe.weights(name), seen[name].moments, seen[name].scale
                weakest = self.stage.settings.ridge
                ridge = best_ridge(moments, kept, toward, scale, weakest, both_ways=False)
                # Batches of one image have no first half.
                half = moments.half if moments.half is not None and moments.half.rows else moments
                probe.write(name, refit(half, kept, ridge=ridge, toward=toward))
            place = min(chain.place_of(name) for name in readers)
            scores = self._scores(place, from_images=place != probe.place)
            pairs = zip(scores, self.answers, strict=True)
            return self._mean(float((_centred(a) - _centred(b)).square().sum()) for a, b in pairs)

    @contextmanager
    def _put_back(self, readers: list[str]) -> Iterator[None]:
        """Let the block change weights of some readers."""
        probe = self.stage.probe
        norms = [probe.norm_of(name) for name in readers]
        modules: list[Any] = [
            probe.current.get_submodule(name) for name in (*readers, *norms) if name is not None
        ]
        saved = [{k: v.clone() for k, v in module.state_dict().items()} for module in modules]
        try:
            yield
        finally:
            for module, state in zip(modules, saved, strict=True):
                module.load_state_dict(state)

    def _scores(self, place: int, *, from_images: bool) -> Iterator[Tensor]:
        """Scores of the images that no solution has seen, some at a time."""
        probe, waiting = self.stage.probe, []
        start = 0 if from_images else place
        for number in self.batches:
            if from_images:
                features = probe.samples.batches[number].to(probe.samples.device)
            else:
                (features,) = probe.current_features.at(number)
            # The first half of each batch is what `Moments.half` was taken of.
            waiting.append(features[probe.first_half(number) :])
            is_last = number + self.batches.step >= len(probe.samples.sizes)
            if is_last or sum(map(len, waiting)) >= AT_ONCE:
                together = torch.cat(waiting)
                waiting.clear()
                if len(together):
                    run = run_from(self.stage.chain, start, probe.current, together, [self.last])
                    yield run[self.last]

    def _mean(self, sums: Iterator[float]) -> float:
        """Sum over all images of all processes, by their number."""
        images = sum(map(len, self.answers))
        box = torch.tensor([sum(sums), images], dtype=torch.float64)
        self.stage.probe.add_up(box)
        return max(float(box[0] / box[1]), 1e-30)


def _centred(scores: Tensor) -> Tensor:
    """What a softmax sees of scores."""
    return scores.double() - scores.double().mean(1, keepdim=True)
