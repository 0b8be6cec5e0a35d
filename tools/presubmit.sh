#!/usr/bin/env bash
# What a change must pass: the format of the files it touches, the include
# directions, the shell scripts, clang-tidy on the C++ it touches, and the
# build and tests of the preset `ci`. Compares with the branch named by the
# first argument (default: main), uncommitted and untracked files included.
set -euo pipefail
cd "$(dirname "$0")/.."
base=${1:-main}
failed=0

step() { printf '\n== %s\n' "$1"; }

# Runs a check; remembers a failure, so that one run reports all of them.
check() { "$@" || failed=1; }

# check_with TOOL ARGUMENT…: runs it if the tool is installed.
check_with() {
  if command -v "$1" >/dev/null; then
    check "$@"
  else
    echo "skipped: $1 is not installed"
  fi
}

merge_base=$(git merge-base "$base" HEAD 2>/dev/null ||
  git hash-object -t tree /dev/null)
mapfile -t changed < <(
  {
    git diff --name-only --diff-filter=d "$merge_base"
    git ls-files --others --exclude-standard
  } | sort -u
)

# The changed files whose names match a regular expression.
changed_like() {
  local file
  for file in "${changed[@]}"; do
    if [[ "$file" =~ $1 ]]; then printf '%s\n' "$file"; fi
  done
}
mapfile -t sources < <(changed_like '\.(h|cc|cu|cuh)$')
mapfile -t host_sources < <(changed_like '\.cc$')
mapfile -t scripts < <(changed_like '(\.sh|^\.ci/run)$')

step "Format of ${#sources[@]} changed C++ files"
if ((${#sources[@]})); then
  check_with clang-format --dry-run -Werror "${sources[@]}"
fi

step "Include directions"
check python3 tools/check_includes.py

step "${#scripts[@]} changed shell scripts"
if ((${#scripts[@]})); then
  check_with shellcheck -x "${scripts[@]}"
fi

step "clang-tidy of ${#host_sources[@]} changed C++ files"
if ((${#host_sources[@]})); then
  # Without CUDA and with GCC's flags alone; clang 14 knows no CUDA 13.
  cmake --preset dev >/dev/null
  cmake --build --preset dev --target tessera_proto
  # Files that this build leaves out have no compile command.
  mapfile -t host_sources < <(
    for file in "${host_sources[@]}"; do
      if grep -qF "/$file\"" build/dev/compile_commands.json; then
        printf '%s\n' "$file"
      fi
    done
  )
  if ((${#host_sources[@]})); then
    check_with clang-tidy --quiet -p build/dev \
      --extra-arg=-Wno-unknown-warning-option "${host_sources[@]}"
  fi
fi

step "Build and tests"
check tools/test.sh

if ((failed)); then
  printf '\npresubmit: FAILED\n'
  exit 1
fi
printf '\npresubmit: all passed\n'
