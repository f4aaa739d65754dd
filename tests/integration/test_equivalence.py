"""Cut equals mask, and a saved network computes the same bits in another process.

For each network: weights and norms at random, a random plan over all open groups, the proof with
its own power check, for the default scope and with everything open. Then all slim networks are
saved, and one fresh process loads them all.
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dcptool.network import artifact, models
from dcptool.network.base import Network
from dcptool.network.cost import plan_cost
from dcptool.network.graph import ChannelGraph, build_graph
from dcptool.network.surgery import cut, plan_cuts, prove, randomise, removed_units

# fmt: off
SMALL = (
    "timm:test_byobnet", "timm:test_convnext", "timm:test_convnext2", "timm:test_convnext3",
    "timm:test_efficientnet", "timm:test_efficientnet_evos", "timm:test_efficientnet_gn",
    "timm:test_efficientnet_ln", "timm:test_nfnet", "timm:test_resnet", "timm:test_vit",
    "timm:test_vit2", "timm:test_vit3", "timm:test_vit4", "zoo:resnet20", "zoo:resnet20_a",
    "timm:mobilenetv3_small_050", "timm:convnextv2_atto", "timm:regnety_002",
    "torchvision:shufflenet_v2_x0_5",
)
# fmt: on

# fmt: off
WHOLE = (
    "timm:resnet18", "timm:resnet50", "timm:resnet50d", "timm:resnext50_32x4d", "timm:seresnet50",
    "timm:wide_resnet50_2", "timm:resnetv2_50", "timm:vgg16_bn", "timm:vgg19_bn",
    "timm:mobilenetv1_100", "timm:mobilenetv2_100", "timm:mobilenetv3_large_100",
    "timm:mobilenetv4_conv_small", "timm:efficientnet_b0", "timm:tf_efficientnetv2_s",
    "timm:mnasnet_100", "timm:fbnetc_100", "timm:ghostnet_100", "timm:densenet121",
    "timm:inception_v3", "timm:regnetx_008", "timm:regnety_008", "timm:repvgg_b0",
    "timm:rexnet_100", "timm:dla34", "timm:darknet53", "timm:cspresnet50", "timm:hrnet_w18_small",
    "timm:convnext_tiny", "timm:vit_small_patch16_224", "torchvision:resnet50",
    "torchvision:mobilenet_v2", "torchvision:mobilenet_v3_large", "torchvision:efficientnet_b0",
    "torchvision:densenet121", "torchvision:googlenet", "torchvision:inception_v3",
    "torchvision:shufflenet_v2_x1_0", "torchvision:squeezenet1_1", "torchvision:regnet_y_400mf",
    "torchvision:convnext_tiny", "torchvision:vgg16_bn",
)
# fmt: on

# Nothing in them lies inside the paper's scope.
NOTHING_BY_DEFAULT = ("timm:repvgg_b0",)

FRESH = """
import json, sys, torch
from pathlib import Path
from dcptool.network import artifact
folder = Path(sys.argv[1])
wrong = []
for path in sorted(p for p in folder.iterdir() if p.is_dir()):
    network = artifact.load(path)
    saved = torch.load(folder / f"{path.name}.pt", weights_only=True)
    with torch.no_grad():
        if not torch.equal(network.module(saved["image"]), saved["scores"]):
            wrong.append(path.name)
print(json.dumps(wrong))
"""


def random_plan(graph: ChannelGraph, scope: str, residual: bool, seed: int) -> set[int]:
    """Each open group keeps a random share of its units, between a fifth and all but one."""
    draw = torch.Generator().manual_seed(seed)
    kept: dict[str, list[int]] = {}
    for group in graph.open_groups(scope, residual):
        size = len(group.units)
        share = float(torch.empty(1).uniform_(0.2, 0.9, generator=draw))
        order = torch.randperm(size, generator=draw)
        kept[group.name] = sorted(order[: min(max(1, round(share * size)), size - 1)].tolist())
    return removed_units(graph, kept)


def check(name: str, folder: Path) -> None:
    """Prove both plans of one network, and save the smaller network with its scores."""
    network = models.load(name, pretrained=False)
    size = network.input.size
    graph = build_graph(network.module, size)
    for scope, residual in (("paper", False), ("paper", True), ("all", True)):
        dead = random_plan(graph, scope, residual, seed=len(name))
        assert dead or name in NOTHING_BY_DEFAULT, f"nothing is open in {name}"
        if dead:
            proof = prove(network.module, graph, dead, size)
            assert proof.difference <= 1e-4
    planned = plan_cost(graph, network.module, dead)
    slim = replace(network, module=copy.deepcopy(network.module), cuts=plan_cuts(graph, dead))
    randomise(slim.module)
    cut(slim.module, slim.cuts)
    save(slim, planned.params, planned.macs, folder, name.replace(":", "-"))


def save(slim: Network, params: int, macs: int, folder: Path, name: str) -> None:
    assert sum(p.numel() for p in slim.module.parameters()) == params
    artifact.save(slim, folder / name, cost={"params": params, "macs": macs})
    image = torch.randn((1, *slim.input.size), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        scores = slim.module.eval()(image)
    assert torch.isfinite(scores).all()
    torch.save({"image": image, "scores": scores}, folder / f"{name}.pt")


def reload_all(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FRESH, str(folder)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []


@pytest.fixture(scope="module")
def small_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("small")


@pytest.fixture(scope="module")
def whole_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("whole")


@pytest.mark.parametrize("name", SMALL)
def test_cut_equals_mask(name: str, small_folder: Path) -> None:
    check(name, small_folder)


def test_a_fresh_process_computes_the_same_bits(small_folder: Path) -> None:
    if not any(small_folder.iterdir()):
        pytest.skip("no network was saved in this run")
    reload_all(small_folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_cut_equals_mask_on_the_whole_list(name: str, whole_folder: Path) -> None:
    check(name, whole_folder)


@pytest.mark.slow
def test_a_fresh_process_computes_the_same_bits_for_the_whole_list(whole_folder: Path) -> None:
    if not any(whole_folder.iterdir()):
        pytest.skip("no network was saved in this run")
    reload_all(whole_folder)
