#!/usr/bin/env bash
# Makes what the demo and the tests need: system packages, criu, runsc, docker, .venv with everything but Ray, and
# .venv-oldest, which is the same with Ray, and with the oldest Gymnasium that sandbox_gym supports, which Ray asks for.
# Does nothing when all of it is there. PYTHON chooses the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."

oldest_gymnasium=$(sed -n 's/^dependencies = .*gymnasium>=\([0-9.]*\).*/\1/p' pyproject.toml)
python=${PYTHON:-python3}
torch=torch==2.13.0

say() { printf '%s\n' "$*" >&2; }

system_packages() { # prints those that are missing
  "$python" -c 'import ensurepip, venv' 2>/dev/null || echo python3-venv
  [ "$(id -u)" -eq 0 ] || return 0
  # Root's sandboxes have their disks on btrfs; an ordinary user's are in memory.
  PATH=$PATH:/usr/sbin:/sbin command -v mkfs.btrfs >/dev/null || echo btrfs-progs
  # Tests compare machine code with its source, and messages with their definition; one guest is of node.
  command -v objcopy >/dev/null || echo binutils
  command -v gcc >/dev/null || echo gcc
  command -v protoc >/dev/null || echo protobuf-compiler
  command -v node >/dev/null || echo nodejs
  # Guests that work on repositories, and that go through the proxy.
  command -v git >/dev/null || echo git
  command -v curl >/dev/null || echo curl
  # Two examples have these in their sandboxes; pages are looked at in the latter, and plotly draws with it.
  command -v redis-server >/dev/null || echo redis-server
  command -v chromium >/dev/null || echo chromium
  [ -x /usr/lib/chromium/chromium-headless-shell ] || echo chromium-headless-shell
}

# Debian starts a service as it installs it, and at each boot.
without_services() ( # a command
  policy=/usr/sbin/policy-rc.d
  if [ ! -e "$policy" ]; then
    trap 'rm -f "$policy"' EXIT
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
  fi
  "$@"
)

install_system_packages() {
  local missing
  mapfile -t missing < <(system_packages)
  [ ${#missing[@]} -gt 0 ] || return 0
  local command="apt-get install -y --no-install-recommends ${missing[*]}"
  if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    say "Missing system packages (Debian's names): ${missing[*]}. As root: $command"
    exit 1
  fi
  say "Installing ${missing[*]} ..."
  export DEBIAN_FRONTEND=noninteractive
  without_services $command >/dev/null 2>&1 </dev/null ||
    { apt-get update -qq && without_services $command >/dev/null; } </dev/null
  [[ " ${missing[*]} " != *" redis-server "* ]] || update-rc.d redis-server disable >/dev/null
}

install_criu() { # only root's sandboxes can use it
  [ "$(id -u)" -ne 0 ] || scripts/install-criu.sh ||
    say "Going on without criu: only guests that can be forked can be snapshotted."
}

install_runsc() { # the same
  [ "$(id -u)" -ne 0 ] || scripts/install-runsc.sh || say "Going on without runsc: no gVisor backend."
}

install_docker() { # the tests of that backend start a daemon of their own, as root
  [ "$(id -u)" -ne 0 ] || scripts/install-docker.sh ||
    say "Going on without docker: backend=\"docker\" can't be tested."
}

# A stamp names what an environment was made from; where it differs, the environment is made again.
stamp() { { "$python" -VV; cat pyproject.toml scripts/setup.sh; pwd; } | sha256sum; }

make_venv() {
  say "Making .venv (a minute or two) ..."
  rm -rf .venv .venv-oldest
  "$python" -m venv .venv
  .venv/bin/python -m pip install -qq --disable-pip-version-check --editable '.[dev]'
}

# Hard links to .venv's packages, then another Gymnasium, and Ray: what both have is the same in both. PyTorch in a release
# whose wheel needs no GPU's libraries.
make_oldest() {
  say "Making .venv-oldest (Gymnasium $oldest_gymnasium, Ray; a minute) ..."
  rm -rf .venv-oldest
  "$python" -m venv --without-pip .venv-oldest
  local packages
  packages=$(cd .venv && echo lib/python3*/site-packages)
  rm -rf ".venv-oldest/$packages"
  cp -al ".venv/$packages" ".venv-oldest/$packages"
  .venv-oldest/bin/python -m pip install -qq --disable-pip-version-check --no-deps "gymnasium==$oldest_gymnasium"
  .venv-oldest/bin/python -m pip install -qq --disable-pip-version-check "$torch" --editable '.[ray]'
}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
  say "$python is $("$python" -V 2>&1): sandbox-gym needs Python 3.10 or newer. Name one by PYTHON=..."
  exit 1
}
exec 9<pyproject.toml
flock 9 # one set-up at a time
install_system_packages
install_criu
install_runsc
install_docker
wanted=$(stamp)
if [ "$(cat .venv/stamp 2>/dev/null)" != "$wanted" ]; then
  make_venv
  echo "$wanted" >.venv/stamp
fi
if [ "$(cat .venv-oldest/stamp 2>/dev/null)" != "$wanted" ]; then
  make_oldest
  echo "$wanted" >.venv-oldest/stamp
fi
