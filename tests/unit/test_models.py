import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save
from torch import nn

from dcptool.errors import InputError, UsageError
from dcptool.network import fetch as fetching
from dcptool.network import models
from dcptool.network.fetch import Place
from dcptool.network.models import Base
from dcptool.network.names import nearest, resolve

DATA = Path(
    os.environ.get("DCPTOOL_TEST_DATA", Path(__file__).parents[2].parent / "shared" / "data")
)


def weights_file(name: str) -> Path:
    path = DATA / "weights" / f"{name}.safetensors"
    if not path.exists():
        pytest.skip(f"no {path}; set DCPTOOL_TEST_DATA")
    return path


def giving(state: dict[str, torch.Tensor], asked: list[Place] | None = None) -> fetching.Fetch:
    def fetch(place: Place, offline: bool) -> tuple[Path, bytes]:
        if asked is not None:
            asked.append(place)
        return Path("model.safetensors"), save({k: v.contiguous() for k, v in state.items()})

    return fetch


def never(place: Place, offline: bool) -> tuple[Path, bytes]:
    raise AssertionError(f"asked for {place}")


def random_state(name: str, **options: object) -> dict[str, torch.Tensor]:
    return models.load(name, pretrained=False, seed=9, **options).module.state_dict()  # type: ignore[arg-type]


# Names


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("resnet50", ("timm", "resnet50")),
        ("squeezenet1_1", ("torchvision", "squeezenet1_1")),
        ("timm:resnet50.a1_in1k", ("timm", "resnet50.a1_in1k")),
        ("torchvision:resnet50", ("torchvision", "resnet50")),
        ("zoo:resnet56_a", ("zoo", "resnet56_a")),
        ("tv_resnet50", ("timm", "resnet50.tv_in1k")),
        ("hf-hub:timm/resnet18.a1_in1k", ("timm", "hf-hub:timm/resnet18.a1_in1k")),
        ("hf_hub:timm/resnet18.a1_in1k", ("timm", "hf-hub:timm/resnet18.a1_in1k")),
    ],
)
def test_resolve(name: str, wanted: tuple[str, str]) -> None:
    assert resolve(name) == wanted


@pytest.mark.parametrize(
    "name",
    [
        "local-dir:/tmp/x",
        "timm:local-dir:x",
        "../m",
        "/etc/passwd",
        "timm:a/b",
        "a\\b",
        "hf-hub:../y",
        "hf-hub:/etc/passwd",
        "hf-hub:a/b/c",
        "hf-hub:x",
        "torchvision:fasterrcnn_resnet50_fpn",
        "torchvision:quantized_resnet50",
        "torchvision:r3d_18",
        "torchvision:fcn_resnet50",
        "zoo:resnet50",
        "resnet50.nope",
        "nope:resnet50",
        "",
    ],
)
def test_names_that_are_refused(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        models.load(name, pretrained=False, fetch=never)
    assert caught.value.try_
    is_path = not name.startswith("hf-hub:") and ("local-dir" in name or {"/", "\\"} & set(name))
    assert ("is a path" in caught.value.message) == bool(is_path)


def test_three_nearest_of_all_registries() -> None:
    assert nearest("resnet56")[0] == "zoo:resnet56"
    assert "torchvision:squeezenet1_1" in nearest("squeezenet1_2")
    assert "resnet50" in nearest("resnett50")
    assert nearest("torchvision:resnt50")[0] == "torchvision:resnet50"
    assert all(near.startswith("resnet50.") for near in nearest("resnet50.a1_in2k"))
    with pytest.raises(UsageError) as caught:
        resolve("mobilnetv2_100")
    assert "mobilenetv2_100" in caught.value.try_
    assert len(nearest("mobilnetv2_100")) == 3


# Building


def test_random_weights_follow_the_seed_and_nothing_else() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    one = models.load("test_resnet", pretrained=False, seed=1, fetch=never)
    assert torch.equal(torch.rand(1), expected), "the random state of the caller moved"
    two = models.load("test_resnet", pretrained=False, seed=1, fetch=never)
    other = models.load("test_resnet", pretrained=False, seed=2, fetch=never)
    same = [
        all(torch.equal(v, net.module.state_dict()[k]) for k, v in one.module.state_dict().items())
        for net in (two, other)
    ]
    assert same == [True, False]
    assert not one.module.training


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("test_vit", {"img_size": 96, "num_classes": 5}),
        ("torchvision:shufflenet_v2_x0_5", {"num_classes": 3}),
        ("torchvision:googlenet", {}),
        ("zoo:resnet20", {"num_classes": 4}),
    ],
)
def test_base_builds_the_same_module_again(name: str, options: dict[str, int]) -> None:
    network = models.load(name, pretrained=False, **options)  # type: ignore[arg-type]
    base = network.base
    document = json.loads(
        json.dumps([base.source, base.name, base.num_classes, {**base.arguments}])
    )
    again = models.build(Base(*document))
    models.fill(again, network.module.state_dict(), where="memory", network=str(base))
    x = torch.rand(2, *network.input.size)
    with torch.no_grad():
        assert torch.equal(again(x), network.module(x))
        assert again(x).shape[1] == options.get("num_classes", base.num_classes)


@pytest.mark.parametrize(
    "base",
    [
        Base("timm", "resnet18", 10, {"pretrained": True}),
        Base("timm", "resnet18", 10, {"pretrained_cfg_overlay": "x"}),
        Base("timm", "resnet18", 10, {"checkpoint_path": "/etc/passwd"}),
        Base("timm", "resnet18", 10, {"cardinality": 10**12}),
        Base("timm", "resnet18", 10, {"act_layer": ["relu"]}),  # type: ignore[dict-item]
        Base("timm", "resnet18", 10, {"drop_rate": float("nan")}),
        Base("timm", "resnet18", 10, {"no_such_argument": 1}),
        Base("timm", "resnet18", 10**9),
        Base("timm", "hf-hub:x/y", 10),
        Base("timm", "local-dir:/tmp", 10),
        Base("torchvision", "resnet18", 10, {"weights": "DEFAULT"}),
        Base("torchvision", "fasterrcnn_resnet50_fpn", 10),
        Base("zoo", "resnet18", 10),
        Base("evil", "resnet18", 10),
    ],
)
def test_build_refuses_what_a_file_must_not_ask(base: Base) -> None:
    with pytest.raises(InputError):
        models.build(base)


def test_inputs() -> None:
    timm = models.load("resnet50", pretrained=False).input
    assert (timm.size, timm.interpolation, timm.crop_pct) == ((3, 224, 224), "bicubic", 0.95)
    vision = models.load("torchvision:inception_v3", pretrained=False).input
    assert (vision.size, vision.interpolation) == ((3, 299, 299), "bilinear")
    assert vision.crop_pct == pytest.approx(299 / 342)
    zoo = models.load("zoo:resnet20", pretrained=False)
    assert (zoo.input.mean, zoo.input.std, zoo.input.crop_pct) == ((0,) * 3, (1,) * 3, 1.0)
    assert zoo.base.num_classes == 10
    small = models.load("resnet18", pretrained=False, img_size=32)
    assert (small.input.size, small.input.crop_pct) == ((3, 32, 32), 1.0)


@pytest.mark.parametrize("name", ["torchvision:inception_v3", "torchvision:maxvit_t"])
def test_image_size_that_cannot_be(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        models.load(name, pretrained=False, img_size=30)
    assert "30 px" in caught.value.message


# Filling


def test_checkpoint(tmp_path: Path) -> None:
    state = random_state("test_resnet")
    torch.save({"state_dict_ema": {f"module.{k}": v for k, v in state.items()}}, tmp_path / "a.pt")
    network = models.load("test_resnet", checkpoint=tmp_path / "a.pt", fetch=never)
    assert all(torch.equal(v, state[k]) for k, v in network.module.state_dict().items())
    assert network.weights == "checkpoint a.pt"


def misfit(
    tmp_path: Path, state: dict[str, torch.Tensor], name: str = "zoo:resnet20"
) -> InputError:
    torch.save(state, tmp_path / "a.pt")
    with pytest.raises(InputError) as caught:
        models.load(name, checkpoint=tmp_path / "a.pt")
    assert str(tmp_path / "a.pt") in caught.value.message
    return caught.value


def test_keys_that_do_not_fit(tmp_path: Path) -> None:
    whole = random_state("zoo:resnet20")
    why = misfit(tmp_path, {k: v for k, v in whole.items() if not k.startswith("layer1.")}).why
    assert why.startswith("30 missing: layer1.0.conv1.weight, ")
    assert why.endswith("and 25 more")
    why = misfit(tmp_path, whole | {f"extra{n}": torch.ones(1) for n in range(7)}).why
    assert why == "7 unexpected: extra0, extra1, extra2, extra3, extra4 and 2 more"
    why = misfit(tmp_path, whole | {"conv1.weight": torch.ones(16, 1, 3, 3)}).why
    assert why == "1 of another shape: conv1.weight 16x1x3x3 (network: 16x3x3x3)"
    why = misfit(tmp_path, {"a": torch.ones(1)}, "test_resnet").why
    assert "missing" in why
    assert "1 unexpected: a" in why


def test_classifier_of_another_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = random_state("zoo:resnet20", num_classes=7)
    error = misfit(tmp_path, state)
    assert "7 classes" in error.why
    assert error.try_ == "--num-classes 7"
    models.load("zoo:resnet20", checkpoint=tmp_path / "a.pt", num_classes=7)
    assert capsys.readouterr().err == ""
    network = models.load("zoo:resnet20", checkpoint=tmp_path / "a.pt", num_classes=3)
    assert "starts afresh" in capsys.readouterr().err
    assert network.module.linear.weight.shape == (3, 64)
    assert torch.equal(network.module.conv1.weight, state["conv1.weight"])


def test_missing_batch_counters_are_no_fault(tmp_path: Path) -> None:
    state = random_state("zoo:resnet20")
    torch.save({k: v for k, v in state.items() if "tracked" not in k}, tmp_path / "a.pt")
    models.load("zoo:resnet20", checkpoint=tmp_path / "a.pt")


def test_pretrained_weights_with_another_head() -> None:
    state, asked = random_state("test_resnet"), list[Place]()
    network = models.load("test_resnet", num_classes=5, fetch=giving(state, asked))
    assert asked[0].repo.startswith("timm/test_resnet.")
    assert asked[0].names == ("model.safetensors", "pytorch_model.bin")
    own = network.module.state_dict()
    assert own["fc.weight"].shape[0] == 5
    assert all(torch.equal(own[k], v) for k, v in state.items() if not k.startswith("fc."))
    again = models.load("test_resnet", num_classes=5, fetch=giving(state))
    assert torch.equal(own["fc.weight"], again.module.state_dict()["fc.weight"])


def test_timm_converts_position_embeddings() -> None:
    state = random_state("test_vit")
    network = models.load("test_vit", img_size=96, num_classes=5, fetch=giving(state))
    own = network.module.state_dict()
    assert own["pos_embed"].shape[1] < state["pos_embed"].shape[1]
    assert torch.equal(own["blocks.0.attn.qkv.weight"], state["blocks.0.attn.qkv.weight"])
    assert own["head.weight"].shape[0] == 5
    assert "state_dict" not in network.module.pretrained_cfg


def test_torchvision_keys() -> None:
    state = random_state("torchvision:googlenet")
    aux = {"aux1.conv.conv.weight": torch.ones(1), "aux2.fc1.bias": torch.ones(1)}
    network = models.load("torchvision:googlenet", fetch=giving(state | aux))
    assert network.base.arguments == {"transform_input": True}
    assert network.module.aux1 is None
    dense = random_state("torchvision:densenet121")
    old = {}
    for key, value in dense.items():
        for part in ("norm1", "norm2", "conv1", "conv2"):
            key = (
                key.replace(f".{part}.", f".{part[:-1]}.{part[-1]}.")
                if "denselayer" in key
                else key
            )
        old[key] = value
    assert old.keys() != dense.keys()
    models.load("torchvision:densenet121", fetch=giving(old))
    models.load("torchvision:mnasnet0_5", fetch=giving(random_state("torchvision:mnasnet0_5")))


def test_zoo_has_no_published_weights() -> None:
    with pytest.raises(UsageError) as caught:
        models.load("zoo:resnet20", fetch=never)
    assert "--checkpoint" in caught.value.try_


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("zoo:resnet56_a", "cifar10_resnet56_a"),
        ("zoo:resnet20_a", "cifar10_resnet20_a"),
        ("zoo:resnet56", "cifar10_resnet56_b"),
        ("mobilenetv2_100", "mobilenetv2_100"),
        ("tf_efficientnet_lite0", "tf_efficientnet_lite0"),
        ("torchvision:squeezenet1_1", "torchvision_squeezenet1_1"),
    ],
)
def test_real_weights(name: str, file: str) -> None:
    network = models.load(name, checkpoint=weights_file(file), offline=True, fetch=never)
    with torch.no_grad():
        scores = network.module(torch.rand(2, *network.input.size))
    assert scores.isfinite().all()


# Names on the hub

CONFIG = {
    "architecture": "test_resnet",
    "num_classes": 12,
    "pretrained_cfg": {"input_size": [3, 96, 96], "mean": [0.1] * 3, "std": [0.2] * 3},
}


def hub(config: object, state: dict[str, torch.Tensor]) -> fetching.Fetch:
    def fetch(place: Place, offline: bool) -> tuple[Path, bytes]:
        if place.names == ("config.json",):
            return Path("config.json"), json.dumps(config).encode()
        return giving(state)(place, offline)

    return fetch


def test_hub_name_becomes_a_registered_one() -> None:
    state = random_state("test_resnet", num_classes=12)
    network = models.load("hf-hub:me/mine", fetch=hub(CONFIG, state))
    assert network.base == Base("timm", "test_resnet", 12)
    assert network.input.size == (3, 96, 96)
    assert torch.equal(network.module.state_dict()["fc.weight"], state["fc.weight"])
    models.build(network.base)


@pytest.mark.parametrize(
    "change",
    [
        {"architecture": "nope"},
        {"architecture": "hf-hub:x/y"},
        {"architecture": 3},
        {"model_args": {"pretrained": True}},
        {"model_args": {"checkpoint_path": "/etc/passwd"}},
        {"model_args": {"block": {"a": 1}}},
        {"model_args": [1]},
        {"num_classes": "ten"},
        {"num_classes": 10**12},
        {"pretrained_cfg": {"input_size": [3, 10**9, 10**9]}},
        {"pretrained_cfg": {"mean": ["a"] * 3}},
        {"pretrained_cfg": [1]},
    ],
)
def test_hub_configuration_is_not_trusted(change: dict[str, object]) -> None:
    with pytest.raises(InputError):
        models.load("hf-hub:me/mine", pretrained=False, fetch=hub({**CONFIG, **change}, {}))


def test_module_names_survive() -> None:
    assert isinstance(models.load("zoo:vggnet", pretrained=False).module, nn.Module)
    assert {"Base", "Cut", "Input", "Network", "build", "load", "resolve"} <= set(models.__all__)
