"""The start of `agentrl`, which `python -m agentrl_cli` is, too."""

import sys


def main() -> int:
    """Run the command line; a Ctrl-C while it is imported ends it as a later one does."""
    try:
        from agentrl_cli import commands
    except KeyboardInterrupt:
        print("Error: Interrupted.", file=sys.stderr)
        return 130
    return commands.main()


if __name__ == "__main__":
    sys.exit(main())
