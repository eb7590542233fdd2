"""``python -m cluster`` is the ``kvferry`` command."""

from cluster.cli import main

if __name__ == "__main__":
    main()
