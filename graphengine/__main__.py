"""What `graphengine` and, in a checkout that is not installed, `python3 -m graphengine` run."""

import signal

if signal.getsignal(signal.SIGINT) == signal.default_int_handler:  # not where nohup ignores it
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C amid the imports shows no traceback


def main() -> None:
    from graphengine.cli.main import main as command

    command()


if __name__ == "__main__":
    main()
