#include "tools/origin.h"

#include <ctime>

#include "profiler/machine.h"

namespace tessera {
namespace {

std::string Today() {
  const std::time_t now = std::time(nullptr);
  std::tm utc = {};
  gmtime_r(&now, &utc);
  char text[16];
  std::strftime(text, sizeof(text), "%Y-%m-%d", &utc);
  return text;
}

}  // namespace

ProfileOrigin OriginOf(int ranks, const std::string& devices) {
  const Machine machine = ReadMachine();
  ProfileOrigin origin;
  origin.host = (machine.cpu.empty() ? "unknown CPU" : machine.cpu) + ", " +
                std::to_string(machine.cpus) + " cores";
  if (!devices.empty()) origin.host += ", " + devices;
  origin.date = Today();
  origin.libraries = "tessera's kernels, compiled by GCC " __VERSION__;
  origin.ranks_at_once = ranks;
  return origin;
}

}  // namespace tessera
