#pragma once
// What samples hold, as the numbers of a block.

#include <cstdint>
#include <span>

#include "runtime/kernels/kernel.h"

namespace tessera {

// Puts `numbers` in the elements of a block from the one at `first` on, each
// rounded to the block's dtype; of an int32 block they are whole.
void PutNumbers(const LocalTensor& block, int64_t first,
                std::span<const double> numbers);

}  // namespace tessera
