"""Cutting: from kept units to kept indices, from kept indices to smaller modules, and the proof.

Edits modules in place with index_select; forward code and state-dict names stay. The proof
compares a cut copy with a copy whose consumers have zeros for the same channels.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from timm.layers.grn import GlobalResponseNorm
from torch import Tensor, nn

from dcptool.errors import GateFailed, InputError
from dcptool.network.graph import ChannelGraph, Group
from dcptool.network.models import Cut
from dcptool.network.module_cuts import TRANSPOSED, bake, cut_part, is_standardised

TOLERANCE = 1e-4
# A difference must be small beside what the mask itself moved, or the proof proves nothing.
SHARE_OF_POWER = 1e-2


@dataclass(frozen=True)
class Proof:
    """Largest difference between mask and cut, and how far the mask moved the output."""

    difference: float
    power: float

    @property
    def has_power(self) -> bool:
        """Whether a wrong cut would have shown."""
        return self.power > 0 and self.difference <= SHARE_OF_POWER * self.power


def removed_units(graph: ChannelGraph, kept: Mapping[str, Iterable[int]]) -> set[int]:
    """Units that go when only the given unit indices of each named group stay."""
    dead: set[int] = set()
    for name, indices in kept.items():
        units = graph.group(name).units
        stay = set(indices)
        if not stay:
            raise InputError(f"cannot remove every channel of {name}")
        dead.update(unit for i, unit in enumerate(units) if i not in stay)
    return dead


def plan_cuts(graph: ChannelGraph, dead: set[int]) -> dict[str, Cut]:
    """Kept indices of every site that the removal of `dead` units changes."""
    gone = np.zeros(max(dead, default=0) + 1, dtype=bool)
    gone[list(dead)] = True
    cuts: dict[str, Cut] = {}
    for site in graph.sites.values():
        inputs, outputs = _kept(site.inputs, gone), _kept(site.outputs, gone)
        if inputs is not None or outputs is not None:
            cuts[site.name] = Cut(inputs, outputs, site.dim)
    return cuts


def _kept(units: np.ndarray, gone: np.ndarray) -> tuple[int, ...] | None:
    """Indices of units that stay; none when all do. Units beyond the table are not gone."""
    stay = (units < 0) | (units >= len(gone)) | ~gone[np.clip(units, 0, len(gone) - 1)]
    return None if stay.all() else tuple(np.flatnonzero(stay).tolist())


def cut(module: nn.Module, cuts: Mapping[str, Cut]) -> None:
    """Shrink the named modules and parameters in place to their kept indices."""
    for name, kept in cuts.items():
        owner, _, leaf = name.rpartition(".")
        try:
            parent = module.get_submodule(owner)
        except AttributeError as err:
            raise InputError(f"cannot cut {name}", why="the network has no such part") from err
        if not hasattr(parent, leaf):
            raise InputError(f"cannot cut {name}", why="the network has no such part")
        if not cut_part(parent, leaf, kept):
            raise InputError(f"cannot cut {name}", why="parts of its type are not cut")


def bake_all(module: nn.Module) -> dict[str, Cut]:
    """Bake all standardised layers, for code that is about to change their weights.

    Returns cuts that keep every input; recorded with the network, they bake on loading too.
    """
    cuts: dict[str, Cut] = {}
    for name, layer in module.named_modules():
        if is_standardised(layer):
            bake(layer)
            cuts[name] = Cut(tuple(range(layer.in_channels)), None)
    return cuts


def compose(old: Mapping[str, Cut], new: Mapping[str, Cut]) -> dict[str, Cut]:
    """Cuts of a network that was cut twice, in indices of the dense one."""

    def chain(first: Sequence[int] | None, then: Sequence[int] | None) -> tuple[int, ...] | None:
        if first is None or then is None:
            kept = first if then is None else then
            return None if kept is None else tuple(kept)
        return tuple(first[i] for i in then)

    result = dict(old)
    for name, kept in new.items():
        before = old.get(name, Cut(None, None, kept.dim))
        result[name] = Cut(
            chain(before.inputs, kept.inputs), chain(before.outputs, kept.outputs), kept.dim
        )
    return result


def mask(module: nn.Module, graph: ChannelGraph, dead: set[int]) -> None:
    """Zero the weights with which dense layers read dead units.

    Response norms read channels without weights: there the activations are zeroed, and the mean
    is scaled to the channels that live.
    """
    gone = np.fromiter(dead, dtype=np.int64, count=len(dead))
    with torch.no_grad():
        for site in graph.sites.values():
            columns = np.flatnonzero(np.isin(site.inputs, gone))
            if site.kind == "response_norm" and len(columns):
                _mask_response(module.get_submodule(site.name), columns)
            if site.is_dense and len(columns):
                silence(module.get_submodule(site.name), torch.from_numpy(columns))


def silence(layer: nn.Module, columns: Tensor) -> None:
    """Zero the weights with which a dense layer reads some of its inputs."""
    if is_standardised(layer):
        bake(layer)
    weight = layer.weight
    assert isinstance(weight, Tensor)
    weight.data.index_fill_(0 if isinstance(layer, TRANSPOSED) else 1, columns, 0.0)


def _mask_response(norm: nn.Module, columns: np.ndarray) -> None:
    assert isinstance(norm, GlobalResponseNorm)
    share = 1 - len(columns) / len(norm.weight)
    norm.weight.mul_(share)
    norm.eps *= share
    dim, index = norm.channel_dim, torch.from_numpy(columns)

    def silence(_: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
        return inputs[0].index_fill(dim, index, 0.0)

    norm.register_forward_pre_hook(silence)


def fits(
    graph: ChannelGraph, groups: Sequence[Group], trial: nn.Module, input_size: tuple[int, ...]
) -> bool:
    """Whether the network's code still runs when every second unit of `groups` is gone.

    `trial` is a copy without data; it is cut, run and put back as it was.
    """
    cuts = plan_cuts(graph, {unit for group in groups for unit in group.units[1::2]})
    owners = {_owner(trial, name) for name in cuts}
    before = [(owner, type(owner), _state(owner)) for owner in owners]
    try:
        cut(trial, cuts)
        with torch.no_grad():
            trial(torch.empty((1, *input_size), device="meta"))
    except Exception:  # noqa: BLE001, RUF100 - any error in foreign code means that it does not fit
        return False
    finally:
        for owner, kind, state in before:
            owner.__class__ = kind
            owner.__dict__.clear()
            owner.__dict__.update(state)
    return True


def _owner(module: nn.Module, name: str) -> nn.Module:
    parent = module.get_submodule(name.rpartition(".")[0])
    target = getattr(parent, name.rpartition(".")[2])
    return target if isinstance(target, nn.Module) else parent


def _state(module: nn.Module) -> dict[str, Any]:
    own = dict(module.__dict__)
    return {**own, "_parameters": dict(own["_parameters"]), "_buffers": dict(own["_buffers"])}


def randomise(module: nn.Module, seed: int = 0) -> None:
    """Weights, norms and statistics that hide nothing: fresh ones are ones and zeros."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if not tensor.is_floating_point() or not tensor.numel():
                continue
            if tensor.dim() > 1 and isinstance(tensor, nn.Parameter) and tensor[0].numel() > 1:
                tensor.normal_(0, math.sqrt(2 / tensor[0].numel()), generator=draw)
            elif name.endswith(("running_mean", "bias")):
                tensor.normal_(0, 0.1, generator=draw)
            elif isinstance(tensor, nn.Parameter) or name.endswith(("running_var", "weight")):
                tensor.uniform_(0.5, 1.5, generator=draw)


def _settle(module: nn.Module, image: Tensor) -> None:
    """Give norms statistics near those of their input, so that signals neither die nor explode."""
    draw = torch.Generator().manual_seed(2)

    def adapt(norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        mean, variance = norm.running_mean, norm.running_var
        if not isinstance(mean, Tensor) or not isinstance(variance, Tensor):
            return
        flat = inputs[0].transpose(0, 1).flatten(1)
        found = flat.var(dim=1, correction=0) + 0.1 * flat.var(correction=0) + 1e-6
        shift = torch.empty_like(mean).normal_(0, 0.1, generator=draw)
        mean.copy_(flat.mean(dim=1) + shift * found.sqrt())
        variance.copy_(found * torch.empty_like(found).uniform_(0.5, 1.5, generator=draw))

    hooks = [
        layer.register_forward_pre_hook(adapt)
        for layer in module.modules()
        if hasattr(layer, "running_mean")
    ]
    with torch.no_grad():
        module(image)
    for hook in hooks:
        hook.remove()


def prove(
    module: nn.Module, graph: ChannelGraph, dead: set[int], input_size: tuple[int, ...]
) -> Proof:
    """Show on random weights that cutting `dead` equals masking it; raises GateFailed if not."""
    proof = _compare(module, graph, dead, input_size, torch.float32)
    if not (proof.difference <= TOLERANCE and (not dead or proof.has_power)):
        # Badly conditioned networks magnify rounding; twice the digits tell that from an error.
        with suppress(RuntimeError):
            proof = _compare(module, graph, dead, input_size, torch.float64)
    if not proof.difference <= TOLERANCE:
        raise GateFailed(
            "the cut network does not compute what the masked one does",
            why=f"difference {proof.difference:.2g} of the largest output, limit {TOLERANCE:g}",
            try_="dcptool analyze, and please report the network's name",
        )
    if dead and not proof.has_power:
        raise GateFailed(
            "the proof has no power: the mask hardly moved the output",
            why=f"moved {proof.power:.2g} of the largest output, difference {proof.difference:.2g}",
        )
    return proof


def _compare(
    module: nn.Module,
    graph: ChannelGraph,
    dead: set[int],
    input_size: tuple[int, ...],
    dtype: torch.dtype,
) -> Proof:
    masked = copy.deepcopy(module).cpu().to(dtype).eval()
    draw = torch.Generator().manual_seed(1)
    image = torch.randn((2, *input_size), generator=draw, dtype=dtype)
    randomise(masked)
    _settle(masked, image)
    slim = copy.deepcopy(masked)
    with torch.no_grad():
        before = _scores(masked, image)
        mask(masked, graph, dead)
        wanted = _scores(masked, image)
        cut(slim, plan_cuts(graph, dead))
        try:
            got = _scores(slim, image)
        except RuntimeError as err:
            raise GateFailed("the cut network does not run", why=str(err)) from err
    scale = float(wanted.abs().max())
    return Proof(
        float((wanted - got).abs().max()) / scale, float((before - wanted).abs().max()) / scale
    )


def _scores(module: nn.Module, image: Tensor) -> Tensor:
    result = module(image)
    return result if isinstance(result, Tensor) else next(iter(result))
