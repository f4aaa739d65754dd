"""onnxruntime sessions that are what they say they are.

Owns provider names, thread counts and telemetry. A provider that is not there or that
quietly hands its work to the CPU is an error, never a slower number under the wrong name.
Imports no torch.
"""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort

from dcptool.deploy.parity import Array
from dcptool.errors import EnvironmentFault, InputError, UsageError

PROVIDERS = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
    "openvino": "OpenVINOExecutionProvider",
    "rocm": "ROCMExecutionProvider",
    "migraphx": "MIGraphXExecutionProvider",
    "dml": "DmlExecutionProvider",
    "coreml": "CoreMLExecutionProvider",
    "qnn": "QNNExecutionProvider",
    "xnnpack": "XnnpackExecutionProvider",
    "dnnl": "DnnlExecutionProvider",
    "webgpu": "WebGpuExecutionProvider",
}
PACKAGES = {
    "cuda": "onnxruntime-gpu",
    "tensorrt": "onnxruntime-gpu",
    "openvino": "onnxruntime-openvino",
    "dml": "onnxruntime-directml",
    "qnn": "onnxruntime-qnn",
}
_FLOATS = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(double)": np.float64}
_INTEGERS = {"tensor(uint8)": np.uint8, "tensor(int8)": np.int8, "tensor(int64)": np.int64}


def cores() -> int:
    """Processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available() -> list[str]:
    """Short names of the providers of this onnxruntime."""
    have = set(ort.get_available_providers())
    return [name for name, full in PROVIDERS.items() if full in have]


def choose(names: tuple[str, ...]) -> list[str]:
    """Provider names as asked, `all` expanded; exit 5 for what is not there."""
    chosen: list[str] = []
    here = available()
    for name in names:
        if name not in (*PROVIDERS, "all"):
            near = difflib.get_close_matches(name, PROVIDERS, n=1)
            raise UsageError(
                f"unknown provider {name!r}",
                why="known are " + ", ".join(PROVIDERS) + " and all",
                try_=f"--provider {near[0] if near else 'cpu'}",
            )
        for single in here if name == "all" else [name]:
            if single not in here:
                raise EnvironmentFault(
                    f"onnxruntime {ort.__version__} has no provider {single!r}",
                    why=f"this build has: {', '.join(here)}",
                    try_=f"pip install {PACKAGES[single]}, or --provider cpu"
                    if single in PACKAGES
                    else "an onnxruntime built with it, or --provider cpu",
                )
            if single not in chosen:
                chosen.append(single)
    return chosen


def open_session(
    model: bytes,
    *,
    provider: str = "cpu",
    threads: int = 0,
    folder: Path | None = None,
    profile_prefix: Path | None = None,
    denormal_as_zero: bool = False,
) -> ort.InferenceSession:
    """Load a scanned model from memory; `folder` holds its external data, where it has any."""
    ort.disable_telemetry_events()
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads or cores()
    options.inter_op_num_threads = 1
    # Worker threads of an idle session must not spin while another one is being timed.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    if denormal_as_zero:
        options.add_session_config_entry("session.set_denormal_as_zero", "1")
    if folder is not None:
        options.add_session_config_entry(
            "session.model_external_initializers_file_folder_path", str(folder)
        )
    if profile_prefix is not None:
        options.enable_profiling = True
        options.profile_file_prefix = str(profile_prefix)
    full = PROVIDERS[provider]
    try:
        session = ort.InferenceSession(model, options, providers=[full])
    except Exception as err:  # onnxruntime's classes share no public base
        text = str(err).strip().splitlines()[0] if str(err).strip() else type(err).__name__
        if provider != "cpu":
            raise EnvironmentFault(
                f"provider {provider!r} cannot run this model", why=text, try_="--provider cpu"
            ) from err
        raise InputError("onnxruntime cannot load the model", why=text) from err
    got = session.get_providers()
    if not got or got[0] != full:
        raise EnvironmentFault(
            f"provider {provider!r} fell back to {got[0] if got else 'nothing'}",
            why="its libraries or its device are missing on this machine",
            try_="dcptool env, or --provider cpu",
        )
    return session


@dataclass(frozen=True)
class Feed:
    """Name, type and shape of the one input of a classifier; None where a dimension is free."""

    name: str
    kind: str
    shape: tuple[int | None, ...]

    def random(self, batch: int, *, size: int | None = None, seed: int = 0) -> dict[str, Array]:
        """Seeded noise with `batch` images; free height and width take `size`."""
        if size is not None and None not in self.shape[1:] and size not in self.shape[1:]:
            raise UsageError(
                f"the model takes {' x '.join(map(str, self.shape[1:]))} only, not {size} px",
                try_="no --img-size, or a file that was exported with --dynamic size",
            )
        dims: list[int] = []
        for axis, dim in enumerate(self.shape):
            if axis == 0:
                if dim is not None and dim != batch:
                    raise UsageError(
                        f"the model takes batches of {dim} only, not {batch}",
                        try_=f"--batch-size {dim}, or export it with --dynamic batch",
                    )
                dims.append(batch)
            else:
                dims.append(dim if dim is not None else (size or 224))
        generator = np.random.default_rng(seed)
        if self.kind in _FLOATS:
            return {self.name: generator.standard_normal(dims).astype(_FLOATS[self.kind])}
        if self.kind in _INTEGERS:
            return {self.name: generator.integers(0, 100, dims).astype(_INTEGERS[self.kind])}
        raise InputError(f"input {self.name!r} has the unsupported type {self.kind}")


def feed_of(proto: onnx.ModelProto) -> Feed:
    """The input a graph expects, read without loading it; exactly one is supported."""
    stored = {tensor.name for tensor in proto.graph.initializer}
    inputs = [value for value in proto.graph.input if value.name not in stored]
    if len(inputs) != 1:
        raise InputError(
            f"the model has {len(inputs)} inputs, not one",
            why="an image classifier takes one tensor",
        )
    tensor = inputs[0].type.tensor_type
    kind = onnx.TensorProto.DataType.Name(tensor.elem_type).lower()
    shape = tuple(
        int(dim.dim_value) if dim.HasField("dim_value") else None for dim in tensor.shape.dim
    )
    return Feed(inputs[0].name, f"tensor({kind})", shape)
