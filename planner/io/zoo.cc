#include "planner/io/zoo.h"

#include "planner/base/table.h"

namespace tessera {
namespace {

constexpr std::string_view kPrefix = "zoo:";

}  // namespace

std::span<const ZooModel> Zoo() {
  static constexpr ZooModel kModels[] = {
#include <zoo_models.inc>  // of the build folder
  };
  return kModels;
}

bool IsZoo(std::string_view model) {
  return model.starts_with(kPrefix);
}

Result<const ZooModel*> FindInZoo(std::string_view model) {
  return Find("model of the zoo", Zoo(), model.substr(kPrefix.size()));
}

}  // namespace tessera
