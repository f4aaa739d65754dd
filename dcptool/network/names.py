"""Model names: which registry has them, and what was probably meant.

Bare names are timm's, then torchvision's; prefixes choose a registry. A name is never a
path: nothing on the disk is looked at, and `local-dir:` is refused.
"""

from __future__ import annotations

import difflib
import re

from dcptool.errors import UsageError

SOURCES = ("timm", "torchvision", "zoo")
HUB = "hf-hub:"
_HUB_NAME = re.compile(r"[\w][\w.-]*/[\w][\w.-]*(@[\w][\w.-]*)?", re.ASCII)


def resolve(name: str) -> tuple[str, str]:
    """Source and registry name of `resnet50`, `timm:resnet50`, `torchvision:...`, `zoo:...`.

    Names on the Hugging Face hub keep their prefix: `("timm", "hf-hub:timm/resnet18.a1_in1k")`.
    """
    prefix, colon, rest = name.partition(":")
    source, rest = (prefix, rest) if colon and prefix in SOURCES else ("", name)
    if source in ("", "timm") and rest.replace("_", "-", 1).lower().startswith(HUB):
        rest = HUB + rest[len(HUB) :]
        if _HUB_NAME.fullmatch(rest[len(HUB) :]) is None or ".." in rest:
            raise UsageError(
                f"{name!r} is no name of a model on the hub",
                why="such a name has the form hf-hub:organisation/name or ...@revision",
                try_="hf-hub:timm/resnet18.a1_in1k",
            )
        return "timm", rest
    if rest.lower().startswith(("local-dir:", "local_dir:")) or any(c in rest for c in "/\\\0"):
        raise UsageError(
            f"{name!r} is a path, not the name of a model",
            why="there is no artifact of this name, and other folders may not say what code to run",
            try_="dcptool prune resnet50 --rate 0.3; or --checkpoint FILE for weights",
        )
    if source in ("", "timm") and (found := _in_timm(rest)):
        return "timm", found
    if source in ("", "torchvision") and rest in torchvision_names():
        return "torchvision", rest
    if source == "zoo" and rest in zoo_names():
        return "zoo", rest
    raise unknown(name)


def is_name(text: str) -> bool:
    """Whether a model can be meant, whatever else there is of this name."""
    if "/" in text:
        return False
    try:
        return bool(resolve(text))
    except UsageError:
        return False


def is_registered(source: str, name: object) -> bool:
    """Whether a registry has exactly this name; used for names out of files."""
    if not isinstance(name, str):
        return False
    if source == "timm":
        return _in_timm(name) == name
    return name in (torchvision_names() if source == "torchvision" else zoo_names())


def unknown(name: str) -> UsageError:
    """The error for a name that nobody has, with the three nearest."""
    near = nearest(name)
    return UsageError(
        f"there is no model {name!r}",
        why="neither timm nor torchvision nor the zoo has it; did you mean "
        + ", ".join(near[:-1])
        + f" or {near[-1]}?",
        try_=f"dcptool analyze {near[0]}",
        instead=(name, near[0]),
    )


def nearest(name: str, count: int = 3) -> list[str]:
    """Names of all registries that are spelled most like `name`, as they may be typed."""
    prefix, _, rest = name.rpartition(":")
    architecture = rest.lower().partition(".")[0]
    timm_names = _timm_list()
    spellings = {known: known for known in timm_names}
    for known in torchvision_names():
        if known not in timm_names or prefix == "torchvision":
            spellings[f"torchvision:{known}"] = known
    spellings.update({f"zoo:{known}": known for known in zoo_names()})
    matcher = difflib.SequenceMatcher(b=architecture)
    scores: dict[str, tuple[float, bool]] = {}
    for spelling, known in spellings.items():
        matcher.set_seq1(known)
        elsewhere = bool(prefix) and not spelling.startswith(f"{prefix}:")
        scores[spelling] = (-matcher.ratio(), elsewhere)
    tags = []
    if "." in rest and architecture in timm_names:
        import timm

        tagged = timm.list_models(f"{architecture}.*", pretrained=True)
        tags = difflib.get_close_matches(rest, tagged, count, cutoff=0.0)
    return (tags + sorted(scores, key=lambda known: scores[known]))[:count]


def _in_timm(name: str) -> str:
    """Timm's present name for `name`, or nothing."""
    import timm

    name = timm.models.get_deprecated_models().get(name) or name
    if not timm.is_model(name):
        return ""
    try:
        # Raises for a tag that is not known; no tag at all is fine, even without weights.
        if "." in name and timm.get_pretrained_cfg(name, allow_unregistered=False) is None:
            return ""
    except RuntimeError:
        return ""
    return name


def _timm_list() -> list[str]:
    import timm

    names: list[str] = timm.list_models()
    return names


def torchvision_names() -> list[str]:
    """Classifiers only: detection, segmentation, video and quantised models are elsewhere."""
    import torchvision

    names: list[str] = torchvision.models.list_models(module=torchvision.models)
    return names


def zoo_names() -> list[str]:
    """The paper's networks."""
    from dcptool.network import zoo

    return zoo.names()
