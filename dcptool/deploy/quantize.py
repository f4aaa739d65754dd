"""INT8 by onnxruntime's static quantizer: QDQ form, one scale for each output channel.

Owns calibration and the choice of layers that stay in float. The graph it is given has its
norms folded already; it comes back quantized, and nothing is written here.
"""

from __future__ import annotations

import contextlib
import difflib
import logging
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnxruntime import quantization as ortq
from onnxruntime.quantization.qdq_quantizer import QDQQuantizer
from onnxruntime.quantization.registry import QDQRegistry, QLinearOpsRegistry

from dcptool import console
from dcptool.deploy.onnx_graph import sort_nodes
from dcptool.deploy.parity import Array, Function
from dcptool.deploy.session import open_session
from dcptool.errors import UsageError

METHODS = {
    "minmax": ortq.CalibrationMethod.MinMax,
    "entropy": ortq.CalibrationMethod.Entropy,
    "percentile": ortq.CalibrationMethod.Percentile,
}
LAYERS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
AUTO_LIMIT = 0.5
AUTO_SHARE = 0.25

Score = Callable[[onnx.ModelProto], float]


@dataclass(frozen=True)
class Ranges:
    """What calibration saw: the range of every tensor of `proto`."""

    proto: onnx.ModelProto
    tensors: Any
    method: str
    images: int


class _Reader(ortq.CalibrationDataReader):  # type: ignore[misc]
    """One batch for the calibrator, which keeps all it was given in one go."""

    def __init__(self, name: str, batch: Array) -> None:
        self._left: list[dict[str, Array]] = [{name: batch}]

    def get_next(self) -> dict[str, Array] | None:
        """The batch once, then nothing."""
        return self._left.pop() if self._left else None


def _operators() -> list[str]:
    return sorted({*QLinearOpsRegistry, *QDQRegistry})


def calibrate(proto: onnx.ModelProto, batches: Sequence[Array], method: str = "minmax") -> Ranges:
    """Run the float graph over `batches` and record the range of each tensor."""
    name = proto.graph.input[0].name
    with (
        _hushed(),
        tempfile.TemporaryDirectory(prefix="dcptool-int8-") as scratch,
        console.progress("calibrate", len(batches)) as task,
    ):
        plain = Path(scratch) / "float.onnx"
        onnx.save(proto, plain)
        calibrator = ortq.create_calibrator(
            plain,
            _operators(),
            augmented_model_path=str(Path(scratch) / "augmented.onnx"),
            calibrate_method=METHODS[method],
        )
        for batch in batches:
            for part in _fitting(proto, batch):
                calibrator.collect_data(_Reader(name, part))
            task.advance()
        tensors = calibrator.compute_data()
    return Ranges(proto, tensors, method, sum(len(batch) for batch in batches))


def predictor(proto: onnx.ModelProto) -> Function:
    """A graph in memory as a function of batches, also where it takes single images only."""
    session = open_session(proto.SerializeToString())
    name = session.get_inputs()[0].name

    def predict(batch: Array) -> Array:
        parts = _fitting(proto, batch)
        return np.concatenate([np.asarray(session.run(None, {name: p})[0]) for p in parts])

    return predict


def _fitting(proto: onnx.ModelProto, batch: Array) -> list[Array]:
    """A batch as the graph takes it: whole where its first dimension is free, else in ones."""
    fixed = proto.graph.input[0].type.tensor_type.shape.dim[0].HasField("dim_value")
    return [batch[i : i + 1] for i in range(len(batch))] if fixed else [batch]


def quantize(
    ranges: Ranges, *, skip: Sequence[str] = (), only: Sequence[str] = ()
) -> onnx.ModelProto:
    """The graph in INT8 with the layers of `skip` in float, or with nothing but `only` in INT8."""
    copy = onnx.ModelProto()
    copy.CopyFrom(ranges.proto)
    with _hushed():
        quantizer = QDQQuantizer(
            copy,
            per_channel=True,
            reduce_range=False,
            # Unsigned activations: onnxruntime fuses all of them into integer convolutions.
            # With signed ones half of a ResNet-56 stays float and runs slower than without INT8.
            weight_qType=ortq.QuantType.QInt8,
            activation_qType=ortq.QuantType.QUInt8,
            tensors_range=ranges.tensors,
            nodes_to_quantize=list(only),
            nodes_to_exclude=list(skip),
            op_types_to_quantize=_operators(),
            extra_options={},
        )
        quantizer.quantize_model()
    result: onnx.ModelProto = quantizer.model.model
    sort_nodes(result)
    return result


def layers(proto: onnx.ModelProto) -> list[str]:
    """Names of the nodes that hold the weights."""
    return [node.name for node in proto.graph.node if node.op_type in LAYERS]


def named_layers(proto: onnx.ModelProto, names: Sequence[str]) -> list[str]:
    """Layers by name; the name of a block takes all layers in it."""
    every = layers(proto)
    found: list[str] = []
    for name in names:
        matches = [layer for layer in every if layer == name or layer.startswith(f"{name}.")]
        if not matches:
            near = difflib.get_close_matches(name, every, n=3)
            raise UsageError(
                f"--int8-skip: there is no layer {name!r}",
                try_="did you mean " + ", ".join(near) if near else f"for example {every[0]}",
            )
        found.extend(matches)
    return found


def by_harm(ranges: Ranges, batch: Array) -> list[str]:
    """Layers in the order in which quantizing them alone disturbs the output, worst first."""
    exact = np.asarray(predictor(ranges.proto)(batch), dtype=np.float64)
    harm: dict[str, float] = {}
    every = layers(ranges.proto)
    with console.progress("finding the layers that hurt", len(every)) as task:
        for layer in every:
            rough = np.asarray(predictor(quantize(ranges, only=[layer]))(batch), dtype=np.float64)
            harm[layer] = float(np.square(rough - exact).mean())
            task.advance(status=layer)
    return sorted(every, key=lambda layer: -harm[layer])


def quantize_auto(
    ranges: Ranges, batch: Array, drop: Score, limit: float = AUTO_LIMIT
) -> tuple[onnx.ModelProto, list[str]]:
    """Leave as few layers in float as keep the drop within `limit` points.

    Tries none, then one, two, four ... of the worst, up to a quarter of all; of those that
    miss the limit the best one is returned.
    """
    model = quantize(ranges)
    best: tuple[float, onnx.ModelProto, list[str]] = (drop(model), model, [])
    if best[0] <= limit:
        return best[1], best[2]
    worst = by_harm(ranges, batch)
    count = 1
    while count <= max(1, int(AUTO_SHARE * len(worst))):
        skip = worst[:count]
        model = quantize(ranges, skip=skip)
        lost = drop(model)
        console.detail(f"{count} layers in float: {lost:.2f} points lost")
        if lost < best[0]:
            best = (lost, model, skip)
        if lost <= limit:
            break
        count *= 2
    return best[1], best[2]


@contextlib.contextmanager
def _hushed() -> Iterator[None]:
    """Keep the quantizer's log lines and prints off the terminal."""
    import io

    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(level)
