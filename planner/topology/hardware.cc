#include "planner/topology/hardware.h"

#include <algorithm>
#include <vector>

#include "planner/topology/fitted_links.h"
#include "planner/topology/upkeep.h"

namespace tessera {
namespace {

constexpr double kTera = 1e12;
constexpr double kGiga = 1e9;
constexpr int64_t kGB = 1'000'000'000;

// The total that nvidia-smi prints for the device (of A10G, L4 and T4: pull
// request 2797 of modal-labs/modal-client, 2025), less 1 GiB for the CUDA
// context and the libraries' own buffers (assumed).
Bytes LessContext(int64_t nvidia_smi_mib) {
  return UsableMemory({nvidia_smi_mib * (int64_t{1} << 20)});
}

// Streaming kernels reach about nine tenths of the peak of HBM and GDDR
// (STREAM-like copies; assumed, there is no table of it). Profiles replace it.
constexpr double kStreaming = 0.90;

// A GPU's figures in the units of its datasheet: memory as nvidia-smi prints
// it, GB/s, TFLOP/s.
struct GpuRow {
  std::string_view name;
  std::string source;
  GpuGeneration generation;
  int multiprocessors;
  int64_t memory_mib;
  double bandwidth;
  double fp64, fp32, bf16, fp16, fp8;
  // What large 16-bit products reach of the peak (fp32 where there are none).
  double efficiency;
  double fp4 = 0;
  double sustained = 0;
};

DeviceType Gpu(const GpuRow& row) {
  DeviceType type;
  type.name = row.name;
  type.source = row.source;
  type.memory = LessContext(row.memory_mib);
  type.memory_bandwidth = {row.bandwidth * kGiga};
  type.generation = row.generation;
  type.multiprocessors = row.multiprocessors;
  type.peak_fp64 = {row.fp64 * kTera};
  type.peak_fp32 = {row.fp32 * kTera};
  type.peak_bf16 = {row.bf16 * kTera};
  type.peak_fp16 = {row.fp16 * kTera};
  type.peak_fp8 = {row.fp8 * kTera};
  type.peak_fp4 = {row.fp4 * kTera};
  type.compute_efficiency = row.efficiency;
  type.sustained_rate = row.sustained;
  type.memory_efficiency = kStreaming;
  type.launch_overhead = KernelFloor(row.generation);
  return type;
}

// Blackwell under the load of whole steps. Large bf16 products of SimuMax's
// B200, timed one after the other, take 1.455 times as long as NVIDIA
// aiconfigurator's, timed with pauses (tools/fit_kernels.py prints both): its
// limit is the board's watts. Those that do not follow the clock, 300 (assumed:
// memory, links, leakage), are the same on all; the others go with the rate.
// `unloaded` is the rate of large products after a pause, over B200's.
double SustainedOfBlackwell(std::string_view device, double unloaded) {
  constexpr std::string_view kMeasured = "b200-sxm-180gb";
  constexpr double kRate = 1 / 1.455;
  constexpr double kOtherWatts = 300;
  const double rate = kRate * (BoardWatts(device) - kOtherWatts) /
                      (BoardWatts(kMeasured) - kOtherWatts) / unloaded;
  return std::min(rate, 1.0);
}

// Peaks are dense, fp64 by tensor cores where there are some, fp32 without
// TF32, 16- and 8-bit types with fp32 sums. Numbers of multiprocessors are
// those of the product's whitepaper, or what CUDA reports of the device.
std::vector<GpuRow> MakeGpus() {
  using enum GpuGeneration;
  const std::string large =
      "; efficiency: median of large bf16 products in NVIDIA aiconfigurator, ";
  const std::string a100 = large + "262 of 312 TFLOP/s";
  const std::string h100 = large + "767 of 989.4 TFLOP/s";
  const std::string h200 = large + "760 of 989.4 TFLOP/s";
  const std::string b200 = large + "1,481 of 2,250 TFLOP/s";
  const std::string gb200 = large + "1,620 of 2,500 TFLOP/s";
  const std::string v100 =
      "; efficiency: DeepBench V100, 90th percentile of fp16 training products "
      "105 of 125 TFLOP/s";
  const std::string p100 =
      "; efficiency: DeepBench P100, 90th percentile of fp32 training products "
      "9.0 of 10.6 TFLOP/s";
  const std::string a100_pcie =
      "; efficiency: median of large bf16 products in SimuMax's table, 227 of "
      "312 TFLOP/s (vidur's: 222)";
  const std::string a40 =
      "median of large fp16 products on A40 in vidur's table, 112 of 149.7 "
      "TFLOP/s";
  const std::string t4 =
      "; efficiency: DeepBench T4, median of large fp16 products, 38.9 of 65 "
      "TFLOP/s";
  constexpr double kA100 = 262.0 / 312;
  constexpr double kA100Pcie = 227.0 / 312;
  constexpr double kA40 = 112 / 149.7;
  constexpr double kT4 = 38.9 / 65;
  constexpr double kL40s = 205.0 / 362;
  constexpr double kH100 = 767 / 989.4;
  constexpr double kH200 = 760 / 989.4;
  constexpr double kB200 = 1481.0 / 2250;
  constexpr double kGb200 = 1620.0 / 2500;
  constexpr double kV100 = 105.0 / 125;
  // DeepBench times products after a pause, and 300 W do not last. Of 0.65 to 1
  // the least mean error over the runs of BigScience and of Alpa on V100, under
  // stacks that reach 0.95 on A100.
  constexpr double kV100Sustained = 0.76;
  constexpr double kP100 = 9.0 / 10.6;
  return {
      {"a100-sxm4-40gb", "NVIDIA A100 datasheet (2020)" + a100, kAmpere, 108,
       40536, 1555, 19.5, 19.5, 312, 312, 0, kA100},
      {"a100-sxm4-80gb", "NVIDIA A100 datasheet (2021)" + a100, kAmpere, 108,
       81251, 2039, 19.5, 19.5, 312, 312, 0, kA100},
      {"a100-pcie-40gb", "NVIDIA A100 datasheet (2020), PCIe" + a100_pcie,
       kAmpere, 108, 40536, 1555, 19.5, 19.5, 312, 312, 0, kA100Pcie},
      {"a100-pcie-80gb", "NVIDIA A100 datasheet (2021), PCIe" + a100_pcie,
       kAmpere, 108, 81251, 1935, 19.5, 19.5, 312, 312, 0, kA100Pcie},
      {"a800-sxm4-40gb",
       "A100 with fewer NVLinks (Reuters, November 2022)" + a100, kAmpere, 108,
       40536, 1555, 19.5, 19.5, 312, 312, 0, kA100},
      {"a800-sxm4-80gb",
       "A100 with fewer NVLinks (Reuters, November 2022)" + a100, kAmpere, 108,
       81251, 2039, 19.5, 19.5, 312, 312, 0, kA100},
      {"h100-sxm5-80gb", "NVIDIA H100 datasheet (2023)" + h100, kHopper, 132,
       81559, 3350, 67, 67, 989.4, 989.4, 1978.9, kH100},
      {"h100-sxm5-96gb",
       "H100 SXM with 96 GB of HBM2e, 2.4 TB/s (pytorch/torchtitan "
       "benchmarks/llama3_h100_202412_torchtitan.md: Meta's Grand Teton, power "
       "limited to 500 W, which is not in these figures); the rest as H100 "
       "SXM" +
           h100,
       kHopper, 132, 97871, 2400, 67, 67, 989.4, 989.4, 1978.9, kH100},
      {"gh200-96gb",
       "NVIDIA GH200 (2023): 96 GB of HBM3, 4 TB/s; the rest as H100 SXM" +
           h100,
       kHopper, 132, 97871, 4000, 67, 67, 989.4, 989.4, 1978.9, kH100},
      {"gh200-144gb",
       "NVIDIA GH200 (2024): 144 GB of HBM3e, 4.9 TB/s; the rest as H100 SXM" +
           h100,
       kHopper, 132, 146831, 4900, 67, 67, 989.4, 989.4, 1978.9, kH100},
      {"h100-pcie-80gb",
       "NVIDIA H100 PCIe product brief (2022); efficiency: as H100 SXM",
       kHopper, 114, 81559, 2000, 51, 51, 756.5, 756.5, 1513, kH100},
      {"h100-nvl-94gb",
       "NVIDIA H100 datasheet (2024), NVL; efficiency: as H100 SXM", kHopper,
       132, 95830, 3900, 60, 60, 835.5, 835.5, 1671, kH100},
      {"h800-sxm5-80gb",
       "H100 with fewer NVLinks and 1 TFLOP/s of fp64 (DeepSeek-V3 report, "
       "2024)" +
           h100,
       kHopper, 132, 81559, 3350, 1, 67, 989.4, 989.4, 1978.9, kH100},
      {"h20-96gb",
       "NVIDIA H20 specifications (2023): 4.0 TB/s, 148 TFLOP/s bf16, 296 fp8; "
       "efficiency: assumed 0.9, its clock being held down by licence and not "
       "by power",
       kHopper, 78, 97871, 4000, 1, 44, 148, 148, 296, 0.9},
      {"h200-sxm5-141gb", "NVIDIA H200 datasheet (2024)" + h200, kHopper, 132,
       143771, 4800, 67, 67, 989.4, 989.4, 1978.9, kH200},
      {"b200-sxm-180gb",
       "NVIDIA DGX B200 datasheet (2024): 1,440 GB, 64 TB/s, 18 PFLOP/s dense "
       "bf16, 36 fp8, 296 TFLOP/s fp64, 600 TFLOP/s fp32 over 8 GPUs" +
           b200,
       kBlackwell, 148, 183359, 8000, 37, 75, 2250, 2250, 4500, kB200, 9000,
       SustainedOfBlackwell("b200-sxm-180gb", 1)},
      {"gb200-186gb",
       "NVIDIA GB200 NVL72 datasheet (2024): 13.4 TB, 576 TB/s, 180 PFLOP/s "
       "dense bf16, 360 fp8, 2,880 TFLOP/s fp64, 5,760 TFLOP/s fp32 over 72 "
       "GPUs" +
           gb200,
       kBlackwell, 152, 189471, 8000, 40, 80, 2500, 2500, 5000, kGb200, 10000,
       SustainedOfBlackwell("gb200-186gb", kGb200 * 2500 / (kB200 * 2250))},
      {"b300-sxm-288gb",
       "NVIDIA DGX B300 datasheet (2025): 2.3 TB, 64 TB/s, 36 PFLOP/s dense "
       "fp8 over 8 GPUs; bf16 half of it; fp64 10 TFLOP/s over 8; fp32 as "
       "B200; efficiency: as B200",
       kBlackwell, 148, 274658, 8000, 1.25, 75, 2250, 2250, 4500, kB200, 13500,
       SustainedOfBlackwell("b300-sxm-288gb", 1)},
      {"gb300-288gb",
       "NVIDIA GB300 NVL72 datasheet (2025): 20 TB, 576 TB/s, 360 PFLOP/s "
       "dense fp8, 180 bf16, 100 TFLOP/s fp64 over 72 GPUs; fp32 as GB200; "
       "efficiency: as GB200",
       kBlackwell, 152, 264909, 8000, 1.39, 80, 2500, 2500, 5000, kGb200, 15000,
       SustainedOfBlackwell("gb300-288gb", kGb200 * 2500 / (kB200 * 2250))},
      {"v100-sxm2-16gb", "NVIDIA V100 datasheet (2018)" + v100, kVolta, 80,
       16160, 900, 7.8, 15.7, 0, 125, 0, kV100, 0, kV100Sustained},
      {"v100-sxm2-32gb", "NVIDIA V100 datasheet (2018)" + v100, kVolta, 80,
       32510, 900, 7.8, 15.7, 0, 125, 0, kV100, 0, kV100Sustained},
      {"v100s-pcie-32gb",
       "NVIDIA V100 datasheet (2020), V100S: 1,134 GB/s, 16.4 TFLOP/s fp32, "
       "130 fp16" +
           v100,
       kVolta, 80, 32510, 1134, 8.2, 16.4, 0, 130, 0, kV100, 0, kV100Sustained},
      {"titan-v-12gb",
       "NVIDIA TITAN V (2017): 653 GB/s, 14.9 TFLOP/s fp32, 110 fp16; memory "
       "nominal" +
           v100,
       kVolta, 80, 12288, 653, 7.45, 14.9, 0, 110, 0, kV100, 0, kV100Sustained},
      {"v100-pcie-16gb", "NVIDIA V100 datasheet (2018), PCIe" + v100, kVolta,
       80, 16160, 900, 7, 14, 0, 112, 0, kV100, 0, kV100Sustained},
      {"v100-pcie-32gb", "NVIDIA V100 datasheet (2018), PCIe" + v100, kVolta,
       80, 32510, 900, 7, 14, 0, 112, 0, kV100, 0, kV100Sustained},
      {"titan-rtx-24gb",
       "NVIDIA Turing architecture whitepaper (2018) and TITAN RTX product "
       "page; efficiency: as V100",
       kTuring, 72, 24220, 672, 0.51, 16.3, 0, 130.5, 0, kV100},
      {"quadro-rtx-8000-48gb", "as titan-rtx-24gb, with 48 GB (nominal)",
       kTuring, 72, 49152, 672, 0.51, 16.3, 0, 130.5, 0, kV100},
      {"rtx-2080-ti-11gb",
       "NVIDIA Turing architecture whitepaper (2018): 616 GB/s, 13.4 TFLOP/s "
       "fp32, 53.8 fp16 with fp32 sums; memory nominal; efficiency: as V100",
       kTuring, 68, 11264, 616, 0.42, 13.4, 0, 53.8, 0, kV100},
      {"a10-24gb",
       "NVIDIA A10 datasheet (2021): 600 GB/s, 31.2 TFLOP/s fp32, 125 bf16; "
       "fp64 1/64 of fp32 (GA102 whitepaper); memory as A10G; efficiency: as "
       "A40, " +
           a40,
       kAmpere, 72, 23028, 600, 0.49, 31.2, 125, 125, 0, kA40},
      {"a30-24gb",
       "NVIDIA A30 datasheet (2021): 933 GB/s, 10.3 TFLOP/s fp32 and fp64, 165 "
       "bf16; memory nominal" +
           a100_pcie,
       kAmpere, 56, 24576, 933, 10.3, 10.3, 165, 165, 0, kA100Pcie},
      {"rtx-a6000-48gb",
       "NVIDIA RTX A6000 datasheet (2020): 768 GB/s, 38.7 TFLOP/s fp32, 154.8 "
       "bf16; fp64 1/64 of fp32; memory as A40; efficiency: as A40, " +
           a40,
       kAmpere, 84, 46068, 768, 0.60, 38.7, 154.8, 154.8, 0, kA40},
      {"a10g-24gb",
       "NVIDIA A10G datasheet for AWS (2022): 600 GB/s, 35 TFLOP/s fp32, 70 "
       "bf16; fp64 1/64 of fp32 (GA102 whitepaper); efficiency: as A40, " +
           a40,
       kAmpere, 80, 23028, 600, 0.55, 35, 70, 70, 0, kA40},
      {"a40-48gb",
       "NVIDIA A40 datasheet (2021): 696 GB/s, 37.4 TFLOP/s fp32, 149.7 bf16; "
       "fp64 1/64 of fp32; efficiency: " +
           a40,
       kAmpere, 84, 46068, 696, 0.58, 37.4, 149.7, 149.7, 0, kA40},
      {"rtx-3090-24gb",
       "NVIDIA GA102 whitepaper (2021): 936 GB/s, 35.6 TFLOP/s fp32, 71 bf16; "
       "efficiency: as A40, " +
           a40,
       kAmpere, 82, 24576, 936, 0.56, 35.6, 71, 71, 0, kA40},
      {"l4-24gb",
       "NVIDIA L4 datasheet (2023): 300 GB/s, 30.3 TFLOP/s fp32, 242 bf16 and "
       "485 fp8 with sparsity; fp64 1/64 of fp32; efficiency: assumed as L40S",
       kAda, 58, 23034, 300, 0.47, 30.3, 121, 121, 242.5, kL40s},
      {"l40s-48gb",
       "NVIDIA L40S datasheet (2023): 864 GB/s, 91.6 TFLOP/s fp32, 362 bf16, "
       "733 fp8; fp64 1/64 of fp32" +
           large + "205 of 362 TFLOP/s",
       kAda, 142, 46068, 864, 1.43, 91.6, 362, 362, 733, kL40s},
      {"l40-48gb",
       "NVIDIA L40 datasheet (2022): 864 GB/s, 90.5 TFLOP/s fp32, 181 bf16, "
       "362 fp8; fp64 1/64 of fp32; efficiency: assumed as A40",
       kAda, 142, 46068, 864, 1.41, 90.5, 181, 181, 362, kA40},
      {"rtx-6000-ada-48gb",
       "NVIDIA RTX 6000 Ada datasheet (2022): 960 GB/s, 91.1 TFLOP/s fp32, 364 "
       "bf16, 728 fp8; fp64 1/64 of fp32; memory and efficiency as L40S",
       kAda, 142, 46068, 960, 1.42, 91.1, 364, 364, 728, kL40s},
      {"rtx-5090-32gb",
       "NVIDIA RTX Blackwell whitepaper (2025): 1,792 GB/s, 170 "
       "multiprocessors, 104.8 TFLOP/s fp32, 209.5 bf16, 419 fp8, 1,676 fp4 "
       "with fp32 sums; fp64 1/64 of fp32; memory nominal; efficiency: assumed "
       "as A40",
       kAda, 170, 32607, 1792, 1.64, 104.8, 209.5, 209.5, 419, kA40, 1676},
      {"rtx-pro-6000-96gb",
       "NVIDIA RTX PRO 6000 Blackwell (2025): 1,792 GB/s, 188 "
       "multiprocessors, 125 TFLOP/s fp32, 2,000 TFLOP/s fp4; bf16 a quarter "
       "and fp8 half of it; fp64 1/64 of fp32; memory nominal; efficiency: "
       "assumed as L40S",
       kAda, 188, 97887, 1792, 1.95, 125, 503.8, 503.8, 1007.6, kL40s, 2015},
      {"rtx-4090-24gb",
       "NVIDIA Ada whitepaper (2022): 1,008 GB/s, 82.6 TFLOP/s fp32, 165.2 "
       "bf16, 330.3 fp8; efficiency: assumed as A40",
       kAda, 128, 24564, 1008, 1.29, 82.6, 165.2, 165.2, 330.3, kA40},
      {"t4-16gb",
       "NVIDIA T4 datasheet (2018): 320 GB/s, 8.1 TFLOP/s fp32, 65 fp16; fp64 "
       "1/32 of fp32 (Turing whitepaper)" +
           t4,
       kTuring, 40, 15360, 320, 0.25, 8.1, 0, 65, 0, kT4},
      {"p100-sxm2-16gb", "NVIDIA P100 datasheet (2016)" + p100, kPascal, 56,
       16280, 732, 5.3, 10.6, 0, 21.2, 0, kP100},
      {"p40-24gb",
       "NVIDIA P40 datasheet (2016): 346 GB/s, 11.8 TFLOP/s fp32; fp16 as "
       "fp32; "
       "memory nominal" +
           p100,
       kPascal, 30, 24576, 346, 0.37, 11.8, 0, 11.8, 0, kP100},
      {"gtx-1080-ti-11gb",
       "NVIDIA GTX 1080 Ti (2017): 484 GB/s, 11.3 TFLOP/s fp32; fp16 as fp32; "
       "memory nominal" +
           p100,
       kPascal, 28, 11264, 484, 0.35, 11.3, 0, 11.3, 0, kP100},
      {"p100-pcie-16gb", "NVIDIA P100 datasheet (2016), PCIe" + p100, kPascal,
       56, 16280, 732, 4.7, 9.3, 0, 18.7, 0, kP100},
      {"k80-gk210-12gb",
       "NVIDIA K80 datasheet (2014), one of the board's two GPUs, boost clock; "
       "efficiency: assumed as P100",
       kNone, 0, 11441, 240, 1.455, 4.37, 0, 0, 0, kP100},
  };
}

std::vector<DeviceType> MakeDeviceTypes() {
  std::vector<DeviceType> types;
  for (const GpuRow& row : MakeGpus()) types.push_back(Gpu(row));
  DeviceType core;
  core.name = "cpu-core";
  core.source =
      "assumed: an x86-64 core at 2.5 GHz with two 256-bit FMA units (32 fp32 "
      "operations a cycle), half of it reached by blocked products; 16-bit "
      "types at half of that, being converted to fp32 and back; 10 GB/s of "
      "memory; 4 GB of the host's memory; 1 us to start a kernel. A "
      "profile of the machine replaces all of them";
  core.memory = {4 * kGB};
  core.memory_bandwidth = {10 * kGiga};
  core.peak_fp64 = {40 * kGiga};
  core.peak_fp32 = {80 * kGiga};
  core.peak_bf16 = {40 * kGiga};
  core.peak_fp16 = {40 * kGiga};
  core.compute_efficiency = 0.5;
  core.memory_efficiency = 0.8;
  core.launch_overhead = Duration::FromSeconds(1e-6);
  core.concurrent_streams = true;
  core.shared_memory = true;
  types.push_back(std::move(core));
  return types;
}

struct LinkRow {
  LinkType type;
  double gigabits = 0;  // NominalGigabits
};

// Bandwidths are what large transfers reach, so that a ring over them gives
// the published bus bandwidth; the nominal figure stands in the source.
// Latencies are those of a step of a running collective, not of a cold write,
// shared out over the links that a step crosses. Most are fitted
// (fitted_links.h); the others are taken from their nearest relatives.
std::vector<LinkRow> MakeLinkTypes() {
  const auto row = [](std::string name, std::string source, double bandwidth,
                      double latency, double start = 0) {
    return LinkRow{{std::move(name),
                    std::move(source),
                    {bandwidth},
                    Duration::FromSeconds(latency),
                    Duration::FromSeconds(start),
                    {}}};
  };
  const auto found = [](std::string_view name) -> const FittedLink& {
    const auto* const at =
        std::ranges::find(kFittedLinks, name, &FittedLink::name);
    TESSERA_CHECK(at != kFittedLinks.end()) << name;
    return *at;
  };
  const auto fitted = [&](std::string_view name, const std::string& source) {
    const FittedLink& link = found(name);
    LinkRow made =
        row(std::string(name), source + "; " + std::string(link.source),
            link.bandwidth, link.latency_s, std::max(0.0, link.start_s));
    made.type.in_switch_bandwidth = {link.in_switch_bandwidth};
    return made;
  };
  const auto scaled = [&](std::string_view of, std::string name, double share,
                          const std::string& source) {
    LinkRow made = fitted(of, source + "; the rest as " + std::string(of));
    made.type.name = std::move(name);
    made.type.bandwidth = made.type.bandwidth * share;
    made.type.in_switch_bandwidth = made.type.in_switch_bandwidth * share;
    return made;
  };
  const auto rated = [](double gigabits, LinkRow made) {
    made.gigabits = gigabits;
    return made;
  };
  // A direct link is a whole step.
  const FittedLink& nvlink3 = found("nvlink3");
  const double direct = 2 * nvlink3.latency_s;
  const double old_start = nvlink3.start_s;
  LinkRow nvl72 = fitted(
      "nvlink5-nvl72",
      "NVIDIA GB200 NVL72 datasheet: 900 GB/s a direction; sums in the switch "
      "as nvlink5 (no table has more than 4 of these GPUs)");
  nvl72.type.in_switch_bandwidth = {found("nvlink5").in_switch_bandwidth};
  // One way between two hosts crosses two network links and four of PCIe.
  constexpr double kPcieLatency = 0.85e-6;
  // 512 B on 2, 4 and 8 L40S and RTX PRO 6000 (NVIDIA aiconfigurator's NCCL
  // table): 7.7 and 6.3 us less two steps of 1.2 and 1.5 us.
  constexpr double kPcieStart = 4.5e-6;
  const std::string pcie =
      "; 80 % reached (packet headers; assumed); latency: half a step of NCCL "
      "on L40S, 1.7 us, in NVIDIA aiconfigurator's NCCL table";
  const auto pcie_row = [&](std::string name, std::string source,
                            double bandwidth) {
    return row(std::move(name), std::move(source), bandwidth, kPcieLatency,
               kPcieStart);
  };
  const FittedLink& ndr = found("ib-ndr");
  // NDR's rings reach 96 % of nominal (SimAI's table), its sends 87 % (B200
  // over ConnectX-7); of the others nothing was measured.
  constexpr double kReached = 0.92;
  const auto network = [&](std::string name, const std::string& source,
                           double gigabits) {
    return rated(
        gigabits,
        row(std::move(name),
            source +
                "; 92 % reached, between ib-ndr's rings and its sends; latency "
                "as ib-ndr",
            kReached * gigabits / 8 * kGiga, ndr.latency_s));
  };
  // TCP through the host: what it reaches and 15 us (half of a one-way 30 us)
  // are assumed.
  constexpr double kTcpLatency = 15e-6;
  constexpr double kTcp = 0.84;
  const auto tcp = [&](std::string name, std::string source, double gigabits) {
    return rated(gigabits, row(std::move(name), std::move(source),
                               kTcp * gigabits / 8 * kGiga, kTcpLatency));
  };
  const FittedLink& efa = found("efa-100g");
  return {
      row("nvlink1",
          "NVIDIA P100 datasheet: 20 GB/s a direction; 90 % reached, as "
          "nvlink2; latency as nvlink3's whole step",
          18 * kGiga, direct, old_start),
      row("nvlink2",
          "NVIDIA V100 datasheet: 25 GB/s a direction; 22.5 reached by "
          "all-reduce over one link (vTrain's V100 table, 2 GPUs, 1 GiB); "
          "latency as nvlink3's whole step",
          22.5 * kGiga, direct, old_start),
      row("nvlink2-x2", "two nvlink2 side by side", 45 * kGiga, direct,
          old_start),
      row("nvlink2-x6",
          "DGX-2: six nvlink2 of each V100 to the NVSwitch (NVIDIA DGX-2 "
          "datasheet, 2018)",
          135 * kGiga, direct, old_start),
      fitted("nvlink3",
             "NVIDIA A100 datasheet: 12 links, 300 GB/s a direction"),
      scaled("nvlink3", "nvlink3-x8", 8.0 / 12,
             "A800: 8 links as nvlink3's 12, 200 GB/s a direction (Reuters, "
             "November 2022)"),
      fitted("nvlink4",
             "NVIDIA H100 datasheet: 18 links, 450 GB/s a direction"),
      scaled("nvlink4", "nvlink4-x8", 8.0 / 18,
             "H800: 8 links as nvlink4's 18, 200 GB/s a direction (DeepSeek-V3 "
             "report, 2024)"),
      fitted("nvlink5", "NVIDIA DGX B200 datasheet: 900 GB/s a direction"),
      nvl72,
      pcie_row("pcie3-x16", "PCI-SIG: 15.75 GB/s a direction" + pcie,
               12.6 * kGiga),
      pcie_row("pcie4-x16", "PCI-SIG: 31.5 GB/s a direction" + pcie,
               25.2 * kGiga),
      pcie_row("pcie5-x16", "PCI-SIG: 63 GB/s a direction" + pcie,
               50.4 * kGiga),
      pcie_row("pcie6-x16", "PCI-SIG: 126 GB/s a direction" + pcie,
               100.8 * kGiga),
      pcie_row("pcie3-host",
               "PCIe 3 x16 through the host: 6.1 GB/s reached by all-reduce of "
               "16 MB on 2 P100 (DeepBench, NCCL 2.0) of 15.75 nominal; "
               "latency as pcie3-x16",
               6.1 * kGiga),
      pcie_row("pcie4-host", "assumed: twice pcie3-host", 12.2 * kGiga),
      pcie_row("pcie5-host", "assumed: twice pcie4-host", 24.4 * kGiga),
      network("ib-fdr", "FDR InfiniBand, 54.5 Gb/s of data", 54.5),
      network("ib-edr", "EDR InfiniBand, 100 Gb/s", 100),
      network("ib-hdr100", "HDR100 InfiniBand, 100 Gb/s", 100),
      network("ib-hdr", "NVIDIA DGX A100 datasheet: HDR InfiniBand, 200 Gb/s",
              200),
      rated(400, fitted("ib-ndr",
                        "NVIDIA DGX H100 and DGX B200 datasheets: NDR "
                        "InfiniBand, 400 Gb/s")),
      network("ib-xdr",
              "NVIDIA ConnectX-8 datasheet (2024): XDR InfiniBand, 800 Gb/s",
              800),
      network("roce-100g", "RDMA over 100 Gb/s Ethernet", 100),
      network("roce-200g", "RDMA over 200 Gb/s Ethernet", 200),
      network("roce-400g", "RDMA over 400 Gb/s Ethernet", 400),
      network("omni-path-100", "Intel Omni-Path 100 (2015), 100 Gb/s", 100),
      tcp("ena-25g",
          "AWS p3.16xlarge: 25 Gb/s; 84 % reached and 15 us (TCP, half of a "
          "one-way 30 us) assumed",
          25),
      tcp("ena-50g", "AWS g4dn.12xlarge: 50 Gb/s; else as ena-25g", 50),
      tcp("ena-100g",
          "AWS g5.48xlarge and g6.48xlarge: 100 Gb/s; else as ena-25g", 100),
      rated(100, fitted("efa-100g", "AWS p4d and p4de: EFA, 100 Gb/s")),
      rated(400, fitted("efa-4x100g",
                        "AWS p5: EFA, 3,200 Gb/s a node, 4 NICs of 100 Gb/s "
                        "for each GPU, striped; 84 % reached, as p4d")),
      rated(400, fitted("efa-2x200g",
                        "AWS p5e and p5en: EFA, 3,200 Gb/s a node, 2 NICs of "
                        "200 Gb/s for each GPU, striped")),
      rated(400,
            row("efa-400g",
                "AWS p6-b200: EFA, 3,200 Gb/s a node, one NIC of 400 Gb/s for "
                "each GPU; share reached and latency as efa-2x200g",
                found("efa-2x200g").bandwidth, found("efa-2x200g").latency_s)),
      rated(800, row("efa-2x400g",
                     "AWS p6-b300: EFA, 6,400 Gb/s a node, 2 NICs of 400 Gb/s "
                     "for each GPU, striped; share reached and latency as "
                     "efa-2x200g",
                     2 * found("efa-2x200g").bandwidth,
                     found("efa-2x200g").latency_s)),
      rated(200, fitted("tcpxo-200g",
                        "Google A3 Mega: GPUDirect-TCPXO, 8 NICs of 200 Gb/s a "
                        "node")),
      rated(200,
            row("tcpx-200g",
                "Google A3 High: GPUDirect-TCPX, 4 NICs of 200 Gb/s a node; "
                "share reached as efa-100g, latency as tcpxo-200g (assumed)",
                efa.bandwidth * 2, found("tcpxo-200g").latency_s)),
      tcp("ethernet-10g",
          "10 Gb/s Ethernet; 84 % reached and 15 us (TCP) assumed; the "
          "published pair stands alone",
          10),
      row("socket",
          "assumed: between two processors, two UPI links of 10.4 GT/s (Intel "
          "Xeon Scalable, 2017 to 2023, has two to four), 20.8 GB/s a "
          "direction each, 80 % reached; latency as pcie5-x16",
          0.8 * 2 * 20.8 * kGiga, kPcieLatency, kPcieStart),
      row("shm-copy",
          "assumed: one core copies 5 GB/s into or out of shared memory and "
          "notices a flag in 1 us. A profile of the machine replaces both",
          5 * kGiga, 1e-6, 8e-6),
      row("shm-memory",
          "assumed: all cores of a host together copy 20 GB/s. A profile of "
          "the machine replaces it",
          20 * kGiga, 0),
  };
}

struct HostRow {
  std::string_view name;
  Host host;
};

// Streaming kernels of the host reach 80 % of its memory's peak (STREAM on
// server processors; assumed). A node's storage is what its data drives do
// together, each SSD as its datasheet says.
std::vector<HostRow> MakeHosts() {
  constexpr double kHostStreaming = 0.8;
  constexpr int64_t kTB = 1000 * kGB;
  const auto row = [](std::string_view name, std::string source, int64_t memory,
                      double peak, double device_link, int64_t storage,
                      double read, double write) {
    return HostRow{name,
                   {std::move(source),
                    {memory},
                    {kHostStreaming * peak},
                    {device_link},
                    {storage},
                    {read},
                    {write}}};
  };
  const std::string sharing =
      "; 80 % of the memory's peak reached (assumed); link as the PCIe "
      "switch's "
      "own, shared by its GPUs";
  const std::string drives =
      "; 3.84 TB U.2 drives as Samsung PM1733 (datasheet: 7.0 GB/s read, 3.8 "
      "write)";
  std::vector<HostRow> hosts = {
      row("dgx-a100-40gb",
          "NVIDIA DGX A100 System User Guide (2020): 1 TB, two EPYC 7742 of 8 "
          "channels DDR4-3200 (409.6 GB/s), 15 TB on 4 drives, two GPUs on a "
          "PCIe 4 switch" +
              sharing + drives,
          1000 * kGB, 409.6 * kGiga, 12.6 * kGiga, 15 * kTB, 28 * kGiga,
          15.2 * kGiga),
      row("dgx-a100-80gb",
          "NVIDIA DGX A100 System User Guide (2021): 2 TB, two EPYC 7742 of 8 "
          "channels DDR4-3200 (409.6 GB/s), 30 TB on 8 drives, two GPUs on a "
          "PCIe 4 switch" +
              sharing + drives,
          2 * kTB, 409.6 * kGiga, 12.6 * kGiga, 30 * kTB, 56 * kGiga,
          30.4 * kGiga),
      row("dgx-h100",
          "NVIDIA DGX H100 datasheet (2023): 2 TB, two Xeon 8480C of 8 "
          "channels DDR5, two DIMMs on each, at 4,400 MT/s (Dell PowerEdge "
          "XE9680 manual, of the same processors; 563.2 GB/s), 30 TB on 8 "
          "drives, PCIe 5 x16 for each GPU" +
              sharing + drives,
          2 * kTB, 563.2 * kGiga, 50.4 * kGiga, 30 * kTB, 56 * kGiga,
          30.4 * kGiga),
      row("dgx-b200",
          "NVIDIA DGX B200 datasheet (2024): 2 TB, two Xeon 8570 of 8 channels "
          "DDR5-5600 (716.8 GB/s), 30 TB on 8 drives, PCIe 5 x16 for each "
          "GPU" +
              sharing + drives,
          2 * kTB, 716.8 * kGiga, 50.4 * kGiga, 30 * kTB, 56 * kGiga,
          30.4 * kGiga),
  };
  const std::string no_drives = "; no drives of its own";
  const std::vector<HostRow> others = {
      row("gb200-nvl72",
          "NVIDIA GB200 NVL72 datasheet (2024): 36 Grace CPUs, 17 TB of "
          "LPDDR5X "
          "at 18.4 TB/s; NVLink-C2C of 900 GB/s both ways for each CPU and its "
          "two GPUs; no drives are named; 80 % of the memory's peak and of the "
          "link reached (assumed)",
          17 * kTB, 18400 * kGiga, 180 * kGiga, 0, 0, 0),
      row("dgx1-v100",
          "NVIDIA DGX-1 datasheet (2017): 512 GB of DDR4-2133, two Xeon "
          "E5-2698 v4 of 4 channels (136.5 GB/s), four SSDs of 1.92 TB (SATA "
          "3; "
          "0.54 GB/s read and 0.52 written each, as Samsung PM863a's "
          "datasheet), two GPUs on a PCIe 3 switch" +
              sharing,
          512 * kGB, 136.5 * kGiga, 6.3 * kGiga, 7680 * kGB, 2.16 * kGiga,
          2.08 * kGiga),
      row("p3.16xlarge",
          "Amazon EC2 P3 page (2017): 488 GiB, two Xeon E5-2686 v4 of 4 "
          "channels DDR4-2400 (153.6 GB/s), two GPUs on a PCIe 3 switch" +
              sharing + no_drives,
          int64_t{488} << 30, 153.6 * kGiga, 6.3 * kGiga, 0, 0, 0),
      row("p4d.24xlarge",
          "Amazon EC2 P4 page (2020): 1,152 GiB, two Xeon Platinum 8275CL of 6 "
          "channels DDR4-2933 (281.6 GB/s), whose PCIe is of generation 3, two "
          "GPUs on a switch, 8 drives of 1 TB, 16 GB/s read together; half "
          "of that written (assumed)" +
              sharing,
          int64_t{1152} << 30, 281.6 * kGiga, 6.3 * kGiga, 8 * kTB, 16 * kGiga,
          8 * kGiga),
      row("p5.48xlarge",
          "Amazon EC2 P5 page (2023): 2 TiB, two EPYC 7R13 of 8 channels "
          "DDR4-3200 (409.6 GB/s), whose PCIe is of generation 4, x16 for each "
          "GPU, 8 drives of 3.84 TB" +
              sharing + drives,
          int64_t{2048} << 30, 409.6 * kGiga, 25.2 * kGiga, 30 * kTB,
          56 * kGiga, 30.4 * kGiga),
      row("p5en.48xlarge",
          "Amazon EC2 P5 page (2024): 2 TiB, two Xeon of 8 channels DDR5-4800 "
          "(614.4 GB/s), PCIe 5 x16 for each GPU, 8 drives of 3.84 TB; also "
          "for p6-b200" +
              sharing + drives,
          int64_t{2048} << 30, 614.4 * kGiga, 50.4 * kGiga, 30 * kTB,
          56 * kGiga, 30.4 * kGiga),
      row("a3",
          "Google Compute Engine A3 page (2024): 1,872 GB, two Xeon Platinum "
          "8481C of 8 channels DDR5-4800 (614.4 GB/s), PCIe 5 x16 for each "
          "GPU, 16 local SSDs of 375 GB, 6 GB/s read and 3 GB/s written "
          "together" +
              sharing,
          1872 * kGB, 614.4 * kGiga, 50.4 * kGiga, 6 * kTB, 6 * kGiga,
          3 * kGiga),
      row("g5.48xlarge",
          "Amazon EC2 G5 page (2021): 768 GiB, two EPYC 7R32 of 8 channels "
          "DDR4-3200 (409.6 GB/s), PCIe 4 x16 for each GPU, 2 drives of 3.8 "
          "TB" +
              sharing + drives,
          int64_t{768} << 30, 409.6 * kGiga, 25.2 * kGiga, 7600 * kGB,
          14 * kGiga, 7.6 * kGiga),
      row("g6.48xlarge",
          "Amazon EC2 G6 page (2024): 768 GiB, two EPYC 7R13 of 8 channels "
          "DDR4-3200 (409.6 GB/s), PCIe 4 x16 for each GPU, 8 drives of 0.94 "
          "TB, 16 GB/s read together and half of that written (assumed, as "
          "p4d.24xlarge's)" +
              sharing,
          int64_t{768} << 30, 409.6 * kGiga, 25.2 * kGiga, 7520 * kGB,
          16 * kGiga, 8 * kGiga),
      row("g4dn.12xlarge",
          "Amazon EC2 G4 page (2019): 192 GiB, a Xeon Platinum 8259CL of 6 "
          "channels DDR4-2933 (140.8 GB/s), PCIe 3 x16 for each GPU, one drive "
          "of 0.9 TB, 2 GB/s read and half of that written (assumed)" +
              sharing,
          int64_t{192} << 30, 140.8 * kGiga, 12.6 * kGiga, 900 * kGB, 2 * kGiga,
          1 * kGiga),
      row("titan-rtx-pair",
          "assumed: a workstation of 64 GB, 4 channels DDR4-2666 (85.3 GB/s; "
          "80 "
          "% reached), a 1 TB Samsung 970 EVO (datasheet: 3.4 GB/s read, 2.5 "
          "written); link as pcie3-host",
          64 * kGB, 85.3 * kGiga, 6.1 * kGiga, kTB, 3.4 * kGiga, 2.5 * kGiga),
      row("p100-edr",
          "Jia et al. 2019, section 8.1: 256 GB, two 10-core Xeon E5-2600 (v4: "
          "4 channels DDR4-2133, 136.5 GB/s, assumed), PCIe 3 x16 for each "
          "GPU" +
              sharing + no_drives,
          256 * kGB, 136.5 * kGiga, 12.6 * kGiga, 0, 0, 0),
      row("k80-fdr",
          "Jia et al. 2019, section 8.1: 256 GB, two 10-core Xeon E5-2680 (v2: "
          "4 channels DDR3-1866, 119.4 GB/s, Intel ARK), four GPUs on a PCIe 3 "
          "switch" +
              sharing + no_drives,
          256 * kGB, 119.4 * kGiga, 3.15 * kGiga, 0, 0, 0),
  };
  hosts.insert(hosts.end(), others.begin(), others.end());
  hosts.push_back(
      {"local-cpu",
       {"assumed: 64 GB of memory that all cores read and write at 20 GB/s, "
        "one at 5 GB/s; 100 GB on a SATA SSD (SATA 3: 0.6 GB/s nominal). "
        "Steps and copies are priced as those of the ranks' own memory",
        {64 * kGB},
        {20 * kGiga},
        {5 * kGiga},
        {100 * kGB},
        {0.5 * kGiga},
        {0.5 * kGiga}}});
  return hosts;
}

template <typename Type>
const Type& RowNamed(std::span<const Type> table, std::string_view name) {
  const auto row = std::ranges::find(table, name, &Type::name);
  TESSERA_CHECK(row != table.end()) << name;
  return *row;
}

template <typename Type>
int Use(std::vector<Type>& used, std::span<const Type> table,
        std::string_view name) {
  const auto found = std::ranges::find(used, name, &Type::name);
  if (found != used.end()) return static_cast<int>(found - used.begin());
  used.push_back(RowNamed(table, name));
  return static_cast<int>(used.size()) - 1;
}

template <typename Type>
int Use(std::vector<Type>& used, const Type& type) {
  const auto found = std::ranges::find(used, type);
  if (found != used.end()) return static_cast<int>(found - used.begin());
  used.push_back(type);
  return static_cast<int>(used.size()) - 1;
}

}  // namespace

Duration KernelFloor(GpuGeneration generation) {
  switch (generation) {
    case GpuGeneration::kBlackwell:
      return Duration::FromSeconds(1.8e-6);
    case GpuGeneration::kHopper:
    case GpuGeneration::kAda:
      return Duration::FromSeconds(2.7e-6);
    default:
      return Duration::FromSeconds(3.1e-6);
  }
}

std::span<const DeviceType> DeviceTypes() {
  static const std::vector<DeviceType> types = MakeDeviceTypes();
  return types;
}

std::span<const LinkType> LinkTypes() {
  static const std::vector<LinkType> types = [] {
    std::vector<LinkType> made;
    for (LinkRow& row : MakeLinkTypes()) made.push_back(std::move(row.type));
    return made;
  }();
  return types;
}

double NominalGigabits(std::string_view link) {
  static const std::vector<LinkRow> rows = MakeLinkTypes();
  const auto row = std::ranges::find_if(
      rows, [&](const LinkRow& r) { return r.type.name == link; });
  TESSERA_CHECK(row != rows.end() && row->gigabits > 0) << link;
  return row->gigabits;
}

const DeviceType& DeviceTypeNamed(std::string_view name) {
  return RowNamed(DeviceTypes(), name);
}

const LinkType& LinkTypeNamed(std::string_view name) {
  return RowNamed(LinkTypes(), name);
}

// The context takes 1 GiB, with the libraries' own buffers (assumed).
Bytes UsableMemory(Bytes whole) {
  return whole - Bytes{int64_t{1} << 30};
}

const Host& HostOf(std::string_view name) {
  static const std::vector<HostRow> hosts = MakeHosts();
  const auto row = std::ranges::find(hosts, name, &HostRow::name);
  TESSERA_CHECK(row != hosts.end()) << name;
  return row->host;
}

int UseDeviceType(Cluster& cluster, std::string_view name) {
  return Use(cluster.device_types, DeviceTypes(), name);
}

int UseDeviceType(Cluster& cluster, const DeviceType& type) {
  return Use(cluster.device_types, type);
}

int UseLinkType(Cluster& cluster, std::string_view name) {
  return Use(cluster.link_types, LinkTypes(), name);
}

int UseLinkType(Cluster& cluster, const LinkType& type) {
  return Use(cluster.link_types, type);
}

}  // namespace tessera
