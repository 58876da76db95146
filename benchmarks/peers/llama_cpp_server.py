"""llama.cpp's OpenAI server with a GGUF file, until SIGTERM. For the environment that llama_cpp.sh makes.

usage: llama_cpp_server.py FILE.gguf NAME PORT
"""

import os
import signal
import sys

import xllamacpp  # type: ignore[import-not-found]

MAX_STREAMS = 32
CONTEXT = 4096  # tokens a stream

gguf, name, port = sys.argv[1:]
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
params = xllamacpp.CommonParams()
params.model.path = gguf
params.model_alias = {name}
params.hostnames = ["127.0.0.1"]
params.port = int(port)
params.n_parallel = MAX_STREAMS
params.n_ctx = MAX_STREAMS * CONTEXT
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = len(os.sched_getaffinity(0))
params.n_gpu_layers = 0
server = xllamacpp.Server(params)
print(f"ready: {server.listening_address}", flush=True)
signal.sigwait({signal.SIGTERM, signal.SIGINT})
os._exit(0)  # its threads don't join
