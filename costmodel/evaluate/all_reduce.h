#pragma once
// An all-reduce that no plan's task graph has, priced as one of its tasks.

#include "costmodel/price.h"

namespace tessera {

// Of `value` over the first axis of `group`, in the pass and role of `task`.
TaskCost PriceAllReduce(const Pricer& pricer, Task task, const Value& value,
                        const DeviceGroup& group);

}  // namespace tessera
