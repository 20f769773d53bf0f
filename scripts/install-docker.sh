#!/usr/bin/env bash
# Makes a docker engine available to the tests, which start one of their own: as root on Debian and Ubuntu, the
# distribution's package, which on a machine with systemd also starts it as a service. Does nothing where there is one.
set -euo pipefail

say() { printf '%s\n' "$*" >&2; }

fail() {
  [ ! -s "${log:-}" ] || tail -n 15 "$log" >&2
  say "install-docker: $*"
  exit 1
}

has_docker() {
  local program
  for program in dockerd containerd runc; do
    PATH=$PATH:/usr/sbin:/sbin command -v "$program" >/dev/null || return 1
  done
}

apt() { # waits for another apt to end, not for a server that does not answer
  env DEBIAN_FRONTEND=noninteractive apt-get -y -o DPkg::Lock::Timeout=300 -o Acquire::Retries=2 \
    -o Acquire::http::Timeout=30 -o Acquire::https::Timeout=30 "$@" >>"$log" 2>&1 </dev/null
}

main() {
  ! has_docker || return 0
  [ "$(id -u)" -eq 0 ] || fail "docker is missing. As root: $0"
  command -v apt-get >/dev/null ||
    fail "this is neither Debian nor Ubuntu: install docker 20.10 or newer by this system's package manager"
  exec 8<"$0"
  flock 8
  ! has_docker || return 0 # made by another meanwhile
  log=$(mktemp)
  trap 'rm -f "$log"' EXIT
  say "Installing docker.io ..."
  apt install --no-install-recommends docker.io ||
    { apt update && apt install --no-install-recommends docker.io; } ||
    fail "the package docker.io can't be installed"
  has_docker || fail "docker.io was installed, but its programs are not found"
}

main
