// Products and attention on cases that the contract's lack: widths of the
// tensor cores, several tiles, mixed dtypes, merging, rows that lie apart. The
// CPU's kernels are the reference. Part of two binaries:
// tests/kernels/kernel_device.h.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <ostream>

#include "planner/base/rng.h"
#include "tests/kernels/kernel_device.h"
#include "tests/kernels/random_tensors.h"
#include "tests/support/host_tensor.h"
#include "tests/support/kernel_cases.h"
#include "tests/support/queue_cpu_device.h"

namespace tessera {
namespace {

struct CudaCase {
  std::string name;
  std::string kernel;
  std::string rule;
  std::vector<HostTensor> operands;
  std::vector<HostTensor> results;  // what they hold before the call
  std::vector<Attribute> attributes;
  bool accumulate = false;
  bool places_are_positions = false;
  // Of a result from the CPU's in fp64, relative to its largest value.
  double tolerance = 0;
};

void PrintTo(const CudaCase& c, std::ostream* out) {
  *out << c.name;
}

std::vector<LocalTensor> Locals(const std::vector<HostTensor>& tensors) {
  std::vector<LocalTensor> locals;
  for (const HostTensor& tensor : tensors) {
    locals.push_back(tensor.Local());
    // A tensor without elements stands for one that is masked.
    if (tensor.elements() == 0) locals.back().data = nullptr;
  }
  return locals;
}

KernelCall CallOf(const CudaCase& c, const IndexRule& rule,
                  const std::vector<LocalTensor>& operands,
                  const std::vector<LocalTensor>& results) {
  KernelCall call;
  call.rule = &rule;
  call.attributes = c.attributes;
  call.operands = operands;
  call.results = results;
  call.accumulate = c.accumulate;
  call.places_are_positions = c.places_are_positions;
  return call;
}

std::vector<HostTensor> InDouble(const std::vector<HostTensor>& tensors) {
  std::vector<HostTensor> wide;
  for (const HostTensor& tensor : tensors) {
    wide.push_back(tensor.As(DType::kFloat64));
  }
  return wide;
}

std::vector<HostTensor> ResultsOf(const CudaCase& c, KernelDevice& device) {
  const IndexRule rule = IndexRule::Parse(c.rule).value();
  std::vector<HostTensor> results = c.results;
  const std::vector<LocalTensor> operands = Locals(c.operands);
  const std::vector<LocalTensor> locals = Locals(results);
  RunOnDevice(device, c.kernel, CallOf(c, rule, operands, locals),
              /*in_place=*/false);
  return results;
}

// Those of the CPU, in fp64 on the same values.
std::vector<HostTensor> ExpectedOf(const CudaCase& c) {
  const IndexRule rule = IndexRule::Parse(c.rule).value();
  const std::vector<HostTensor> operands = InDouble(c.operands);
  std::vector<HostTensor> results = InDouble(c.results);
  const std::vector<LocalTensor> operand_locals = Locals(operands);
  const std::vector<LocalTensor> locals = Locals(results);
  FindCpuKernel(c.kernel).value()->run(CallOf(c, rule, operand_locals, locals));
  return results;
}

// ---- Linear -----------------------------------------------------------------

struct LinearDTypes {
  DType x, w, y;
};

std::string NameOf(const LinearDTypes& dtypes) {
  std::string name;
  for (const DType dtype : {dtypes.x, dtypes.w, dtypes.y}) {
    name += "_";
    name += NameOf(dtype);
  }
  return name;
}

void AddLinearCases(const LinearDTypes& dtypes, bool bias, bool accumulate,
                    int64_t rows, int64_t in, int64_t out, Rng& rng,
                    std::vector<CudaCase>& cases) {
  const HostTensor x = Random({3, rows, in}, dtypes.x, rng);
  const HostTensor w = Random({out, in}, dtypes.w, rng);
  const HostTensor y = Random({3, rows, out}, dtypes.y, rng);
  CudaCase c;
  c.accumulate = accumulate;
  const std::string suffix = NameOf(dtypes) + (bias ? "_bias" : "") +
                             (accumulate ? "_adds" : "") + "_" +
                             std::to_string(rows) + "x" + std::to_string(out) +
                             "x" + std::to_string(in);
  const auto add = [&](const char* kernel, const char* rule,
                       std::vector<HostTensor> operands, HostTensor result) {
    c.kernel = kernel;
    c.name = kernel + suffix;
    c.rule = rule;
    // The sums in fp32 are long.
    c.tolerance = 2 * Rounding(result.dtype()) + 2e-5;
    c.operands = std::move(operands);
    c.results = {std::move(result)};
    cases.push_back(c);
  };
  if (bias) {
    add("linear", "bsi,oi+o->bso", {x, w, Random({out}, dtypes.y, rng)}, y);
    // A bias that another shard adds.
    add("linear", "bsi,oi+o->bso", {x, w, HostTensor({0}, dtypes.y)}, y);
    cases.back().name += "_masked";
    return;
  }
  add("linear", "bsi,oi->bso", {x, w}, y);
  add("linear_dx", "bso,oi->bsi", {y, w}, Random(x.shape(), dtypes.x, rng));
  add("linear_dw", "bso,bsi->oi", {y, x},
      Random(w.shape(), DType::kFloat32, rng));
  add("linear_db", "bso->o", {y}, Random({out}, DType::kFloat32, rng));
}

// Products in every direction and dtype, mixed ones among them, with and
// without bias, adding and not.
std::vector<CudaCase> LinearCases() {
  constexpr DType kBf16 = DType::kBFloat16;
  constexpr DType kFp16 = DType::kFloat16;
  constexpr DType kFp32 = DType::kFloat32;
  Rng rng(3);
  std::vector<CudaCase> cases;
  for (const LinearDTypes& dtypes :
       {LinearDTypes{kBf16, kBf16, kBf16}, LinearDTypes{kFp16, kFp16, kFp16},
        LinearDTypes{kFp32, kFp32, kFp32},
        // A router's.
        LinearDTypes{kBf16, kBf16, kFp32}, LinearDTypes{kFp16, kBf16, kFp32}}) {
    for (const bool accumulate : {false, true}) {
      for (const bool bias : {false, true}) {
        AddLinearCases(dtypes, bias, accumulate, 5, 7, 3, rng, cases);
        AddLinearCases(dtypes, bias, accumulate, 25, 40, 72, rng, cases);
      }
    }
  }
  // Sums long enough to be split.
  AddLinearCases({kBf16, kBf16, kFp32}, false, true, 400, 9, 4, rng, cases);
  return cases;
}

// ---- Attention --------------------------------------------------------------

enum class Order { kRising, kShuffled, kZigzag, kDocuments };

struct AttentionShape {
  std::string name;
  DType dtype = DType::kBFloat16;
  int64_t b = 1, s = 0, g = 1, r = 1, d = 64, t = 0, e = 64;
  double window = 0;
  Order order = Order::kRising;
  int64_t first_query = 0;  // the position
  int64_t first_key = 0;
  bool accumulate = false;
  // Results, and what is added, in fp32, as while blocks travel.
  bool wide = false;
  // The caller knows that positions count up: cuDNN's case, where it is.
  bool ordered = false;
};

HostTensor Positions(const AttentionShape& shape, int64_t n, int64_t first,
                     Rng& rng) {
  HostTensor positions({shape.b, n}, DType::kInt32);
  for (int64_t i = 0; i < positions.elements(); ++i) {
    int64_t column = i % n;
    switch (shape.order) {
      case Order::kRising:
      case Order::kShuffled:
        break;
      case Order::kZigzag:  // an early half and a late one
        if (column >= n / 2) column += 3 * n;
        break;
      case Order::kDocuments:  // of 37 each
        column = column % 37 + 2 * 400 * (column / 37);
        break;
    }
    positions.Set(i, static_cast<double>(first + column));
  }
  for (int64_t i = 0;
       shape.order == Order::kShuffled && i < positions.elements(); ++i) {
    const int64_t other = i - rng.Below(static_cast<uint32_t>(i % n) + 1);
    const double swapped = positions.At(other);
    positions.Set(other, positions.At(i));
    positions.Set(i, swapped);
  }
  return positions;
}

void AddAttentionCases(const AttentionShape& shape,
                       std::vector<CudaCase>& cases) {
  Rng rng(11);
  const auto random = [&](const Shape& dims) {
    return Random(dims, shape.dtype, rng);
  };
  const int64_t b = shape.b, s = shape.s, g = shape.g, r = shape.r, d = shape.d,
                t = shape.t, e = shape.e;
  const DType result = shape.wide ? DType::kFloat32 : shape.dtype;
  CudaCase forward;
  forward.kernel = "attention";
  forward.name = shape.name;
  forward.rule = "bsgrd,btgd,btge,bs,bt->bsgre,bsgr";
  // Probabilities far from equal.
  forward.attributes = {{"scale", 3 / std::sqrt(static_cast<double>(d))},
                        {"window", shape.window}};
  forward.operands = {random({b, s, g, r, d}), random({b, t, g, d}),
                      random({b, t, g, e}),
                      Positions(shape, s, shape.first_query, rng),
                      Positions(shape, t, shape.first_key, rng)};
  forward.results = {Random({b, s, g, r, e}, result, rng),
                     Random({b, s, g, r}, DType::kFloat32, rng)};
  forward.accumulate = shape.accumulate;
  forward.places_are_positions = shape.ordered;
  if (shape.accumulate) {  // some rows have seen nothing yet
    for (int64_t i = 0; i < forward.results[1].elements(); i += 3) {
      forward.results[1].Set(i, -INFINITY);
    }
  }
  // Probabilities are rounded, and the result.
  const double rounding = Rounding(shape.dtype);
  forward.tolerance = shape.dtype == DType::kFloat32 ? 1e-5 : 2 * rounding;

  CudaCase backward = forward;
  backward.kernel = "attention_dqkv";
  backward.name = shape.name + "_dqkv";
  backward.rule = "bsgre,bsgrd,btgd,btge,bs,bt,bsgre,bsgr->bsgrd,btgd,btge";
  CudaCase fresh = forward;
  fresh.accumulate = false;
  const std::vector<HostTensor> o = ExpectedOf(fresh);
  backward.operands.insert(backward.operands.begin(), random({b, s, g, r, e}));
  backward.operands.push_back(o[0].As(shape.dtype));
  backward.operands.push_back(o[1].As(DType::kFloat32));
  backward.results = {Random({b, s, g, r, d}, result, rng),
                      Random({b, t, g, d}, result, rng),
                      Random({b, t, g, e}, result, rng)};
  // o is rounded, and P and dS on their way into sums of either sign.
  backward.tolerance = shape.dtype == DType::kFloat32 ? 2e-5 : 4 * rounding;
  cases.push_back(forward);
  cases.push_back(backward);
}

// Head widths, groups, windows, orders of positions, ragged lengths, merging.
std::vector<CudaCase> AttentionCases() {
  constexpr DType kBf16 = DType::kBFloat16;
  constexpr DType kFp16 = DType::kFloat16;
  constexpr DType kFp32 = DType::kFloat32;
  std::vector<AttentionShape> shapes;
  for (const DType dtype : {kBf16, kFp16, kFp32}) {
    const std::string name(NameOf(dtype));
    shapes.push_back(
        {.name = name + "_one_tile", .dtype = dtype, .s = 17, .t = 17});
    shapes.push_back({.name = name + "_grouped",
                      .dtype = dtype,
                      .b = 2,
                      .s = 70,
                      .g = 2,
                      .r = 3,
                      .d = 16,
                      .t = 70,
                      .e = 24});
    shapes.push_back({.name = name + "_shuffled",
                      .dtype = dtype,
                      .s = 150,
                      .d = 32,
                      .t = 150,
                      .e = 32,
                      .window = 40,
                      .order = Order::kShuffled});
    // Keys of which queries see all, some and nothing.
    shapes.push_back({.name = name + "_zigzag_of_a_ring",
                      .dtype = dtype,
                      .s = 70,
                      .d = 32,
                      .t = 90,
                      .e = 32,
                      .order = Order::kZigzag,
                      .first_query = 60,
                      .accumulate = true,
                      .wide = true});
    shapes.push_back({.name = name + "_adds",
                      .dtype = dtype,
                      .b = 2,
                      .s = 33,
                      .r = 2,
                      .d = 32,
                      .t = 65,
                      .e = 32,
                      .first_query = 20,
                      .accumulate = true});
    shapes.push_back({.name = name + "_documents",
                      .dtype = dtype,
                      .s = 100,
                      .d = 32,
                      .t = 100,
                      .e = 32,
                      .window = 400,
                      .order = Order::kDocuments});
    // Some see nothing at all.
    shapes.push_back({.name = name + "_blind",
                      .dtype = dtype,
                      .s = 40,
                      .d = 32,
                      .t = 40,
                      .e = 32,
                      .first_key = 20});
    // No multiples of 8: without tensor cores.
    shapes.push_back({.name = name + "_odd",
                      .dtype = dtype,
                      .s = 70,
                      .r = 2,
                      .d = 5,
                      .t = 70,
                      .e = 7});
    for (const int64_t width : {64, 128}) {
      shapes.push_back({.name = name + "_ordered_" + std::to_string(width),
                        .dtype = dtype,
                        .b = 2,
                        .s = 40,
                        .g = 2,
                        .r = 2,
                        .d = width,
                        .t = 40,
                        .e = width,
                        .ordered = true});
    }
    for (const int64_t width : {80, 96, 128, 136, 256}) {
      shapes.push_back({.name = name + "_" + std::to_string(width),
                        .dtype = dtype,
                        .s = 50,
                        .d = width,
                        .t = 70,
                        .e = width,
                        .first_query = 20});
    }
  }
  std::vector<CudaCase> cases;
  for (const AttentionShape& shape : shapes) AddAttentionCases(shape, cases);
  return cases;
}

class ProductKernels : public ::testing::TestWithParam<CudaCase> {
 protected:
  void SetUp() override {
    device_ = MakeKernelDevice();
    if (device_ == nullptr) GTEST_SKIP() << "no CUDA device";
  }

  std::unique_ptr<KernelDevice> device_;
};

void ExpectNear(const CudaCase& c, const std::vector<HostTensor>& actual,
                const std::vector<HostTensor>& expected) {
  for (size_t k = 0; k < actual.size(); ++k) {
    double largest = 0;
    for (int64_t i = 0; i < expected[k].elements(); ++i) {
      const double x = expected[k].At(i);
      if (std::isfinite(x)) largest = std::max(largest, std::abs(x));
    }
    for (int64_t i = 0; i < actual[k].elements(); ++i) {
      const double x = expected[k].At(i);
      const double y = actual[k].At(i);
      if (x == y) continue;
      ASSERT_LE(std::abs(x - y), c.tolerance * largest)
          << c.name << " result " << k << " element " << i << " is " << y
          << ": expected " << x;
    }
  }
}

TEST_P(ProductKernels, EqualTheCpusAndGiveTheSameBitsAgain) {
  const CudaCase& c = GetParam();
  device_->Reorder(1);
  const std::vector<HostTensor> actual = ResultsOf(c, *device_);
  device_->Reorder(2);
  const std::vector<HostTensor> again = ResultsOf(c, *device_);
  for (size_t k = 0; k < actual.size(); ++k) {
    EXPECT_TRUE(actual[k].SameBits(again[k])) << "result " << k;
  }
  ExpectNear(c, actual, ExpectedOf(c));
}

// ---- Rows that lie apart ----------------------------------------------------

// A tensor whose first two dimensions are those of its rows, in memory where
// these have gaps.
struct Apart {
  Apart(const HostTensor& of, int64_t gap)
      : tensor(of),
        stride(RowOf(of) + gap),
        storage({of.elements() / RowOf(of), stride}, of.dtype()) {
    for (int64_t i = 0; i < tensor.elements(); ++i) {
      storage.Set(Place(i), tensor.At(i));
    }
  }
  static int64_t RowOf(const HostTensor& tensor) {
    return tensor.elements() / (tensor.shape()[0] * tensor.shape()[1]);
  }
  int64_t Place(int64_t i) const {
    return i / RowOf(tensor) * stride + i % RowOf(tensor);
  }
  LocalTensor Local() const {
    LocalTensor local = tensor.Local();
    local.data = storage.Local().data;
    local.row = RowOf(tensor);
    local.row_stride = stride;
    return local;
  }
  HostTensor Packed() const {
    HostTensor packed = tensor;
    for (int64_t i = 0; i < tensor.elements(); ++i) {
      packed.Set(i, storage.At(Place(i)));
    }
    return packed;
  }

  HostTensor tensor;
  int64_t stride;
  HostTensor storage;
};

bool MayHaveGaps(const CudaCase& c) {
  const auto whole = [](const HostTensor& tensor) {
    return tensor.shape().size() > 2 && Apart::RowOf(tensor) % 8 == 0;
  };
  switch (FindCudaKernel(c.kernel).value()->rows_apart) {
    case RowsApart::kNone:
      return false;
    case RowsApart::kFirstOperand:
      return whole(c.operands[0]);
    case RowsApart::kResults:
      return std::ranges::all_of(c.results, whole);
  }
  return false;
}

// The gradient of turned queries and keys, in vectors and, of widths that these
// do not divide, one by one.
std::vector<CudaCase> RotaryCases() {
  Rng rng(5);
  std::vector<CudaCase> cases;
  for (const DType dtype :
       {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
    for (const int64_t width : {64, 20}) {
      CudaCase c;
      c.kernel = "rotary_dx";
      c.name = "rotary_dx_" + std::string(NameOf(dtype)) + "_" +
               std::to_string(width);
      c.rule = "bsgd,bs->bsgd";
      c.attributes = {{"theta", 10000}, {"fraction", 1}};
      c.tolerance = 2 * Rounding(dtype);
      HostTensor positions({2, 5}, DType::kInt32);
      for (int64_t i = 0; i < 10; ++i) positions.Set(i, i % 5 * 7.0);
      c.operands = {Random({2, 5, 6, width}, dtype, rng), positions};
      c.results = {Random({2, 5, 6, width}, dtype, rng)};
      cases.push_back(c);
    }
  }
  return cases;
}

std::vector<CudaCase> CasesWithGaps() {
  std::vector<CudaCase> cases;
  for (const auto& some : {LinearCases(), AttentionCases(), RotaryCases()}) {
    std::ranges::copy_if(some, std::back_inserter(cases), MayHaveGaps);
  }
  return cases;
}

class KernelsWithRowsApart : public ProductKernels {};

// All of them, and where there are several, one.
TEST_P(KernelsWithRowsApart, EqualTheCpusWithoutGaps) {
  const CudaCase& c = GetParam();
  const IndexRule rule = IndexRule::Parse(c.rule).value();
  const std::vector<HostTensor> expected = ExpectedOf(c);
  const bool of_results =
      FindCudaKernel(c.kernel).value()->rows_apart == RowsApart::kResults;
  const size_t count = of_results ? c.results.size() : 1;
  for (const size_t least : {size_t{0}, count - 1}) {
    std::vector<HostTensor> results = c.results;
    std::vector<LocalTensor> in = Locals(c.operands);
    std::vector<LocalTensor> out = Locals(results);
    std::vector<Apart> apart;
    apart.reserve(count);
    for (size_t i = 0; i < count; ++i) {
      apart.emplace_back(of_results ? c.results[i] : c.operands[i],
                         static_cast<int64_t>(8 * (i + 1)));
      if (i >= least) (of_results ? out : in)[i] = apart[i].Local();
    }
    RunOnDevice(*device_, c.kernel, CallOf(c, rule, in, out),
                /*in_place=*/false);
    for (size_t i = least; of_results && i < count; ++i) {
      results[i] = apart[i].Packed();
    }
    ExpectNear(c, results, expected);
  }
}

// The gradients of a gate, by one kernel.
TEST(GateWithRowsApart, EqualsThatWithoutGaps) {
  const auto device = MakeKernelDevice();
  if (device == nullptr) GTEST_SKIP() << "no CUDA device";
  const auto gate = std::ranges::find(
      CudaFusedKernels(), "multiply+silu_dx+multiply", &Kernel::name);
  ASSERT_NE(gate, CudaFusedKernels().end());
  const IndexRule rule = IndexRule::Parse("bsh,bsh,bsh,bsh->bsh,bsh").value();
  for (const DType dtype :
       {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
    Rng rng(6);
    std::vector<HostTensor> operands;
    for (int i = 0; i < 4; ++i) {
      operands.push_back(Random({3, 70, 24}, dtype, rng));
    }
    const std::vector<HostTensor> whole(2, HostTensor({3, 70, 24}, dtype));
    const Apart dx(whole[0], 8);
    const Apart dother(whole[1], 40);
    CudaCase c;
    RunOnDevice(*device, *gate,
                CallOf(c, rule, Locals(operands), Locals(whole)),
                /*in_place=*/false);
    RunOnDevice(*device, *gate,
                CallOf(c, rule, Locals(operands), {dx.Local(), dother.Local()}),
                /*in_place=*/false);
    EXPECT_FALSE(std::isnan(whole[0].At(0)) || std::isnan(whole[1].At(0)));
    EXPECT_TRUE(dx.Packed().SameBits(whole[0])) << NameOf(dtype);
    EXPECT_TRUE(dother.Packed().SameBits(whole[1])) << NameOf(dtype);
  }
}

TEST(RowsApartTest, ADeviceOfTestsTakesThemAsCudaDoes) {
  for (const auto kernels : {CudaKernels(), CudaFusedKernels()}) {
    for (const Kernel& kernel : kernels) {
      EXPECT_EQ(kernel.rows_apart, RowsApartOf(kernel.name)) << kernel.name;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Rotary, ProductKernels,
                         ::testing::ValuesIn(RotaryCases()),
                         [](const auto& info) { return info.param.name; });
INSTANTIATE_TEST_SUITE_P(All, KernelsWithRowsApart,
                         ::testing::ValuesIn(CasesWithGaps()),
                         [](const auto& info) { return info.param.name; });
INSTANTIATE_TEST_SUITE_P(Linear, ProductKernels,
                         ::testing::ValuesIn(LinearCases()),
                         [](const auto& info) { return info.param.name; });
INSTANTIATE_TEST_SUITE_P(Attention, ProductKernels,
                         ::testing::ValuesIn(AttentionCases()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace tessera
