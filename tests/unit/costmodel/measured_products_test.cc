#include "costmodel/source/measured_products.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <sstream>

#include "costmodel/profile/profile_io.h"
#include "costmodel/source/cost_source.h"
#include "planner/topology/hardware.h"
#include "tests/support/paths.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr MatmulMode kIdle = {.dtype = DType::kBFloat16, .loaded = false};

ProfileKey Product(std::string_view device, const MatmulShape& shape) {
  ProfileKey key;
  key.name = kProductName;
  key.dtype = DType::kBFloat16;
  key.device = device;
  key.rule = kProductRule;
  key.extents = {static_cast<int64_t>(shape.batch),
                 static_cast<int64_t>(shape.m), static_cast<int64_t>(shape.k),
                 static_cast<int64_t>(shape.n)};
  return key;
}

// One row, measured 1.5 times as long as the model says: at it the weight is
// 1 / 0.1^3 = 1000 of 1000.05; at d octaves 1 / (d^2 + 0.1)^3 beside 0.05.
TEST(MeasuredProducts, CorrectTheModelNearWhatWasMeasured) {
  const DeviceType& device = DeviceTypeNamed("h100-sxm5-80gb");
  const MatmulShape shape = {.m = 4096, .n = 2048, .k = 1024};
  ProfileDb profile;
  profile.rows[Product(device.name, shape)] = {
      1.5 * MatmulSeconds(device, shape, kIdle), 0, 1};
  const MeasuredProducts products(&profile, {&device, 1});
  const auto factor = [&](const MatmulShape& at, DType dtype) {
    return products.Factor(kProductName, device.name, dtype, at).value();
  };
  EXPECT_NEAR(factor(shape, DType::kBFloat16), 1.5, 1e-4);
  EXPECT_NEAR(factor(shape, DType::kFloat16), 1.5, 1e-4);
  // An octave: 1 / 1.1^3 = 0.751 of 0.801.
  EXPECT_NEAR(factor({.m = 8192, .n = 2048, .k = 1024}, DType::kBFloat16),
              std::pow(1.5, 0.7513 / 0.8013), 1e-3);
  // Three: 1 / 9.1^3 = 0.00133 of 0.0513.
  EXPECT_NEAR(factor({.m = 4096, .n = 2048, .k = 8192}, DType::kBFloat16),
              std::pow(1.5, 0.00133 / 0.05133), 1e-3);
  EXPECT_FALSE(
      products.Factor(kProductName, device.name, DType::kFloat32, shape));
  EXPECT_FALSE(
      products.Factor(kProductName, "a100-sxm4-80gb", DType::kBFloat16, shape));
  EXPECT_FALSE(MeasuredProducts(nullptr, {&device, 1})
                   .Factor(kProductName, device.name, DType::kBFloat16, shape));
}

// Rows of a kernel, timed amid load, are for that kernel alone; a fused one is
// another. Between its rows they come before a line through time over
// operations: half as many columns of a product that takes twice the model's
// time.
TEST(MeasuredProducts, OfAKernelAreItsOwn) {
  const DeviceType& device = DeviceTypeNamed("h100-sxm5-80gb");
  const MatmulShape shape = {.m = 4096, .n = 2048, .k = 1024};
  ProfileKey key;
  key.name = "linear+gelu";
  key.device = device.name;
  key.dtype = DType::kBFloat16;
  key.rule = "bsi,oi->bso";
  key.extents = {1, 4096, 1024, 2048};
  ProfileDb profile;
  profile.rows[key] = {2 * MatmulSeconds(device, shape, {}), 0, 1};
  const MeasuredProducts products(&profile, {&device, 1});
  EXPECT_NEAR(
      products.Factor("linear+gelu", device.name, DType::kBFloat16, shape)
          .value(),
      2, 1e-3);
  for (const std::string_view other :
       {std::string_view("linear"), kProductName}) {
    EXPECT_FALSE(products.Factor(other, device.name, DType::kBFloat16, shape));
  }
  CostQuery query;
  query.key = key;
  query.key.extents.back() = 1024;
  query.device = &device;
  query.op_class = OpClass::kMatmul;
  query.matmul = MatmulShape{.m = 4096, .n = 1024, .k = 1024};
  query.matmul_factor = products.Factor("linear+gelu", device.name,
                                        DType::kBFloat16, *query.matmul);
  query.factor_of_kernel = true;
  const Cost cost = PriceOf(query, &profile);
  EXPECT_EQ(cost.source, CostSource::kInterpolated);
  EXPECT_DOUBLE_EQ(cost.seconds, *query.matmul_factor *
                                     MatmulSeconds(device, *query.matmul, {}));
}

// Of a kernel without rows of its own; those come first.
TEST(MeasuredProducts, PriceKernelsThatWereNotMeasured) {
  const DeviceType& device = DeviceTypeNamed("h100-sxm5-80gb");
  const ProfileDb none;
  CostQuery query;
  query.device = &device;
  query.key.name = "linear_dx";
  query.key.device = device.name;
  query.key.dtype = DType::kBFloat16;
  query.key.rule = "bso,oi->bsi";
  query.key.extents = {1, 4096, 2048, 1024};
  query.op_class = OpClass::kMatmul;
  query.matmul = MatmulShape{.m = 4096, .n = 1024, .k = 2048};
  const Cost plain = PriceOf(query, &none);
  EXPECT_EQ(plain.source, CostSource::kAnalytical);
  query.matmul_factor = 1.25;
  const Cost corrected = PriceOf(query, &none);
  EXPECT_EQ(corrected.source, CostSource::kInterpolated);
  EXPECT_DOUBLE_EQ(corrected.seconds, 1.25 * plain.seconds);
  ProfileDb own;
  own.rows[query.key] = {1, 0, 1};
  EXPECT_EQ(PriceOf(query, &own).seconds, 1);
}

std::vector<fs::path> ProfileFiles() {
  std::vector<fs::path> files;
  for (const auto& entry :
       fs::directory_iterator(ExamplePath("../profiler/profiles"))) {
    if (entry.path().extension() == ".txtpb") files.push_back(entry.path());
  }
  return files;
}

TEST(PublishedProfiles, SayWhoMeasuredAndAreOfOneKnownDevice) {
  ASSERT_GE(ProfileFiles().size(), 8U);
  for (const fs::path& file : ProfileFiles()) {
    const auto profile = ReadProfile(file.string());
    ASSERT_TRUE(profile.has_value()) << profile.error().ToString();
    EXPECT_NE(profile->origin.host, "") << file;
    EXPECT_NE(profile->origin.libraries, "") << file;
    std::set<std::string> devices;
    for (const auto& [key, row] : profile->rows) devices.insert(key.device);
    ASSERT_EQ(devices, std::set{file.stem().string()});
    EXPECT_EQ(DeviceTypeNamed(*devices.begin()).name, *devices.begin());
  }
}

// Each product of Tessera's own kernels on an H200, predicted from the others:
// nearer than by a line over operations.
TEST(OwnProfile, PredictsProductsThatItDoesNotHave) {
  const ProfileDb profile =
      ReadProfile(ExamplePath("../profiler/profiles/tessera/h200.txtpb"))
          .value();
  const DeviceType& device = DeviceTypeNamed("h200-sxm5-141gb");
  struct Errors {
    double by_operations = 0;
    double by_shape = 0;
    int products = 0;
  };
  std::map<std::string, Errors> by_kernel;
  for (const auto& [key, row] : profile.rows) {
    const OpDef* const op = OperatorOf(key.name);
    if (op == nullptr || op->op_class != OpClass::kMatmul) continue;
    ProfileDb others = profile;
    others.rows.erase(key);
    const IndexRule rule = IndexRule::Parse(key.rule).value();
    const std::vector<DType> operands(rule.operands.size(), key.dtype);
    const std::vector<DType> results(
        rule.results.size(),
        op->name.ends_with("_dw") ? DType::kFloat32 : key.dtype);
    CostQuery query;
    query.key = key;
    query.device = &device;
    query.op_class = OpClass::kMatmul;
    query.matmul = MatmulShapeOf({.rule = &rule,
                                  .extents = key.extents,
                                  .operand_dtypes = operands,
                                  .result_dtypes = results,
                                  .attributes = {}});
    Errors& errors = by_kernel[key.name];
    const auto error = [&] {
      return std::abs(PriceOf(query, &others).seconds / row.median_s - 1);
    };
    errors.by_operations += error();
    query.matmul_factor =
        MeasuredProducts(&others, {&device, 1})
            .Factor(key.name, device.name, key.dtype, *query.matmul);
    query.factor_of_kernel = true;
    errors.by_shape += error();
    ++errors.products;
  }
  EXPECT_EQ(by_kernel.size(), 6U);
  for (const auto& [kernel, errors] : by_kernel) {
    const double mean = errors.by_shape / errors.products;
    RecordProperty(kernel, std::to_string(mean));
    EXPECT_LT(mean, errors.by_operations / errors.products) << kernel;
    EXPECT_LT(mean, kernel == "linear_dx+gelu_dx" ? 0.12 : 0.05) << kernel;
  }
}

// Published products that the profiles do not have (another sample of the same
// tables) come out nearer than by the model alone.
TEST(PublishedProfiles, PredictProductsThatTheyDoNotHave) {
  struct Errors {
    double model = 0;
    double profile = 0;
    int products = 0;
  };
  std::map<std::string, Errors> by_device;
  for (const fs::path& file : ProfileFiles()) {
    const ProfileDb profile = ReadProfile(file.string()).value();
    const DeviceType& device = DeviceTypeNamed(file.stem().string());
    const MeasuredProducts products(&profile, {&device, 1});
    std::ifstream table(TestdataPath("published/matmul.csv"));
    std::string line;
    std::getline(table, line);
    while (std::getline(table, line)) {
      std::ranges::replace(line, ',', ' ');
      std::istringstream in(line);
      std::string source;
      std::string name;
      std::string type;
      MatmulShape shape;
      double us = 0;
      in >> source >> name >> type >> shape.m >> shape.n >> shape.k >>
          shape.batch >> shape.result_bytes >> us;
      // SimuMax's were measured amid the load of a step.
      if (name != device.name || type != "16bit" || source == "simumax" ||
          profile.Find(Product(name, shape)) != nullptr) {
        continue;
      }
      const double seconds = MatmulSeconds(device, shape, kIdle);
      const auto factor =
          products.Factor(kProductName, device.name, DType::kBFloat16, shape);
      if (!factor) continue;
      Errors& errors = by_device[name];
      errors.model += std::abs(seconds * 1e6 / us - 1);
      errors.profile += std::abs(*factor * seconds * 1e6 / us - 1);
      ++errors.products;
    }
  }
  EXPECT_GE(by_device.size(), 8U);
  double ratios = 0;
  for (const auto& [device, errors] : by_device) {
    EXPECT_GE(errors.products, 50) << device;
    EXPECT_LT(errors.profile, errors.model) << device;
    ratios += errors.profile / errors.model;
  }
  EXPECT_LT(ratios / static_cast<double>(by_device.size()), 0.85);
}

}  // namespace
}  // namespace tessera
