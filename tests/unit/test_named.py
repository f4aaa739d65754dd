"""Sets of images that have a name: shards, torchvision, Hugging Face."""

from __future__ import annotations

import io
import pickle
import tarfile
from pathlib import Path
from urllib.error import URLError

import numpy
import pytest
import torch
from painted import network
from PIL import Image

from dcptool.errors import EnvironmentFault, InputError
from dcptool.training.data import DataSpec, open_data
from dcptool.training.loader import loader


def test_shards_are_read_by_number(folder: Path, tmp_path: Path) -> None:
    root = tmp_path / "shards"
    root.mkdir()
    for split in ("train", "val"):
        with tarfile.open(root / f"set-{split}-000.tar", "w") as shard:
            for number in range(8):
                stream = io.BytesIO()
                Image.new("RGB", (16, 16), (number * 10,) * 3).save(stream, "PNG")
                parts = ((".png", stream.getvalue()), (".cls", str(number % 2).encode()))
                for ending, body in parts:
                    member = tarfile.TarInfo(f"{number:04d}{ending}")
                    member.size = len(body)
                    shard.addfile(member, io.BytesIO(body))
    data = open_data(DataSpec(dataset="wds/", data_dir=root), network())
    assert (len(data.train), len(data.val)) == (8, 8)
    shown, labels = next(iter(loader(data.val, 8)))
    assert labels.tolist() == [0, 1] * 4
    assert shown[:, 0, 0, 0].tolist() == pytest.approx(
        [(n * 10 / 255 - 0.5) / 0.25 for n in range(8)]
    )


def test_torchvision_folders_by_name(folder: Path) -> None:
    data = open_data(DataSpec(dataset="torch/image_folder", data_dir=folder), network())
    assert len(data.test or ()) == 6


def test_a_set_of_torchvision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torchvision = pytest.importorskip("torchvision")
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    names = [f"class{n}" for n in range(10)]
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": names}))
    for number, name in enumerate([*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]):
        pixels = numpy.full((10, 3072), 10 * number, numpy.uint8)
        body = {"data": pixels, "labels": list(range(10))}
        (folder / name).write_bytes(pickle.dumps(body))
    cifar10 = torchvision.datasets.CIFAR10
    spec = DataSpec(dataset="torch/cifar10", data_dir=tmp_path)
    with pytest.raises(InputError, match="cannot open torch/cifar10"):
        open_data(spec, network())
    # Its own files only pass its sums of checks.
    monkeypatch.setattr(cifar10, "_check_integrity", lambda _self: True)
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *_: True)
    data = open_data(spec, network())
    assert (len(data.train), len(data.val), len(data.test or ())) == (45, 5, 10)
    assert data.classes == tuple(names)
    assert data.source == "torch/cifar10"
    assert data.test is not None
    shown, labels = next(iter(loader(data.test, 10)))
    assert labels.tolist() == list(range(10))
    assert float(shown[0, 0, 0, 0]) == pytest.approx((50 / 255 - 0.5) / 0.25)


def test_a_download_that_fails_is_the_networks_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise URLError("no route to host")

    monkeypatch.setattr("urllib.request.urlopen", unreachable)
    spec = DataSpec(dataset="torch/cifar10", data_dir=tmp_path, dataset_download=True)
    with pytest.raises(EnvironmentFault, match="cannot download torch/cifar10") as caught:
        open_data(spec, network())
    assert "no route" in caught.value.why


def test_a_set_of_hugging_face(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    pytest.importorskip("datasets")
    cache = tmp_path_factory.mktemp("rows")
    spec = DataSpec(dataset=f"hfds/{folder}", data_dir=cache, offline=True)
    data, plain = open_data(spec, network()), open_data(DataSpec(data_dir=folder), network())
    assert data.source == f"hfds/{folder.name}"
    assert data.classes == plain.classes
    assert data.test is not None
    assert plain.test is not None
    (ours, labels), (theirs, wanted) = (next(iter(loader(d.test, 6))) for d in (data, plain))
    assert labels.tolist() == wanted.tolist()
    assert torch.equal(ours, theirs)
