#include "planner/base/table.h"
#include "runtime/kernels/kernel.h"

namespace tessera {

#define TESSERA_KERNELS(family) std::vector<Kernel> Cpu##family##Kernels();
#include "runtime/kernels/kernels.def"
#undef TESSERA_KERNELS

double KernelCall::attribute(std::string_view name) const {
  for (const Attribute& attribute : attributes) {
    if (attribute.name == name) return attribute.value;
  }
  TESSERA_CHECK(false) << "no attribute " << name;
  return 0;
}

StepArgument KernelCall::step_argument() const {
  StepArgument argument{{step, 0}, numbers};
  for (const Attribute& attribute : attributes) {
    if (attribute.name != "lr") continue;
    argument.given.learning_rate = attribute.value;
  }
  return argument;
}

std::span<const Kernel> CpuKernels() {
  static const std::vector<Kernel>* const table = [] {
    auto* kernels = new std::vector<Kernel>();
#define TESSERA_KERNELS(family)                       \
  for (const Kernel& kernel : Cpu##family##Kernels()) \
    kernels->push_back(kernel);
#include "runtime/kernels/kernels.def"
#undef TESSERA_KERNELS
    return kernels;
  }();
  return *table;
}

Result<const Kernel*> FindCpuKernel(std::string_view name) {
  return Find("CPU kernel", CpuKernels(), name);
}

}  // namespace tessera
