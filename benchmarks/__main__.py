"""`make bench`: our servers and vLLM, where it is installed, in one run of about 20 minutes."""

from __future__ import annotations

import sys

from benchmarks.compare import main

_DEFAULTS = ["--sampled", "--long-prompts=4"]

if __name__ == "__main__":
    sys.exit(main([*_DEFAULTS, *sys.argv[1:]]))
