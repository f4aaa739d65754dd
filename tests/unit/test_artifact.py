"""Artifacts: saved, read again bit for bit, refused when anything does not verify."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dcptool.errors import InputError, UsageError
from dcptool.network import artifact, models
from dcptool.network.base import Input, Network
from dcptool.network.cost import count, plan_cost
from dcptool.network.graph import build_graph
from dcptool.network.surgery import compose, cut, plan_cuts, prove, randomise, removed_units


def make_slim(network: Network, rate: float = 0.5) -> Network:
    """Every open group loses a share of its units, spread over its width."""
    graph = build_graph(network.module, network.input.size)
    kept = {
        g.name: range(0, len(g.units), 2) if rate == 0.5 else range(int(len(g.units) * (1 - rate)))
        for g in graph.open_groups("all", True)
    }
    cuts = plan_cuts(graph, removed_units(graph, kept))
    cut(network.module, cuts)
    network.cuts = compose(network.cuts, cuts)
    return network


def save(network: Network, folder: Path) -> Path:
    counted = count(network.module, network.input.size)
    cost = artifact.cost_document(counted.params, counted.macs, counted.params, counted.macs)
    artifact.save(network, folder, cost=cost, metrics={"top1": 1.5}, lineage={"method": "none"})
    return folder


def scores(module: nn.Module, size: tuple[int, ...]) -> Tensor:
    draw = torch.Generator().manual_seed(11)
    with torch.no_grad():
        result: Tensor = module.eval()(torch.randn(2, *size, generator=draw))
    return result


@pytest.fixture
def slim() -> Network:
    network = make_slim(models.load("timm:test_efficientnet", pretrained=False, num_classes=7))
    randomise(network.module)
    network.classes = tuple("abcdefg")
    return network


@pytest.fixture
def folder(slim: Network, tmp_path: Path) -> Path:
    return save(slim, tmp_path / "slim")


FRESH = """
import sys, torch
from pathlib import Path
from dcptool.network import artifact
network = artifact.load(Path(sys.argv[1]))
draw = torch.Generator().manual_seed(11)
with torch.no_grad():
    result = network.module(torch.randn(2, *network.input.size, generator=draw))
torch.save(result, sys.argv[2])
"""


def test_a_fresh_process_computes_the_same_bits(
    slim: Network, folder: Path, tmp_path: Path
) -> None:
    wanted = scores(slim.module, slim.input.size)
    out = tmp_path / "scores.pt"
    subprocess.run([sys.executable, "-c", FRESH, str(folder), str(out)], check=True)
    assert torch.equal(torch.load(out, weights_only=True), wanted)


def test_everything_comes_back(slim: Network, folder: Path) -> None:
    again = artifact.load(folder)
    assert again.base == slim.base
    assert again.input == slim.input
    assert again.classes == slim.classes
    assert dict(again.cuts) == dict(slim.cuts)
    assert not again.module.training
    manifest = artifact.read(folder)
    assert manifest.metrics == {"top1": 1.5}
    assert manifest.lineage == {"method": "none"}
    for name, tensor in slim.module.state_dict().items():
        assert torch.equal(again.module.state_dict()[name], tensor)


def test_an_artifact_can_be_cut_again(folder: Path, tmp_path: Path) -> None:
    twice = make_slim(artifact.load(folder), rate=0.25)
    again = artifact.load(save(twice, tmp_path / "twice"))
    size = twice.input.size
    assert torch.equal(scores(again.module, size), scores(twice.module, size))
    fewer = sum(p.numel() for p in again.module.parameters())
    assert fewer < sum(p.numel() for p in artifact.load(folder).module.parameters())


def test_a_network_with_nothing_cut_is_an_artifact_too(tmp_path: Path) -> None:
    network = models.load("zoo:resnet20", pretrained=False)
    again = artifact.load(save(network, tmp_path / "whole"))
    assert again.cuts == {}
    assert torch.equal(scores(again.module, (3, 32, 32)), scores(network.module, (3, 32, 32)))


def edit(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "manifest.json"
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def weights(folder: Path) -> Path:
    return folder / "model.safetensors"


def flip(folder: Path) -> None:
    data = bytearray(weights(folder).read_bytes())
    data[len(data) // 2] ^= 1
    weights(folder).write_bytes(data)


def truncate(folder: Path) -> None:
    weights(folder).write_bytes(weights(folder).read_bytes()[:-1])


def lengthen(folder: Path) -> None:
    weights(folder).write_bytes(weights(folder).read_bytes() + b"\0")


def wrong_hash(folder: Path) -> None:
    edit(folder, lambda d: d["files"]["model.safetensors"].update(sha256="0" * 64))


def wrong_cost(folder: Path) -> None:
    edit(folder, lambda d: d["cost"].update(params=d["cost"]["params"] + 1))


def first_cut(document: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = next(c for c in document["cuts"].values() if "out" in c)
    return found


def index_too_large(folder: Path) -> None:
    edit(folder, lambda d: first_cut(d).update(out="0-5,999999"))


def one_index_less(folder: Path) -> None:
    edit(folder, lambda d: first_cut(d).update(out="0"))


def strange_module(folder: Path) -> None:
    edit(folder, lambda d: d["cuts"].update({"__class__": {"out": "0"}}))


def method_as_module(folder: Path) -> None:
    edit(folder, lambda d: d["cuts"].update({"forward": {"out": "0"}}))


def strange_base(folder: Path) -> None:
    edit(folder, lambda d: d["base"].update(name="../../etc/passwd"))


def strange_source(folder: Path) -> None:
    edit(folder, lambda d: d["base"].update(source="os"))


def other_base(folder: Path) -> None:
    edit(folder, lambda d: d["base"].update(name="test_resnet"))


def newer_format(folder: Path) -> None:
    edit(folder, lambda d: d.update(format=2))


def twice_the_same_key(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace("{", '{"format": 1,', 1))


def no_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def no_weights(folder: Path) -> None:
    weights(folder).unlink()


def pointer_to_weights(folder: Path) -> None:
    weights(folder).write_text("version https://git-lfs.github.com/spec/v1\n")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (flip, "not the file that the manifest describes"),
        (truncate, "truncated"),
        (lengthen, "limit is"),
        (wrong_hash, "not the file that the manifest describes"),
        (wrong_cost, "does not verify"),
        (index_too_large, "cannot cut"),
        (one_index_less, ""),
        (strange_module, "cannot cut"),
        (method_as_module, "cannot cut"),
        (strange_base, "registry"),
        (strange_source, "unknown model source"),
        (other_base, "cannot cut"),
        (newer_format, "newer format"),
        (twice_the_same_key, "appears twice"),
        (no_manifest, "unfinished artifact"),
        (no_weights, "cannot read weights"),
        (pointer_to_weights, "truncated"),
    ],
)
def test_damage_is_refused(damage: Callable[[Path], None], words: str, folder: Path) -> None:
    damage(folder)
    with pytest.raises(InputError) as caught:
        artifact.load(folder)
    assert words in caught.value.lines()


def test_widths_that_do_not_fit_each_other_are_refused(tmp_path: Path) -> None:
    """Consistent with its own weights and hash, and still no network."""
    network = models.load("zoo:resnet20", pretrained=False)
    graph = build_graph(network.module, network.input.size)
    group = graph.open_groups()[0]
    cuts = plan_cuts(graph, removed_units(graph, {group.name: [0, 1]}))
    del cuts[group.consumers[0]]
    cut(network.module, cuts)
    network.cuts = cuts
    params = sum(p.numel() for p in network.module.parameters())
    artifact.save(network, tmp_path / "odd", cost={"params": params})
    with pytest.raises(InputError, match="does not verify"):
        artifact.load(tmp_path / "odd")


def test_a_crash_before_the_manifest_leaves_no_artifact(
    slim: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("dcptool.files.publish_json", crash)
    with pytest.raises(KeyboardInterrupt):
        artifact.save(slim, tmp_path / "half", cost={})
    with pytest.raises(InputError, match="unfinished artifact"):
        artifact.load(tmp_path / "half")


def test_an_empty_folder_is_no_artifact(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no artifact"):
        artifact.load(tmp_path)


def test_a_folder_does_not_hide_the_model_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("resnet18", "mine"):
        (tmp_path / name).mkdir()
    assert not artifact.is_artifact("resnet18")
    assert artifact.is_artifact("mine")
    (tmp_path / "resnet18" / artifact.MANIFEST).write_text("{}")
    assert artifact.is_artifact("resnet18")
    assert artifact.is_artifact("./resnet18")


def test_options_that_an_artifact_does_not_take(folder: Path) -> None:
    with pytest.raises(UsageError, match="--checkpoint and --num-classes"):
        artifact.open_target(str(folder), checkpoint=Path("x"), num_classes=3)
    assert artifact.open_target(str(folder), img_size=64).input.size == (3, 64, 64)


# A module of the user's own


class Own(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)
        self.block = nn.Sequential(nn.Conv2d(width, 24, 3, padding=1), nn.PReLU(24))
        self.back = nn.Conv2d(24, width, 1)
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x)).relu()
        x = x + self.back(self.block(x))
        return self.head(x.mean((2, 3)))


def test_a_module_of_ones_own_is_analysed_cut_saved_and_loaded(tmp_path: Path) -> None:
    module = Own().eval()
    randomise(module)
    spec = Input((1, 20, 20), (0.5,), (0.25,))
    network = Network(module, artifact.custom_base(module, 3), spec, ("a", "b", "c"))
    graph = build_graph(module, spec.size)
    assert {g.name: g.status for g in graph.groups} == {
        "stem": "coupled",
        "block.0": "prunable",
        "head": "locked",
    }
    dead = removed_units(graph, {"block.0": range(0, 24, 3), "stem": range(5)})
    prove(module, graph, dead, spec.size)
    planned = plan_cost(graph, module, dead)
    network.cuts = plan_cuts(graph, dead)
    cut(module, network.cuts)
    assert count(module, spec.size).macs == planned.macs
    save(network, tmp_path / "own")
    with pytest.raises(InputError, match="a module of your own") as caught:
        artifact.load(tmp_path / "own")
    assert "factory=" in caught.value.try_
    assert "Own" in caught.value.why
    again = artifact.load(tmp_path / "own", factory=Own)
    assert again.classes == ("a", "b", "c")
    assert torch.equal(scores(again.module, spec.size), scores(module, spec.size))
    with pytest.raises(InputError):
        artifact.load(tmp_path / "own", factory=lambda: Own(width=4))


def test_a_folder_that_holds_artifacts_names_them(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "run" / "prune").mkdir(parents=True)
    shutil.copy(folder / "manifest.json", tmp_path / "run" / "prune")
    with pytest.raises(InputError, match="is the run of a recipe") as caught:
        artifact.read(tmp_path / "run")
    assert caught.value.try_.endswith(str(tmp_path / "run" / "prune"))
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "prune.json").write_text("{}")
    with pytest.raises(InputError, match="is an unfinished artifact") as caught:
        artifact.read(tmp_path / "begun")
    assert caught.value.try_ == f"dcptool prune --resume {tmp_path / 'begun'}"
