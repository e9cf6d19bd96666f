"""`python -m shardkeep` is the same as the `shardkeep` command."""

from shardkeep.cli import main

if __name__ == "__main__":
    main()
