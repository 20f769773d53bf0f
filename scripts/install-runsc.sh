#!/usr/bin/env bash
# Makes a runsc that the gVisor backend can use available, as root on Debian: one static file, taken out of the package
# of a newer suite of the same archive, which is not installed itself. Does nothing where there is one. Some seconds.
set -euo pipefail

oldest=20240101 # Debian 12's own, of 2022, loses a container that it checkpoints
target=/usr/local/sbin/runsc
suites=(trixie bookworm-backports) # both have that of July 2024; sid's panics

say() { printf '%s\n' "$*" >&2; }

fail() {
  [ ! -s "${work:-}/log" ] || tail -n 15 "$work/log" >&2
  say "install-runsc: $*"
  exit 1
}

is_fit() { # a program; its version is a date: "0.0~20240729.0", "release-20240729.0"
  local date
  date=$(timeout 20 "$1" --version 2>/dev/null </dev/null | sed -nE 's/^runsc version .*[~-](20[0-9]{6})\..*/\1/p')
  [ "${date:-0}" -ge "$oldest" ]
}

has_fit_runsc() { # the places where backends/gvisor/runsc.py looks
  local folder folders
  IFS=: read -ra folders <<<"$PATH:/usr/local/sbin:/usr/sbin:/sbin"
  for folder in "${folders[@]}"; do
    [ ! -x "$folder/runsc" ] || ! is_fit "$folder/runsc" || return 0
  done
  return 1
}

logged() { "$@" >>"$work/log" 2>&1 </dev/null; }

apt() { # waits for another apt to end, not for a server that does not answer
  logged env DEBIAN_FRONTEND=noninteractive apt-get -y -o DPkg::Lock::Timeout=300 -o Acquire::Retries=2 \
    -o Acquire::http::Timeout=30 -o Acquire::https::Timeout=30 "$@"
}

debian_entries() { # prints FILE:LINE of each entry of apt's configuration that is Debian's own archive
  # shellcheck disable=SC2016
  apt-get indextargets --format '$(SOURCESENTRY)' 'Created-By: Packages' 'Origin: Debian' 'Label: Debian' \
    'Component: main' | sort -u
}

# FILE:LINE of an entry, and a suite: prints the entry for that suite's packages. All else stays: address, keys, options.
packages_of() {
  local file=${1%:*} line=${1##*:}
  if [[ $file == *.sources ]]; then
    awk -v line="$line" -v suite="$2" '
      NF == 0 { if (stanza && NR > line) exit; stanza = ""; next }
      /^#/ { next }
      /^[^ \t]/ { dropped = tolower($0) ~ /^(types|suites|components|enabled)[ \t]*:/ }
      !dropped { stanza = stanza $0 "\n" }
      END { printf "Types: deb\nSuites: %s\nComponents: main\n%s", suite, stanza }' "$file"
  else
    sed -nE "${line}s/^ *deb(-src)?[ \t]+(\[[^]]*\][ \t]+)?([^ \t]+).*/deb \2\3 $2 main/p" "$file"
  fi
}

# Into $work. apt gets lists of its own: the machine's stay as they are, and no package comes from another suite.
fetch_package() { # FILE:LINE, suite
  local state="$work/apt-$2" list=${1%:*}
  mkdir -p "$state/lists" # apt removes what it does not know from it
  list="$state/newer.${list##*.}" # apt tells the two formats apart by this ending
  packages_of "$1" "$2" >"$list"
  local private=(-o Dir::Etc::sourcelist="$list" -o Dir::Etc::sourceparts=/dev/null
    -o Dir::State::lists="$state/lists" -o Dir::Cache::pkgcache= -o Dir::Cache::srcpkgcache=
    -o APT::Sandbox::User=root -o Acquire::Check-Valid-Until=false) # a mirror may be frozen at a date
  apt update "${private[@]}" || return 1
  (cd "$state" && apt download "${private[@]}" runsc) || return 1
  mv "$state"/runsc_*.deb "$work/runsc.deb"
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
