"""A process that becomes a command as soon as its launcher's guardian knows of it.

It runs as a script. If the launcher is killed before that, nobody would end the command: then it
never starts.
"""

import os
import signal
import sys


def main(fd: int, command: list[str]) -> None:
    """Waits for the launcher's word, and executes the command.

    **Arguments:** a socket, by which the word comes, and the number of an error goes; the command.
    """
    if not os.read(fd, 1):
        return
    os.set_inheritable(fd, False)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores, and programs inherit
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], list(command))
    except OSError as error:
        os.write(fd, str(error.errno).encode())


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
