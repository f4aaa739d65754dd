"""How far the channel graph reaches: one model of every timm family, and CNNs that users know.

    python tests/benchmarks/families.py [--out FILE] [--table] [--only NAME ...] [--again]

Each model runs in a process of its own with a time limit: our graph with the proof on random
plans, and torch-pruning (extra `peers`) on the same model, without proof since it has none.
Results are appended to FILE as JSON lines, the last line of a model counts, and what is there is
not run again. Prints a Markdown table. A number, never a gate.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

# The smallest model of each timm family. Marked +: convolutions carry the network.
FAMILIES = """
beit beit_base_patch16_224            | byoanet +halonet_h1
byobnet +mobileone_s1                 | cait cait_xxs24_224
coat coat_tiny                        | convit convit_tiny
convmixer +convmixer_768_32           | convnext +convnext_zepto_rms
cpubone +cpubone_nano                 | crossvit crossvit_tiny_240
csatv2 +csatv2                        | cspnet +cs3darknet_focus_s
davit davit_tiny                      | deepseek_vit deepseek_vit_412m
deit deit_tiny_patch16_224            | densenet +densenet121
dla +dla46x_c                         | dpn +dpn48b
edgenext +edgenext_xx_small           | efficientformer +efficientformer_l1
efficientformer_v2 +efficientformerv2_s0 | efficientnet +mobilenetv2_035
efficientvim +efficientvim_m1         | efficientvit_mit +efficientvit_b0
efficientvit_msra +efficientvit_m0    | eva vit_tiny_patch16_dinov3_qkvb
fasternet +fasternet_t0               | fastvit +fastvit_t8
focalnet +focalnet_tiny_srf           | gcvit gcvit_xxtiny
gemma4_vit gemma4_vit_167m            | ghostnet +ghostnet_050
hardcorenas +hardcorenas_b            | hgnet +hgnetv2_b0
hiera hiera_tiny_224                  | hieradet_sam2 sam2_hiera_tiny
hrnet +hrnet_w18_small                | iformer +iformer_t
inception_next +inception_next_atto   | inception_resnet_v2 +inception_resnet_v2
inception_v3 +inception_v3            | inception_v4 +inception_v4
lcnetv2 +lcnetv2_small                | levit +levit_128s
lowformer +lowformer_b0               | mambaout +mambaout_femto
maxxvit +maxvit_pico_rw_256           | metaformer +poolformerv2_s12
mlp_mixer gmlp_ti16_224               | mobilenetv3 +mobilenetv3_small_050
mobilenetv5 +mobilenetv5_base         | mobilevit +mobilevit_xxs
mvitv2 mvitv2_tiny                    | naflexvit naflexvit_base_patch16_parfac_gap
nasnet +nasnetalarge                  | nest nest_tiny
nextvit +nextvit_small                | nfnet +nf_regnet_b0
pit pit_ti_224                        | pnasnet +pnasnet5large
pvt_v2 pvt_v2_b0                      | qwen3_vit qwen3_vit_88m
rdnet +rdnet_tiny                     | regnet +regnetx_002
repghost +repghostnet_050             | repvit +repvit_m1
res2net +res2next50                   | resnest +resnest14d
resnet +resnet10t                     | resnetv2 +resnetv2_18
rexnet +rexnet_100                    | selecsls +selecsls42
senet +legacy_seresnet18              | sequencer sequencer2d_s
shvit +shvit_s1                       | sknet +skresnet18
starnet +starnet_s050                 | swiftformer +swiftformer_xs
swin_transformer swin_tiny_patch4_window7_224 | swin_transformer_v2 swinv2_tiny_window8_256
swin_transformer_v2_cr swinv2_cr_tiny_224 | tiny_vit +tiny_vit_5m_224
tnt tnt_s_legacy_patch16_224          | tresnet +tresnet_m
twins twins_svt_small                 | vgg +vgg11
visformer +visformer_tiny             | vision_transformer vit_tiny_patch16_224
vision_transformer_hybrid vit_tiny_r_s16_p8_224
vision_transformer_relpos vit_srelpos_small_patch16_224
vision_transformer_sam samvit_base_patch16_224 | vitamin vitamin_small_224
volo volo_d1_224                      | vovnet +ese_vovnet19b_slim_dw
xception +legacy_xception             | xception_aligned +xception41p
xcit xcit_nano_12_p8_224
"""

# Further CNNs; the family column says where they come from.
FURTHER = """
resnet18 resnet50 resnet50d resnext50_32x4d seresnet50 wide_resnet50_2 ecaresnet26t
seresnext26d_32x4d resnetblur50 resnetv2_50 resnetv2_50x1_bit vgg16_bn mobilenetv1_100
mobilenetv2_100
mobilenetv3_large_100 mobilenetv4_conv_small mobilenetv4_hybrid_medium efficientnet_b0
efficientnet_lite0 tf_efficientnetv2_s tf_efficientnet_b0 efficientnet_es efficientnet_cc_b0_4e
mixnet_s tinynet_e lcnet_050 semnasnet_075 spnasnet_100 mnasnet_100 fbnetc_100 fbnetv3_b
ghostnet_100 ghostnetv2_100 ghostnetv3_100 regnetx_008 regnety_008 regnetz_b16 regnetv_040
repvgg_a0 repvgg_b0 gernet_s mobileone_s0 resnext26ts gcresnext26ts eca_resnext26ts bat_resnext26ts
botnet26t_256 lambda_resnet26t dla34 dla60_res2net darknet53 cspresnet50 cspdarknet53 dpn68
res2net50_26w_4s resnest26d eca_nfnet_l0 nf_resnet26 dm_nfnet_f0 convnext_tiny convnextv2_atto
hrnet_w18 xception65 ese_vovnet39b skresnext50_32x4d rexnetr_200 hgnet_tiny edgenext_small
mobilevitv2_050 cs3darknet_m coatnet_0_rw_224 vit_small_patch16_224
torchvision:alexnet torchvision:resnet50 torchvision:mobilenet_v2 torchvision:mobilenet_v3_large
torchvision:efficientnet_b0 torchvision:densenet121 torchvision:googlenet torchvision:inception_v3
torchvision:shufflenet_v2_x1_0 torchvision:squeezenet1_1 torchvision:regnet_y_400mf
torchvision:mnasnet0_5 torchvision:convnext_tiny torchvision:vgg16_bn torchvision:swin_t
torchvision:maxvit_t torchvision:vit_b_16
"""
ATTENTION = ("torchvision:swin_t", "torchvision:vit_b_16", "vit_small_patch16_224")
# Of the processor, on one thread, so that other work on the machine changes nothing.
PEER_SECONDS = 60
OUR_SECONDS = 300


def models() -> list[tuple[str, str, bool]]:
    """Family, name as `dcptool` takes it, and whether it is a CNN."""
    rows = []
    for entry in FAMILIES.replace("\n", "|").split("|"):
        if entry.strip():
            family, name = entry.split()
            rows.append((family, name.lstrip("+"), name.startswith("+")))
    known = {name for _, name, _ in rows}
    for name in FURTHER.split():
        if name not in known:
            source = "torchvision" if ":" in name else "further"
            rows.append((source, name, name not in ATTENTION))
    return rows


def _build(name: str) -> tuple[Any, tuple[int, int, int]]:
    from dcptool.network.models import load

    full = name if ":" in name else f"timm:{name}"
    network = load(full, pretrained=False)
    return network.module, network.input.size


def ours(name: str) -> dict[str, Any]:
    """Our graph of one model, and the proof with half of every open group gone at random."""
    import torch

    from dcptool.network.graph import build_graph
    from dcptool.network.surgery import prove, removed_units

    module, size = _build(name)
    begin, cpu = time.perf_counter(), time.process_time()
    graph = build_graph(module, size)
    wall, cpu = time.perf_counter() - begin, time.process_time() - cpu
    status = Counter(group.status for group in graph.groups)
    # The class scores are never prunable, in no network.
    inner = [g for g in graph.groups if graph.structure.classifier not in g.producers]
    locked = [group for group in inner if group.status == "locked"]
    channels = sum(group.channels for group in inner)
    reasons = Counter[str]()
    for group in locked:
        reasons[group.reason.split(";")[0]] += group.channels
    result: dict[str, Any] = {
        "groups": dict(status),
        "locked_share": sum(group.channels for group in locked) / max(channels, 1),
        "reason": reasons.most_common(1)[0][0] if reasons else "",
        "graph_seconds": round(wall, 2),
        "graph_cpu_seconds": round(cpu, 2),
    }
    draw = torch.Generator().manual_seed(5)
    for label, scope, residual in (("default", "paper", False), ("all", "all", True)):
        kept = {
            group.name: torch.randperm(len(group.units), generator=draw)[
                : max(1, len(group.units) // 2)
            ].tolist()
            for group in graph.open_groups(scope, residual)
        }
        dead = removed_units(graph, kept)
        if not dead:
            result[label] = "nothing open"
            continue
        proof = prove(module, graph, dead, size)
        result[label] = "proved"
        result[f"{label}_difference"] = proof.difference
        result[f"{label}_power"] = proof.power
    return result


def peer(name: str) -> dict[str, Any]:
    """torch-pruning at 0.5: whether the pruned model runs and has lost parameters."""
    import torch
    import torch_pruning as tp

    module, size = _build(name)
    image = torch.randn(1, *size)
    with torch.no_grad():
        wanted = module(image).shape
    classes = wanted[-1]
    last = [m for m in module.modules() if getattr(m, "out_features", None) == classes]
    last += [m for m in module.modules() if getattr(m, "out_channels", None) == classes]
    before = sum(p.numel() for p in module.parameters())
    begin = time.perf_counter()
    pruner = tp.pruner.MagnitudePruner(
        module,
        image,
        importance=tp.importance.MagnitudeImportance(p=2),
        pruning_ratio=0.5,
        ignored_layers=last[-1:],
    )
    pruner.step()
    with torch.no_grad():
        got = module(image).shape
    after = sum(p.numel() for p in module.parameters())
    verdict = "runs" if got == wanted and after < before else "nothing pruned"
    return {"peer": verdict, "params": after / before, "seconds": time.perf_counter() - begin}


def _child(side: str, name: str, seconds: int, pipe: Connection) -> None:
    warnings.simplefilter("ignore")
    seconds += int(time.process_time())
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    try:
        result = ours(name) if side == "ours" else peer(name)
    except Exception as err:
        result = {"error": f"{type(err).__name__}: {err} {getattr(err, 'why', '')}"[:300]}
    pipe.send(result)


def _run(side: str, name: str, seconds: int) -> dict[str, Any]:
    """Forked, not spawned: loading the libraries would take longer than most graphs."""
    forks = multiprocessing.get_context("fork")
    here, there = forks.Pipe(duplex=False)
    child = forks.Process(target=_child, args=(side, name, seconds, there))
    child.start()
    there.close()
    try:
        result: dict[str, Any] = here.recv()
    except EOFError:
        child.join()
        late = child.exitcode in (-signal.SIGXCPU, -signal.SIGKILL)
        why = f"no answer in {seconds} s" if late else f"died with {child.exitcode}"
        return {"error": why}
    else:
        return result
    finally:
        child.kill()
        child.join()


def read(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Results so far, by model and side; the last line counts."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    if path.exists():
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            found[entry["model"], entry["side"]] = entry
    return found


def table(path: Path) -> str:
    """The results as Markdown, and counts."""
    found = read(path)
    lines = [
        "| family | model | proved | prunable / coupled / outside / locked | locked channels "
        "| main reason for a lock | torch-pruning |",
        "|---|---|---|---|---|---|---|",
    ]
    counts: Counter[str] = Counter()
    for family, name, is_cnn in models():
        mine, other = found.get((name, "ours")), found.get((name, "peer"))
        if mine is None:
            continue
        passed = mine.get("all") == "proved" and mine.get("default") in ("proved", "nothing open")
        verdict = "yes" if passed else mine.get("error") or mine.get("all", "no")
        groups = mine.get("groups", {})
        numbers = " / ".join(
            str(groups.get(s, 0)) for s in ("prunable", "coupled", "outside", "locked")
        )
        share = f"{100 * mine.get('locked_share', 1):.0f} %"
        runs = other is not None and other.get("peer") == "runs"
        theirs = "" if other is None else "runs" if runs else _short(other)
        kind = "cnn" if is_cnn else "attention"
        counts[kind] += 1
        counts[f"{kind} proved"] += passed
        counts[f"{kind} peer"] += runs
        counts[f"{kind} peer only"] += runs and not passed
        reason = mine.get("reason", "").replace("|", "/")
        lines.append(
            f"| {family} | {name}{'' if is_cnn else ' *'} | {verdict[:80]} | {numbers} | {share} "
            f"| {reason} | {theirs} |"
        )
    slow = [
        f"{name} {entry['graph_cpu_seconds']}"
        for (name, side), entry in found.items()
        if side == "ours" and entry.get("graph_cpu_seconds", 0) > 3
    ]
    lines += ["", "\\* attention carries the network", "", f"{dict(counts)}", f"slow: {slow}"]
    return "\n".join(lines)


def _short(entry: dict[str, Any]) -> str:
    text: str = entry.get("error") or entry.get("peer", "")
    return text.split(":")[0][:40]


def main() -> None:
    """Run what is missing and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    default = Path(tempfile.gettempdir()) / "dcptool-families.jsonl"
    parser.add_argument("--out", type=Path, default=default)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--side", choices=["ours", "peer"])
    parser.add_argument("--peer-seconds", type=int, default=PEER_SECONDS)
    parser.add_argument("--again", action="store_true", help="run also what is in the file")
    parser.add_argument("--table", action="store_true", help="print the table and run nothing")
    options = parser.parse_args()
    if not options.table:
        _run_all(options)
    print(table(options.out))


def _run_all(options: argparse.Namespace) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import dcptool.network.artifact
    import dcptool.network.graph  # noqa: F401 - loaded once, for all children

    with suppress(ImportError):
        import torch_pruning  # noqa: F401
    for family, name, _ in sorted(models(), key=lambda row: not row[2]):
        if options.only and name not in options.only and family not in options.only:
            continue
        for side in ("ours", "peer"):
            if options.side not in (None, side):
                continue
            if (name, side) in read(options.out) and not options.again:
                continue
            seconds = options.peer_seconds if side == "peer" else OUR_SECONDS
            entry = {"model": name, "side": side, **_run(side, name, seconds)}
            with options.out.open("a") as stream:
                stream.write(json.dumps(entry) + "\n")
            print(json.dumps(entry), file=sys.stderr)


if __name__ == "__main__":
    main()
