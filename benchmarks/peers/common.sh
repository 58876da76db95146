# What the peers' scripts share; sourced by them after `name`, `home` and `bin` are set.
# $PEER_LOG: where the server's output goes (beside the environment if not set).
# $PEER_START_S: how long a start may take (600 s).

say() { echo "$name: $*" >&2; }

make_home() {
  say "installing into $home (minutes)"
  rm -rf "$home"
  mkdir -p "$(dirname "$home")"
  "${PYTHON:-python3}" -m venv "$home"
}

pip() { "$bin/python" -m pip -qq --disable-pip-version-check "$@" >&2; }

check_installed() {
  [ -e "$home/.installed" ] || { say "not installed: run 'benchmarks/peers/$name.sh install' first"; exit 3; }
}

# launch PORT COMMAND...: start it as the leader of a session, wait until /health says 200, print its process id.
launch() {
  local port=$1 log=${PEER_LOG:-$home/serve-$1.log} pid
  shift
  setsid "$@" >"$log" 2>&1 </dev/null &
  pid=$!
  say "process $pid, log in $log"
  trap 'stop "$pid"; exit 130' INT TERM
  wait_ready "$pid" "http://127.0.0.1:$port/health" "${PEER_START_S:-600}" &
  if ! wait $!; then  # a trap may interrupt this
    tail -n 20 "$log" >&2
    stop "$pid"
    exit 1
  fi
  say "ready after $SECONDS s"
  echo "$pid"
}

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
        sys.exit("the server ended at its start")
    time.sleep(0.5)  # a foreign process: there is nothing else to wait on
sys.exit(f"the server was not ready after {limit_s:g} s")
PYTHON
}

# The process group of a session's leader is all that it started.
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
