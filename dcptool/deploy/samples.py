"""Real images for parity, calibration and accuracy, as arrays that onnxruntime takes."""

from __future__ import annotations

from collections.abc import Callable

import torch

from dcptool.deploy.int8 import Images
from dcptool.deploy.parity import Array, Function
from dcptool.network.models import Network
from dcptool.training import data as training_data
from dcptool.training.classes import check_classes
from dcptool.training.data import Data, DataSpec
from dcptool.training.evaluate import evaluate
from dcptool.training.loader import Batches, ImageSet

BATCH = 16
ACCURACY_BATCH = 100
PARITY_IMAGES = 33


def open_images(spec: DataSpec, network: Network) -> Data:
    """The data as the exported network will see it: its own size, also for the built-in set."""
    return training_data.open_data(training_data.at_own_size(spec), network)


def parity_batches(data: Data, seed: int = 0) -> list[Array]:
    """A few images, the same for the same seed."""
    return _arrays(training_data.samples(data, PARITY_IMAGES, seed))


def calibration_images(data: Data, network: Network, count: int, seed: int = 0) -> Images:
    """Training images to calibrate with; accuracy on test, or on val where there is no test."""
    check_classes(network, data)
    batches = _arrays(training_data.samples(data, count, seed))
    if not data.labelled:
        return Images(batches, source=data.source)
    return Images(batches, _top1(data.report, network), _top1(data.val, network), data.source)


def _top1(images: ImageSet, network: Network) -> Callable[[Function], float]:
    batches = Batches(images, ACCURACY_BATCH)

    def measure(predict: Function) -> float:
        def scores(images: torch.Tensor) -> torch.Tensor:
            return torch.from_numpy(predict(images.numpy()))

        return evaluate(scores, batches, network.base.num_classes, title="accuracy").top1

    return measure


def _arrays(images: ImageSet) -> list[Array]:
    return [batch.numpy() for batch, _ in Batches(images, BATCH)]
