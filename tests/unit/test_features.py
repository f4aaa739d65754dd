"""Features of samples: kept in memory or on disk, read as rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from dcptool.selection.features import choose_positions, rows_at, values_at
from dcptool.selection.store import Room, Store


def test_store_spills_to_disk_above_the_limit(tmp_path: Path) -> None:
    room = Room(100, tmp_path)
    store = Store(room)
    chunks = [torch.arange(20.0) + i for i in range(4)]
    for chunk in chunks:
        store.add(chunk)
    assert room.used <= 100
    assert len(list(tmp_path.rglob("*.bin"))) == 3
    assert all(torch.equal(a, b) for (a,), b in zip(store, chunks, strict=True))
    store.clear()
    assert not list(tmp_path.rglob("*.bin"))
    room.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("limit", [0, 2**20])
def test_kept_features_lie_in_memory_as_they_did(tmp_path: Path, limit: int) -> None:
    store = Store(Room(limit, folder=tmp_path))
    maps = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    vector = torch.randn(2, 7)
    store.add(maps, vector)
    kept, other = store.at(0)
    assert torch.equal(kept, maps)
    assert kept.stride() == maps.stride()
    assert torch.equal(other, vector)
    store.room.close()


def test_rows_do_not_depend_on_the_layout() -> None:
    layer = nn.Conv2d(3, 2, 3, stride=2, padding=1)
    maps = torch.randn(2, 3, 9, 8)
    positions = choose_positions((1, 2, 5, 4), 2, 6, torch.Generator().manual_seed(0))
    rows = rows_at(layer, maps, positions)
    weights, bias = layer.weight.detach().flatten(1).T, layer.bias
    assert bias is not None
    wanted = values_at(layer(maps).detach(), positions)
    assert torch.allclose(rows @ weights + bias.detach(), wanted, atol=1e-5)
    last = maps.contiguous(memory_format=torch.channels_last)
    assert torch.equal(rows_at(layer, last, positions), rows)
