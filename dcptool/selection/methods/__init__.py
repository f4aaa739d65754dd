"""The rules of selection, one small file each, and the table of them.

A method answers one question: of this group, in which order would you keep the units? How many
stay is the budget's business, and what becomes of the readers is the stage's.
"""

from __future__ import annotations

from collections.abc import Mapping

from dcptool.selection.methods.apoz import Apoz
from dcptool.selection.methods.cp import ChannelPruning
from dcptool.selection.methods.dcp import Dcp
from dcptool.selection.methods.l1 import L1
from dcptool.selection.methods.question import Method
from dcptool.selection.methods.randomly import Randomly
from dcptool.selection.methods.slimming import Slimming
from dcptool.selection.methods.thinet import ThiNet
from dcptool.selection.methods.width import Width

METHODS: Mapping[str, Method] = {
    "dcp": Dcp(),
    "random": Randomly(),
    "l1": L1(),
    "apoz": Apoz(),
    "thinet": ThiNet(),
    "cp": ChannelPruning(),
    "slimming": Slimming(),
    "wm": Width(),
    "wm+": Width(),
}
# Ways of training around one cut: no stages before it.
AT_ONCE = frozenset(("slimming", "wm", "wm+"))
FROM_SCRATCH = frozenset(("wm", "wm+"))
