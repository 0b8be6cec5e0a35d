# shellcheck shell=bash
# Installs the Debian packages that the build needs and that are missing.
# Sourced by demo.sh and test.sh; quick and silent when everything is there.

tessera_install_deps() {
  local packages=(
    g++ cmake ninja-build ccache
    protobuf-compiler libprotobuf-dev
    libboost-graph-dev libeigen3-dev libjemalloc-dev zlib1g-dev
    libgtest-dev libgmock-dev libbenchmark-dev
    python3
  )
  if ! command -v dpkg-query >/dev/null; then
    echo "install_deps: not a Debian system, so nothing is installed." \
      "The build needs what these packages hold: ${packages[*]}" >&2
    return 0  # CMake names what it does not find.
  fi

  local missing=() package
  for package in "${packages[@]}"; do
    if [[ "$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null)" \
      != installed ]]; then
      missing+=("$package")
    fi
  done
  if ((${#missing[@]} == 0)); then
    return 0
  fi

  if ! command -v apt-get >/dev/null; then
    echo "install_deps: apt-get is not available; install these packages:" \
      "${missing[*]}" >&2
    return 1
  fi
  local as_root=()
  if ((EUID != 0)); then
    if ! command -v sudo >/dev/null; then
      echo "install_deps: run as root, or have root run:" \
        "apt-get install ${missing[*]}" >&2
      return 1
    fi
    as_root=(sudo)
  fi
  echo "Installing ${missing[*]}"
  local apt=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q)
  "${apt[@]}" update &&
    "${apt[@]}" install -y --no-install-recommends "${missing[@]}"
}

tessera_install_deps
