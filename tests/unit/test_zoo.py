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
}


def count(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def test_names() -> None:
    depths = (20, 32, 44, 56, 110)
    wanted = {f"resnet{d}{a}" for d in depths for a in ("", "_a")} | {"vggnet"}
    assert set(zoo.names()) == wanted


@pytest.mark.parametrize("name", PARAMETERS)
def test_size(name: str) -> None:
    assert count(zoo.create(name, 10)) == PARAMETERS[name]


def test_macs_of_the_paper() -> None:
    macs = {"resnet56": 125_747_840, "vggnet": 398_136_320}
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


@pytest.mark.parametrize("name", ["resnet20", "resnet20_a", "vggnet"])
def test_traced_module_answers_the_same(name: str) -> None:
    torch.manual_seed(0)
    module = zoo.create(name, 7).eval()
    x = torch.randn(2, 3, 32, 32)
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
    assert {entry.size for entry in zoo.ENTRIES.values()} == {(3, 32, 32)}


def test_keys_of_other_implementations() -> None:
    own = zoo.create("resnet20", 10).state_dict()
    foreign = {
        key.replace("shortcut", "downsample").replace("linear", "fc"): value
        for key, value in own.items()
    }
    assert foreign.keys() != own.keys()
    assert zoo.rename(foreign).keys() == own.keys()
