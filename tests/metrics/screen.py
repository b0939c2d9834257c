"""A terminal to test with: a pseudo-terminal, and what a person would see on it."""

import os
import pty
import re
import sys
import termios
import threading

STEERING = re.compile(r"\x1b\[(\??)(\d*)(?:;\d+)*([A-Za-z])|([\r\n])|([^\x1b\r\n]+)")


class Screen:
    """A terminal of so many columns, in the place of both standard streams.

    with Screen() as screen:
        print("anything")
    screen.lines()  # what stands on it
    """

    def __init__(self, columns=80):
        master, slave = pty.openpty()
        termios.tcsetwinsize(slave, (40, columns))
        self.columns, self._master = columns, master
        self.file = os.fdopen(slave, "w", buffering=1)
        self._bytes = bytearray()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        while True:
            try:
                some = os.read(self._master, 65536)
            except OSError:  # the other end was closed
                return
            self._bytes += some

    def __enter__(self):
        self._before = sys.stdout, sys.stderr
        sys.stdout = sys.stderr = self.file
        return self

    def __exit__(self, *_):
        sys.stdout, sys.stderr = self._before
        self.file.close()
        self._reader.join(5)
        os.close(self._master)

    def written(self):
        """Every byte, as text."""
        return self._bytes.decode()

    def lines(self):
        """As they stand at the end, without empty ones."""
        rows, row, column = [""], 0, 0
        for private, number, letter, control, text in STEERING.findall(self.written()):
            if control == "\r":
                column = 0
            elif control == "\n":
                row += 1
                rows += [""] * (row + 1 - len(rows))
            elif letter == "A":
                row = max(0, row - int(number or 1))
            elif letter == "K":
                rows[row] = ""
            elif text:
                rows[row] = (
                    rows[row][:column].ljust(column) + text + rows[row][column + len(text) :]
                )
                column += len(text)
            else:
                assert letter in "mhl" or private, f"an unknown control: {letter}"
        return [line.rstrip() for line in rows if line.strip()]

    def cursor_is_shown(self):
        return self.written().rfind("\x1b[?25h") >= self.written().rfind("\x1b[?25l")
