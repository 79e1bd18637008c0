"""`python3 -m graphengine`: the console script for a checkout that is not installed."""

from graphengine.cli.main import main

if __name__ == "__main__":
    main()
