"""How this program starts itself again: what lies in the working folder is not imported.

`python -m` and `python -c` look there first, and a folder that holds a foreign model may hold a
`resource.py`, too.
"""

from __future__ import annotations

import sys
from pathlib import Path

_HOME = str(Path(__file__).resolve().parents[1])


def command(module: str, function: str = "main") -> list[str]:
    """The words that call a function of one of our modules in a new interpreter."""
    code = (
        "import sys; sys.path[:] = [p for p in sys.path if p]; "
        f"sys.path.append({_HOME!r}); from {module} import {function}; {function}()"
    )
    return [sys.executable, "-c", code]
