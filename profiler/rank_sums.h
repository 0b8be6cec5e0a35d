#pragma once
// Sums over the ranks of a job.

#include <cstdint>
#include <memory>
#include <span>

#include "planner/base/result.h"
#include "runtime/comm/communicator.h"
#include "runtime/device/device.h"

namespace tessera {

// Of numbers of the host, by way of device memory.
class RankSums {
 public:
  // Both outlive it.
  static Result<std::unique_ptr<RankSums>> Make(RankDevice& device,
                                                Communicator& all);
  ~RankSums();
  RankSums(const RankSums&) = delete;
  RankSums& operator=(const RankSums&) = delete;

  // All ranks call it with as many numbers, and get their sums.
  Result<void> Sum(std::span<double> numbers);
  Result<double> Sum(double number);

 private:
  static constexpr int64_t kMost = 1024;  // at once
  RankSums(RankDevice& device, Communicator& all)
      : device_(device), all_(all) {}

  RankDevice& device_;
  Communicator& all_;
  void* memory_ = nullptr;
};

}  // namespace tessera
