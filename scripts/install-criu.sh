#!/usr/bin/env bash
# Makes a criu that the CRIU engine can use (4.1 or newer) available, as root on Debian and Ubuntu: the distribution's
# package where that is new enough, else (Debian) one built from the source that a newer suite of the same archive has.
# Does nothing where there is one. Half a minute to two; needs no other source than those that apt has.
set -euo pipefail

oldest=4.1 # the first that takes the kernels that sandboxes need; Debian 12 has 3.17.1
target=/usr/local/sbin/criu
patches=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/criu-patches
suites=(sid trixie) # from Linux 6.16 on, criu before 4.2 can dump no TCP or UDP socket; trixie has 4.1
build_packages=(build-essential pkg-config protobuf-c-compiler protobuf-compiler libprotobuf-c-dev
  libprotobuf-dev libnl-3-dev libcap-dev libnet1-dev libbsd-dev libnftables-dev libgnutls28-dev uuid-dev
  python3-minimal)

program=criu
# shellcheck source=scripts/debian.sh
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/debian.sh"

is_fit() { # a version
  [[ $1 == [0-9]* ]] && [ "$(printf '%s\n' "$oldest" "$1" | sort -V | head -n 1)" = "$oldest" ]
}

version_of() { timeout 10 "$1" --version 2>/dev/null </dev/null | sed -n 's/^Version: *//p'; }

is_fit_criu() { is_fit "$(version_of "$1")"; }

has_fit_criu() { is_anywhere is_fit_criu; } # where backends/native/criu.py looks

# ---- packages ------------------------------------------------------------------------------------------------------

update_once() {
  [ -z "${updated:-}" ] || return 0
  apt update || say "apt-get update failed: going on with the lists that are there"
  updated=yes
}

install_packages() {
  apt install --no-install-recommends "$@" && return 0
  update_once # lists that are stale name files that the archive has no more
  apt install --no-install-recommends "$@" || fail "these packages can't be installed: $*"
}

candidate() { # the version that apt would install, or "(none)"
  apt-cache policy criu 2>/dev/null | sed -n 's/^ *Candidate: *//p'
}

# ---- from source ---------------------------------------------------------------------------------------------------

fetch_source() { # FILE:LINE, suite: into $work/source
  fetch_from "$1" "$2" deb-src source --tar-only criu || return 1
  mkdir -p "$work/source"
  logged tar -xf "$fetched"/criu_*.orig.tar.* -C "$work/source" --strip-components=1
}

mend() { # a criu without the patches works too, but then some processes are refused
  local patch
  for patch in "$patches"/*.patch; do
    if ! logged patch -d "$work/source" -p1 --dry-run -i "$patch"; then
      say "$patch does not fit the source: going on without any"
      return 0
    fi
  done
  for patch in "$patches"/*.patch; do
    logged patch -d "$work/source" -p1 -i "$patch"
  done
  # shellcheck disable=SC2016
  echo 'CRIU_VERSION := $(CRIU_VERSION)-sandbox-gym' >>"$work/source/Makefile.versions"
}

build() {
  local entry suite
  for suite in "${suites[@]}"; do
    for entry in $(debian_entries); do
      ! fetch_source "$entry" "$suite" || break 2
    done
  done
  [ -e "$work/source/Makefile" ] || fail "no source of a newer criu could be had (tried: ${suites[*]})"
  mend
  # A fixed environment: make's own variables (this may be run by it) and CFLAGS would get through to criu's Makefile.
  (cd "$work/source" && logged timeout 900 env -i PATH="$PATH" LC_ALL=C make -j"$(nproc)" criu) ||
    fail "criu did not build"
  local built="$work/source/criu/criu"
  is_fit "$(version_of "$built")" || fail "what was built is $(version_of "$built"), not $oldest or newer"
  keep_libraries_of "$built"
  install -D -s -m 755 "$built" "$target.part"
  mv "$target.part" "$target" # at once: one that is running, or starts just now, is whole
}

keep_libraries_of() { # or they go with the build packages that brought them
  local library packages
  packages=$(for library in $(objdump -p "$1" | sed -n 's/^ *NEEDED *//p'); do
    dpkg-query -S "*/lib/$(gcc -print-multiarch)/$library" 2>>"$work/log" | sed 's/: .*//'
  done | sort -u)
  # shellcheck disable=SC2086
  logged apt-mark manual $packages || fail "criu's libraries can't be marked as needed: $packages"
}

# --------------------------------------------------------------------------------------------------------------------

main() {
  ! has_fit_criu || return 0
  [ "$(id -u)" -eq 0 ] || fail "criu $oldest or newer is missing. As root: $0"
  command -v apt-get >/dev/null ||
    fail "this is neither Debian nor Ubuntu: install criu $oldest or newer by this system's package manager"
  exec 8<"$0"
  flock 8
  ! has_fit_criu || return 0 # made by another meanwhile
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  export LC_ALL=C
  [[ $(candidate) == [0-9]* ]] || update_once
  if is_fit "$(candidate)"; then
    say "Installing criu $(candidate) ..."
    install_packages criu
  elif [ -n "$(debian_entries)" ]; then
    say "Building criu from Debian's source (a minute or two): the package here is $(candidate) ..."
    install_packages "${build_packages[@]}"
    build
  else
    fail "the package here is $(candidate), $oldest or newer is needed. On Ubuntu:" \
      "add-apt-repository -y ppa:criu/ppa && apt-get install -y criu"
  fi
  has_fit_criu || fail "criu was installed, but none of $oldest or newer is found"
}

[ "${BASH_SOURCE[0]}" != "$0" ] || main # a test reads the functions alone
