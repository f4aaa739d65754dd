"""Where losses go, what a block is, and what lies outside the paper's scope."""

from __future__ import annotations

import pytest

from dcptool.network import models
from dcptool.network.graph import build_graph
from dcptool.network.structure import Structure


def structure(name: str) -> Structure:
    network = models.load(name, pretrained=False)
    return build_graph(network.module, network.input.size).structure


# The authors' places: after block 7, 14, 21 of 27; 5, 10, 15 of 16; 3, 6 of 8.
@pytest.mark.parametrize(
    ("name", "losses", "places"),
    [
        ("timm:resnet18", 2, ("layer2.0", "layer3.1")),
        ("timm:resnet50", 3, ("layer2.1", "layer3.2", "layer4.1")),
    ],
)
def test_losses_go_where_the_authors_put_them(
    name: str, losses: int, places: tuple[str, ...]
) -> None:
    found = structure(name)
    assert found.default_losses() == losses
    assert tuple(p.removesuffix(".act2").removesuffix(".act3") for p in found.pivots(losses)) == (
        places
    )


def test_three_losses_in_27_blocks() -> None:
    found = structure("zoo:resnet56")
    assert found.default_losses() == 3
    ends = found.block_ends
    assert len(ends) == 27
    assert found.pivots(3) == (ends[6], ends[13], ends[20])


def test_a_plain_network_is_divided_by_its_depth() -> None:
    found = structure("zoo:vggnet")
    assert not found.has_residuals
    assert found.default_losses() == 2
    depth = dict(found.cut_points)
    assert [depth[place] for place in found.pivots(2)] == [6, 11]


def test_more_losses_than_places_are_as_many_as_there_are_places() -> None:
    found = structure("zoo:resnet20")
    assert len(found.pivots(16)) <= 9
    assert len(set(found.pivots(16))) == len(found.pivots(16))


def test_outside_the_scope_says_why() -> None:
    plain = Structure((), {}, False, "fc", ("a", "fc"), (), ())
    assert plain.outside(["a", "fc"], ["fc"]) == "it feeds the classifier"
    assert plain.outside(["a", "b"], ["b"]) == ""
    block = Structure(
        (frozenset({"a", "b"}),), {"c": "blocks.1", "d": "blocks.1"}, True, "fc", (), (), ()
    )
    assert block.outside(["a", "b"], ["b"]) == ""
    assert block.outside(["c", "d"], ["d"]) == ""
    assert "inside one residual block" in block.outside(["b", "c"], ["c"])
