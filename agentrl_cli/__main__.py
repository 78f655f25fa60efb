"""`python -m agentrl_cli` is `agentrl`."""

import sys

from agentrl_cli.commands import main

if __name__ == "__main__":
    sys.exit(main())
