#include "costmodel/source/kernel_time.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <map>
#include <sstream>
#include <vector>

#include "planner/ir/op.h"
#include "planner/topology/hardware.h"
#include "tests/support/paths.h"

namespace tessera {
namespace {

constexpr MatmulMode kIdle = {.dtype = DType::kFloat16, .loaded = false};

double Seconds(std::string_view device, double batch, double m, double n,
               double k, MatmulMode mode = kIdle) {
  return MatmulSeconds(DeviceTypeNamed(device),
                       {.batch = batch, .m = m, .n = n, .k = k}, mode);
}

const std::vector<double>& Extents() {
  static const std::vector<double> extents = [] {
    std::vector<double> values;
    for (double e = 1; e < 70000; e = std::ceil(e * 1.31)) values.push_back(e);
    return values;
  }();
  return extents;
}

constexpr double MatmulShape::*kExtents[] = {
    &MatmulShape::batch, &MatmulShape::m, &MatmulShape::n, &MatmulShape::k};

// Terms may be added up in another order.
constexpr double kRounded = 1 - 1e-12;

// No product beats the datasheet's peak or its memory, and more of any extent
// never takes less time.
TEST(MatmulSeconds, NeverBeatsTheDatasheetAndGrowsWithEveryExtent) {
  for (const DeviceType& device : DeviceTypes()) {
    if (!HasKernelTimes(device)) continue;
    for (const DType dtype :
         {DType::kFloat64, DType::kFloat32, DType::kFloat16}) {
      for (const bool loaded : {false, true}) {
        const MatmulMode mode = {.dtype = dtype, .loaded = loaded};
        const double peak = PeakOf(device, mode).value;
        if (peak == 0) continue;
        const auto width = static_cast<double>(SizeOf(dtype));
        for (double MatmulShape::*extent : kExtents) {
          for (const double other : {1.0, 96.0, 4096.0}) {
            double last = 0;
            for (const double size : Extents()) {
              MatmulShape shape = {1, other, other, other, width, width};
              shape.*extent = size;
              const double seconds = MatmulSeconds(device, shape, mode);
              EXPECT_GE(seconds, last * kRounded) << device.name << " " << size;
              last = seconds;
              const double points = shape.batch * shape.m * shape.n * shape.k;
              EXPECT_GT(seconds, 2 * points / peak) << device.name;
              const double bytes =
                  width * shape.batch *
                  (shape.m * shape.k + shape.n * shape.k + shape.m * shape.n);
              EXPECT_GT(seconds, bytes / device.memory_bandwidth.value)
                  << device.name;
            }
          }
        }
      }
    }
  }
}

// 108 multiprocessors: 108 tiles of 256 x 128 are one wave, 109 more than one.
// A long k makes the wave dominate: the step is seen.
TEST(MatmulSeconds, AWaveMoreIsAStep) {
  const double one = Seconds("a100-sxm4-80gb", 1, 256, 128 * 108, 65536);
  const double less = Seconds("a100-sxm4-80gb", 1, 256, 128 * 107, 65536);
  const double more = Seconds("a100-sxm4-80gb", 1, 256, 128 * 109, 65536);
  EXPECT_LT(one - less, 0.01 * one);
  EXPECT_GT(more - one, 0.05 * one);
}

TEST(MatmulSeconds, FewerBitsAreFasterAndALoadSlows) {
  const MatmulMode fp8 = {
      .dtype = DType::kBFloat16, .fp8 = true, .loaded = false};
  MatmulShape shape = {.m = 8192, .n = 8192, .k = 8192};
  for (const char* name : {"h100-sxm5-80gb", "b200-sxm-180gb", "l40s-48gb"}) {
    const DeviceType& device = DeviceTypeNamed(name);
    shape.operand_bytes = 1;
    const double eight = MatmulSeconds(device, shape, fp8);
    shape.operand_bytes = 2;
    const double sixteen = MatmulSeconds(device, shape, kIdle);
    EXPECT_LT(eight, 0.7 * sixteen) << name;
    EXPECT_GT(eight, 0.45 * sixteen) << name;
    MatmulMode loaded = kIdle;
    loaded.loaded = true;
    EXPECT_GT(MatmulSeconds(device, shape, loaded), sixteen) << name;
  }
}

TEST(MatmulShapeOf, ReadsForwardAndGradients) {
  const std::vector<DType> types = {DType::kBFloat16, DType::kBFloat16};
  const auto of = [&](const char* text, std::vector<int64_t> extents) {
    const IndexRule rule = IndexRule::Parse(text).value();
    return MatmulShapeOf({.rule = &rule,
                          .extents = extents,
                          .operand_dtypes = types,
                          .result_dtypes = types,
                          .attributes = {}});
  };
  // b, s, i, o = 2, 3, 5, 7.
  const auto forward = of("bsi,oi+o->bso", {2, 3, 5, 7});
  ASSERT_TRUE(forward.has_value());
  EXPECT_EQ(forward->batch, 1);
  EXPECT_EQ(forward->m, 6);
  EXPECT_EQ(forward->n, 7);
  EXPECT_EQ(forward->k, 5);
  // dw: b, s, o, i = 2, 3, 7, 5.
  const auto dw = of("bso,bsi->oi", {2, 3, 7, 5});
  EXPECT_EQ(dw->m, 7);
  EXPECT_EQ(dw->n, 5);
  EXPECT_EQ(dw->k, 6);
  // Experts are a batch: e, b, s, i, o.
  const auto expert = of("ebsi,eoi->ebso", {4, 2, 3, 5, 7});
  EXPECT_EQ(expert->batch, 4);
  EXPECT_EQ(expert->m, 6);
  // h is of one operand only.
  EXPECT_FALSE(of("bsh,g->bsg", {2, 3, 5, 7}).has_value());
}

// Measured products, thinned by tools/fit_kernels.py. `most` is what the
// median error of the products of training sizes (every extent at least 256)
// may be, in percent; SimuMax's B200 was measured under load.
struct Published {
  const char* source;
  const char* device;
  const char* type;
  double most;
  bool loaded = false;
};
constexpr Published kPublished[] = {
    {"aiconfigurator", "a100-sxm4-80gb", "16bit", 8},
    {"aiconfigurator", "h100-sxm5-80gb", "16bit", 6},
    {"aiconfigurator", "h200-sxm5-141gb", "16bit", 6},
    {"aiconfigurator", "b200-sxm-180gb", "16bit", 7},
    {"aiconfigurator", "gb200-186gb", "16bit", 7},
    {"aiconfigurator", "l40s-48gb", "16bit", 10},
    {"vidur", "a100-pcie-80gb", "16bit", 6},
    {"vidur", "a40-48gb", "16bit", 8},
    {"vidur", "h100-nvl-94gb", "16bit", 10},
    {"simumax", "a100-pcie-80gb", "16bit", 6},
    {"simumax", "b200-sxm-180gb", "16bit", 10, true},
    {"deepbench", "v100-sxm2-16gb", "16bit", 6},
    {"deepbench", "t4-16gb", "16bit", 6},
    {"deepbench", "v100-sxm2-16gb", "fp32", 6},
    {"neusight", "v100-pcie-32gb", "fp32", 8},
    {"neusight", "a100-pcie-40gb", "fp32", 8},
    {"neusight", "t4-16gb", "fp32", 12},
};

TEST(MatmulSeconds, AgreesWithPublishedTables) {
  std::ifstream file(TestdataPath("published/matmul.csv"));
  std::string line;
  std::getline(file, line);
  ASSERT_EQ(line, "source,device,type,m,n,k,batch,result_bytes,us");
  std::map<std::string, std::vector<double>> errors;
  while (std::getline(file, line)) {
    std::ranges::replace(line, ',', ' ');
    std::istringstream in(line);
    std::string source;
    std::string device;
    std::string type;
    MatmulShape shape;
    double us = 0;
    in >> source >> device >> type >> shape.m >> shape.n >> shape.k >>
        shape.batch >> shape.result_bytes >> us;
    ASSERT_TRUE(in) << line;
    if (std::min({shape.m, shape.n, shape.k}) < 256) continue;
    const bool single = type == "fp32";
    shape.operand_bytes = single ? 4 : 2;
    const auto row = std::ranges::find_if(kPublished, [&](const Published& p) {
      return p.source == source && p.device == device && p.type == type;
    });
    if (row == std::end(kPublished)) continue;
    const MatmulMode mode = {
        .dtype = single ? DType::kFloat32 : DType::kFloat16,
        .loaded = row->loaded};
    const double seconds = MatmulSeconds(DeviceTypeNamed(device), shape, mode);
    errors[source + " " + device + " " + type].push_back(
        std::abs(seconds * 1e6 / us - 1));
  }
  for (const Published& row : kPublished) {
    const std::string name =
        std::string(row.source) + " " + row.device + " " + row.type;
    std::vector<double>& of = errors[name];
    ASSERT_GE(of.size(), 30U) << name;
    std::ranges::sort(of);
    EXPECT_LE(100 * of[of.size() / 2], row.most) << name;
  }
}

}  // namespace
}  // namespace tessera
