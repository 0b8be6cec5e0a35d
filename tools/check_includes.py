#!/usr/bin/env python3
"""Checks who includes whom, against the table of CONTRIBUTING.md.

Prints `file:line: rule` for every include that breaks a rule; exit status 1 if
there is one. With file names as arguments it checks only those.
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent

# Room -> rooms whose headers it may include, besides its own.
ROOMS = {
    "planner": [],
    "costmodel": ["planner"],
    "runtime": ["planner"],
    "profiler": ["planner", "costmodel", "runtime"],
    "tools": ["planner", "costmodel", "runtime", "profiler"],
    "tests": ["planner", "costmodel", "runtime", "profiler", "tools"],
}

# The same for the folders inside planner.
PLANNER = {
    "base": [],
    "ir": ["base"],
    "ops": ["base", "ir"],
    "topology": ["base", "ir"],
    "schedule": ["base", "ir"],
    "plan": ["base", "ir", "ops", "schedule"],
    "lower": ["base", "ir", "ops", "plan", "schedule"],
    "search": ["base", "ir", "ops", "plan", "schedule"],
    "io": ["base", "ir", "ops", "topology", "schedule", "plan", "lower",
           "search"],
}

KERNELS = r"^runtime/kernels/cpu/"

# Header -> the files that may include it, and why no others may.
LIBRARIES = [
    (r".*\.pb\.h", r"_io(_test)?\.cc$",
     "protobuf is the file format: only files named *_io.cc include it"),
    (r"google/protobuf/.*", r"_io(_test)?\.(cc|h)$",
     "protobuf is the file format: only files named *_io include it"),
    (r"Eigen/.*", KERNELS,
     "only runtime/kernels/cpu includes Eigen, whose inline functions depend "
     "on the instruction set that this folder alone is compiled for"),
    (r"boost/.*", r"^(planner|costmodel)/.*\.cc$",
     "Boost stays out of headers and of all rooms but planner and costmodel"),
    (r"cuda.*|cublas.*|nccl.*",
     r"\.cu$|/kernels/cuda/|/device/cuda_|/comm/(nccl|cuda)_|"
     r"^tests/(gpu|emulation)/",
     "CUDA and NCCL only in the files that a build without them leaves out "
     "(see runtime/CMakeLists.txt)"),
]

INCLUDE = re.compile(r'\s*#\s*include\s*(["<])([^">]+)[">]')


def broken_rule(file, quote, header):
    """The rule that `file` breaks by including `header`, or None."""
    for headers, files, rule in LIBRARIES:
        if re.fullmatch(headers, header) and not re.search(files, file):
            return rule
    if quote == "<" or header.endswith(".pb.h"):
        return None
    room, target = file.split("/")[0], header.split("/")[0]
    if target not in ROOMS:
        return "quoted includes start at the root of the repository"
    if target != room and target not in ROOMS[room]:
        return f"{room} does not include {target}"
    if room == target == "planner":
        room, target = file.split("/")[1], header.split("/")[1]
        if target != room and target not in PLANNER[room]:
            return f"planner/{room} does not include planner/{target}"
    if re.search(KERNELS, header) and not re.search(KERNELS, file):
        target = ROOT / header
        if target.exists() and "#include <Eigen/" in target.read_text():
            return "headers with Eigen stay inside runtime/kernels/cpu"
    return None


def main(arguments):
    files = [pathlib.Path(name).resolve() for name in arguments] or [
        path for room in ROOMS for path in sorted((ROOT / room).rglob("*"))]
    broken = 0
    for path in files:
        if path.suffix not in (".h", ".cc", ".cu", ".cuh", ".def"):
            continue
        file = path.relative_to(ROOT).as_posix()
        lines = path.read_text(encoding="utf-8").splitlines()
        for number, line in enumerate(lines, start=1):
            match = INCLUDE.match(line)
            rule = match and broken_rule(file, *match.groups())
            if rule:
                print(f"{file}:{number}: {match[2]}: {rule}")
                broken += 1
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
