#include "planner/ir/short_graph.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "planner/io/importer.h"
#include "tests/support/paths.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;

Graph Model(const std::string& name) {
  ImportOptions options;
  options.global_batch = 4;
  options.seq_len = 64;
  return Differentiate(
             ImportModel(ExamplePath("models/" + name + "/config.json"),
                         options)
                 .value())
      .value();
}

// Twelve layers of 12 * 768^2 + 13 * 768 parameters between the embedding and
// the head: nine of them go.
TEST(ShortGraph, KeepsThreeOfEqualBlocks) {
  const Graph graph = Model("gpt2");
  const ShortGraph shortened = Shorten(graph);
  EXPECT_THAT(shortened.block_of,
              ElementsAre(0, 1, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 3, 4));
  EXPECT_EQ(shortened.graph.blocks.size(), 5u);
  EXPECT_EQ(ParameterCount(graph) - ParameterCount(shortened.graph),
            9 * (12 * 768 * 768 + 13 * 768));
  EXPECT_TRUE(Validate(shortened.graph).empty());
  const std::vector<int> kept = BlockClasses(shortened.graph);
  EXPECT_EQ(kept[1], kept[3]);
}

// All layers of the decoder read what the encoder has left, and all of a half
// its relative positions. Nine of the encoder's twelve layers go, of 4 * 768^2
// + 2 * 768 * 3072 + 2 * 768 parameters, and eight of the decoder's, of which
// the first is not like the others, of 4 * 768^2 + 768 more.
TEST(ShortGraph, LayersMayReadOneTensor) {
  const Graph graph = Model("t5-base");
  const ShortGraph shortened = Shorten(graph);
  EXPECT_TRUE(Validate(shortened.graph).empty());
  EXPECT_EQ(graph.blocks.size() - shortened.graph.blocks.size(), 17u);
  const int64_t layer = 4 * 768 * 768 + 2 * 768 * 3072 + 2 * 768;
  EXPECT_EQ(ParameterCount(graph) - ParameterCount(shortened.graph),
            9 * layer + 8 * (layer + 4 * 768 * 768 + 768));
}

TEST(ShortGraph, LeavesFewBlocksAlone) {
  const Graph graph = Shorten(Model("gpt2")).graph;
  EXPECT_EQ(Shorten(graph).graph, graph);
}

}  // namespace
}  // namespace tessera
