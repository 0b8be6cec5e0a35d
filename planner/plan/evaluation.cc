#include "planner/plan/evaluation.h"

namespace tessera {

std::string_view NameOf(MemoryCategory category) {
  static constexpr std::array<std::string_view, kMemoryCategories> kNames = {
      "parameters",    "gradients", "optimizer", "activations",
      "communication", "workspace", "framework", "allocator"};
  return kNames[static_cast<size_t>(category)];
}

Duration Breakdown::total() const {
  return compute + optimizer + all_reduce + all_gather + reduce_scatter +
         all_to_all + send_recv + copies + idle;
}

}  // namespace tessera
