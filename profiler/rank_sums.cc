#include "profiler/rank_sums.h"

#include <algorithm>
#include <cstddef>

namespace tessera {

Result<std::unique_ptr<RankSums>> RankSums::Make(RankDevice& device,
                                                 Communicator& all) {
  std::unique_ptr<RankSums> sums(new RankSums(device, all));
  TESSERA_TRY(sums->memory_, device.Allocate({kMost * SizeOf(DType::kFloat64)},
                                             MemoryCategory::kCommunication));
  return sums;
}

RankSums::~RankSums() {
  if (memory_ != nullptr) device_.Free(memory_);
}

Result<void> RankSums::Sum(std::span<double> numbers) {
  constexpr auto kStep = static_cast<size_t>(kMost);
  for (size_t i = 0; i < numbers.size(); i += kStep) {
    const auto some = numbers.subspan(i, std::min(kStep, numbers.size() - i));
    const Bytes bytes = {static_cast<int64_t>(some.size_bytes())};
    device_.Write(memory_, some.data(), bytes);
    TESSERA_RETURN_IF_ERROR(
        all_.AllReduce(memory_, std::ssize(some), DType::kFloat64));
    device_.Read(some.data(), memory_, bytes);
    TESSERA_RETURN_IF_ERROR(device_.Synchronize());
  }
  return {};
}

Result<double> RankSums::Sum(double number) {
  TESSERA_RETURN_IF_ERROR(Sum({&number, 1}));
  return number;
}

}  // namespace tessera
