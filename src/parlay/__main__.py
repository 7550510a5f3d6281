"""The entry point of the command `parlay` and of `python -m parlay`."""

import signal
import sys


def main() -> int:
    """Run the command line of this process, and return its exit code. Ctrl-C during the first imports ends it without a
    traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # background jobs of a shell ignore SIGINT
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from parlay.cli import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
