"""`shardkeep` as it is where the packages in the variable WITHOUT_PACKAGES, separated by commas, are not installed."""

import os
import sys

sys.modules.update(dict.fromkeys(os.environ["WITHOUT_PACKAGES"].split(",")))  # None: an import of it fails

if __name__ == "__main__":
    from shardkeep.cli.main import main

    main()
