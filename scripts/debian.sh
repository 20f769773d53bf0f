# What scripts that install programs on Debian share; they set `program`, and `work`, a folder for the log, before they
# call apt. shellcheck shell=bash

say() { printf '%s\n' "$*" >&2; }

fail() {
  [ ! -s "${work:-}/log" ] || tail -n 15 "$work/log" >&2
  say "install-$program: $*"
  exit 1
}

logged() { "$@" >>"$work/log" 2>&1 </dev/null; }

apt() { # waits for another apt to end, not for a server that does not answer
  logged env DEBIAN_FRONTEND=noninteractive apt-get -y -o DPkg::Lock::Timeout=300 -o Acquire::Retries=2 \
    -o Acquire::http::Timeout=30 -o Acquire::https::Timeout=30 "$@"
}

is_anywhere() { # a function that says whether a program is fit: looks where the package does, with PATH first
  local folder folders
  IFS=: read -ra folders <<<"$PATH:/usr/local/sbin:/usr/sbin:/sbin"
  for folder in "${folders[@]}"; do
    [ ! -x "$folder/$program" ] || ! "$1" "$folder/$program" || return 0
  done
  return 1
}

debian_entries() { # prints FILE:LINE of each entry of apt's configuration that is Debian's own archive
  # shellcheck disable=SC2016
  apt-get indextargets --format '$(SOURCESENTRY)' 'Created-By: Packages' 'Origin: Debian' 'Label: Debian' \
    'Component: main' | sort -u
}

# FILE:LINE of an entry, a suite, and deb or deb-src: prints the entry for that suite. All else stays: address, keys,
# options; but sources are of no architecture.
entry_of() {
  local file=${1%:*} line=${1##*:} dropped='types|suites|components|enabled'
  [ "$3" = deb ] || dropped+='|architectures'
  if [[ $file == *.sources ]]; then
    awk -v line="$line" -v suite="$2" -v kind="$3" -v names="^($dropped)[ \t]*:" '
      NF == 0 { if (stanza && NR > line) exit; stanza = ""; next }
      /^#/ { next }
      /^[^ \t]/ { dropped = tolower($0) ~ names }
      !dropped { stanza = stanza $0 "\n" }
      END { printf "Types: %s\nSuites: %s\nComponents: main\n%s", kind, suite, stanza }' "$file"
  else
    sed -nE "${line}s/^ *deb(-src)?[ \t]+(\[[^]]*\][ \t]+)?([^ \t]+).*/$3 \2\3 $2 main/p" "$file"
  fi
}

# An entry, a suite, deb or deb-src, and a command of apt's: runs it in a folder of its own, whose name goes to `fetched`.
# apt gets lists of its own: the machine's stay as they are, and no package comes from another suite.
fetch_from() {
  local state="$work/apt-$2" list=${1%:*}
  mkdir -p "$state/lists" # apt removes what it does not know from it
  list="$state/newer.${list##*.}" # apt tells the two formats apart by this ending
  entry_of "$1" "$2" "$3" >"$list"
  local private=(-o Dir::Etc::sourcelist="$list" -o Dir::Etc::sourceparts=/dev/null
    -o Dir::State::lists="$state/lists" -o Dir::Cache::pkgcache= -o Dir::Cache::srcpkgcache=
    -o APT::Sandbox::User=root -o Acquire::Check-Valid-Until=false) # a mirror may be frozen at a date
  apt update "${private[@]}" || return 1
  (cd "$state" && apt "${private[@]}" "${@:4}") || return 1
  fetched=$state
}
