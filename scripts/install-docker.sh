#!/usr/bin/env bash
# Makes a docker engine available to the tests, which start one of their own: as root on Debian and Ubuntu, the
# distribution's package, which on a machine with systemd also starts it as a service. Does nothing where there is one.
set -euo pipefail

program=docker
# shellcheck source=scripts/debian.sh
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/debian.sh"

has_docker() {
  local program
  for program in dockerd containerd runc; do
    PATH=$PATH:/usr/sbin:/sbin command -v "$program" >/dev/null || return 1
  done
}

main() {
  ! has_docker || return 0
  [ "$(id -u)" -eq 0 ] || fail "docker is missing. As root: $0"
  command -v apt-get >/dev/null ||
    fail "this is neither Debian nor Ubuntu: install docker 20.10 or newer by this system's package manager"
  exec 8<"$0"
  flock 8
  ! has_docker || return 0 # made by another meanwhile
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  say "Installing docker.io ..."
  apt install --no-install-recommends docker.io ||
    { apt update && apt install --no-install-recommends docker.io; } ||
    fail "the package docker.io can't be installed"
  has_docker || fail "docker.io was installed, but its programs are not found"
}

main
