#pragma once
// Attributes of a call that not every node has, or that are whole numbers.

#include <cstdint>
#include <string_view>

#include "runtime/kernels/kernel.h"

namespace tessera {

// `otherwise` where the attribute does not exist.
inline double AttributeOr(const KernelCall& call, std::string_view name,
                          double otherwise) {
  for (const Attribute& attribute : call.attributes) {
    if (attribute.name == name) return attribute.value;
  }
  return otherwise;
}

// REQUIRES: the attribute exists and is a whole number.
inline int64_t WholeAttribute(const KernelCall& call, std::string_view name) {
  return static_cast<int64_t>(call.attribute(name));
}

}  // namespace tessera
