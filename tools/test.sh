#!/usr/bin/env bash
# Installs what is missing, builds the preset `ci` (Release, warnings are
# errors) and runs all tests but the benchmarks. Ends with ctest's summary.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=tools/install_deps.sh
source tools/install_deps.sh
cmake --workflow --preset ci
