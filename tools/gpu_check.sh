#!/usr/bin/env bash
# What only a machine with a GPU can check, in parts that are bounded in time.
#
#   tools/gpu_check.sh [--only PART]… [--time-limit SECONDS] [--out FILE]
#       BUILD_DIR
#
# PART is one of the checks device, discover, parity, run, run-graph, check,
# nccl, run-nccl, which run side by side, or of the measurements step, graph,
# offload, rounding, profile, losses, training, kernels, matmul, attention, copy,
# sanitize, which then have the GPU for themselves, in this order; without --only
# all run. A part that fails does not keep the others from running; one for which
# no time is left is skipped. Without a GPU nothing runs: the script says so and
# exits with 0. Otherwise it exits with 1 if a part failed, and writes one JSON file:
# the device, its driver, the versions, and for every part its status (passed,
# failed, timed out, skipped), seconds and what it measured or the end of its
# output. What all parts printed is in FILE.log. Beside the parts: `parity`,
# `parity_graph` (with --graph) and `nccl`, how far the losses of each plan are
# from the CPU's, of ranks on one GPU as threads, and over NCCL
# (tests/gpu/run_parity.py); `losses` and `training`, against PyTorch
# (tests/bench/against_pytorch.py; where python3 has torch; TRAINING holds flags
# for it). Default FILE: tests/bench/results/DEVICE-DATE.json beside this
# script. `profile` times what plans of GPT-2 need and leaves its file at
# FILE.profile.pb, or profiler/profiles/tessera/DEVICE.pb.
#
# The binaries may come from another machine (nothing is built or installed
# here, only bash, coreutils and Python 3 are needed):
#   cmake -B BUILD_DIR -DTESSERA_CUDA=ON -DProtobuf_USE_STATIC_LIBS=ON
#   cmake --build BUILD_DIR --target tessera tessera_gpu_test tessera_gpu_bench
# (with attention by cuDNN where CMake finds cudnn_frontend.h: pip install
# nvidia-cudnn-frontend before)
#   tools/gpu_check.sh --pack FOLDER BUILD_DIR
# --pack copies them, stripped, with the shared libraries that a plain Linux
# lacks, to FOLDER, which is then the BUILD_DIR to run from. CUDA's and NCCL's
# libraries (hundreds of megabytes) are not packed: they are looked for in
# FOLDER/lib, where the loader looks, in /usr/local/cuda*/lib*, and in the
# packages nvidia-* of the machine's python3.
set -uo pipefail
cd_root=$(cd "$(dirname "$0")/.." && pwd)

usage() {
  sed -n '2,/^set/{/^#/{s/^# \{0,1\}//;p}}' "$0" >&2
  exit 2
}

checks=(device discover parity run run-graph check nccl run-nccl)
measurements=(step graph offload rounding profile losses training kernels matmul
  attention copy sanitize)
all_parts=("${checks[@]}" "${measurements[@]}")
parts=()
out=
pack=
time_limit=7200
while [[ $# -gt 0 ]]; do
  case $1 in
    --only)
      [[ " ${all_parts[*]} " == *" ${2:-} "* ]] || {
        echo "gpu_check: unknown part '${2:-}'; known: ${all_parts[*]}" >&2
        exit 2
      }
      parts+=("$2")
      shift 2 ;;
    --out) [[ -n ${2:-} ]] || usage; out=$2; shift 2 ;;
    --time-limit)
      [[ ${2:-} =~ ^[1-9][0-9]*$ ]] || {
        echo "gpu_check: --time-limit '${2:-}': expected seconds, at least 1" >&2
        exit 2
      }
      time_limit=$2
      shift 2 ;;
    --pack) [[ -n ${2:-} ]] || usage; pack=$2; shift 2 ;;
    -*) usage ;;
    *) break ;;
  esac
done
[[ $# -eq 1 ]] || usage
build=$(cd "$1" 2>/dev/null && pwd) || {
  echo "gpu_check: no folder '$1'" >&2
  exit 2
}
[[ ${#parts[@]} -gt 0 ]] || parts=("${all_parts[@]}")

# The binary NAME, where a build or --pack leaves it.
find_binary() {
  local place
  for place in "$build/$1" "$build/tests/$1"; do
    [[ -x $place ]] && echo "$place" && return
  done
}
test_binary=$(find_binary tessera_gpu_test)
bench_binary=$(find_binary tessera_gpu_bench)
tessera=$(find_binary tessera)
for name in tessera tessera_gpu_test tessera_gpu_bench; do
  [[ -n $(find_binary $name) ]] || {
    echo "gpu_check: $build has no $name (see the head of this script)" >&2
    exit 2
  }
done

if [[ -n $pack ]]; then
  mkdir -p "$pack/lib"
  for binary in "$test_binary" "$bench_binary" "$tessera"; do
    strip -o "$pack/$(basename "$binary")" "$binary" || exit 1
  done
  # Every Linux has glibc and its loader; libstdc++ must not be older than ours.
  ldd "$test_binary" "$bench_binary" "$tessera" | awk '/=> \// {print $3}' | sort -u |
    grep -Ev '/(ld-linux|libc|libm|libdl|librt|libpthread|libcu|libnccl|libnv)[^/]*\.so' |
    xargs -r -I{} cp -L {} "$pack/lib/"
  du -sh "$pack"
  exit 0
fi

# ---- Is there a GPU? --------------------------------------------------------

if ! command -v nvidia-smi >/dev/null || ! nvidia-smi -L 2>/dev/null | grep -q GPU
then
  echo "gpu_check: skipped: this machine has no GPU (nvidia-smi names none); nothing ran"
  exit 0
fi

# ---- Libraries --------------------------------------------------------------

folders=$build/lib:${LD_LIBRARY_PATH:-}
for folder in /usr/local/cuda*/lib /usr/local/cuda*/lib64 \
    $(python3 -c '
import glob, site, sys
for base in site.getsitepackages():
    print("\n".join(glob.glob(base + "/nvidia/*/lib")))' 2>/dev/null); do
  [[ -d $folder ]] && folders=$folders:$folder
done
export LD_LIBRARY_PATH=$folders
missing=$(ldd "$test_binary" "$bench_binary" "$tessera" 2>&1 | grep -E 'not found' | sort -u)
if [[ -n $missing ]]; then
  echo "gpu_check: the binaries cannot start here:" >&2
  echo "$missing" >&2
  exit 1
fi

# ---- The parts --------------------------------------------------------------

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export TEST_TMPDIR=$work

# limit_of SECONDS: no more than is left of --time-limit.
limit_of() {
  local left=$((time_limit - SECONDS))
  echo $(($1 < left ? $1 : left))
}

# bounded GRACE SECONDS COMMAND…: as `timeout`, but 124 where that had to kill
# what went on for GRACE seconds more: 137 is one that something else has killed,
# as the kernel does for want of memory.
bounded() {
  local begin=$SECONDS status=0
  timeout --kill-after="$1" "$2" "${@:3}" || status=$?
  if ((status == 137 && SECONDS - begin >= $2)); then status=124; fi
  return "$status"
}
export -f bounded

# run_part NAME SECONDS COMMAND…
run_part() {
  local name=$1 limit
  limit=$(limit_of "$2")
  shift 2
  local begin end status
  if ((limit < 5)); then
    echo "no time is left" | tee "$work/$name.log"
    echo "77 0 0" >"$work/$name.status"
    return
  fi
  echo "== $name (at most $limit s)"
  begin=$(date +%s.%N)
  bounded 10 "$limit" "$@" >"$work/$name.log" 2>&1
  status=$?
  end=$(date +%s.%N)
  echo "$status $begin $end" >"$work/$name.status"
  tail -n 5 "$work/$name.log"
  echo "== $name: exit status $status"
}

# run_bench NAME SECONDS FILTER
run_bench() {
  run_part "$1" "$2" "$bench_binary" --benchmark_filter="$3" \
    --benchmark_min_time=0.1 --benchmark_repetitions=3 \
    --benchmark_report_aggregates_only=true \
    --benchmark_out="$work/$1.json" --benchmark_out_format=json
}

# run_tests NAME SECONDS FILTER
run_tests() {
  run_part "$1" "$2" "$test_binary" --gtest_filter="$3" --gtest_brief=1 \
    --gtest_output=json:"$work/$1.json"
}

# Each holds a kernel to the CPU's: by the cores of the host, a share of the
# tests in each process.
parity() {
  local filter='*CudaKernel*:*FusedKernel*:*ProductKernels*:*RankSum*'
  filter+=':CublasLtMatMulGpuTest.*:*RowsApart*:*KernelLimits*'
  filter+=':*LittleWorkspace*'
  local shares=$((($(nproc) + 1) / 2)) share failed=0
  ((shares > 8)) && shares=8
  local pids=()
  for ((share = 0; share < shares; ++share)); do
    GTEST_TOTAL_SHARDS=$shares GTEST_SHARD_INDEX=$share "$test_binary" \
      --gtest_filter="$filter" --gtest_brief=1 \
      --gtest_output=json:"$work/parity.$share.json" &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do wait "$pid" || failed=1; done
  return $failed
}
export -f parity

# run_parity NAME SECONDS BACKEND [--graph]: plans of tests/gpu/run_parity.py,
# which ends by itself.
run_parity() {
  local limit
  limit=$(limit_of "$2")
  run_part "$1" "$limit" python3 "$cd_root/tests/gpu/run_parity.py" \
    --tessera "$tessera" --examples "$cd_root/examples" --backend "$3" \
    --seconds "$((limit > 20 ? limit - 10 : limit / 2))" --out "$work/$1.json" "${@:4}"
}

# GPT-2 124M on one GPU without and with graphs: the same losses, and how long a
# step takes.
graph() {
  local flags=(run --backend cuda --nproc 1 --global-batch 16 --seq-len 1024
    --model "$cd_root/examples/models/gpt2/config.json" --dtype bf16
    --data "$cd_root/examples/data/gpl-3.txt" --strategy mbs=16 --steps 30
    --json)
  "$tessera" "${flags[@]}" >"$work/singly.json" &&
    "$tessera" "${flags[@]}" --graph >"$work/graphs.json" &&
    python3 - "$work" <<'PYTHON'
import json, sys

singly, graphs = (json.load(open(f"{sys.argv[1]}/{name}.json"))
                  for name in ("singly", "graphs"))
found = {"model": "gpt2-124m", "graphs": graphs["graphs"],
         "step_time_s": singly["step_time_s"],
         "step_time_with_graphs_s": graphs["step_time_s"],
         "losses_equal": singly["losses"] == graphs["losses"]}
print(json.dumps(found))
json.dump(found, open(f"{sys.argv[1]}/graph.json", "w"))
sys.exit(0 if found["losses_equal"] else 1)
PYTHON
}
export -f graph

# GPT-2 1558M without and with its optimizer, and its gradients, on the host: the
# same losses to rounding, and how long a step takes.
offload() {
  local flags=(run --backend cuda --nproc 1 --global-batch 16 --seq-len 1024
    --model "$cd_root/examples/models/gpt2-xl/config.json" --dtype bf16
    --set model.resid_pdrop=0 --set model.embd_pdrop=0 --set model.attn_pdrop=0
    --data "$cd_root/examples/data/gpl-3.txt" --steps 4 --json)
  "$tessera" "${flags[@]}" --strategy mbs=8 >"$work/on-gpu.json" &&
    "$tessera" "${flags[@]}" --strategy mbs=8,offload=optimizer:host \
      >"$work/optimizer-on-host.json" &&
    "$tessera" "${flags[@]}" >"$work/gradients-on-host.json" \
      --strategy mbs=8,offload=optimizer:host,gradients:host &&
    python3 - "$work" <<'PYTHON'
import json, sys

names = ["on-gpu", "optimizer-on-host", "gradients-on-host"]
runs = [json.load(open(f"{sys.argv[1]}/{name}.json")) for name in names]
worst = max(abs(a - b) for run in runs for a, b in zip(run["losses"],
                                                      runs[0]["losses"]))
found = {"model": "gpt2-1558m", "largest_difference_of_losses": worst,
         "step_time_s": {name: run["step_time_s"]
                         for name, run in zip(names, runs)}}
print(json.dumps(found))
json.dump(found, open(f"{sys.argv[1]}/offload.json", "w"))
sys.exit(0 if worst < 1e-2 else 1)
PYTHON
}
export -f offload

# GPT-2 124M, rounded at random: twice the same losses, and near those of
# rounding to nearest. And products chosen by time, which later runs read, of one
# rank and of two stages: then none are left to choose.
rounding() {
  local model=(run --global-batch 16 --seq-len 1024
    --model "$cd_root/examples/models/gpt2/config.json" --dtype bf16
    --set model.resid_pdrop=0 --set model.embd_pdrop=0 --set model.attn_pdrop=0
    --data "$cd_root/examples/data/gpl-3.txt" --deterministic --json)
  local flags=("${model[@]}" --backend cuda --nproc 1 --strategy mbs=16
    --steps 10)
  local stages=("${model[@]}" --backend cuda-loopback --nproc 2
    --strategy "pp=2,mbs=8" --steps 2 --tune "$work/products-of-stages")
  "$tessera" "${flags[@]}" >"$work/nearest.json" &&
    "$tessera" "${flags[@]}" --stochastic-rounding >"$work/random.json" &&
    "$tessera" "${flags[@]}" --stochastic-rounding >"$work/again.json" &&
    "$tessera" "${flags[@]}" --tune "$work/products" >"$work/chosen.json" &&
    cp "$work/products" "$work/products-of-first" &&
    "$tessera" "${flags[@]}" --tune "$work/products" >"$work/read.json" &&
    "$tessera" "${flags[@]}" --tune "$work/products" >"$work/reread.json" &&
    cmp "$work/products" "$work/products-of-first" &&
    "$tessera" "${stages[@]}" >"$work/stages.json" &&
    cp "$work/products-of-stages" "$work/products-of-first-stages" &&
    "$tessera" "${stages[@]}" >"$work/stages.json" &&
    cmp "$work/products-of-stages" "$work/products-of-first-stages" &&
    python3 - "$work" <<'PYTHON'
import json, sys

names = ["nearest", "random", "again", "chosen", "read", "reread"]
nearest, random, again, chosen, read, reread = (
    json.load(open(f"{sys.argv[1]}/{name}.json")) for name in names)
apart = max(abs(a - b) for a, b in zip(nearest["losses"], random["losses"]))
found = {"model": "gpt2-124m",
         "twice_the_same": random["losses"] == again["losses"],
         "largest_difference_to_nearest": apart,
         "step_s": {"nearest": nearest["step_time_s"],
                    "chosen": chosen["step_time_s"],
                    "read": read["step_time_s"]},
         "read_twice_the_same": read["losses"] == reread["losses"]}
print(json.dumps(found))
json.dump(found, open(f"{sys.argv[1]}/rounding.json", "w"))
sys.exit(0 if found["twice_the_same"] and 0 < apart < 0.1 and
         found["read_twice_the_same"] else 1)
PYTHON
}
export -f rounding
export tessera cd_root work

# sanitize SECONDS: small kernels under compute-sanitizer, which is ten to a
# hundred times slower: wrong addresses, then races of shared memory. It may not
# end by SIGTERM. What `timeout` runs is a group of processes of its own, which
# nobody else ends: each tool is killed before this part's time is over.
sanitize() {
  local sanitizer tool limit=$(($1 / 2 - 10))
  sanitizer=$(command -v compute-sanitizer ||
    ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | head -n 1)
  if [[ -z $sanitizer ]]; then
    echo "this machine has no compute-sanitizer"
    return 77
  fi
  if ((limit < 5)); then
    echo "no time is left"
    return 77
  fi
  for tool in memcheck racecheck; do
    echo "-- $tool"
    # Some tests provoke errors of CUDA's calls.
    bounded 5 "$limit" "$sanitizer" --tool "$tool" --report-api-errors no \
      --error-exitcode 1 \
      "$test_binary" --gtest_brief=1 \
      --gtest_filter='*RankSum*:DeviceGpuTest.*:*CudaKernel*:*FusedKernel*' ||
      return
  done
}
export -f sanitize
export test_binary

# run_pytorch NAME SECONDS OF_EACH FLAG…: against_pytorch.py, where there is a
# torch. A program that it runs has OF_EACH of these seconds.
run_pytorch() {
  local name=$1 limit of_each
  limit=$(limit_of "$2")
  of_each=$((limit * $3 / $2))
  shift 3
  if ! python3 -c 'import torch, numpy' 2>/dev/null; then
    run_part "$name" 5 bash -c 'echo "python3 has no torch here"; exit 77'
    return
  fi
  run_part "$name" "$limit" python3 "$cd_root/tests/bench/against_pytorch.py" \
    "$tessera" --backend cuda -o "$work/$name.json" \
    --time-limit "$((of_each < 1 ? 1 : of_each))" "$@"
  cat "$work/$name.json.log" >>"$work/$name.log" 2>/dev/null
}

# What plans of GPT-2 need, and the ladder as far as there is time. A file that
# is there is extended.
run_profile() {
  local file=$out.profile.pb
  if [[ -z $out ]]; then
    mkdir -p "$cd_root/profiler/profiles/tessera"
    file=$cd_root/profiler/profiles/tessera/$(nvidia-smi --query-gpu=name \
      --format=csv,noheader | head -n 1 | tr '[:upper:] ' '[:lower:]-').pb
  fi
  local limit
  limit=$(limit_of 200)
  run_part profile "$limit" "$tessera" profile --backend cuda --nproc 1 \
    --model "$cd_root/examples/models/gpt2/config.json" --global-batch 16 \
    --seq-len 1024 --dtype bf16 \
    --time-limit "$((limit < 2 ? 1 : limit * 3 / 5))" -o "$file"
}

# GPT-2 124M on one GPU: where the time of a step goes, by kernel and size.
step() {
  "$tessera" run --backend cuda --nproc 1 --global-batch 32 --seq-len 1024 \
    --model "$cd_root/examples/models/gpt2/config.json" --dtype bf16 \
    --data "$cd_root/examples/data/gpl-3.txt" --strategy mbs=32 --steps 12 \
    --compare "$@"
}
export -f step

run() {
  local part=$1
  case $part in
    profile) run_profile ;;
    step) run_part step 100 bash -c step ;;
    discover)
      run_part discover 60 "$tessera" discover -o "$work/cluster.txtpb" ;;
    losses)
      run_pytorch losses 300 140 --losses --dtype bf16 ;;
    training)
      # shellcheck disable=SC2086
      run_pytorch training 590 55 --speed --steps 12 \
        --try=--graph "--try=--graph --tune" ${TRAINING:-} ;;
    device)
      run_tests device 120 'CudaArenaTest.*:CudaDeviceTest.*:DeviceGpuTest.*' ;;
    parity) run_part parity 300 bash -c parity ;;
    nccl) run_tests nccl 400 '*Nccl*GpuTest.*' ;;
    run) run_parity run 400 cuda-loopback ;;
    run-graph) run_parity run-graph 300 cuda-loopback --graph ;;
    check)
      run_part check 120 "$tessera" run --backend cuda --nproc 1 --dtype bf16 \
        --model "$cd_root/examples/models/gpt2-tiny/config.json" \
        --data "$cd_root/examples/data/gpl-3.txt" --global-batch 8 \
        --seq-len 64 --steps 5 --check 5 ;;
    graph) run_part graph 200 bash -c graph ;;
    offload) run_part offload 200 bash -c offload ;;
    rounding) run_part rounding 120 bash -c rounding ;;
    run-nccl) run_parity run-nccl 300 cuda ;;
    sanitize)
      run_part sanitize 600 bash -c "sanitize $(limit_of 600)" ;;
    copy)
      run_bench copy 120 '^(Copy|CopyHalfRows|Zero|Write|Read|Allocate|EnqueueAllReduce)' ;;
    kernels)
      run_bench kernels 300 '^Kernel' ;;
    matmul)
      run_bench matmul 400 '^MatMul/' ;;
    attention)
      run_bench attention 300 '^Attention/' ;;
  esac
}

ran=()
for part in "${checks[@]}"; do
  [[ " ${parts[*]} " == *" $part "* ]] || continue
  run "$part" &
  ran+=("$part")
done
wait
for part in "${measurements[@]}"; do
  [[ " ${parts[*]} " == *" $part "* ]] || continue
  run "$part"
  ran+=("$part")
done
parts=("${ran[@]}")

# ---- The results ------------------------------------------------------------

python3 - "$work" "$cd_root/tests/bench/results" "$out" "${parts[@]}" <<'PYTHON'
import datetime, json, pathlib, re, subprocess, sys

work, results, out = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3]


def query(fields):
    text = subprocess.run(
        ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"],
        capture_output=True, text=True).stdout.strip()
    return [field.strip() for field in text.splitlines()[0].split(",")]


COUNTERS = ["bytes_per_second", "flops", "first_us", "best_us"]


def rows_of(name):
    path = work / f"{name}.json"
    try:
        return json.loads(path.read_text())["rows"]
    except (OSError, json.JSONDecodeError):  # did not run, or was cut off
        return []


def against_pytorch(name, field, otherwise):
    try:
        return json.loads((work / f"{name}.json").read_text())[field]
    except (OSError, json.JSONDecodeError, KeyError):
        return otherwise


def measured(name):
    """What a part's own JSON file says, in short."""
    if name == "discover":
        return {"output": (work / "discover.log").read_text(errors="replace")}
    paths = [*work.glob(f"{name}.json"), *work.glob(f"{name}.[0-9].json")]
    try:
        files = [json.loads(path.read_text()) for path in paths]
    except json.JSONDecodeError:  # cut off
        return {}
    if not files:
        return {}
    data = files[0]
    if "training" in data:  # stands beside the parts
        return {}
    if name in ("graph", "offload", "rounding"):
        return data
    if "rows" in data:
        return {"plans": len(data["rows"]), "plans_failed": [
            f"{row['ranks']}:{row['plan']}" for row in data["rows"]
            if not row["ok"]]}
    if "benchmarks" in data:
        return {"benchmarks": [
            {"name": row["run_name"], "seconds": row["real_time"] * 1e-9,
             **{key: row[key] for key in COUNTERS if key in row}}
            for row in data["benchmarks"]
            if row.get("aggregate_name") == "median"]}
    failed, ran, skipped = [], 0, []
    for suite in (suite for file in files for suite in file["testsuites"]):
        for test in suite["testsuite"]:
            name = f"{suite['name']}.{test['name']}"
            if test["result"] == "SKIPPED":
                skipped.append(name)
            else:
                ran += 1
            if test.get("failures"):
                failed.append(name)
    return {"tests_run": ran, "tests_failed": failed, "tests_skipped": skipped}


parts, bad = [], False
for name in sys.argv[4:]:
    code, begin, end = (work / f"{name}.status").read_text().split()
    log = (work / f"{name}.log").read_text(errors="replace")
    status = {"0": "passed", "77": "skipped",
              "124": "timed out"}.get(code, "failed")
    part = {"part": name, "status": status,
            "seconds": round(float(end) - float(begin), 3), **measured(name)}
    # A binary that finds no GPU where nvidia-smi finds one passes nothing.
    if status in ("passed", "skipped") and (part.get("tests_skipped") or
                                            "no CUDA device" in log):
        part["status"] = status = "failed"
    if status not in ("passed", "skipped"):
        bad = True
        part["exit_status"] = int(code)
        part["output_tail"] = log[-4000:]
    parts.append(part)

device, driver, memory = query("name,driver_version,memory.total")
versions = {}
log = work / "nccl.log"
found = re.search(r"NCCL (\d+\.\d+\.\d+)",
                  log.read_text(errors="replace") if log.exists() else "")
if found:
    versions["nccl"] = found[1]
found = re.search(r"CUDA Version: *([\d.]+)", subprocess.run(
    ["nvidia-smi"], capture_output=True, text=True).stdout)
if found:
    versions["cuda_driver"] = found[1]
date = datetime.datetime.now(datetime.timezone.utc)
document = {"device": device, "memory": memory, "driver": driver,
            "date": date.isoformat(timespec="seconds"), "versions": versions,
            "parts": parts, "parity": rows_of("run"),
            "parity_graph": rows_of("run-graph"),
            "nccl": rows_of("run-nccl"),
            "losses": against_pytorch("losses", "losses", None),
            "training": against_pytorch("training", "training", [])}
if not out:
    slug = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    out = f"{results}/{slug}-{date:%Y-%m-%d}.json"
path = pathlib.Path(out)
path.parent.mkdir(parents=True, exist_ok=True)
beside = path.with_suffix(".json.part")
beside.write_text(json.dumps(document, indent=2) + "\n")
beside.rename(path)
with open(path.with_suffix(".json.log"), "w", encoding="utf-8") as logs:
    for name in sys.argv[4:]:
        log = (work / f"{name}.log").read_text(errors="replace")
        logs.write(f"==== {name}\n{log[-1_000_000:]}\n")
for part in parts:
    print(f"{part['part']}: {part['status']} in {part['seconds']} s")
print(f"wrote {path}")
sys.exit(1 if bad else 0)
PYTHON
