"""The gate in front of every .onnx file that comes from a disk.

Reads the file once, parses it as data and refuses what could reach other files, run foreign
code or fill the memory: links and external data outside the folder, sparse initialisers,
custom operators, versions nobody knows, absurd dimensions. Only what passes here is shown to
onnx's checker or to onnxruntime, and those see the very bytes that were scanned.
"""

from __future__ import annotations

import math
import os
import shlex
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from dcptool import files
from dcptool.errors import InputError

SIZE_LIMIT = 2**31 - 1
ELEMENT_LIMIT = 2**31
NODE_LIMIT = 500_000
DEPTH_LIMIT = 16
DOMAINS = frozenset({"", "ai.onnx", "ai.onnx.ml", "com.microsoft"})
_GRAPHS = (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS)


@dataclass(frozen=True)
class Scanned:
    """A file that passed: its bytes, its graph, and the folder of its external data."""

    path: Path
    data: bytes
    proto: onnx.ModelProto
    folder: Path | None

    @property
    def weight_bytes(self) -> int:
        """What its weights take in memory by their dimensions: no file size can inflate it."""
        graphs = [graph for graph, _ in _graphs(self.proto.graph)]
        tensors = [tensor for graph in graphs for tensor in graph.initializer]
        return sum(math.prod(tensor.dims) * _item_bytes(tensor.data_type) for tensor in tensors)

    @property
    def bytes(self) -> int:
        """Size with external data."""
        return len(self.data) + sum(
            (self.folder / name).stat().st_size
            for name in _external_files(self.proto)
            if self.folder
        )


def scan(path: Path) -> Scanned:
    """Read and judge an .onnx file; exit 3 says what is wrong with it."""
    if not path.exists() and not path.is_symlink():
        raise InputError(
            f"there is no file {path}",
            why="an exported network was named",
            try_=f"dcptool export --onnx {shlex.quote(str(path))}",
        )
    data = files.read_bytes(
        path,
        what="ONNX file",
        limit=SIZE_LIMIT,
        # Before gigabytes of something else are in memory.
        check=lambda stream, _: _sniff(path, stream.read(512)),
    )
    proto = onnx.ModelProto()
    try:
        proto.ParseFromString(data)
    except (DecodeError, RecursionError, ValueError) as err:
        raise _refusal(path, "it is not ONNX, or it is truncated") from err
    if not proto.ir_version or not proto.HasField("graph") or not proto.graph.node:
        raise _refusal(path, "it is not ONNX: there is no graph in it")
    _check_versions(path, proto)
    if proto.functions:
        raise _refusal(path, f"it defines functions of its own: {proto.functions[0].name}")
    _check_inputs(path, proto)
    nodes = 0
    for graph, depth in _graphs(proto.graph):
        if depth > DEPTH_LIMIT:
            raise _refusal(path, f"graphs are nested more than {DEPTH_LIMIT} deep")
        nodes += len(graph.node)
        if nodes > NODE_LIMIT:
            raise _refusal(path, f"it has more than {NODE_LIMIT:,} nodes")
        _check_graph(path, graph)
    external = _external_files(proto)
    for name in external:
        _check_external(path, name)
    return Scanned(path, data, proto, path.resolve().parent if external else None)


def _item_bytes(kind: int) -> int:
    try:
        return int(onnx.helper.tensor_dtype_to_np_dtype(kind).itemsize)
    except (KeyError, TypeError, ValueError):
        return 0


def _refusal(path: Path, why: str, try_: str = "") -> InputError:
    return InputError(f"refused {path}", why=why, try_=try_)


def _sniff(path: Path, data: bytes) -> None:
    head = data[:512].lstrip()
    if not data:
        raise _refusal(path, "it is empty", "download or export it again")
    if head.startswith(b"version https://git-lfs"):
        raise _refusal(path, "it is a Git LFS pointer, not the file itself", "git lfs pull")
    if head[:1] == b"<" and (b"html" in head.lower() or head.startswith(b"<?xml")):
        raise _refusal(path, "it is a web page, not ONNX", "download the file itself")
    if data.startswith(b"PK\x03\x04") or (data[:1] == b"\x80" and data[1:2] in b"\x02\x03\x04\x05"):
        raise _refusal(
            path, "it is a pickle or a torch archive, which can run code", "dcptool export MODEL"
        )
    if head[:1] == b"{":
        raise _refusal(path, "it is JSON, not ONNX")
    if data[:1] == b"\0":
        raise _refusal(path, "it begins with zeros: not ONNX, or a download that never finished")


def _check_versions(path: Path, proto: onnx.ModelProto) -> None:
    if proto.ir_version > onnx.IR_VERSION:
        raise _refusal(
            path,
            f"IR version {proto.ir_version}; the newest known is {onnx.IR_VERSION}",
            "pip install -U onnx onnxruntime, or export it with an older opset",
        )
    known = onnx.defs.onnx_opset_version()
    for entry in proto.opset_import:
        # Domains that no node uses are often listed; those of nodes are looked at one by one.
        if entry.domain in ("", "ai.onnx") and not 1 <= entry.version <= known:
            raise _refusal(path, f"opset {entry.version}; the newest known is {known}")


def _check_inputs(path: Path, proto: onnx.ModelProto) -> None:
    values = (*proto.graph.input, *proto.graph.output, *proto.graph.value_info)
    for value in values:
        dims = [d.dim_value for d in value.type.tensor_type.shape.dim if d.HasField("dim_value")]
        _check_dims(path, value.name, dims)


def _check_dims(path: Path, name: str, dims: list[int]) -> None:
    total = 1
    for dim in dims:
        total *= max(dim, 1)
        if dim < 0 or total > ELEMENT_LIMIT:
            raise _refusal(path, f"tensor {name[:80]!r} has the dimensions {dims[:8]}")


def _graphs(graph: onnx.GraphProto, depth: int = 0) -> Iterator[tuple[onnx.GraphProto, int]]:
    """Every graph inside `graph`, with an explicit stack: depth is the attacker's choice."""
    stack = [(graph, depth)]
    while stack:
        current, level = stack.pop()
        yield current, level
        for node in current.node:
            for attribute in node.attribute:
                if attribute.type in _GRAPHS or attribute.graphs or attribute.HasField("g"):
                    inner = [attribute.g] if attribute.HasField("g") else []
                    stack.extend((one, level + 1) for one in (*inner, *attribute.graphs))


def _check_graph(path: Path, graph: onnx.GraphProto) -> None:
    if graph.sparse_initializer:
        raise _refusal(
            path,
            "it has sparse initialisers, which unfold to any size while loading",
            "export it again with dense weights",
        )
    for tensor in graph.initializer:
        _check_tensor(path, tensor)
    for node in graph.node:
        if node.domain not in DOMAINS:
            raise _refusal(
                path, f"node {node.name[:80]!r} uses the operator domain {node.domain[:80]!r}"
            )
        for attribute in node.attribute:
            if attribute.HasField("sparse_tensor") or attribute.sparse_tensors:
                raise _refusal(path, f"node {node.name[:80]!r} holds a sparse tensor")
            if attribute.HasField("t"):
                _check_tensor(path, attribute.t, attribute_of=node.name)
            for tensor in attribute.tensors:
                _check_tensor(path, tensor, attribute_of=node.name)


def _check_tensor(path: Path, tensor: onnx.TensorProto, attribute_of: str = "") -> None:
    _check_dims(path, tensor.name or attribute_of, list(tensor.dims))
    if attribute_of and tensor.data_location == onnx.TensorProto.EXTERNAL:
        raise _refusal(path, f"node {attribute_of[:80]!r} has an attribute in external data")


def _external_files(proto: onnx.ModelProto) -> list[str]:
    names: set[str] = set()
    for graph, _ in _graphs(proto.graph):
        for tensor in graph.initializer:
            if tensor.data_location == onnx.TensorProto.EXTERNAL:
                found = [e.value for e in tensor.external_data if e.key == "location"]
                # Protobuf gives bytes where a text is not valid UTF-8.
                names.add(found[0] if len(found) == 1 and isinstance(found[0], str) else "")
            elif tensor.external_data:
                names.add("")
    return sorted(names)


def _check_external(path: Path, name: str) -> None:
    """External data must be a regular file of its own inside the model's folder."""
    shown = name[:120]
    pure = PurePosixPath(name)
    if (
        not name
        or "\0" in name
        or "\\" in name
        or pure.is_absolute()
        or PureWindowsPath(name).drive
        or ".." in pure.parts
    ):
        raise _refusal(path, f"its external data {shown!r} lies outside its folder")
    # Each step is looked at by itself: a linked parent leads outside as well.
    place = path.resolve().parent
    for index, part in enumerate(pure.parts):
        place = place / part
        try:
            info = os.lstat(place)
        except OSError as err:
            raise _refusal(
                path, f"its external data {shown!r} cannot be read: {err.strerror}"
            ) from err
        if stat.S_ISLNK(info.st_mode):
            raise _refusal(
                path, f"its external data {shown!r} is behind a link", "copy the file itself"
            )
        last = index == len(pure.parts) - 1
        if last and not stat.S_ISREG(info.st_mode):
            raise _refusal(path, f"its external data {shown!r} is not a regular file")
        if last and info.st_nlink > 1:
            raise _refusal(
                path,
                f"its external data {shown!r} is a hard link (linked {info.st_nlink} times)",
                "copy the file itself",
            )
