import pytest
import torch
from torch import fx

from dcptool.network import zoo

# From the table in the paper; the parameter-free ones lack two 1x1 convolutions and norms.
PARAMETERS = {
    "resnet20": 272_474,
    "resnet20_a": 269_722,
    "resnet56": 855_770,
    "resnet56_a": 853_018,
    "resnet110": 1_730_714,
    "vggnet": 20_040_522,
    "mobilenet_v1": 3_217_226,
    "mobilenet_v1_public": 3_217_226,
    "mobilenet_v2": 2_236_682,
    "mobilenet_v2_public": 2_236_682,
}


def count(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def test_names() -> None:
    depths = (20, 32, 44, 56, 110)
    wanted = {f"resnet{d}{a}" for d in depths for a in ("", "_a")} | {"vggnet"}
    wanted |= {f"mobilenet_v{n}{a}" for n in (1, 2) for a in ("", "_public")}
    wanted |= {"mobilenet_v1_224", "spherenet4", "spherenet20"}
    assert set(zoo.names()) == wanted


@pytest.mark.parametrize("name", PARAMETERS)
def test_size(name: str) -> None:
    assert count(zoo.create(name, 10)) == PARAMETERS[name]


def test_macs_of_the_paper() -> None:
    macs = {"resnet56": 125_747_840, "vggnet": 398_136_320, "mobilenet_v1": 213_084_160}
    for name, wanted in macs.items():
        total = 0

        def hook(module, inputs, output):
            nonlocal total
            weight = module.weight
            total += weight.numel() * (output[0, 0].numel() if output.dim() == 4 else 1)

        module = zoo.create(name, 10).eval()
        for part in module.modules():
            if isinstance(part, torch.nn.Conv2d | torch.nn.Linear):
                part.register_forward_hook(hook)
        module(torch.zeros(1, 3, 32, 32))
        assert total == wanted


@pytest.mark.parametrize(
    "name",
    [
        "resnet20",
        "resnet20_a",
        "vggnet",
        "mobilenet_v1",
        "mobilenet_v2",
        "spherenet4",
        "spherenet20",
    ],
)
def test_traced_module_answers_the_same(name: str) -> None:
    torch.manual_seed(0)
    module = zoo.create(name, 7).eval()
    x = torch.randn(2, *zoo.ENTRIES[name].size)
    with torch.no_grad():
        scores = module(x)
        assert scores.shape == (2, 7)
        assert torch.equal(fx.symbolic_trace(module)(x), scores)


def test_parameter_free_shortcut_centres_the_channels() -> None:
    shortcut = zoo.create("resnet20_a", 10).layer2[0].shortcut
    x = torch.randn(1, 16, 8, 8)
    y = shortcut(x)
    assert y.shape == (1, 32, 4, 4)
    assert torch.equal(y[:, 8:24], x[:, :, ::2, ::2])
    assert y[:, :8].abs().sum() == y[:, 24:].abs().sum() == 0


def test_inputs() -> None:
    plain, scaled = zoo.ENTRIES["resnet56"], zoo.ENTRIES["resnet56_a"]
    assert (plain.mean, plain.std) == ((0.0,) * 3, (1.0,) * 3)
    assert (scaled.mean, scaled.std) == (zoo.IMAGENET_MEAN, zoo.IMAGENET_STD)
    odd = {name: entry.size for name, entry in zoo.ENTRIES.items() if entry.size != (3, 32, 32)}
    faces = (3, 112, 96)
    assert odd == {"mobilenet_v1_224": (3, 224, 224), "spherenet4": faces, "spherenet20": faces}
    # 0 and 255 as in (pixel - 127.5) / 128.
    face = zoo.ENTRIES["spherenet4"]
    assert (1 - face.mean[0]) / face.std[0] == pytest.approx(127.5 / 128)


def test_spherenet_counts_as_the_paper_counts_it() -> None:
    # Without the classifier, which is for training alone; the linear layer is 87.65 % of it.
    four = zoo.create("spherenet4", 0)
    assert count(four) == 12_562_496
    assert count(four.fc5) / count(four) == pytest.approx(0.8765, abs=5e-5)
    assert four.eval()(torch.zeros(1, 3, 112, 96)).shape == (1, 512)
    twenty = zoo.create("spherenet20", 0)
    assert sum(isinstance(m, torch.nn.Conv2d) for m in twenty.modules()) == 20


def test_residual_pairs_of_spherenet_are_added() -> None:
    twenty = zoo.create("spherenet20", 3).eval()
    x = torch.randn(1, 3, 112, 96)
    with torch.no_grad():
        y = twenty.relu1_1(twenty.conv1_1(x))
        pair = twenty.relu1_3(twenty.conv1_3(twenty.relu1_2(twenty.conv1_2(y))))
        seen = []
        twenty.conv2_1.register_forward_pre_hook(lambda _m, inputs: seen.append(inputs[0]))
        twenty(x)
    assert torch.equal(seen[0], y + pair)


def test_strides_of_mobilenets() -> None:
    def sizes(name: str) -> list[int]:
        seen = []
        module = zoo.create(name, 10).eval()
        for part in module.modules():
            if isinstance(part, torch.nn.Conv2d) and part.groups > 1:
                part.register_forward_hook(lambda _m, _i, output: seen.append(output.shape[-1]))
        with torch.no_grad():
            module(torch.zeros(1, *zoo.ENTRIES[name].size))
        return seen

    assert sizes("mobilenet_v1") == [32] * 2 + [16] * 4 + [8] * 6 + [4]
    assert sizes("mobilenet_v1_public") == [32] + [16] * 2 + [8] * 2 + [4] * 6 + [2] * 2
    assert sizes("mobilenet_v1_224")[-1] == 7
    assert sizes("mobilenet_v2") == [32] + [16] * 5 + [8] * 7 + [4] * 4
    assert sizes("mobilenet_v2_public") == [32] * 3 + [16] * 3 + [8] * 7 + [4] * 4


def test_keys_of_other_implementations() -> None:
    own = zoo.create("resnet20", 10).state_dict()
    foreign = {
        key.replace("shortcut", "downsample").replace("linear", "fc"): value
        for key, value in own.items()
    }
    assert foreign.keys() != own.keys()
    assert zoo.rename(foreign).keys() == own.keys()


def test_weights_of_public_files() -> None:
    own = zoo.create("mobilenet_v1_224", 10).state_dict()
    places = {"conv1": "0", "bn1": "1", "conv2": "3", "bn2": "4"}
    listed = {}
    for key, value in own.items():
        parts = key.split(".")
        if parts[0] == "layers":
            key = f"module.model.{int(parts[1]) + 1}.{places[parts[2]]}.{parts[3]}"
        elif parts[0] in ("conv1", "bn1"):
            key = f"module.model.0.{places[parts[0]]}.{parts[1]}"
        else:
            key = key.replace("linear", "module.fc")
        listed[key] = value
    found = zoo.translate("mobilenet_v1_224", listed)
    assert found.keys() == own.keys()
    assert all(found[key] is own[key] for key in own)

    own = zoo.create("spherenet20", 30).state_dict()
    found = zoo.translate("spherenet20", {**own, "fc6.weight": own["fc6.weight"].T})
    assert torch.equal(found["fc6.weight"], own["fc6.weight"])
    assert zoo.translate("spherenet20", own)["fc6.weight"] is own["fc6.weight"]

    own = zoo.create("vggnet", 10).state_dict()
    bare = {
        key.replace("features", "feature"): value
        for key, value in own.items()
        if not (key.endswith(".bias") and key.replace("bias", "running_mean") not in own)
        or key.startswith("classifier")
    }
    assert len(bare) == len(own) - 16
    found = zoo.translate("vggnet", bare)
    assert found.keys() == own.keys()
    assert found["features.0.bias"].shape == (64,)
    assert not found["features.0.bias"].any()
