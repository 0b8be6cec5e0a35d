// Plans of the zoo's models priced as edits of one another, as the search does,
// against plans priced as wholes (tests/support/delta_walk.h); kUsage has the
// flags. Prints a line for each model: how many differ, and the microseconds of
// a candidate priced as an edit, as a whole by an evaluator that remembers as
// much, and lowered and simulated from nothing. Exits with 1 where any differs.

#include <algorithm>
#include <cstdio>
#include <string>

#include "tests/support/delta_walk.h"
#include "tests/support/number_flags.h"

namespace tessera {
namespace {

// Candidates of small models take less: so many times as many.
constexpr int64_t kSmall = 16;

constexpr testing::DeltaCase kLarge[] = {
    {"alexnet", 4096, 0, DType::kFloat32, "k80-fdr:4"},
    {"vgg16", 1024, 0, DType::kFloat32, "p100-edr:4"},
    {"inception-v3", 1024, 0, DType::kFloat32, "p100-edr:4"},
    {"resnet-101", 1024, 0, DType::kFloat32, "k80-fdr:4"},
    {"vit-base-patch16-224", 1024, 0, DType::kBFloat16, "dgx-a100-80gb:1"},
    {"rnntc", 1024, 0, DType::kFloat32, "p100-edr:4"},
    {"rnnlm", 1024, 0, DType::kFloat32, "k80-fdr:4"},
    {"nmt", 1024, 0, DType::kFloat32, "k80-fdr:4"},
    {"nmt", 4096, 0, DType::kFloat32, "k80-fdr:16"},
    {"dlrm", 4096, 0, DType::kFloat32, "dgx-a100-80gb:1"},
    {"bert-large", 256, 512, DType::kFloat16, "dgx1-v100-32gb:2"},
    {"t5-base", 96, 512, DType::kBFloat16, "g5.48xlarge:3"},
    {"gpt2-xl", 512, 1024, DType::kBFloat16, "dgx-a100-80gb:4"},
    {"llama-3-8b", 256, 4096, DType::kBFloat16, "dgx-h100:4"},
    {"mixtral-8x7b", 256, 4096, DType::kBFloat16, "dgx-h100:8"},
    {"gpt3-175b", 1536, 2048, DType::kBFloat16, "dgx-a100-80gb:128"},
};

struct Settings {
  int64_t candidates = 200;
  int64_t seed = 0;
  int64_t simulate = 50;
};

int Run(const Settings& settings) {
  std::printf("%-22s %-18s %10s %9s %9s %12s %12s %12s %7s %9s\n", "model",
              "cluster", "candidates", "accepted", "different", "change, us",
              "whole, us", "simulated", "whole/", "simulated/");
  int64_t different = 0;
  const auto run = [&](const testing::DeltaCase& c, int64_t candidates) {
    const testing::DeltaWalk walk = testing::WalkByDeltas(
        c, static_cast<uint64_t>(settings.seed), candidates, settings.simulate);
    different += walk.different;
    const double change = walk.change_s / static_cast<double>(walk.candidates);
    const double whole = walk.whole_s / static_cast<double>(walk.candidates);
    const double simulated =
        walk.simulated_s /
        static_cast<double>(std::max<int64_t>(1, walk.simulated));
    std::printf(
        "%-22s %-18s %10lld %9lld %9lld %12.1f %12.1f %12.1f %7.1f %9.1f\n",
        c.model, c.cluster, static_cast<long long>(walk.candidates),
        static_cast<long long>(walk.accepted),
        static_cast<long long>(walk.different), change * 1e6, whole * 1e6,
        simulated * 1e6, whole / change, simulated / change);
    for (const std::string& difference : walk.differences) {
      std::printf("  %s\n", difference.c_str());
    }
    std::fflush(stdout);
  };
  for (const testing::DeltaCase& c : testing::SmallDeltaCases()) {
    run(c, kSmall * settings.candidates);
  }
  for (const testing::DeltaCase& c : kLarge) run(c, settings.candidates);
  return different == 0 ? 0 : 1;
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  constexpr const char* kUsage =
      "usage: tessera_delta [FLAG N]...\n"
      "  --candidates N  of each model, 16 times as many of small ones (200)\n"
      "  --seed N        of the walks (0)\n"
      "  --simulate N    every N-th is simulated from nothing, too (50)\n";
  tessera::Settings settings;
  const tessera::testing::NumberFlag flags[] = {
      {"--candidates", &settings.candidates},
      {"--seed", &settings.seed},
      {"--simulate", &settings.simulate}};
  if (const auto code =
          tessera::testing::ReadNumberFlags(argc, argv, flags, kUsage)) {
    return *code;
  }
  return tessera::Run(settings);
}
