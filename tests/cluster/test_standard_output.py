"""What a command prints for programs is its answer alone."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import os
from cluster.standard_output import kept_for_the_answer

print("before")
try:
    with kept_for_the_answer():
        os.write(1, b"a remark of a library\\n")
        print("another one")
        {ends}
except ValueError:
    pass
print("{{}}")
"""


def test_what_others_write_meanwhile_goes_to_the_error_output() -> None:
    for ends in ("pass", "raise ValueError"):
        command = [sys.executable, "-c", PROGRAM.format(ends=ends)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout == "before\n{}\n"
        assert done.stderr == "a remark of a library\nanother one\n"
