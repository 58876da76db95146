"""A child that beats, for tests: what `pdserve worker` is to its parent, without the weights.

    child_script.py FOLDER [MODE] --beat-fd N --die-with-parent [...]

Each run adds a line with its process id to FOLDER/pids. Modes: beat, silent (never a beat), fail (ends with
words on stderr), deaf (beats, and takes no notice of SIGTERM), token (writes FOLDER/token).
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path

from pdserve.lifecycle import die_with_parent
from pdserve_wire.auth import read_token

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("mode", nargs="?", default="beat")
parser.add_argument("--beat-fd", type=int)
parser.add_argument("--ready-fd", type=int)
parser.add_argument("--die-with-parent", action="store_true")
parser.add_argument("--cluster-token-file", type=Path)
parser.add_argument("--advertise")
arguments = parser.parse_args()
assert arguments.die_with_parent
die_with_parent()
if arguments.mode == "fail":
    sys.exit("pdserve: the weights are not there")
if arguments.mode == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if arguments.mode == "token":
    tokens = {read_token(arguments.cluster_token_file) for _ in range(2)}
    (arguments.folder / "token").write_text(" ".join(tokens))
with (arguments.folder / "pids").open("a") as pids:
    pids.write(f"{os.getpid()}\n")
if arguments.ready_fd is not None:
    os.write(arguments.ready_fd, b'{"http": "127.0.0.1:1"}\n')
while arguments.mode != "silent":
    os.write(arguments.beat_fd, b".")
    time.sleep(0.1)
time.sleep(60)
