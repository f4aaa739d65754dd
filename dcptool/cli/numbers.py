"""Numbers as options take them: in their range, and ones that can be worked with.

click compares, and nan passes every comparison; infinity passes where there is no upper bound.
Recipes have the same limit and the same words.
"""

from __future__ import annotations

from typing import Any

import click

LARGEST = 2**63 - 1


class FiniteRange(click.FloatRange):
    """A number in a range, neither nan nor beyond what a computer counts to."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Read the number; click's own refusals come first."""
        found: float = super().convert(value, param, ctx)
        if not abs(found) <= LARGEST:
            self.fail(f"{found:g} is out of range", param, ctx)
        return found
