"""`dcptool evaluate` on networks with known accuracy, on files, and on nothing at all."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy
import pytest
from PIL import Image

from dcptool.cli.app import run


def test_the_built_in_images_and_an_onnx_file_agree(dcptool, tmp_path: Path) -> None:
    model = ("zoo:resnet20", "--no-pretrained")
    direct = dcptool("evaluate", *model, "--per-class", "--json")
    assert direct.returncode == 0, direct.stderr
    found = json.loads(direct.stdout)
    assert found["images"] == 400
    assert len(found["per_class"]) == 10
    assert found["images_per_second"] > 0
    for extra in ((), ("--with-preprocessing", "--softmax")):
        name = f"model{len(extra)}.onnx"
        made = dcptool("export", *model, "--onnx", name, *extra)
        assert made.returncode == 0, made.stderr
        exported = json.loads(dcptool("evaluate", name, "--json").stdout)
        assert exported["top1"] == pytest.approx(found["top1"], abs=0.26)
        if not extra:
            assert exported["loss"] == pytest.approx(found["loss"], rel=1e-3)
        assert exported["images"] == 400


def here(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Run a command in this process, where the libraries are loaded already."""
    code = run(list(arguments))
    said = capsys.readouterr()
    return code, said.out, said.err


def test_gates_and_refusals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for number in range(8):
        folder = tmp_path / "data" / "val" / ("a" if number % 2 else "b")
        folder.mkdir(parents=True, exist_ok=True)
        pixels = numpy.random.default_rng(number).integers(0, 256, (32, 32, 3), dtype=numpy.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    model = ("zoo:resnet20", "--no-pretrained")
    code, _, err = here(capsys, "evaluate", *model, "--data-dir", "data")
    assert code == 3
    assert "the data has 2 classes, zoo:resnet20 has 10" in err
    right = ("evaluate", *model, "--num-classes", "2", "--data-dir", "data")
    code, out, _ = here(capsys, *right, "--json")
    assert code == 0
    assert json.loads(out)["images"] == 8
    assert json.loads(out)["skipped"] == 0
    assert here(capsys, *right, "--min-top1", "100")[0] == 4
    assert here(capsys, "evaluate", *model, "--images", "data")[0] == 2
    (tmp_path / "data" / "val" / "a" / "1.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    code, _, err = here(capsys, *right)
    assert code == 3
    assert "1.png" in err
    code, out, err = here(capsys, *right, "--skip-bad", "1", "--json")
    assert json.loads(out)["images"] == 7
    assert json.loads(out)["skipped"] == 1
    assert "1 unreadable image" in err


KNOWN = {
    "cifar10_resnet20_a": ("zoo:resnet20_a", 91.73, None),
    "cifar10_resnet56_a": ("zoo:resnet56_a", 93.39, None),
    "cifar10_resnet56_b": ("zoo:resnet56", 93.20, None),
    "tf_efficientnet_lite0": ("timm:tf_efficientnet_lite0", 73.4, 91.1),
    "mobilenetv2_100": ("timm:mobilenetv2_100", 68.8, 89.5),
    "torchvision_squeezenet1_1": ("torchvision:squeezenet1_1", 54.8, 79.7),
}


@pytest.mark.slow
@pytest.mark.parametrize("weights", KNOWN)
def test_known_accuracies(dcptool, shared_data: Path, weights: str) -> None:
    name, top1, top5 = KNOWN[weights]
    data = shared_data / "imagenet2k"
    if weights.startswith("cifar10"):
        data = Path(os.environ.get("DCPTOOL_TEST_CIFAR10", shared_data / "cifar10"))
        if not data.is_dir():
            pytest.skip(
                f"no CIFAR-10 at {data}; make it with cifar10.py and set DCPTOOL_TEST_CIFAR10"
            )
    file = shared_data / "weights" / f"{weights}.safetensors"
    done = dcptool(
        "evaluate", name, "--checkpoint", str(file), "--data-dir", str(data), "--json", timeout=900
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["top1"] == pytest.approx(top1, abs=0.1)
    if top5 is not None:
        assert found["top5"] == pytest.approx(top5, abs=0.1)
