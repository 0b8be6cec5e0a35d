#include "costmodel/evaluate/block_sample.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>

#include "planner/base/element_count.h"
#include "planner/ir/op.h"

namespace tessera {
std::vector<int> SampleBlocks(const Graph& graph) {
  std::vector<std::string> forms(graph.blocks.size());
  // Elements of what a block's operators read and write.
  std::vector<int64_t> sizes(graph.blocks.size(), 0);
  for (const Node& node : graph.nodes) {
    if (node.pass != Pass::kForward) continue;
    const auto b = static_cast<size_t>(node.block);
    forms[b] += std::string(node.op->name) + ' ';
    for (const auto* tensors : {&node.operands, &node.results}) {
      for (TensorId id : *tensors) {
        sizes[b] += ElementCount(graph.tensor(id).shape);
      }
    }
  }
  std::map<std::string, std::vector<int>> of_form;
  for (size_t b = 0; b < forms.size(); ++b) {
    of_form[forms[b]].push_back(static_cast<int>(b));
  }
  std::vector<int> stands(graph.blocks.size());
  for (auto& [form, blocks] : of_form) {
    std::ranges::stable_sort(
        blocks, {}, [&](int b) { return sizes[static_cast<size_t>(b)]; });
    // Parts of as many blocks up to one, each with its middle for a sample.
    const size_t n = blocks.size();
    const size_t parts = std::min<size_t>(n, kSampledOfForm);
    for (size_t part = 0; part < parts; ++part) {
      const size_t begin = part * n / parts;
      const size_t end = (part + 1) * n / parts;
      for (size_t i = begin; i < end; ++i) {
        stands[static_cast<size_t>(blocks[i])] = blocks[(begin + end - 1) / 2];
      }
    }
  }
  return stands;
}

}  // namespace tessera
