#!/usr/bin/env bash
# Makes a runsc that the gVisor backend can use available, as root on Debian: one static file, taken out of the package
# of a newer suite of the same archive, which is not installed itself. Does nothing where there is one. Some seconds.
set -euo pipefail

oldest=20240101 # Debian 12's own, of 2022, loses a container that it checkpoints
target=/usr/local/sbin/runsc
suites=(trixie bookworm-backports) # both have that of July 2024; sid's panics

program=runsc
# shellcheck source=scripts/debian.sh
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/debian.sh"

is_fit() { # a program; its version is a date: "0.0~20240729.0", "release-20240729.0"
  local date
  date=$(timeout 20 "$1" --version 2>/dev/null </dev/null | sed -nE 's/^runsc version .*[~-](20[0-9]{6})\..*/\1/p')
  [ "${date:-0}" -ge "$oldest" ]
}

has_fit_runsc() { is_anywhere is_fit; } # where backends/gvisor/runsc.py looks

fetch_package() { # FILE:LINE, suite: into $work
  fetch_from "$1" "$2" deb download runsc || return 1
  mv "$fetched"/runsc_*.deb "$work/runsc.deb"
}

unpack() {
  logged dpkg-deb --extract "$work/runsc.deb" "$work/tree" || fail "the package can't be unpacked"
  is_fit "$work/tree/usr/bin/runsc" || fail "the package's runsc does not work here"
  install -D -m 755 "$work/tree/usr/bin/runsc" "$target.part"
  mv "$target.part" "$target" # at once: one that is running, or starts just now, is whole
}

main() {
  ! has_fit_runsc || return 0
  [ "$(id -u)" -eq 0 ] || fail "runsc is missing. As root: $0"
  command -v apt-get >/dev/null || fail "this is not Debian: put gVisor's release of runsc at $target"
  exec 8<"$0"
  flock 8
  ! has_fit_runsc || return 0 # made by another meanwhile
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  export LC_ALL=C
  say "Fetching runsc ..."
  local entry suite
  for suite in "${suites[@]}"; do
    for entry in $(debian_entries); do
      ! fetch_package "$entry" "$suite" || break 2
    done
  done
  [ -e "$work/runsc.deb" ] ||
    fail "no package of it could be had (tried: ${suites[*]}): put gVisor's release of runsc at $target"
  unpack
  has_fit_runsc || fail "runsc was unpacked, but is not found"
}

[ "${BASH_SOURCE[0]}" != "$0" ] || main # a test reads the functions alone
