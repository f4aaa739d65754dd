"""`python -m dcptool`, and what torchrun starts."""

from dcptool.cli.app import main

main()
