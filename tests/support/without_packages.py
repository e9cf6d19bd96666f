"""`shardkeep` as it is where the packages in the variable WITHOUT_PACKAGES, separated by commas, are not installed."""

import os
import sys


def main() -> None:
    for package in os.environ["WITHOUT_PACKAGES"].split(","):
        sys.modules[package] = None  # type: ignore[assignment]  # an import of it fails
    from shardkeep.cli.main import main

    main()
