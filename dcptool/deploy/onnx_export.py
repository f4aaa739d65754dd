"""From a torch module to an ONNX graph in memory.

Owns the call of torch's exporters and keeps their chatter off the terminal. The exporter
built on torch.export is used; the older one only when that fails, and the result says which
ran. Nothing is written here, and no graph is changed here.
"""

from __future__ import annotations

import contextlib
import io
import logging
import signal
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import onnx
import torch
from torch import nn

from dcptool import console
from dcptool.errors import InputError
from dcptool.network.models import Network
from dcptool.training import signals

# torch writes its operators for opset 18; anything older needs onnx's version converter,
# which has crashed on crafted graphs.
OPSET_DEFAULT, OPSET_MIN, OPSET_MAX = 18, 18, 23
INPUT_NAME, OUTPUT_NAME = "input", "logits"
SIZE_LIMIT = 2**31 - 1


@dataclass(frozen=True)
class Translation:
    """An ONNX graph as the exporter left it."""

    proto: onnx.ModelProto
    exporter: str
    opset: int
    dynamic: str


def translate(
    network: Network, *, opset: int = OPSET_DEFAULT, dynamic: str = "batch"
) -> Translation:
    """Express the eval-mode forward of `network` in ONNX operators."""
    module = network.module.eval()
    # Two images: torch.export would take a batch of one for a constant.
    batch = 1 if dynamic == "none" else 2
    example = torch.zeros(batch, *network.input.size, device=_device(module))
    heard = io.StringIO()
    # torch takes whatever is raised on the way for a network that it cannot translate.
    with signals.watch() as flag, _hushed(heard), torch.no_grad():
        try:
            proto, exporter = _by_export(module, example, opset, dynamic), "torch.export"
        except Exception as first:
            heard.write(f"{type(first).__name__}: {first}\n")
            try:
                proto, exporter = _by_script(module, example, opset, dynamic), "torchscript"
            except Exception as second:
                raise InputError(
                    f"cannot express {network.base} in ONNX",
                    why=f"torch.export: {_first_line(first)}\ntorchscript: {_first_line(second)}",
                    try_="another --opset, or --dynamic none",
                ) from first
    if flag.number:
        signal.raise_signal(flag.number)
    if exporter != "torch.export":
        console.warn("torch.export could not translate this network; used the TorchScript exporter")
        console.detail(heard.getvalue())
    _check_dynamic(proto, dynamic, network)
    return Translation(proto, exporter, _opset(proto), dynamic)


def _by_export(
    module: nn.Module, example: torch.Tensor, opset: int, dynamic: str
) -> onnx.ModelProto:
    shapes = None
    if dynamic != "none":
        axes = {0: torch.export.Dim("batch", min=1)}
        if dynamic == "size":
            axes |= {2: torch.export.Dim.AUTO, 3: torch.export.Dim.AUTO}
        shapes = (axes,)
    program = torch.onnx.export(
        module,
        (example,),
        dynamo=True,
        external_data=False,
        dynamic_shapes=shapes,
        input_names=[INPUT_NAME],
        output_names=[OUTPUT_NAME],
        opset_version=opset,
        verbose=False,
    )
    if program is None:
        raise RuntimeError("the exporter returned nothing")
    proto: onnx.ModelProto = program.model_proto
    if proto.ByteSize() > SIZE_LIMIT:
        raise InputError("the network does not fit into one ONNX file of 2 GB")
    return proto


def _by_script(
    module: nn.Module, example: torch.Tensor, opset: int, dynamic: str
) -> onnx.ModelProto:
    axes: dict[str, dict[int, str]] = {}
    if dynamic != "none":
        axes = {INPUT_NAME: {0: "batch"}, OUTPUT_NAME: {0: "batch"}}
    if dynamic == "size":
        axes[INPUT_NAME] |= {2: "height", 3: "width"}
    buffer = io.BytesIO()
    torch.onnx.export(
        module,
        (example,),
        buffer,  # type: ignore[arg-type]  # the older exporter writes to streams
        dynamo=False,
        dynamic_axes=axes,
        input_names=[INPUT_NAME],
        output_names=[OUTPUT_NAME],
        opset_version=min(opset, 20),
        verbose=False,
    )
    return onnx.load_from_string(buffer.getvalue())


def _check_dynamic(proto: onnx.ModelProto, dynamic: str, network: Network) -> None:
    """Refuse a graph that is bound to a shape although it was asked not to be."""
    dims = proto.graph.input[0].type.tensor_type.shape.dim
    wanted = {"none": (), "batch": (0,), "size": (0, 2, 3)}[dynamic]
    bound = [axis for axis in wanted if dims[axis].HasField("dim_value")]
    if bound:
        names = {0: "batch size", 2: "height", 3: "width"}
        raise InputError(
            f"cannot export {network.base} with --dynamic {dynamic}",
            why=f"its forward code binds the {' and '.join(names[axis] for axis in bound)}",
            try_="--dynamic " + ("batch" if 0 not in bound else "none"),
        )


def _opset(proto: onnx.ModelProto) -> int:
    return int(next(e.version for e in proto.opset_import if e.domain in ("", "ai.onnx")))


def _device(module: nn.Module) -> torch.device:
    first = next(module.parameters(), None)
    return torch.device("cpu") if first is None else first.device


def _first_line(err: Exception) -> str:
    lines = [line for line in str(err).splitlines() if line.strip()]
    return f"{type(err).__name__}: {lines[0].strip() if lines else ''}"[:300]


@contextlib.contextmanager
def _hushed(heard: io.StringIO) -> Iterator[None]:
    """Keep what the exporters print, log and warn out of the command's own output."""
    loggers = [
        logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")
    ]
    levels = [logger.level for logger in loggers]
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(heard),
        contextlib.redirect_stderr(heard),
    ):
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
