"""``python -m hstrain``."""

from hstrain.cli import main

main()
