"""`parlay`, and `python -m parlay`."""

import signal
import sys


def main() -> int:
    """Run the process's own command line, and return the exit code. Ctrl-C amid the first imports prints nothing."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # jobs in the background of a shell ignore it
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from parlay.cli import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
